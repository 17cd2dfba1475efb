"""Replay recorded texts under a budget policy, on the clock of a machine: exact and repeatable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftwood.draft.surrogate import Surrogate
from draftwood.replay.machines import Machine
from draftwood.replay.recording import RecordedText, Recording
from draftwood.tree.budget import Fixed
from draftwood.tree.calibration import CALIBRATION_WIDTHS, Calibration
from draftwood.tree.latency import LatencyModel, OnlineLatency
from draftwood.tree.policy import BudgetPolicy, CycleState
from draftwood.tree.tree import ScoredPrefixes

BUDGETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class TextResult:
    """One text under one policy.

    Attributes:
        num_tokens: emitted.
        num_cycles: target passes.
        num_drafted: nodes verified.
        seconds: by the machine's clock.
        plain_s: seconds plain decoding takes for the same text.
    """

    num_tokens: int
    num_cycles: int
    num_drafted: int
    seconds: float
    plain_s: float

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.plain_s / self.seconds


@dataclass(frozen=True)
class Replay:
    """A recording under one policy on one machine; sums over its texts."""

    machine: Machine
    texts: Sequence[TextResult]

    @property
    def num_tokens(self) -> int:
        return sum(text.num_tokens for text in self.texts)

    @property
    def num_cycles(self) -> int:
        return sum(text.num_cycles for text in self.texts)

    @property
    def num_drafted(self) -> int:
        return sum(text.num_drafted for text in self.texts)

    @property
    def seconds(self) -> float:
        return sum(text.seconds for text in self.texts)

    @property
    def acceptance_length(self) -> float:
        """τ: tokens per cycle."""
        return self.num_tokens / self.num_cycles

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def speedup(self) -> float:
        """Over plain decoding on the same machine."""
        return sum(text.plain_s for text in self.texts) / self.seconds


def replay(
    recording: Recording,
    policy: BudgetPolicy,
    machine: Machine,
    *,
    latency: LatencyModel | None = None,
    surrogate: Surrogate | None = None,
) -> Replay:
    """What ``policy`` would have made of the recorded texts, one after the other.

    Args:
        recording: drafts and outcomes at every position.
        policy: a new one; what it learns carries over from text to text.
        machine: the clock.
        latency: what the policy consults, refit by every cycle; by default a new
            ``OnlineLatency`` calibrated on the machine, as ``draftwood.load`` makes one.
        surrogate: calibrates scores as in the engine.
    """
    model = latency if latency is not None else OnlineLatency(_measured(machine))
    run = _Run(recording, policy, machine, model, surrogate)
    return Replay(machine, [run.text(text) for text in recording.texts])


def best_fixed(
    recording: Recording, machine: Machine, budgets: Sequence[int] = BUDGETS
) -> tuple[int, Replay]:
    """The oracle: the fixed budget that was fastest over the whole recording, in hindsight."""
    done = {budget: replay(recording, Fixed(budget), machine) for budget in budgets}
    best = min(done, key=lambda budget: done[budget].seconds)
    return best, done[best]


class _Run:
    """The state of one replay."""

    def __init__(
        self,
        recording: Recording,
        policy: BudgetPolicy,
        machine: Machine,
        latency: LatencyModel,
        surrogate: Surrogate | None,
    ) -> None:
        self._recording, self._policy, self._machine = recording, policy, machine
        self._latency, self._surrogate = latency, surrogate

    def text(self, text: RecordedText) -> TextResult:
        position = num_cycles = num_drafted = 0
        total_s = 0.0
        while position < len(text):
            accepted, budget, seconds = self._cycle(text, position)
            position = min(position + accepted + 1, len(text))
            num_cycles += 1
            num_drafted += budget
            total_s += seconds
        return TextResult(len(text), num_cycles, num_drafted, total_s, self._plain_s(text))

    def _cycle(self, text: RecordedText, position: int) -> tuple[int, int, float]:
        """(accepted nodes, verified nodes, seconds) of the cycle that begins at a position."""
        context_len = text.prompt_len - 1 + position
        state = CycleState([context_len], self._recording.horizon)
        max_nodes, max_width = self._policy.limits(state, self._latency)
        if max_nodes == 0:
            return 0, 0, self._spend(1, context_len, 1, drafted=False)
        if max_width == 1:
            scored, picks = text.chain(position), text.chain_picks(position)
        elif max_width is None:
            scored, picks = text.prefixes(position, max_nodes), text.picks(position, max_nodes)
        else:
            raise ValueError(f"recordings hold trees and chains, not trees of width {max_width}")
        if self._surrogate is not None:
            scored = self._surrogate.calibrated(scored, [self._recording.sampled])
        budget = int(self._policy.choose(scored, state, self._latency)[0])
        nodes = _accepted(scored, budget, picks)
        num_picks = min(len(nodes) + 1, len(text) - position)
        seconds = self._spend(1 + budget, context_len, num_picks, drafted=True)
        if self._surrogate is not None:
            self._surrogate.learn([picks[: len(nodes) + 1]])
        self._policy.observe(scored, np.array([budget]), [nodes])
        return len(nodes), budget, seconds

    def _spend(self, width: int, context_len: int, num_tokens: int, *, drafted: bool) -> float:
        machine = self._machine
        verify_s = float(machine.verify_s(np.array([width]), context_len, 1)[0])
        draft_s = machine.draft_s(context_len, 1) if drafted else None
        other_s, walk_s = machine.other_s(), machine.walk_s(num_tokens)
        self._latency.observe(
            width=width, context_len=context_len, num_seqs=1, verify_s=verify_s, draft_s=draft_s,
            other_s=other_s, walk_s=walk_s, num_tokens=num_tokens,
        )  # fmt: skip
        return verify_s + (draft_s or 0.0) + other_s + walk_s

    def _plain_s(self, text: RecordedText) -> float:
        machine = self._machine
        passes = sum(
            float(machine.verify_s(np.array([1]), text.prompt_len - 1 + at, 1)[0])
            for at in range(len(text))
        )
        return passes + len(text) * (machine.other_s() + machine.walk_s(1))


def _accepted(scored: ScoredPrefixes, budget: int, picks: Sequence[int]) -> list[int]:
    """Columns among the first ``budget`` that the target's tokens run along."""
    place = {token: column for column, token in enumerate(scored.token_ids[0, :budget].tolist())}
    nodes: list[int] = []
    for token in picks:
        if token not in place:
            break
        nodes.append(place[token])
    return nodes


def _measured(machine: Machine) -> Calibration:
    """What calibrating on the machine would find."""
    widths = np.array(CALIBRATION_WIDTHS)
    seconds = machine.verify_s(widths, machine.curve.context_len, 1)
    return Calibration(
        CALIBRATION_WIDTHS, tuple(seconds.tolist()), machine.curve.context_len
    )  # fmt: skip
