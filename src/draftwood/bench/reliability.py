"""How true a drafter's probabilities are: predicted against observed acceptance of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from draftwood.records import CycleRecord
from draftwood.tree.tree import FloatArray, IntArray

EDGES = np.array([0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0])


class Reliability:
    """An ``on_cycle`` listener that keeps what is needed and counts only when asked.

    A node's prefix probability is the drafter's promise that the target's own text goes through
    it. Nodes are put into bins of promised probability.
    """

    def __init__(self) -> None:
        self._cycles: list[tuple[FloatArray, IntArray]] = []

    def __call__(self, record: CycleRecord) -> None:
        for row, index in enumerate(record.decoding):
            budget = int(record.budgets[row])
            if budget:
                accepted = record.verdicts[index].path[1:] - record.tree.span(index)[0] - 1
                self._cycles.append((record.scored.log_probs[row, :budget], accepted))

    def counts(self) -> dict[str, list[Any]]:
        """Per bin of ``EDGES``: nodes, sum of promised probabilities, nodes that were accepted."""
        num = np.zeros(len(EDGES) - 1, dtype=np.int64)
        promised, accepted = np.zeros(len(num)), num.copy()
        for log_probs, path in self._cycles:
            probs = np.exp(log_probs)
            bins = np.clip(np.searchsorted(EDGES, probs, side="right") - 1, 0, len(num) - 1)
            np.add.at(num, bins, 1)
            np.add.at(promised, bins, probs)
            np.add.at(accepted, bins[path], 1)
        return {
            "num": num.tolist(),
            "promised": np.round(promised, 4).tolist(),
            "accepted": accepted.tolist(),
        }


def curve(parts: Sequence[dict[str, list[Any]]]) -> list[tuple[float, float, int]]:
    """(mean promised probability, share accepted, nodes) of every bin that has nodes."""
    if not parts:
        return []
    num, promised, accepted = (
        np.sum([part[name] for part in parts], axis=0) for name in ("num", "promised", "accepted")
    )
    return [
        (float(p / n), float(a / n), int(n))
        for n, p, a in zip(num, promised, accepted, strict=True)
        if n > 0
    ]
