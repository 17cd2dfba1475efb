"""The verification budget when drafting runs beside verification."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftwood.ahead.planner import Planner
from draftwood.tree.floor import Floor
from draftwood.tree.latency import LatencyModel
from draftwood.tree.policy import MAX_NODES, CycleState
from draftwood.tree.ranked import rank_nodes
from draftwood.tree.tree import FloatArray, IntArray, ScoredPrefixes
from draftwood.tree.trust import Trust

_FEWEST_NODES = 16
_STEP = 1.15  # between the numbers of nodes that are compared
_BRANCHES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class AheadBudget:
    """Chooses nodes n and branches M together.

    Tokens per second of a cycle that verifies n nodes while M branches are drafted:

        (1 + Φ(n)) / (max(t_verify(n), t_ahead(M)) + (1 − h(n, M)) · t_draft + t_other)

    h is the probability that the bonus token is among the M most probable outcomes of the tree of
    n nodes: a bigger tree accepts more and spreads what is left over more outcomes. Φ and h are
    scaled by how far their promises have come true. With S sequences 1 becomes S, and one miss
    costs a draft for all: 1 − h becomes 1 − h^S for the mean h.

    Args:
        planner: of the ``AheadDrafter``; it is told M.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        planner.is_asked_widely = True
        self._trust = Trust()
        self._floor = Floor()
        self._most_nodes = _FEWEST_NODES
        self._cost = 1.0
        self.why = ""

    def limits(self, state: CycleState, latency: LatencyModel) -> tuple[int, int | None]:
        if state.horizon == 0 or not self._floor.drafts():
            self.why = "plain is faster"
            return 0, None
        return min(self._most_nodes + self._planner.num_spare, MAX_NODES), None

    def choose(self, scored: ScoredPrefixes, state: CycleState, latency: LatencyModel) -> IntArray:
        num_seqs = len(scored)
        ranked = rank_nodes(scored)
        totals = _totals(min(len(ranked.phi), num_seqs * self._most_nodes + 1))
        fixed = self._planner.options.num_branches
        free = [m for m in _BRANCHES if m <= self._planner.most_branches]
        branches = np.array(free if fixed is None else [fixed])
        hits = self._planner.pace.hit_trust.ratio * hit_probs(scored, totals, branches)
        hits = np.minimum(hits / max(num_seqs, 1), 1.0)
        tokens = num_seqs + self._trust.ratio * ranked.phi[totals]
        seconds, plain = self._seconds(totals, branches, hits, state, latency)
        speed = tokens[:, None] / seconds
        best, which = np.unravel_index(int(np.argmax(speed)), speed.shape)
        total = int(totals[best])
        self._planner.planned = int(branches[which])
        self._cost = float(seconds[best, which]) / plain
        self.why = f"n={total} M={branches[which]} h={hits[best, which]:.2f}"
        budgets = ranked.budgets(total)
        used = int(budgets.max(initial=0))
        self._most_nodes = max(2 * used, _FEWEST_NODES, self._most_nodes - self._most_nodes // 16)
        return budgets

    def observe(
        self, scored: ScoredPrefixes, budgets: IntArray, accepted: Sequence[Sequence[int]]
    ) -> None:
        num_seqs = max(len(budgets), 1)
        phi = float(scored.phi()[np.arange(len(budgets)), budgets].sum())
        num_accepted = sum(len(nodes) for nodes in accepted)
        self._trust.observe(num_accepted, phi)
        tokens = 0.5 * (num_accepted + self._trust.ratio * phi)
        self._floor.observe(1.0 + tokens / num_seqs, 1.0 + num_accepted / num_seqs, self._cost)

    def _seconds(
        self,
        totals: IntArray,
        branches: IntArray,
        hits: FloatArray,
        state: CycleState,
        latency: LatencyModel,
    ) -> tuple[FloatArray, float]:
        """[n, M] seconds of a cycle, and those of one that only decodes."""
        num_seqs = max(len(state.context_lens), 1)
        context_len = sum(state.context_lens) / num_seqs
        pace, other = self._planner.pace, latency.other_s()
        widths = np.concatenate([[num_seqs], num_seqs + totals])
        verify = latency.verify_s(widths, context_len, num_seqs)
        ahead = np.array([pace.ahead_s(m) if m else 0.0 for m in branches.tolist()])
        missed = 1.0 - hits**num_seqs
        both = np.maximum(verify[1:, None], ahead) + missed * pace.draft_s + other
        return both, float(verify[0]) + other


def hit_probs(scored: ScoredPrefixes, totals: IntArray, branches: IntArray) -> FloatArray:
    """[n, M] expected number of sequences whose outcome is among the M most probable ones.

    Outcomes with a known bonus token only: what an open one is worth is another matter.

    Args:
        scored: prefixes of S sequences.
        totals: numbers of nodes verified, over all sequences, the most probable first.
        branches: numbers of outcomes drafted for.
    """
    valid = np.arange(scored.max_nodes) < scored.counts[:, None]
    seq, column = np.nonzero(valid)
    log_probs = scored.log_probs[valid]
    order = np.argsort(-log_probs, kind="stable")
    rank_of = np.full((len(scored), scored.max_nodes + 1), -1)
    rank_of[seq[order], column[order]] = np.arange(len(order))
    parents = rank_of[seq[order], scored.parents[seq[order], column[order]]]  # −1: the anchor
    probs = np.exp(log_probs[order])
    is_outcome = (parents < totals[:, None]) & (np.arange(len(order)) >= totals[:, None])
    number = np.cumsum(is_outcome, axis=1)
    return np.stack(
        [np.where(is_outcome & (number <= m), probs, 0.0).sum(axis=1) for m in branches.tolist()],
        axis=1,
    )


def _totals(size: int) -> IntArray:
    """Numbers of nodes to compare, 0 … size − 1: all the small ones, fewer of the large."""
    found = [0]
    while found[-1] < size - 1:
        found.append(min(max(found[-1] + 1, int(found[-1] * _STEP)), size - 1))
    return np.array(found, dtype=np.int64)
