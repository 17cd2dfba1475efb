"""The default budget policy: fastest expected decoding, plain where drafting does not pay."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from draftwood.tree.floor import Floor
from draftwood.tree.latency import LatencyModel
from draftwood.tree.policy import MAX_NODES, CycleState
from draftwood.tree.ranked import rank_nodes
from draftwood.tree.tree import FloatArray, IntArray, ScoredPrefixes
from draftwood.tree.trust import Trust

_FEWEST_NODES = 16  # always asked for, so that the curve is seen to fall
_YARDSTICK = 0.003  # of the gain over plain decoding may go into measuring plain cycles
_LEAST_BETWEEN = 8  # drafted cycles between those
_BETWEEN_IF_MEASURED = 32  # the first time, if plain cycles were measured before
_HOPE = 0.15  # a band of widths not visited lately may be this much cheaper than predicted
_EXPLORES = 0.5  # no exploring for a drafter whose promises come less true
_FADE = 0.998  # per cycle, of visits
_MEASURED = 5.0  # visits that a measurement before the first cycle is worth
_NUM_BANDS = 40


class Online:
    """Takes the number of nodes that makes decoding fastest in the long run, over all sequences.

    With Φ the expected accepted nodes (scaled by how far the drafter's probabilities have come
    true lately) and seconds(N) the predicted cycle, the speed over many cycles is
    Σ (S + Φ) / Σ seconds. The N that maximises it also maximises S + Φ(N) − speed · seconds(N) in
    every cycle (Dinkelbach 1967), which unlike the cycle's own ratio (S + Φ) / seconds does not
    waste time on cycles that are going badly. The maximum is taken over the whole curve: seconds
    may have steps. Nodes of all sequences compete for one budget.

    Times are in units of a plain cycle, so that a change of the machine's speed changes nothing.

    Args:
        is_calibrated: the latency model starts from measured passes, so that there is less to
            find out by decoding.

    Attributes:
        why: what decided the last budget: "speed" (the best predicted), "all" (every node the
            drafter offered) or "limit" (every node it was asked for), "explore" (a width not seen
            lately), "trial" (drafting is tried again), "plain" (no node pays in this cycle),
            "floor" (drafting does not pay), "yardstick" (plain decoding is measured), "off" (a
            drafter that never drafts).
    """

    def __init__(self, *, is_calibrated: bool = False) -> None:
        self.why = ""
        self._floor = Floor()
        self._trust = Trust()
        self._most_nodes = _FEWEST_NODES
        self._lens: list[int] = []
        self._cost = 1.0
        self._explores = False
        # Of width bands, fading.
        self._visits = np.full(_NUM_BANDS, _MEASURED if is_calibrated else 0.0)
        self._since_plain = 0.0 if is_calibrated else math.inf  # cycles
        self._between_plain = _BETWEEN_IF_MEASURED if is_calibrated else _LEAST_BETWEEN / 2

    def limits(self, state: CycleState, latency: LatencyModel) -> tuple[int, int | None]:
        self._visits *= _FADE
        self._since_plain += 1
        new_text, self._lens = _has_new_text(self._lens, state), list(state.context_lens)
        if reason := self._reason_not_to_draft(state, new_text):
            self.why = reason
            self._since_plain = 0
            return 0, None
        if self._floor.begins_trial:
            self._trust = Trust()
        return min(self._most_nodes, MAX_NODES), None

    def choose(self, scored: ScoredPrefixes, state: CycleState, latency: LatencyModel) -> IntArray:
        num_seqs = len(scored)
        ranked = rank_nodes(scored)
        tokens = num_seqs + self._trust.ratio * ranked.phi
        bands = _bands(num_seqs + np.arange(len(tokens)))
        costs, hopes = _costs(state, latency, num_seqs, 1.0 - _HOPE * 0.5 ** self._visits[bands])
        if self._floor.in_trial or self._trust.ratio < _EXPLORES:
            hopes = costs
        speed = self._floor.speed or float((tokens / hopes).max()) / num_seqs
        worth = max(speed, 1.0) * num_seqs
        total = int(np.argmax(tokens - worth * hopes))
        self._explores = total != int(np.argmax(tokens - worth * costs))
        self._cost = float(costs[total])
        self._visits[bands[total]] += 1.0
        budgets = ranked.budgets(total)
        self.why = self._reason(total, len(tokens) - 1, int(budgets.max(initial=0)))
        self._most_nodes = _next_limit(self._most_nodes, int(budgets.max(initial=0)))
        return budgets

    def observe(
        self, scored: ScoredPrefixes, budgets: IntArray, accepted: Sequence[Sequence[int]]
    ) -> None:
        num_seqs = max(len(budgets), 1)
        phi = float(scored.phi()[np.arange(len(budgets)), budgets].sum())
        num_accepted = sum(len(nodes) for nodes in accepted)
        self._trust.observe(num_accepted, phi)
        if self._explores:
            return  # says little about drafting as it will be
        # Half of what happened and half of what was to be expected: a fair sum with less noise.
        tokens = 0.5 * (num_accepted + self._trust.ratio * phi)
        self._floor.observe(1.0 + tokens / num_seqs, 1.0 + num_accepted / num_seqs, self._cost)

    def _reason_not_to_draft(self, state: CycleState, new_text: bool) -> str:
        if state.horizon == 0:
            return "off"
        if self._yardstick_due():
            return "yardstick"
        return "" if self._floor.drafts(new_text=new_text) else "floor"

    def _reason(self, total: int, num_offered: int, most: int) -> str:
        """Of a budget of ``total`` nodes, ``most`` of them in one sequence."""
        if self._floor.in_trial:
            return "trial"
        if self._explores:
            return "explore"
        if total == 0:
            return "plain"
        if most >= self._most_nodes:
            return "limit"
        return "all" if total == num_offered else "speed"

    def _yardstick_due(self) -> bool:
        """Whether to decode one cycle plainly, to see what plain costs now; first of all."""
        if self._since_plain <= self._between_plain:
            return False
        gain = (self._floor.speed or 1.0) - 1.0
        wanted = max(gain / _YARDSTICK, _LEAST_BETWEEN)
        self._between_plain = min(2.0 * self._between_plain, wanted)  # often at first
        return True


def _has_new_text(before: Sequence[int], state: CycleState) -> bool:
    """Whether a sequence that was not there in the last cycle has joined, by the lengths alone."""
    lens = state.context_lens
    if len(lens) != len(before):
        return len(lens) > len(before)
    grown = (now - old for old, now in zip(before, lens, strict=True))
    return any(not 0 < growth <= state.horizon + 1 for growth in grown)


def _bands(widths: IntArray) -> IntArray:
    """Half octaves."""
    return np.minimum(2.0 * np.log2(widths), _NUM_BANDS - 1).astype(np.int64)


def _costs(
    state: CycleState, latency: LatencyModel, num_seqs: int, optimism: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Predicted duration of a drafted cycle of 0, 1, … nodes in plain cycles, and a hopeful one."""
    context_len = sum(state.context_lens) / max(num_seqs, 1)
    widths = num_seqs + np.arange(len(optimism))
    verify = latency.verify_s(widths, context_len, num_seqs)
    rest = latency.draft_s(context_len, num_seqs) + latency.other_s()
    plain = float(verify[0]) + latency.other_s()
    return (verify + rest) / plain, (verify * optimism + rest) / plain


def _next_limit(limit: int, used: int) -> int:
    """Nodes to ask for: room to double, given back slowly."""
    wanted = max(2 * used, _FEWEST_NODES)
    return wanted if wanted > limit else max(wanted, limit - max(1, limit // 16))
