"""CaDDTree's budget (2606.01813): grow while the next node raises the speed, on convex costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftwood.tree.latency import LatencyModel
from draftwood.tree.policy import MAX_NODES, CycleState
from draftwood.tree.ranked import rank_nodes
from draftwood.tree.tree import FloatArray, IntArray, ScoredPrefixes


@dataclass(frozen=True)
class ConvexGreedy:
    """Stops at the first node that does not raise θ(n) = (1 + Φ(n)) / (C_d + C_v(n)).

    C_v is the convex, non-decreasing fit of the latency curve, on which θ has a single maximum
    (their theorem), so that the first non-improving node ends the search.

    Deviations: C_v comes from the online latency model instead of an offline profile per context
    length, and the fit is isotonic in the increments (pool adjacent violators) instead of least
    squares in the values; in a batch, all sequences' nodes compete for one budget. As in the
    paper there is no floor and no cost outside the two models.
    """

    max_nodes: int = MAX_NODES
    why = "convex"

    def limits(self, state: CycleState, latency: LatencyModel) -> tuple[int, int | None]:
        return self.max_nodes, None

    def choose(self, scored: ScoredPrefixes, state: CycleState, latency: LatencyModel) -> IntArray:
        ranked = rank_nodes(scored)
        context_len = sum(state.context_lens) / max(len(scored), 1)
        widths = len(scored) + np.arange(len(ranked.phi))
        verify = convex_fit(latency.verify_s(widths, context_len, len(scored)))
        speed = (len(scored) + ranked.phi) / (latency.draft_s(context_len, len(scored)) + verify)
        worse = np.flatnonzero(speed[1:] <= speed[:-1])
        return ranked.budgets(int(worse[0]) if len(worse) else len(speed) - 1)

    def observe(
        self, scored: ScoredPrefixes, budgets: IntArray, accepted: Sequence[Sequence[int]]
    ) -> None:
        pass


def convex_fit(values: FloatArray) -> FloatArray:
    """The convex non-decreasing sequence whose increments are nearest to those of ``values``."""
    blocks: list[tuple[float, int]] = []  # mean increment, length; increasing
    for step in np.diff(values).tolist():
        mean, count = max(step, 0.0), 1
        while blocks and blocks[-1][0] >= mean:
            before, length = blocks.pop()
            mean = (before * length + mean * count) / (length + count)
            count += length
        blocks.append((mean, count))
    steps = np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])
    return float(values[0]) + np.concatenate([[0.0], np.cumsum(steps)])
