"""Keyed noise of whole vocabularies, kept while drafts ask for the same positions again."""

from __future__ import annotations

from collections import OrderedDict

import torch

from draftwood.noise import KeyedNoise

MAX_BYTES = 1 << 27


class NoiseRows:
    """Rows g_t(v) of the columns of a drafter, in float32.

    A block drafts positions t … t + horizon − 1, the next one mostly the same again: with a row
    kept, a committed token costs one row of hashing instead of one per cycle it was drafted in.

    Args:
        token_ids: [V] target token ids of the columns (int64).
        max_bytes: of rows kept; the least recently used go first.
    """

    def __init__(self, token_ids: torch.Tensor, max_bytes: int = MAX_BYTES) -> None:
        self._token_ids = token_ids
        self._max_rows = max(1, max_bytes // (4 * len(token_ids)))
        self._rows: OrderedDict[tuple[int, int, int], torch.Tensor] = OrderedDict()

    def rows(self, noise: KeyedNoise, positions: list[int]) -> torch.Tensor:
        """[len(positions), V] noise at output positions."""
        return torch.stack([self._row(noise, position) for position in positions])

    def _row(self, noise: KeyedNoise, position: int) -> torch.Tensor:
        key = (noise.seed, noise.sample_index, position)
        row = self._rows.get(key)
        if row is None:
            row = noise.gumbel(position, self._token_ids).float()
            self._rows[key] = row
            while len(self._rows) > self._max_rows:
                self._rows.popitem(last=False)
        else:
            self._rows.move_to_end(key)
        return row
