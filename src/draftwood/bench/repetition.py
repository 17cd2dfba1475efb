"""Does an output fall into repetition? Loops are easy to draft and inflate acceptance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_PERIOD = 64  # tokens of the repeated span
MIN_TIMES = 3  # how often it is said in a row
MIN_TOKENS = 16  # of the whole loop; shorter ones are lists and tables
MIN_SHARE = 1 / 3  # of the output, for a loop that the output leaves again


def is_repetitive(token_ids: Sequence[int]) -> bool:
    """Whether a loop ends the output, or is a third of it."""
    end, length = longest_loop(token_ids)
    return length > 0 and (end == len(token_ids) or length >= MIN_SHARE * len(token_ids))


def longest_loop(token_ids: Sequence[int]) -> tuple[int, int]:
    """(end, length in tokens) of the longest loop, one that ends the output before any other.

    A loop is a span of at most ``MAX_PERIOD`` tokens said ``MIN_TIMES`` times in a row or more,
    the last time perhaps in part; (0, 0) if there is none of ``MIN_TOKENS``.
    """
    ids = np.asarray(token_ids)
    best = (0, 0)
    for period in range(1, min(MAX_PERIOD, len(ids) // MIN_TIMES) + 1):
        for end, length in _runs(ids, period):
            if length < max(MIN_TIMES * period, MIN_TOKENS):
                continue
            at_end = end == len(ids)
            if (at_end, length) > (best[0] == len(ids) and best[1] > 0, best[1]):
                best = (end, length)
    return best


def _runs(ids: np.ndarray, period: int) -> list[tuple[int, int]]:
    """(end, length) of every maximal stretch in which each token equals the one a period before."""
    same = np.concatenate([[False], ids[period:] == ids[:-period], [False]])
    edges = np.flatnonzero(same[1:] != same[:-1])
    starts, ends = edges[::2], edges[1::2]
    return [(int(e) + period, int(e - s) + period) for s, e in zip(starts, ends, strict=True)]
