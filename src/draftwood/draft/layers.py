"""The drafter's layers: Qwen3-style attention over [context; block], SwiGLU, RMS norms.

Shapes: G groups of n blocks of B rows; C context tokens of a group; H hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from draftwood.draft.block_attention import LayerKV, Masks, attend_blocks
from draftwood.draft.config import DraftConfig
from draftwood.draft.rms_norm import rms_norm
from draftwood.draft.rope import rotate

# A weight times at most this many rows is memory-bound; W @ x.T then reads W in its own layout.
_FEW_ROWS = 32


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class Linear(nn.Linear):
    """``nn.Linear`` with a fast path for the few rows of a decoding step on CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return project(x, self.weight, self.bias)


def project(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., in] · weight [out, in]ᵀ + bias."""
    num_rows = x.numel() // x.shape[-1]
    few = x.device.type == "cpu" and 1 < num_rows <= _FEW_ROWS and not torch.is_grad_enabled()
    if not few:
        return F.linear(x, weight, bias)
    out = (weight @ x.reshape(num_rows, -1).t()).t().reshape(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


class Attention(nn.Module):
    """Attention of blocks to context keys/values and to themselves."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_kv_heads = config.num_key_value_heads
        heads, bias = config.num_attention_heads, config.attention_bias
        self.q_proj = Linear(config.hidden_size, heads * self.head_dim, bias=bias)
        self.k_proj = Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = Linear(heads * self.head_dim, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> LayerKV:
        """Keys and values of rows x [G, N, H], each [G, kv_heads, N, head_dim]."""
        shape = (*x.shape[:-1], self.num_kv_heads, self.head_dim)
        keys = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        values = self.v_proj(x).view(shape).transpose(1, 2)
        return rotate(keys, cos[:, None], sin[:, None]), values

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        context: LayerKV,
        masks: Masks,
        first_row: int,
    ) -> torch.Tensor:
        """Attend from rows ``first_row``… of every block.

        Args:
            x: [G, n, B, H] normed block rows.
            cos, sin: [G, n, B, head_dim / 2].
            context: this layer's context keys and values.
            masks: hidden context [G, 1, n, 1 or R, C] and hidden block columns [R, B] or None,
                True where attention is forbidden, R = B − first_row.

        Returns:
            [G, n, R, H].
        """
        groups, n, size, _ = x.shape
        rows, kv = size - first_row, self.num_kv_heads
        flat = (groups, n * size, -1)
        keys, values = self.keys_values(x.reshape(flat), cos.reshape(flat), sin.reshape(flat))
        keys = keys.view(groups, kv, n, size, self.head_dim)
        values = values.view(groups, kv, n, size, self.head_dim)
        query = self.q_proj(x[:, :, first_row:]).view(groups, n, rows, -1, self.head_dim)
        turn = (slice(None), slice(None), slice(first_row, None), None)
        query = rotate(self.q_norm(query), cos[turn], sin[turn])
        share = query.shape[3] // kv  # query heads per key/value head
        query = query.view(groups, n, rows, kv, share, self.head_dim).permute(0, 3, 1, 2, 4, 5)
        query = query.reshape(groups, kv, n, rows * share, self.head_dim) * self.head_dim**-0.5
        mixed = attend_blocks(query, context, (keys, values), masks, share)
        mixed = mixed.view(groups, kv, n, rows, share, self.head_dim).permute(0, 2, 3, 1, 4, 5)
        return self.o_proj(mixed.reshape(groups, n, rows, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
