"""Verification budgets: how many drafted nodes each sequence sends to the target this cycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftwood.tree.latency import LatencyModel
from draftwood.tree.online import Online
from draftwood.tree.policy import MAX_NODES, BudgetPolicy, CycleState
from draftwood.tree.tree import IntArray, ScoredPrefixes

__all__ = [
    "MAX_NODES", "BudgetPolicy", "Chain", "CycleState", "Fixed", "Off", "Online", "parse_budget",
]  # fmt: skip


@dataclass(frozen=True)
class Off:
    """Never draft: plain autoregressive decoding."""

    def limits(self, state: CycleState, latency: LatencyModel) -> tuple[int, int | None]:
        return 0, None

    def choose(self, scored: ScoredPrefixes, state: CycleState, latency: LatencyModel) -> IntArray:
        return np.zeros(len(scored), dtype=np.int64)

    def observe(
        self, scored: ScoredPrefixes, budgets: IntArray, accepted: Sequence[Sequence[int]]
    ) -> None:
        pass


@dataclass(frozen=True)
class Chain:
    """The single most probable continuation, to the drafter's horizon (DFlash)."""

    def limits(self, state: CycleState, latency: LatencyModel) -> tuple[int, int | None]:
        return state.horizon, 1

    def choose(self, scored: ScoredPrefixes, state: CycleState, latency: LatencyModel) -> IntArray:
        return scored.counts.copy()

    def observe(
        self, scored: ScoredPrefixes, budgets: IntArray, accepted: Sequence[Sequence[int]]
    ) -> None:
        pass


@dataclass(frozen=True)
class Fixed:
    """The same number of nodes every cycle (DDTree)."""

    budget: int

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise ValueError(f"budget must be ≥ 0, got {self.budget}; use 'off' or 0 for none")

    def limits(self, state: CycleState, latency: LatencyModel) -> tuple[int, int | None]:
        return self.budget, None

    def choose(self, scored: ScoredPrefixes, state: CycleState, latency: LatencyModel) -> IntArray:
        return np.minimum(scored.counts, self.budget)

    def observe(
        self, scored: ScoredPrefixes, budgets: IntArray, accepted: Sequence[Sequence[int]]
    ) -> None:
        pass


def parse_budget(budget: str | int | BudgetPolicy) -> BudgetPolicy:
    """The policy a user means: ``"auto"``, ``"chain"``, ``"off"``, a number of nodes, or a policy.

    Raises:
        ValueError: anything else.
    """
    if isinstance(budget, (bool, float)):
        raise ValueError(f"budget must be a whole number of nodes, got {budget!r}")
    if isinstance(budget, int):
        return Fixed(budget)
    if not isinstance(budget, str):
        return budget
    text = budget.strip().lower()
    named: dict[str, type[Online | Chain | Off]] = {"auto": Online, "chain": Chain, "off": Off}
    if text in named:
        return named[text]()
    try:
        return Fixed(int(text))
    except ValueError as error:
        raise ValueError(
            f"budget must be 'auto', 'chain', 'off' or a number of nodes ≥ 0, got {budget!r}"
        ) from error
