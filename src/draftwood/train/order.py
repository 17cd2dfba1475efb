"""Which responses each step sees: a pure function of seed, epoch and lengths (exact resume)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Responses of similar length share a batch; sorting inside windows this many batches wide keeps
# the order random at larger scale.
_WINDOW = 16


@dataclass(frozen=True)
class PlannedBatch:
    """Responses of one micro-batch, and how many anchors to draw from each."""

    responses: tuple[int, ...]
    num_anchors: int


def plan_epoch(
    num_anchors: Sequence[int],
    *,
    blocks: int,
    blocks_per_response: int,
    seed: int,
    epoch: int,
) -> list[PlannedBatch]:
    """Partition all responses that have anchors into batches of about ``blocks`` blocks.

    Every response of a batch gives equally many anchors, at most ``blocks_per_response``, so no
    row of the packed call is wasted on padding; short responses come in larger groups.

    Args:
        num_anchors: [N] anchors each response has.
    """
    rng = np.random.default_rng([seed, epoch])
    usable = np.flatnonzero(np.asarray(num_anchors) > 0)
    order = rng.permutation(usable)
    group = max(blocks // blocks_per_response, 1)
    batches: list[PlannedBatch] = []
    for start in range(0, len(order), group * _WINDOW):
        window = order[start : start + group * _WINDOW]
        window = window[np.argsort([-num_anchors[i] for i in window], kind="stable")]
        batches += _fill(window.tolist(), num_anchors, blocks, blocks_per_response)
    return [batches[i] for i in rng.permutation(len(batches))]


def _fill(
    window: list[int], num_anchors: Sequence[int], blocks: int, limit: int
) -> list[PlannedBatch]:
    """Cut a window, longest first, into batches of at least ``blocks`` blocks (the last fewer)."""
    batches = []
    start = 0
    while start < len(window):
        end = start + 1
        while end < len(window):
            if (end - start) * min(num_anchors[window[end - 1]], limit) >= blocks:
                break
            end += 1
        chosen = tuple(window[start:end])
        batches.append(PlannedBatch(chosen, min(num_anchors[chosen[-1]], limit)))
        start = end
    return batches
