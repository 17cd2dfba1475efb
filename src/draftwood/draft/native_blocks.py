"""The layers of a drafter in one compiled call (``native.cpp``), on its context caches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from draftwood.draft.context_cache import ContextCache
from draftwood.draft.products import HalfLinear
from draftwood.target.native import Layer, Linear, Native, load_native
from draftwood.target.native_layer import MAX_GROUPS, MAX_HEAD_DIM, Scratch
from draftwood.tree.tree import IntArray

_MAX_COPY_BYTES = 2**30
_COLUMNS = 14  # of a View of native.cpp, numbers of 8 bytes
_FLOAT = 4  # bytes


class NativeBlocks:
    """Pre-norm layers (attention, SwiGLU) over rows behind the cached context of sequences.

    In bfloat16 with float32 sums where the processor has instructions for that and the weights are
    large: a draft may round, the target never does. Otherwise in float32. Holds copies.

    Args:
        native: the compiled kernels.
        layers: drafter layers of one shape, float32 on the CPU.
        head_dim: of the attention.
    """

    def __init__(self, native: Native, layers: Sequence[Any], head_dim: int) -> None:
        first = layers[0]
        inner, hidden = first.mlp.gate_proj.weight.shape
        widest = first.self_attn.q_proj.weight, first.mlp.down_proj.weight
        self._half = native.has_half and all(HalfLinear.suits(weight) for weight in widest)
        self._native, self._run = native, native.stack_half if self._half else native.stack
        self._kept: list[torch.Tensor] = []
        self._scratch = Scratch()
        heads = len(first.self_attn.q_proj.weight) // head_dim
        kv_heads = len(first.self_attn.k_proj.weight) // head_dim
        self._widths = (hidden, (heads + 2 * kv_heads) * head_dim, heads * head_dim, inner)
        shape = (hidden, inner, heads, kv_heads, head_dim)
        self._specs = (Layer * len(layers))(*[self._spec(layer, shape) for layer in layers])

    @staticmethod
    def of(layers: Sequence[Any], head_dim: int) -> NativeBlocks | None:
        """For these layers, if they suit and there are compiled kernels."""
        weights = [p for layer in layers for p in layer.parameters()]
        if not weights or any(w.dtype != torch.float32 or w.device.type != "cpu" for w in weights):
            return None
        native = load_native()
        if native is None or sum(w.nbytes for w in weights) > _MAX_COPY_BYTES:
            return None
        attention = layers[0].self_attn
        groups = len(attention.q_proj.weight) // len(attention.k_proj.weight)
        fits = head_dim % (2 * native.vector) == 0 and head_dim <= MAX_HEAD_DIM
        return NativeBlocks(native, layers, head_dim) if fits and groups <= MAX_GROUPS else None

    def __deepcopy__(self, _memo: object) -> NativeBlocks:
        """The same weights, which nothing changes, and buffers of its own."""
        other = copy.copy(self)
        other._scratch = Scratch()
        return other

    def run(
        self,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        caches: Sequence[ContextCache],
        sizes: Sequence[int],
        masks: Sequence[Sequence[torch.Tensor | None]],
    ) -> torch.Tensor:
        """[N, H] output of the last layer.

        Keys and values of the rows lie behind each cache afterwards; ``reserve`` the room first.

        Args:
            x: [N, H] rows of all sequences in turn.
            turn: cos and sin [N, 1, head_dim / 2] of their positions.
            caches: one per sequence.
            sizes: rows of each sequence.
            masks: per layer and sequence an additive [rows, context + rows] mask, or None where
                every row sees everything.
        """
        x = x.contiguous()
        cos, sin = (factor[:, 0] for factor in turn)
        cosine, sine = torch.cat([cos, cos], dim=1), torch.cat([-sin, sin], dim=1)
        views = self._views(caches, sizes, masks)
        outputs = x.new_empty(len(self._specs), *x.shape)
        buffers = self._scratch.rows(len(x), self._widths)
        normed, qkv, attended, inner = (buffer.data_ptr() for buffer in buffers)
        self._run(
            self._specs, len(self._specs), x.data_ptr(), cosine.data_ptr(), sine.data_ptr(),
            views.ctypes.data, len(caches), normed, qkv, attended, inner, outputs.data_ptr(),
            len(x), torch.get_num_threads(),
        )  # fmt: skip
        return outputs[-1]

    def _views(
        self,
        caches: Sequence[ContextCache],
        sizes: Sequence[int],
        masks: Sequence[Sequence[torch.Tensor | None]],
    ) -> IntArray:
        """[layers, sequences, 14] what every layer attends to, as ``View`` of native.cpp."""
        table = np.zeros((len(self._specs), len(caches), _COLUMNS), dtype=np.int64)
        start = 0
        for s, (cache, size) in enumerate(zip(caches, sizes, strict=True)):
            buffer = cache.buffer
            layer, keys_values, head, row, _ = buffer.stride()
            base = buffer.data_ptr() + _FLOAT * layer * np.arange(len(self._specs))
            new = _FLOAT * cache.length * row
            part = table[:, s]
            part[:, 0], part[:, 1] = base, base + _FLOAT * keys_values
            part[:, 2:6] = head, row, head, row
            part[:, 8:11] = start, size, cache.length + size
            part[:, 12], part[:, 13] = part[:, 0] + new, part[:, 1] + new
            start += size
        for rows, of_layer in zip(table, masks, strict=True):
            for row, mask in zip(rows, of_layer, strict=True):
                if mask is not None:
                    row[6:8] = mask.data_ptr(), mask.stride(0)
        return table

    def _spec(self, layer: Any, shape: tuple[int, ...]) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        hidden, inner, _, _, head_dim = shape
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
        missing = 4 - len(norms)
        gate_up = self._packed(mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach())
        return Layer(
            self._linear(*projections), self._linear(attention.o_proj),
            Linear(gate_up, None, hidden, inner), self._linear(mlp.down_proj),
            *[self._pointer(norm.weight.detach()) for norm in norms], *[None] * missing,
            *[norm.eps for norm in norms], *[0.0] * missing, head_dim**-0.5, *shape,
        )  # fmt: skip

    def _linear(self, *linears: Any) -> Linear:
        """Several over one input as one."""
        weight = torch.cat([one.weight.detach() for one in linears])
        biases = [one.bias.detach() for one in linears if one.bias is not None]
        bias = self._pointer(torch.cat(biases)) if biases else None
        return Linear(self._packed(weight), bias, *weight.shape[::-1])

    def _packed(self, *matrices: torch.Tensor) -> int:
        pack = self._native.packed_half if self._half else self._native.packed
        return self._pointer(pack(*matrices))

    def _pointer(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()
