"""Which outcomes to draft for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from draftwood.ahead.outcomes import Outcomes
from draftwood.tree.tree import IntArray


class Choice(Protocol):
    """Chooses the outcomes that get a branch. The decoding rule never depends on it."""

    def choose(self, outcomes: Outcomes, most: int) -> Outcomes:
        """At most ``most`` of ``outcomes``, which are all those of the sequences at hand."""
        ...


@dataclass(frozen=True)
class Likeliest:
    """The most probable outcomes, over all sequences together.

    Attributes:
        soft_weight: worth of a branch whose bonus token is unknown, next to one that knows it:
            it serves any token, with a poorer draft. 0 takes none.
    """

    soft_weight: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.soft_weight <= 1.0:
            raise ValueError(f"soft_weight must lie in 0 … 1, got {self.soft_weight}")

    def choose(self, outcomes: Outcomes, most: int) -> Outcomes:
        worth = np.where(outcomes.is_known, 1.0, self.soft_weight) * outcomes.probs
        order = np.argsort(-worth, kind="stable")
        return outcomes.take(order[worth[order] > 0.0][:most])


@dataclass(frozen=True)
class Grid:
    """The D3D paper's: C−1 rejection positions × F alternatives, and full acceptance.

    Along the best path of each tree: the walk ends before its i-th node, i < C, with one of the F
    most probable other tokens; or at its end, with any token. That is (C−1)F + 1 branches beside
    the path itself, N_async = B[(C−1)F + 2] tokens for one sequence with B a block. A grid larger
    than the branches at hand is cut at the end of its path.

    Attributes:
        positions: C; None takes what fits.
        alternatives: F; None takes what fits.
    """

    positions: int | None = None
    alternatives: int | None = None

    def __post_init__(self) -> None:
        check_count("positions", self.positions, 1, optional=True)
        check_count("alternatives", self.alternatives, 1, optional=True)

    def choose(self, outcomes: Outcomes, most: int) -> Outcomes:
        if len(outcomes) == 0:
            return outcomes
        num_seqs = int(outcomes.seq.max()) + 1
        each = max(most // num_seqs, 1)
        found = Outcomes.join(
            [self._one(outcomes.take(outcomes.seq == s), each) for s in range(num_seqs)]
        )
        if len(found) <= most:
            return found
        return found.take(np.sort(np.argsort(-found.probs, kind="stable")[:most]))

    def _one(self, outcomes: Outcomes, most: int) -> Outcomes:
        """One sequence: of the grids that fit, the one of the highest probability."""
        if len(outcomes) == 0:
            return outcomes
        path = _main_path(outcomes)
        on_path = path[outcomes.depths] == outcomes.nodes
        full = np.flatnonzero(on_path & ~outcomes.is_known & (outcomes.depths == len(path) - 1))
        inside = on_path & outcomes.is_known
        rank = _ranks(outcomes)
        best, best_prob = full, -1.0
        fixed = self.positions
        for positions in range(1, len(path) + 1) if fixed is None else [fixed]:
            rejections = positions - 1
            alternatives = self.alternatives or (most - 1) // max(rejections, 1)
            if rejections * alternatives >= most and (fixed is None or self.alternatives is None):
                continue
            cells = np.flatnonzero(inside & (outcomes.depths < rejections) & (rank < alternatives))
            prob = float(outcomes.probs[cells].sum())
            if prob > best_prob:
                best, best_prob = np.concatenate([full, cells]), prob
        return outcomes.take(best[:most])


def check_count(name: str, value: object, least: int, *, optional: bool) -> None:
    """Refuse what is no whole number from ``least`` on.

    Raises:
        ValueError: naming the value.
    """
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        none = " or None" if optional else ""
        raise ValueError(f"{name} must be a whole number ≥ {least}{none}, got {value!r}")


def _main_path(outcomes: Outcomes) -> IntArray:
    """Of each depth, the node where a walk is most likely to end; in a chain, its only node."""
    ends = np.bincount(outcomes.nodes, weights=outcomes.probs)
    path = np.zeros(int(outcomes.depths.max()) + 1, dtype=np.int64)
    order = np.argsort(ends[outcomes.nodes], kind="stable")  # of one depth the last one stays
    path[outcomes.depths[order]] = outcomes.nodes[order]
    return path


def _ranks(outcomes: Outcomes) -> IntArray:
    """[M] rank of each known outcome among those of its node, from 0."""
    order = np.lexsort((-outcomes.probs, ~outcomes.is_known, outcomes.nodes))
    nodes = outcomes.nodes[order]
    rank = np.empty(len(outcomes), dtype=np.int64)
    rank[order] = np.arange(len(nodes)) - np.searchsorted(nodes, nodes)
    return rank
