"""What a budget policy is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
    """Chooses budgets from Φ and predicted seconds. The decoding rule never depends on it.

    Per cycle: ``limits``, then, if it asked for nodes, ``choose`` and after the walk ``observe``.
    An attribute ``why`` may say in a word or two what decided the last budget; it is traced.
    """

    def limits(self, state: CycleState, latency: LatencyModel) -> tuple[int, int | None]:
        """(max_nodes, max_width) to ask the drafter for; max_nodes 0 skips drafting this cycle."""
        ...

    def choose(self, scored: ScoredPrefixes, state: CycleState, latency: LatencyModel) -> IntArray:
        """[S] drafted nodes to verify per sequence, each ≤ ``scored.counts[s]``."""
        ...

    def observe(
        self, scored: ScoredPrefixes, budgets: IntArray, accepted: Sequence[Sequence[int]]
    ) -> None:
        """What became of the last ``choose``.

        Args:
            scored: the prefixes it was given.
            budgets: [S] the nodes that were verified.
            accepted: [S] columns of ``scored`` on the target's path, in order of depth, before
                truncation at a stop.
        """
        ...
