"""What the engine hands out: outputs, step events and per-cycle records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from draftwood.draft.base import AheadStats
from draftwood.sampling import Pick
from draftwood.tree.tree import DraftTree, IntArray, ScoredPrefixes
from draftwood.verify import Verdict

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class StageSeconds:
    """Where the seconds of one engine cycle went; shared by all its sequences.

    Attributes:
        draft_s: drafter pass with enumeration and choice of the budget.
        verify_s: target forward.
        walk_s: target head, sampling and the walk.
        commit_s: KV commit, the drafter's intake of committed tokens, text.
        other_s: the rest.
    """

    draft_s: float
    verify_s: float
    walk_s: float
    commit_s: float
    other_s: float

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.walk_s + self.commit_s + self.other_s


@dataclass(frozen=True)
class CycleStats:
    """One decoding cycle of one sequence.

    Attributes:
        num_drafted: nodes sent to verification (the budget used).
        num_accepted: drafted nodes on the target's path, before truncation.
        num_committed: tokens emitted, bonus included, after truncation at a stop or limit.
        phi: expected number of accepted nodes Φ(num_drafted) by the scores the policy saw.
        context_len: tokens in the KV cache before the cycle.
        num_seqs: sequences that shared the target pass, prefilling ones included.
        seconds: stage times of the whole pass.
        ahead: how drafting ahead went; None without it.
    """

    num_drafted: int
    num_accepted: int
    num_committed: int
    phi: float
    context_len: int
    num_seqs: int
    seconds: StageSeconds
    ahead: AheadStats | None = None


@dataclass(frozen=True)
class CycleRecord:
    """Everything about one engine cycle, for traces and recordings.

    ``seq_ids``, ``verdicts`` and ``num_committed`` are parallel to the tree's sequences;
    ``scored`` and ``budgets`` hold only those that decoded, listed in ``decoding`` (indices).
    ``drafted`` tells whether the drafter was asked, ``why`` what decided the budgets, in the
    policy's words, ``ahead`` (parallel to ``decoding``) how drafting ahead went.
    """

    seq_ids: Sequence[int]
    decoding: Sequence[int]
    drafted: bool
    tree: DraftTree
    scored: ScoredPrefixes
    budgets: IntArray
    verdicts: Sequence[Verdict]
    num_committed: Sequence[int]
    context_lens: Sequence[int]
    seconds: StageSeconds
    why: str = ""
    ahead: Sequence[AheadStats | None] = ()


@dataclass(frozen=True)
class Output:
    """A finished (or aborted) sequence.

    Attributes:
        seq_id: id returned by ``Engine.add``.
        prompt_token_ids: the prompt as the target saw it.
        token_ids: emitted tokens, a final stop token included.
        text: their text without special tokens, cut before a stop string; "" without tokenizer.
        finish_reason: "stop" (stop token or string), "length", "abort" or "error".
        error: why, when ``finish_reason`` is "error".
        seed: the seed that reproduces this output; None at temperature 0.
        picks: token, log-probability and top log-probabilities per emitted token, when
            ``SamplingParams.logprobs`` asked for them.
        cycles: one record per decoding cycle; prefill is in ``prefill_s``.
        prefill_s: seconds of the passes that took in the prompt.
    """

    seq_id: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    error: str | None = None
    seed: int | None = None
    picks: list[Pick] = field(default_factory=list)
    cycles: list[CycleStats] = field(default_factory=list)
    prefill_s: float = 0.0

    @property
    def num_cycles(self) -> int:
        return len(self.cycles)

    @property
    def acceptance_length(self) -> float:
        """τ: tokens committed per cycle, bonus included; NaN without a cycle."""
        return len(self.token_ids) / len(self.cycles) if self.cycles else float("nan")

    @property
    def hit_rate(self) -> float:
        """Share of drafts that were ready when they were needed; NaN without drafting ahead."""
        sources = [cycle.ahead.source for cycle in self.cycles if cycle.ahead is not None]
        hits = sources.count("hit") + sources.count("soft")
        return hits / len(sources) if sources else float("nan")

    @property
    def standby_rate(self) -> float:
        """Share of drafts for which the drafter that works ahead was away; NaN without one."""
        sources = [cycle.ahead.source for cycle in self.cycles if cycle.ahead is not None]
        return sources.count("standby") / len(sources) if sources else float("nan")

    @property
    def decode_s(self) -> float:
        """Seconds of the decoding cycles this sequence took part in."""
        return sum(cycle.seconds.total_s for cycle in self.cycles)


@dataclass(frozen=True)
class StepEvent:
    """What one engine step did to one sequence.

    Attributes:
        seq_id: id returned by ``Engine.add``.
        token_ids: newly emitted tokens.
        text: newly safe text (may lag behind the tokens; never shown text is taken back).
        output: set when the sequence finished in this step.
    """

    seq_id: int
    token_ids: list[int]
    text: str
    output: Output | None = None
