"""Verification budgets: how many drafted nodes each sequence sends to the target this cycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from draftwood.tree.latency import LatencyModel
from draftwood.tree.tree import IntArray, ScoredPrefixes

MAX_NODES = 256


@dataclass(frozen=True)
class CycleState:
    """What a policy may look at besides the drafter's scores.

    Attributes:
        context_lens: [S] tokens in each sequence's KV cache.
        horizon: deepest prefix the drafter can propose.
    """

    context_lens: Sequence[int]
    horizon: int


class BudgetPolicy(Protocol):
    """Chooses budgets from Φ and predicted seconds. The decoding rule never depends on it."""

    def limits(self, state: CycleState, latency: LatencyModel) -> tuple[int, int | None]:
        """(max_nodes, max_width) to ask the drafter for; max_nodes 0 skips drafting this cycle."""
        ...

    def choose(
        self, scored: ScoredPrefixes, state: CycleState, latency: LatencyModel
    ) -> IntArray:
        """[S] drafted nodes to verify per sequence, each ≤ ``scored.counts[s]``."""
        ...


@dataclass(frozen=True)
class Off:
    """Never draft: plain autoregressive decoding."""

    def limits(self, state: CycleState, latency: LatencyModel) -> tuple[int, int | None]:
        return 0, None

    def choose(
        self, scored: ScoredPrefixes, state: CycleState, latency: LatencyModel
    ) -> IntArray:
        return np.zeros(len(scored), dtype=np.int64)


@dataclass(frozen=True)
class Chain:
    """The single most probable continuation, to the drafter's horizon (DFlash)."""

    def limits(self, state: CycleState, latency: LatencyModel) -> tuple[int, int | None]:
        return state.horizon, 1

    def choose(
        self, scored: ScoredPrefixes, state: CycleState, latency: LatencyModel
    ) -> IntArray:
        return scored.counts.copy()


@dataclass(frozen=True)
class Fixed:
    """The same number of nodes every cycle (DDTree)."""

    budget: int

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise ValueError(f"budget must be ≥ 0, got {self.budget}; use 'off' or 0 for none")

    def limits(self, state: CycleState, latency: LatencyModel) -> tuple[int, int | None]:
        return self.budget, None

    def choose(
        self, scored: ScoredPrefixes, state: CycleState, latency: LatencyModel
    ) -> IntArray:
        return np.minimum(scored.counts, self.budget)
