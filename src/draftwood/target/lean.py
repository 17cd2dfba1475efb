"""A decoder layer of the common Llama shape in as few operations as possible.

On a CPU a forward of a few rows spends a third of its time between the matrix products. This runs
the layer's own mathematics on the layer's own parameters, with the projections of one input done
in one product. Whether a layer has this shape is read from its parts, and then checked against the
model's own output (``kernels``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm

from draftwood.target.attention import PackedPass, tree_attention
from draftwood.target.linear import FastLinear, Weights

_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


def is_llama_shaped(layer: nn.Module) -> bool:
    """Whether the layer has exactly the parts that ``LeanLayer`` runs."""
    if _children(layer) != _LAYER or "forward" in layer.__dict__:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(attention, nn.Module)
    assert isinstance(mlp, nn.Module)
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    if _children(attention) == _ATTENTION | _HEAD_NORMS:
        norms += [attention.q_norm, attention.k_norm]
    elif _children(attention) != _ATTENTION:
        return False
    return (
        _children(mlp) == _MLP
        and all(is_plain_linear(getattr(attention, name)) for name in _ATTENTION)
        and all(is_plain_linear(getattr(mlp, name)) for name in _MLP - {"act_fn"})
        and all(_is_rms_norm(norm) for norm in norms)
        and not any(_is_touched(part) for part in layer.modules() if part is not layer)
    )


def is_plain_linear(module: Any) -> bool:
    """An ``nn.Linear`` in CPU float32 that nobody has altered."""
    return (
        type(module) is nn.Linear
        and isinstance(module.weight, nn.Parameter)
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
        and not _is_touched(module)
    )


def weights_of(*linears: Any) -> Weights:
    """The weights of layers over one input; a missing bias beside others counts as zeros."""
    weights = tuple(module.weight.detach() for module in linears)
    if all(module.bias is None for module in linears):
        return Weights(weights)
    return Weights(
        weights,
        tuple(
            torch.zeros(len(module.weight)) if module.bias is None else module.bias.detach()
            for module in linears
        ),
    )


def _children(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_touched(module: nn.Module) -> bool:
    """Whether hooks or a replaced forward (adapters, offloading) must see its calls."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _is_rms_norm(module: Any) -> bool:
    names = {name for name, _ in module.named_parameters()}
    return names == {"weight"} and isinstance(getattr(module, "variance_epsilon", None), float)


class LeanLayer:
    """Stands in for ``layer.forward`` during a packed pass.

    Args:
        layer: one for which ``is_llama_shaped`` holds.
        window: sliding window that the layer gives to its attention.
        fast: makes the products; called with the weights of each input in turn.
    """

    def __init__(
        self, layer: Any, window: int | None, fast: Callable[[Weights], FastLinear]
    ) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention = attention
        self._window = window
        self._dim = int(attention.head_dim)
        self._num_heads = len(attention.q_proj.weight) // self._dim
        self._num_kv_heads = len(attention.k_proj.weight) // self._dim
        self._qkv = fast(weights_of(attention.q_proj, attention.k_proj, attention.v_proj))
        self._out = fast(weights_of(attention.o_proj))
        self._gate_up = fast(weights_of(mlp.gate_proj, mlp.up_proj))
        self._down = fast(weights_of(mlp.down_proj))
        self._inner = len(mlp.gate_proj.weight)
        self._activation = mlp.act_fn
        self._norm_in = _norm(layer.input_layernorm)
        self._norm_mlp = _norm(layer.post_attention_layernorm)
        self._norm_q = _norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self._norm_k = _norm(attention.k_norm) if hasattr(attention, "k_norm") else None

    def forward(
        self, hidden: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], packed: PackedPass
    ) -> torch.Tensor:
        """[N, hidden_size] → [N, hidden_size]; rope: what ``rope_factors`` returns."""
        num_rows = hidden.shape[0]
        heads = self._qkv(self._norm_in(hidden)).view(num_rows, -1, self._dim)
        queries, keys, values = self._rotated(heads, rope)
        mixed, _ = tree_attention(
            self.attention,
            queries.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            None,
            scaling=self.attention.scaling,
            sliding_window=self._window,
            draftwood_pass=packed,
        )
        hidden = self._out(mixed.reshape(num_rows, -1)).add_(hidden)
        both = self._gate_up(self._norm_mlp(hidden))
        inner = self._activation(both[:, : self._inner]) * both[:, self._inner :]
        return self._down(inner).add_(hidden)

    def _rotated(
        self, heads: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[N, heads, dim] of queries, keys, values; queries and keys normed and rotated."""
        turning = self._num_heads + self._num_kv_heads
        both, values = heads[:, :turning], heads[:, turning:]
        if self._norm_q is not None and self._norm_k is not None:
            parts = both.split([self._num_heads, self._num_kv_heads], dim=1)
            both = torch.cat([self._norm_q(parts[0]), self._norm_k(parts[1])], dim=1)
        cos, sin = rope
        both = torch.addcmul(both * cos, both.roll(self._dim // 2, -1), sin)
        return both[:, : self._num_heads], both[:, self._num_heads :], values


def rope_factors(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[1, N, dim] as the model computes them → [N, 1, dim], the sign of the rotation in sin.

    (x₁, x₂) rotates to (x₁cos − x₂sin, x₂cos + x₁sin): x·cos + roll(x)·sin with the first half of
    sin negated.
    """
    half = cos.shape[-1] // 2
    signed = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
    return cos[0, :, None], signed[:, None]


def _norm(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    weight, epsilon = module.weight.detach(), module.variance_epsilon
    shape = tuple(weight.shape)
    return lambda hidden: rms_norm(hidden, shape, weight, epsilon)
