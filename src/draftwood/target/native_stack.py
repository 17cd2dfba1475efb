"""All decoder layers in one compiled call; what lies between them is then no Python at all."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draftwood.target.attention import PackedPass
from draftwood.target.native import Layer, Native, View
from draftwood.target.native_layer import NativeLayer, Scratch
from draftwood.tree.tree import IntArray

# Columns of a View as numbers of 8 bytes.
_K, _V, _STRIDES, _MASK, _MASK_ROW = 0, 1, slice(2, 6), 6, 7
_START, _ROWS, _KEYS, _CAUSAL, _NEW_K, _NEW_V = 8, 9, 10, 11, 12, 13
_COLUMNS = 14
_FLOAT = 4  # bytes


class NativeStack:
    """Runs a pass when its first layer is called and hands out the layers' outputs one by one.

    So the model's own decoder, its hooks and the taps see every layer as ever.

    Args:
        native: the compiled kernels.
        layers: all layers of the decoder, of equal widths.
        scratch: of this model.
    """

    def __init__(self, native: Native, layers: Sequence[NativeLayer], scratch: Scratch) -> None:
        assert ctypes.sizeof(View) == 8 * _COLUMNS
        assert len({layer.widths for layer in layers}) == 1
        self._native, self._layers, self._scratch = native, list(layers), scratch
        self._specs = (Layer * len(layers))(*[layer.spec for layer in layers])
        self._windows: dict[int | None, IntArray] = {}
        for window in {layer.window for layer in layers}:
            rows = [i for i, layer in enumerate(layers) if layer.window == window]
            self._windows[window] = np.array(rows, dtype=np.int64)
        self._outputs: torch.Tensor | None = None

    def layers(self) -> list[StackLayer]:
        """What stands in for each layer."""
        return [StackLayer(self, index) for index in range(len(self._layers))]

    def forward(
        self,
        index: int,
        hidden: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        packed: PackedPass,
    ) -> torch.Tensor:
        """[N, hidden_size] → [N, hidden_size] of layer ``index``."""
        if index == 0:
            ready = all(cache.has_buffers for cache in packed.caches)
            self._outputs = self.run(hidden, rope, packed) if ready else None
        if self._outputs is None:
            return self._layers[index].forward(hidden, rope, packed)
        output = self._outputs[index]
        if index == len(self._layers) - 1:
            self._outputs = None
        return output

    def run(
        self, hidden: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], packed: PackedPass
    ) -> torch.Tensor:
        """[layers, N, hidden_size] outputs of all layers; needs caches that have buffers."""
        hidden = hidden.contiguous()
        num_rows, num_layers = len(hidden), len(self._layers)
        views = self._views(packed, hidden)
        outputs = hidden.new_empty(num_layers, *hidden.shape)
        cos, sin = (factor.contiguous() for factor in rope)
        buffers = self._scratch.rows(num_rows, self._layers[0].widths)
        normed, qkv, attended, inner = (buffer.data_ptr() for buffer in buffers)
        self._native.stack(
            self._specs, num_layers, hidden.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            views.ctypes.data, views.shape[1], normed, qkv, attended, inner, outputs.data_ptr(),
            num_rows, torch.get_num_threads(),
        )  # fmt: skip
        return outputs

    def _views(self, packed: PackedPass, like: torch.Tensor) -> IntArray:
        """[layers, sequences, 14] what every layer attends to, as ``View`` of native.cpp."""
        num_seqs = len(packed.caches)
        table = np.zeros((len(self._layers), num_seqs, _COLUMNS), dtype=np.int64)
        for seq, cache in enumerate(packed.caches):
            start, end = packed.tree.span(seq)
            places = cache.open_window(end - start)
            table[:, seq, : _STRIDES.stop] = places
            for new, at, row in ((_NEW_K, 0, 3), (_NEW_V, 1, 5)):
                table[:, seq, new] = places[:, at] + _FLOAT * cache.length * places[:, row]
        for window, rows in self._windows.items():
            for seq, view in enumerate(packed.views(window, 1, like.device, like.dtype)):
                part = table[rows, seq]
                part[:, _K] += _FLOAT * view.first_key * part[:, 3]
                part[:, _V] += _FLOAT * view.first_key * part[:, 5]
                if view.mask is not None:
                    part[:, _MASK] = view.mask.data_ptr()
                    part[:, _MASK_ROW] = view.mask.stride(0)
                num_keys = view.cache.length + view.end - view.start - view.first_key
                part[:, _START : _CAUSAL + 1] = (
                    view.start, view.end - view.start, num_keys, view.is_causal,
                )  # fmt: skip
                table[rows, seq] = part
        return table


@dataclass(frozen=True)
class StackLayer:
    """One layer of a stack, as the model calls it."""

    stack: NativeStack
    index: int

    def forward(
        self,
        hidden: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        packed: PackedPass,
    ) -> torch.Tensor:
        """[N, hidden_size] → [N, hidden_size]."""
        return self.stack.forward(self.index, hidden, rope, packed)
