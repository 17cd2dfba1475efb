"""The state of one sequence in the engine, and the one place where its output is truncated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draftwood.draft.base import DraftContext
from draftwood.records import CycleStats, FinishReason, Output
from draftwood.sampling import Pick, Sampler, SamplingParams
from draftwood.target.cache import KVCache
from draftwood.text import TextStream

StopWhen = Callable[[Sequence[int]], bool]


@dataclass(eq=False)
class SequenceState:
    """One sequence between ``add`` and its end.

    Invariant while decoding: ``cache.length == len(token_ids) − 1`` (the anchor is committed but
    not yet in the KV cache).

    Attributes:
        token_ids: prompt and emitted output.
        stop_token_ids: end-of-sequence and stop tokens of this request.
        limit: total number of tokens at which the sequence ends.
        text: incremental detokenizer, None without a tokenizer.
        stop_when: extra stopping test on all tokens, called after each emitted token.
        keep: leave cache and drafter state in place when it finishes (chat).
    """

    seq_id: int
    token_ids: list[int]
    prompt_len: int
    params: SamplingParams
    sampler: Sampler
    cache: KVCache
    stop_token_ids: frozenset[int]
    limit: int
    text: TextStream | None
    stop_when: StopWhen | None = None
    keep: bool = False
    prefill_s: float = 0.0
    cycles: list[CycleStats] = field(default_factory=list)
    picks: list[Pick] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def is_decoding(self) -> bool:
        """Whether the whole prompt but its last token (the first anchor) is in the cache."""
        return self.cache.length == len(self.token_ids) - 1

    def next_chunk(self, max_tokens: int) -> list[int]:
        """The next prompt tokens to prefill; never the last one, which becomes the anchor."""
        end = min(self.cache.length + max_tokens, len(self.token_ids) - 1)
        return self.token_ids[self.cache.length : end]

    def context(self) -> DraftContext:
        """What the drafter sees. A path of depth d emits d + 1 tokens, hence the − 1."""
        max_depth = self.limit - len(self.token_ids) - 1
        return DraftContext(
            self.seq_id, self.token_ids, self.prompt_len, max(0, max_depth), self.sampler
        )

    def accept(self, picks: Sequence[Pick]) -> list[int]:
        """Emit a cycle's picks up to the first stop or limit and drop the rest.

        Returns:
            The emitted token ids, a stop token included.
        """
        emitted: list[int] = []
        for pick in picks:
            emitted.append(pick.token_id)
            self.token_ids.append(pick.token_id)
            if self.params.logprobs is not None:
                self.picks.append(pick)
            self.finish_reason = self._reason_to_finish(pick.token_id)
            if self.finish_reason is not None:
                break
        self.sampler.commit(emitted)
        return emitted

    def _reason_to_finish(self, token_id: int) -> FinishReason | None:
        may_stop = self.num_output >= self.params.min_new_tokens
        hit_string = self.text is not None and self.text.push(token_id, may_stop=may_stop)
        if token_id in self.stop_token_ids or hit_string:
            return "stop"
        try:
            if self.stop_when is not None and self.stop_when(list(self.token_ids)):
                return "stop"
        except Exception as error:  # the user's code: only this sequence ends
            self.error = f"stop_when failed: {error!r}"
            return "error"
        return "length" if len(self.token_ids) >= self.limit else None

    def output(self) -> Output:
        """The record handed to the user; valid once ``finish_reason`` is set."""
        assert self.finish_reason is not None
        return Output(
            seq_id=self.seq_id,
            prompt_token_ids=self.token_ids[: self.prompt_len],
            token_ids=self.token_ids[self.prompt_len :],
            text=self.text.text if self.text is not None else "",
            finish_reason=self.finish_reason,
            error=self.error,
            seed=self.params.seed if self.params.temperature > 0 else None,
            picks=self.picks,
            cycles=self.cycles,
            prefill_s=self.prefill_s,
        )
