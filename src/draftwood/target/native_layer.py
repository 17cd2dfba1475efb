"""Layers and heads on the compiled kernels: the Llama shape again, in two calls a layer."""

from __future__ import annotations

import ctypes
from ctypes import addressof
from typing import Any

import torch
from torch import nn

from draftwood.target.attention import PackedPass
from draftwood.target.lean import is_llama_shaped, weights_of
from draftwood.target.linear import Weights
from draftwood.target.native import Layer, Linear, Native, View

MAX_HEAD_DIM, MAX_GROUPS = 256, 48  # MAX_D, MAX_R of native.cpp
_KEPT_SCRATCH = 32  # row counts whose scratch is kept


def is_native_shaped(layer: nn.Module, native: Native) -> bool:
    """Whether ``NativeLayer`` can run this layer."""
    if not is_llama_shaped(layer):
        return False
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    heads, kv_heads, dim = _heads(attention)
    is_silu = isinstance(mlp.act_fn, nn.SiLU) or type(mlp.act_fn).__name__ == "SiLUActivation"
    return (
        is_silu
        and dim % (2 * native.vector) == 0
        and dim <= MAX_HEAD_DIM
        and heads // kv_heads <= MAX_GROUPS
        and all(p.bias is None for p in (mlp.gate_proj, mlp.up_proj))
    )


def _heads(attention: Any) -> tuple[int, int, int]:
    """(query heads, key heads, head size)."""
    dim = int(attention.head_dim)
    return len(attention.q_proj.weight) // dim, len(attention.k_proj.weight) // dim, dim


class Scratch:
    """Buffers between the two calls of a layer, shared by all layers of a model."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def rows(self, count: int, widths: tuple[int, ...]) -> list[torch.Tensor]:
        """[count, width] for each of ``widths``, with anything in them."""
        key = (count, *widths)
        if key not in self._kept:
            if len(self._kept) >= _KEPT_SCRATCH:
                self._kept.clear()
            self._kept[key] = [torch.empty(count, width) for width in widths]
        return self._kept[key]


class NativeLinear:
    """[N, in] → [N, out] by the compiled product."""

    def __init__(self, native: Native, weights: Weights) -> None:
        self._native = native
        matrix, bias = weights.stacked()
        self._kept = (native.packed(matrix), None if bias is None else bias.contiguous())
        self.spec = Linear(_pointer(self._kept[0]), _pointer(self._kept[1]), *matrix.shape[::-1])

    @property
    def copied_bytes(self) -> int:
        return self._kept[0].nbytes

    def __deepcopy__(self, _memo: object) -> NativeLinear:
        return self  # nothing changes it

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.contiguous()
        out = torch.empty(rows.shape[0], self.spec.O)
        self._native.linear(
            addressof(self.spec), rows.data_ptr(), out.data_ptr(), len(rows),
            torch.get_num_threads(),
        )  # fmt: skip
        return out


class NativeLayer:
    """Stands in for ``layer.forward`` during a packed pass, as ``LeanLayer`` does.

    Args:
        native: the compiled kernels.
        layer: one for which ``is_native_shaped`` holds.
        window: sliding window that the layer gives to its attention.
        scratch: of this model.
    """

    def __init__(self, native: Native, layer: Any, window: int | None, scratch: Scratch) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._native, self.window, self._scratch = native, window, scratch
        self._layer_idx = int(attention.layer_idx)
        heads, kv_heads, dim = _heads(attention)
        inner, hidden_size = mlp.gate_proj.weight.shape
        self._heads = (heads, kv_heads, dim)
        self.widths = (hidden_size, (heads + 2 * kv_heads) * dim, heads * dim, inner)
        qkv = weights_of(attention.q_proj, attention.k_proj, attention.v_proj)
        self._products = [
            NativeLinear(native, weights)
            for weights in (qkv, weights_of(attention.o_proj), weights_of(mlp.down_proj))
        ]
        gate, up = mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()
        self._gate_up = native.packed(gate, up)
        names = ("q_norm", "k_norm") if hasattr(attention, "q_norm") else ()
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(attention, name) for name in names]
        self._norms = [norm.weight.detach() for norm in norms]
        pointers = [_pointer(weight) for weight in self._norms]
        epsilons = [norm.variance_epsilon for norm in norms]
        missing = 4 - len(norms)
        self.spec = Layer(
            self._products[0].spec, self._products[1].spec,
            Linear(self._gate_up.data_ptr(), None, hidden_size, inner), self._products[2].spec,
            *pointers, *[None] * missing, *epsilons, *[0.0] * missing, attention.scaling,
            hidden_size, inner, heads, kv_heads, dim,
        )  # fmt: skip

    @property
    def copied_bytes(self) -> int:
        return self._gate_up.nbytes + sum(product.copied_bytes for product in self._products)

    def forward(
        self,
        hidden: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        packed: PackedPass,
    ) -> torch.Tensor:
        """[N, hidden_size] → [N, hidden_size]; rope: what ``rope_factors`` returns."""
        num_rows, threads = hidden.shape[0], torch.get_num_threads()
        hidden = hidden.contiguous()
        cos, sin = (factor.contiguous() for factor in rope)
        normed, qkv, attended, inner = self._scratch.rows(num_rows, self.widths)
        if any(not cache.has_buffers for cache in packed.caches):
            qkv = torch.empty_like(qkv)  # the cache keeps views of it until the first commit
        spec = addressof(self.spec)
        self._native.qkv(
            spec, hidden.data_ptr(), cos.data_ptr(), sin.data_ptr(), normed.data_ptr(),
            qkv.data_ptr(), num_rows, threads,
        )  # fmt: skip
        views, kept = self._views(qkv, packed, hidden)
        out = torch.empty_like(hidden)
        self._native.rest(
            spec, hidden.data_ptr(), qkv.data_ptr(), addressof(views), len(views),
            attended.data_ptr(), normed.data_ptr(), inner.data_ptr(), out.data_ptr(), num_rows,
            threads,
        )  # fmt: skip
        del kept
        return out

    def _views(
        self, qkv: torch.Tensor, packed: PackedPass, like: torch.Tensor
    ) -> tuple[ctypes.Array[View], list[torch.Tensor]]:
        """Append the rows' keys and values to the caches; (what to attend to, what that is in)."""
        heads, kv_heads, dim = self._heads
        parts = qkv.view(len(qkv), -1, dim).transpose(0, 1)
        keys, values = parts[heads : heads + kv_heads], parts[heads + kv_heads :]
        views = packed.views(self.window, 1, like.device, like.dtype)
        array, kept = (View * len(views))(), []
        for index, view in enumerate(views):
            rows = slice(view.start, view.end)
            k, v = view.cache.append(self._layer_idx, keys[:, rows], values[:, rows])
            k, v = k[:, view.first_key :], v[:, view.first_key :]
            assert k.stride(2) == v.stride(2) == 1
            mask = view.mask
            array[index] = View(
                k.data_ptr(), v.data_ptr(), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
                _pointer(mask), 0 if mask is None else mask.stride(0), view.start,
                view.end - view.start, k.shape[1], view.is_causal, None, None,
            )  # fmt: skip
            kept += [k, v]
        return array, kept


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
