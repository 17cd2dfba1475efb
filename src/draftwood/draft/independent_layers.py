"""The layers of an independent drafter's body: packed rows, around an attention that is given."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from draftwood.draft.independent_config import IndependentConfig
from draftwood.draft.layers import RMSNorm
from draftwood.draft.products import Product, few_rows, product
from draftwood.draft.rope import rotate


class Projection(nn.Linear):
    """x [N, in] · weightᵀ + bias; fast for the few rows of a decoding step.

    Attributes:
        quick: the same product for decoding, on a copy of the weights; None until ``hasten``.
    """

    quick: Product | None = None

    def hasten(self) -> None:
        """Prepare for decoding; later changes of the weights are not seen by it."""
        self.quick = product(self.weight.detach(), None if self.bias is None else self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        return few_rows(x, self.weight, self.bias) if self.quick is None else self.quick(x)


class BodyAttention(nn.Module):
    """Projections around an attention that is given."""

    def __init__(self, config: IndependentConfig) -> None:
        super().__init__()
        heads, kv, dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        hidden = config.hidden_size
        self.head_dim = dim
        self.q_proj = Projection(hidden, heads * dim, bias=config.qkv_bias)
        self.k_proj = Projection(hidden, kv * dim, bias=config.qkv_bias)
        self.v_proj = Projection(hidden, kv * dim, bias=config.qkv_bias)
        self.o_proj = Projection(heads * dim, hidden, bias=config.out_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.has_qk_norm:
            self.q_norm = RMSNorm(dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(dim, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        query, keys, values = (
            one(x).view(len(x), -1, self.head_dim)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, keys = self.q_norm(query), self.k_norm(keys)
        mixed = attend(rotate(query, *turn), rotate(keys, *turn), values)
        out: torch.Tensor = self.o_proj(mixed)
        return out


class BodyMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: IndependentConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Projection(hidden, inner, bias=False)
        self.up_proj = Projection(hidden, inner, bias=False)
        self.down_proj = Projection(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class BodyLayer(nn.Module):
    """Pre-norm transformer layer on packed rows [N, H]."""

    def __init__(self, config: IndependentConfig) -> None:
        super().__init__()
        self.self_attn = BodyAttention(config)
        self.mlp = BodyMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn, attend)
        return x + self.mlp(self.post_attention_layernorm(x))
