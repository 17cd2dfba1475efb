"""Verification budgets: how many drafted nodes each sequence sends to the target this cycle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from draftwood.tree.convex_greedy import ConvexGreedy
from draftwood.tree.latency import LatencyModel
from draftwood.tree.online import Online
from draftwood.tree.policy import MAX_NODES, BudgetPolicy, CycleState
from draftwood.tree.tree import IntArray, ScoredPrefixes

__all__ = [
    "MAX_NODES", "BudgetPolicy", "Chain", "CycleState", "Fixed", "Off", "Online", "is_constant",
    "parse_budget",
]  # fmt: skip


@dataclass(frozen=True)
class Off:
    """Never draft: plain autoregressive decoding."""

    why = "off"

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

    why = "chain"

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
    why = "fixed"

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


def parse_budget(
    budget: str | int | BudgetPolicy, makers: Mapping[str, Callable[[], BudgetPolicy]] | None = None
) -> BudgetPolicy:
    """The policy a user means.

    Args:
        budget: ``"auto"`` (``Online``), ``"convex"`` (``ConvexGreedy``), ``"roofline"``,
            ``"chain"``, ``"off"``, a number of nodes, or a policy, which is returned as it is.
        makers: how to make policies of these names, which know more of a target.
            ``"roofline"`` has no other.

    Raises:
        ValueError: anything else, or ``"roofline"`` where there is no target to fit it to.
    """
    if isinstance(budget, (bool, float)):
        raise ValueError(f"budget must be a whole number of nodes, got {budget!r}")
    if isinstance(budget, (int, Integral)):
        return Fixed(int(budget))
    if not isinstance(budget, str):
        if not all(hasattr(budget, name) for name in ("limits", "choose", "observe")):
            raise _unknown(budget)
        return budget
    text = budget.strip().lower()
    named: dict[str, Callable[[], BudgetPolicy]] = {
        "auto": Online, "convex": ConvexGreedy, "chain": Chain, "off": Off, **(makers or {})
    }  # fmt: skip
    if text in named:
        return named[text]()
    if text == "roofline":
        raise ValueError(
            "budget 'roofline' is fitted to a measured target; give it to draftwood.load, or "
            "give a draftwood.tree.roofline.Roofline here"
        )
    try:
        return Fixed(int(text))
    except ValueError as error:
        raise _unknown(budget) from error


def _unknown(budget: object) -> ValueError:
    return ValueError(
        "budget must be 'auto', 'convex', 'roofline', 'chain', 'off', a number of nodes ≥ 0 or a "
        f"policy, got {budget!r}"
    )


def is_constant(budget: str | int | BudgetPolicy) -> bool:
    """Whether a budget is the same whatever is predicted: a number, ``"chain"`` or ``"off"``.

    Raises:
        ValueError: as ``parse_budget``, but where there is no target yet.
    """
    return isinstance(parse_budget(budget, {"roofline": Online}), (Fixed, Chain, Off))
