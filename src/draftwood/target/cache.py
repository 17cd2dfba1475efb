"""The target's keys and values of one sequence: committed tokens, then the current window."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from draftwood.errors import DraftwoodError
from draftwood.tree.tree import IntArray

MIN_CAPACITY = 64


class KVCache:
    """K/V of the committed tokens of one sequence, followed by an uncommitted *window*.

    A forward appends its rows layer by layer; ``commit`` then keeps the accepted ones. Layers of
    equal shape share one buffer that doubles when full, so a token costs amortised O(1) copies
    and a commit moves only the accepted rows that are out of place.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.release()

    def release(self) -> None:
        """Free all memory; the cache is then empty."""
        self._length = 0
        self._window = 0
        self._groups: list[_Group] = []
        self._slots: list[tuple[_Group, int]] = []
        self._first: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return self._length

    @property
    def window_len(self) -> int:
        """Number of rows appended since the last commit."""
        return self._window

    @property
    def has_buffers(self) -> bool:
        """False until the first commit: ``append`` then keeps what it is given, as it is."""
        return bool(self._slots)

    @property
    def num_bytes(self) -> int:
        """Memory held, spare capacity included."""
        return sum(group.num_bytes for group in self._groups)

    def append(
        self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the window's rows of one layer behind the committed tokens.

        Args:
            layer_idx: decoder layer.
            keys: [kv_heads, n, key_dim]; the same n for every layer of a forward.
            values: [kv_heads, n, value_dim].

        Returns:
            Views of keys and values of all ``length + n`` tokens, valid until the next append.
        """
        self._window = keys.shape[-2]
        if not self._slots:
            # Shapes are unknown before the first forward: keep its rows as they are until commit.
            self._first[layer_idx] = (keys, values)
            return keys, values
        group, slot = self._slots[layer_idx]
        end = self._length + self._window
        group.reserve(end, keep=self._length)
        layer_keys, layer_values = group.keys[slot], group.values[slot]
        layer_keys[:, self._length : end] = keys
        layer_values[:, self._length : end] = values
        return layer_keys[:, :end], layer_values[:, :end]

    def open_window(self, num_rows: int) -> IntArray:
        """Make room for a window in all layers at once, for code that writes it by address.

        Returns:
            [num_layers, 6] per layer: addresses of the keys and values of position 0, then
            distances in elements from head to head and from token to token, of keys, of values.
        """
        assert self.has_buffers
        self._window = num_rows
        for group in self._groups:
            group.reserve(self._length + num_rows, keep=self._length)
        tables = {id(group): group.places() for group in self._groups}
        return np.stack([tables[id(group)][slot] for group, slot in self._slots])

    def commit(self, rows: IntArray) -> None:
        """Make window rows the next committed tokens, in the given order; drop the others.

        Args:
            rows: [k] row numbers within the window, strictly increasing.
        """
        rows = np.asarray(rows, dtype=np.int64)
        path, count = rows.tolist(), len(rows)
        assert all(a < b for a, b in pairwise([-1, *path, self._window])), f"not a path: {path}"
        if not self._slots and count:
            self._allocate()
        first = next((place for place, row in enumerate(path) if row != place), count)
        if first < count:
            for group in self._groups:
                group.gather(self._length + first, self._length + rows[first:])
        self._length += count
        self._window = 0

    def truncate(self, length: int) -> None:
        """Forget the window and all committed tokens from position ``length`` on."""
        assert 0 <= length <= self._length, f"cannot truncate {self._length} tokens to {length}"
        self._length = length
        self._window = 0

    def _allocate(self) -> None:
        missing = [index for index in range(self.num_layers) if index not in self._first]
        if missing or len(self._first) != self.num_layers:
            raise DraftwoodError(
                f"decoder layers {missing} stored no keys and values: such layers "
                "(recurrent, shared or skipped attention) are not supported"
            )
        members: dict[_Shape, list[int]] = {}
        for index in range(self.num_layers):
            members.setdefault(_Shape.of(*self._first[index]), []).append(index)
        slots: dict[int, tuple[_Group, int]] = {}
        for shape, layers in members.items():
            group = _Group(shape, len(layers), self._window)
            self._groups.append(group)
            for slot, index in enumerate(layers):
                group.keys[slot][:, : self._window] = self._first[index][0]
                group.values[slot][:, : self._window] = self._first[index][1]
                slots[index] = (group, slot)
        self._slots = [slots[index] for index in range(self.num_layers)]
        self._first = {}


@dataclass(frozen=True)
class _Shape:
    kv_heads: int
    key_dim: int
    value_dim: int
    device: torch.device
    dtype: torch.dtype

    @staticmethod
    def of(keys: torch.Tensor, values: torch.Tensor) -> _Shape:
        return _Shape(keys.shape[0], keys.shape[-1], values.shape[-1], keys.device, keys.dtype)


class _Group:
    """Buffers [layers, kv_heads, capacity, dim] of all layers that have one shape."""

    def __init__(self, shape: _Shape, num_layers: int, min_capacity: int) -> None:
        self._shape = shape
        self._num_layers = num_layers
        self._capacity = 0
        self.keys = self._empty(shape.key_dim, 0)
        self.values = self._empty(shape.value_dim, 0)
        self.reserve(max(min_capacity, MIN_CAPACITY), keep=0)

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def _empty(self, dim: int, capacity: int) -> torch.Tensor:
        shape = self._shape
        size = (self._num_layers, shape.kv_heads, capacity, dim)
        return torch.empty(size, dtype=shape.dtype, device=shape.device)

    def reserve(self, capacity: int, keep: int) -> None:
        """Make room for ``capacity`` tokens, copying the first ``keep`` if the buffer moves."""
        if capacity <= self._capacity:
            return
        self._capacity = max(capacity, 2 * self._capacity)
        # One buffer at a time, so that growing never holds two copies of both.
        self.keys = self._moved(self.keys, keep)
        self.values = self._moved(self.values, keep)

    def _moved(self, old: torch.Tensor, keep: int) -> torch.Tensor:
        new = self._empty(old.shape[-1], self._capacity)
        new[:, :, :keep] = old[:, :, :keep]
        return new

    def places(self) -> IntArray:
        """[layers, 6] where each layer lies, as ``KVCache.open_window`` returns it."""
        table = np.empty((self._num_layers, 6), dtype=np.int64)
        slots = np.arange(self._num_layers)
        for at, buffer in enumerate((self.keys, self.values)):
            layer, head, token = buffer.stride()[:3]
            table[:, at] = buffer.data_ptr() + slots * layer * buffer.element_size()
            table[:, 2 + 2 * at : 4 + 2 * at] = head, token
        return table

    def gather(self, start: int, sources: IntArray) -> None:
        """Move the tokens at positions ``sources`` to ``start``, ``start + 1``, …"""
        index = torch.from_numpy(sources).to(self.keys.device)
        end = start + len(sources)
        for buffer in (self.keys, self.values):
            buffer[:, :, start:end] = buffer.index_select(2, index)
