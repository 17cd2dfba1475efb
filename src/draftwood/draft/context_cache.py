"""The drafter's own keys and values of one sequence's committed tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

MIN_CAPACITY = 64


class ContextCache:
    """K/V of all drafter layers, with room for the current block behind the context.

    One buffer that doubles when full: a committed token costs amortised O(1) copies, and a pass
    reads views of it. The block's own rows are written behind the context and simply overwritten
    by the next tokens, unless ``commit`` keeps some.

    Args:
        num_layers, num_kv_heads, head_dim, dtype, device: of the drafter.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.length = 0
        self._buffer = torch.empty(
            (num_layers, 2, num_kv_heads, 0, head_dim), dtype=dtype, device=device
        )

    @property
    def capacity(self) -> int:
        return self._buffer.shape[3]

    @property
    def buffer(self) -> torch.Tensor:
        """[layers, 2, kv_heads, capacity, head_dim] itself; growth replaces it."""
        return self._buffer

    def append(self, keys_values: torch.Tensor) -> None:
        """Commit tokens: [layers, 2, kv_heads, n, head_dim]."""
        end = self.length + keys_values.shape[3]
        self.reserve(end)
        self._buffer[:, :, :, self.length : end] = keys_values
        self.length = end

    def commit(self, rows: Sequence[int]) -> None:
        """Keep rows of the last block, in the given order, as the next tokens.

        Args:
            rows: numbers within the block, strictly increasing.
        """
        count = len(rows)
        if list(rows) != list(range(count)):
            index = torch.tensor(rows, device=self._buffer.device) + self.length
            moved = self._buffer.index_select(3, index)
            self._buffer[:, :, :, self.length : self.length + count] = moved
        self.length += count

    def with_block(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, length + B, head_dim] of the context and a block of B rows.

        Views, valid until the next call with the same layer; ``reserve`` the room first.
        """
        end = self.length + keys.shape[1]
        assert end <= self.capacity, (end, self.capacity)
        both = self._buffer[layer, :, :, :end]
        both[0, :, self.length :] = keys
        both[1, :, self.length :] = values
        return both[0], both[1]

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens in all."""
        if capacity <= self.capacity:
            return
        shape = list(self._buffer.shape)
        shape[3] = max(capacity, 2 * self.capacity, MIN_CAPACITY)
        grown = self._buffer.new_empty(shape)
        grown[:, :, :, : self.length] = self._buffer[:, :, :, : self.length]
        self._buffer = grown

    def truncate(self, length: int) -> None:
        """Forget tokens from position ``length`` on."""
        self.length = min(self.length, length)
