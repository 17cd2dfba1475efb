"""THE decode loop: draft a tree, verify it in one target pass, keep what the target says itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import RLock
from typing import Any

import torch

from draftwood.commit import accept, commit
from draftwood.draft.base import (
    AheadStats,
    DraftContext,
    Drafter,
    DraftLimits,
    NullDrafter,
    prefetching,
)
from draftwood.draft.surrogate import Surrogate
from draftwood.drive import generate, stream
from draftwood.learn import file_cycle, refit, teach
from draftwood.records import CycleRecord, Output, StepEvent
from draftwood.request import Prompt, new_sequence
from draftwood.sampling import SamplingParams
from draftwood.sequence import SequenceState, StopWhen
from draftwood.stopwatch import Stopwatch
from draftwood.target.model import Target
from draftwood.tree.budget import BudgetPolicy, CycleState, Off
from draftwood.tree.latency import LatencyModel, OnlineLatency
from draftwood.tree.tree import DraftTree, IntArray, ScoredPrefixes
from draftwood.verify import row_logits, walk


class Engine:
    """Decodes any number of sequences on one target, one drafter and one budget policy.

    Sequences join (``add``) and leave (a stop, ``abort``) between cycles. Threads may share one:
    their sequences are decoded together, each cycle by whoever comes first.

    Args:
        target: the model whose output must not change.
        drafter: what proposes; None decodes plainly.
        policy: how many nodes to verify per cycle; None is plain decoding.
        latency: the latency model the policy consults, and that every cycle refits.
        surrogate: calibrates the drafter's scores and learns from every cycle; None takes the
            scores as they are.
        max_batch: sequences decoded together; more wait in order of arrival.
        prefill_chunk_len: prompt tokens one sequence takes in per cycle.
        on_cycle: called with the full record of every cycle (traces, recordings).
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        policy: BudgetPolicy | None = None,
        *,
        latency: LatencyModel | None = None,
        surrogate: Surrogate | None = None,
        max_batch: int = 16,
        prefill_chunk_len: int = 512,
        on_cycle: Callable[[CycleRecord], None] | None = None,
    ) -> None:
        if max_batch < 1 or prefill_chunk_len < 1:
            raise ValueError(
                f"max_batch and prefill_chunk_len must be ≥ 1, got {max_batch}, {prefill_chunk_len}"
            )
        self.target = target
        self.drafter: Drafter = drafter if drafter is not None else NullDrafter()
        self.policy: BudgetPolicy = policy if policy is not None else Off()
        self.latency: LatencyModel = latency if latency is not None else OnlineLatency()
        self.surrogate = surrogate
        self.max_batch = max_batch
        self.prefill_chunk_len = prefill_chunk_len
        self.on_cycle = on_cycle
        self._waiting: deque[SequenceState] = deque()
        self._running: list[SequenceState] = []
        self._kept: dict[int, SequenceState] = {}
        self._driven: set[int] = set()  # by generate and stream, which look at their records
        self._unread: list[StepEvent] = []
        self._next_id = 0
        self._turn = RLock()  # listeners of a cycle may call abort

    # ---- the loop -------------------------------------------------------------------------

    @torch.inference_mode()
    def cycle(self, seqs: Sequence[SequenceState]) -> list[StepEvent]:
        """One cycle for all ``seqs``: prefilling ones take in a chunk, the others decode."""
        watch = Stopwatch()
        lens = [seq.cache.length for seq in seqs]
        decoding = [i for i, seq in enumerate(seqs) if seq.is_decoding]

        contexts = [seqs[i].context() for i in decoding]
        drafted, scored, budgets = self._draft(contexts)
        tree = self._plant(seqs, decoding, scored, budgets)
        ahead = prefetching(self.drafter)
        if ahead is not None:
            ahead.prefetch(contexts, tree.only(decoding))
        watch.lap("draft_s")

        out = self.target.forward(tree, [seq.cache for seq in seqs], self.drafter.taps)
        watch.lap("verify_s")

        samplers = [seq.sampler if seq.is_decoding else None for seq in seqs]
        logits_of = row_logits(
            self.target.logits, out.hidden, tree, decoding,
            rows_together=self.target.kernels.head_rows,
        )  # fmt: skip
        verdicts = walk(tree, logits_of, samplers)
        watch.lap("walk_s")

        emitted = [accept(seq, verdict) for seq, verdict in zip(seqs, verdicts, strict=True)]
        committed = [
            commit(seq, tree, i, verdict, len(tokens), out.features)
            for i, (seq, verdict, tokens) in enumerate(zip(seqs, verdicts, emitted, strict=True))
        ]
        self.drafter.observe([record for record in committed if record is not None])
        texts = [seq.text.take() if seq.text is not None else "" for seq in seqs]
        watch.lap("commit_s")

        record = CycleRecord(
            [seq.seq_id for seq in seqs], decoding, drafted, tree, scored, budgets, verdicts,
            [len(tokens) for tokens in emitted], lens, watch.seconds(),
            getattr(self.policy, "why", "") if decoding else "", self._ahead_stats(contexts),
        )  # fmt: skip
        self._learn(seqs, record)
        return [self._event(*row) for row in zip(seqs, emitted, texts, strict=True)]

    def _draft(self, contexts: list[DraftContext]) -> tuple[bool, ScoredPrefixes, IntArray]:
        """(whether the drafter was asked, its prefixes, the chosen budgets)."""
        state = CycleState([len(c.token_ids) - 1 for c in contexts], self.drafter.horizon)
        max_nodes, max_width = self.policy.limits(state, self.latency) if contexts else (0, None)
        if max_nodes == 0 or self.drafter.horizon == 0:
            scored = ScoredPrefixes.empty(len(contexts))
            return False, scored, scored.counts
        scored = self.drafter.propose(contexts, DraftLimits(max_nodes, max_width))
        if self.surrogate is not None:
            sampled = [context.sampler.noise is not None for context in contexts]
            scored = self.surrogate.calibrated(scored, sampled)
        return True, scored, self.policy.choose(scored, state, self.latency)

    def _ahead_stats(self, contexts: list[DraftContext]) -> list[AheadStats | None]:
        ahead = prefetching(self.drafter)
        if ahead is None:
            return [None] * len(contexts)
        return [ahead.take_stats(context.seq_id) for context in contexts]

    def _plant(
        self,
        seqs: Sequence[SequenceState],
        decoding: list[int],
        scored: ScoredPrefixes,
        budgets: IntArray,
    ) -> DraftTree:
        if len(decoding) == len(seqs):
            return DraftTree.grow([seq.token_ids[-1] for seq in seqs], scored, budgets)
        chunks = {
            i: DraftTree.chain(seq.next_chunk(self.prefill_chunk_len))
            for i, seq in enumerate(seqs)
            if not seq.is_decoding
        }
        for row, i in enumerate(decoding):
            one = scored.row(row)
            chunks[i] = DraftTree.grow([seqs[i].token_ids[-1]], one, budgets[row : row + 1])
        return DraftTree.pack([chunks[i] for i in range(len(seqs))])

    def _learn(self, seqs: Sequence[SequenceState], record: CycleRecord) -> None:
        """File the cycle with its sequences, then refit what the next one is chosen by."""
        file_cycle(seqs, record)
        if len(record.decoding) == len(seqs):
            refit(self.latency, record, on_cpu=self.target.device.type == "cpu")
        if record.drafted:
            teach(self.surrogate, self.policy, record)
        if self.on_cycle is not None:
            self.on_cycle(record)

    def _event(self, seq: SequenceState, emitted: list[int], text: str) -> StepEvent:
        if seq.finish_reason is None:
            return StepEvent(seq.seq_id, emitted, text)
        tail = seq.text.finish() if seq.text is not None else ""
        if seq in self._running:  # else a listener of this cycle aborted it
            self._running.remove(seq)
            self._retire(seq)
        return StepEvent(seq.seq_id, emitted, text + tail, seq.output())

    # ---- sequences join and leave ---------------------------------------------------------

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        processors: Sequence[Callable[..., torch.Tensor]] = (),
        stop_when: StopWhen | None = None,
        sample_index: int = 0,
        keep: bool = False,
        resume: int | None = None,
    ) -> int:
        """Queue a sequence; it starts with the next ``step``.

        Args:
            prompt: text (one user turn through the chat template), chat messages, or token ids.
            params: sampling settings; greedy by default.
            raw: take a text prompt as it is, without the chat template.
            processors: extra transformers-style logits processors, applied before the others.
            stop_when: ends the sequence when it returns True for all its tokens so far.
            sample_index: selects an independent sample of the same seed.
            keep: keep the KV cache when the sequence finishes, for ``resume``.
            resume: id of a kept sequence whose cached tokens are reused as far as they agree.

        Returns:
            The id used in events and by ``abort``.

        Raises:
            ValueError: an empty or too long prompt, an unknown token or sequence id, stop strings
                without a tokenizer.
        """
        with self._turn:
            if resume is not None and resume not in self._kept:
                raise ValueError(f"no kept sequence {resume} to resume; add it with keep=True")
            seq = new_sequence(
                self.target, self._next_id, prompt, params or SamplingParams(), raw=raw,
                processors=processors, stop_when=stop_when, sample_index=sample_index, keep=keep,
                old=self._kept.get(resume) if resume is not None else None,
            )  # fmt: skip
            if resume is not None:
                del self._kept[resume]
                self.drafter.truncate(seq.seq_id, seq.cache.length)
            self._next_id = max(self._next_id, seq.seq_id + 1)
            self._waiting.append(seq)
            return seq.seq_id

    def step(self) -> list[StepEvent]:
        """Admit waiting sequences and run one cycle; [] when there is nothing to do.

        Returns:
            What happened to the sequences that were added, also in cycles that ``generate`` and
            ``stream`` ran since the last ``step``; their own sequences come up only in those.
        """
        with self._turn:
            self._advance()
            events, self._unread = self._unread, []
            return events

    def _advance(self) -> None:
        """One cycle; its events wait for ``step``, but for sequences that need none."""
        with self._turn:
            while self._waiting and len(self._running) < self.max_batch:
                self._running.append(self._waiting.popleft())
            events = self.cycle(list(self._running)) if self._running else []
            self._unread += [event for event in events if event.seq_id not in self._driven]

    def abort(self, seq_id: int) -> Output | None:
        """End a sequence and free its memory, or free a kept one; None if unknown.

        A sequence added with ``keep=True`` is kept when aborted while it runs: a second call
        frees it.
        """
        groups: tuple[Any, ...] = (self._running, self._waiting)
        with self._turn:
            for group in groups:
                for seq in [seq for seq in group if seq.seq_id == seq_id]:
                    group.remove(seq)
                    seq.finish_reason = "abort"
                    self._retire(seq)
                    return seq.output()
            kept = self._kept.pop(seq_id, None)
            if kept is not None:
                self._free(kept)
            return kept.output() if kept is not None else None

    @property
    def num_active(self) -> int:
        """Sequences running, waiting, or with events that ``step`` has not returned yet."""
        seqs = (*self._running, *self._waiting)
        return len({seq.seq_id for seq in seqs} | {event.seq_id for event in self._unread})

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV caches of running and kept sequences, spare capacity included."""
        return sum(seq.cache.num_bytes for seq in (*self._running, *self._kept.values()))

    def _retire(self, seq: SequenceState) -> None:
        if seq.keep and seq.finish_reason != "error":
            self._kept[seq.seq_id] = seq
        else:
            self._free(seq)

    def _free(self, seq: SequenceState) -> None:
        seq.cache.release()
        self.drafter.release(seq.seq_id)

    # ---- whole generations ----------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
    ) -> list[Output]:
        """Decode prompts to the end; outputs in the order of the prompts.

        Args:
            prompts: one prompt or a list of them (see ``add``); a flat list of ints is one prompt.
            params: one setting for all, or one per prompt.
            raw: take text prompts as they are, without the chat template.
        """
        return generate(self, prompts, params, raw=raw)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, raw: bool = False
    ) -> Iterator[str]:
        """Yield text as it becomes certain; abandoning the iterator frees the sequence."""
        return stream(self, prompt, params, raw=raw)
