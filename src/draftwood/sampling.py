"""The target's next token along a path of a draft tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan

import torch

from draftwood import processing
from draftwood.errors import DraftwoodError
from draftwood.noise import MAX_GUMBEL, MIN_GUMBEL, KeyedNoise
from draftwood.sampling_params import SamplingParams as SamplingParams

Processor = Callable[..., torch.Tensor]

_NOISE_RANGE = MAX_GUMBEL - MIN_GUMBEL


@dataclass(frozen=True)
class Pick:
    """The target's own next token at one position.

    Attributes:
        token_id: the token.
        logprob: natural log of its probability under the unprocessed logits, if asked for.
        top_logprobs: (token id, log-probability) of the most probable tokens, best first.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None


class Sampler:
    """Picks the target's next token of one sequence; depends on its tokens only, never on a tree.

    Args:
        params: the request.
        prompt_ids: prompt tokens.
        vocab_size: V.
        eos_token_ids: the model's end-of-sequence tokens.
        sample_index: selects an independent sample of the same seed.
        processors: transformers-style callables (input_ids [1, L], scores [1, V]) → scores,
            called before everything else, once per visited position and in order.

    Raises:
        ValueError: a token id outside the vocabulary, or temperature > 0 without a seed.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        sample_index: int = 0,
        processors: Sequence[Processor] = (),
    ) -> None:
        params.check_vocabulary(vocab_size)
        if params.temperature > 0 and params.seed is None:
            raise ValueError("temperature > 0 needs a seed; set SamplingParams.seed")
        self.params = params
        self.processors = tuple(processors)
        self.noise = (
            KeyedNoise(params.seed, sample_index)
            if params.temperature > 0 and params.seed is not None
            else None
        )
        self._prompt_len = len(prompt_ids)
        self._tokens = [int(token) for token in prompt_ids]
        self._buffer = torch.tensor(self._tokens, dtype=torch.int64)
        self._num_copied = len(self._tokens)
        self._reach = max((len(word) - 1 for word in params.bad_words), default=0)
        stops = params.stop_token_ids + (() if params.ignore_eos else tuple(eos_token_ids))
        self._stops = sorted({token for token in stops if token < vocab_size})

    @property
    def num_output(self) -> int:
        """Tokens emitted so far."""
        return len(self._tokens) - self._prompt_len

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is the argmax of the raw logits and nothing else is asked."""
        p = self.params
        return p.temperature == 0 and p.logprobs is None and not self._changes_scores

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append tokens that were really emitted."""
        self._tokens.extend(int(token) for token in token_ids)

    def process(self, logits: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        """The scores whose softmax is the law of the next token (their argmax at temperature 0).

        Args:
            logits: [V] raw logits after the committed tokens and ``path``.
            path: tokens picked in this cycle before this position.

        Returns:
            [V] float32 (float64 if the logits are), −inf for forbidden tokens; a new tensor.

        Raises:
            DraftwoodError: a logits processor failed.
        """
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        scores = logits.to(dtype, copy=True)
        if self._changes_scores:
            scores = self._steer(scores, path)
        p = self.params
        if p.temperature == 0:
            return scores
        if p.temperature != 1:
            scores = scores / p.temperature
        if p.top_k > 0:
            scores = processing.keep_top_k(scores, p.top_k)
        if p.top_p < 1:
            scores = processing.keep_top_p(scores, p.top_p)
        if p.min_p > 0:
            scores = processing.keep_min_p(scores, p.min_p)
        return scores

    def pick(self, logits: torch.Tensor, path: Sequence[int]) -> Pick:
        """The next token after ``path``: argmax of processed scores plus noise, ties to the lowest.

        Args:
            logits: [V] raw logits after the committed tokens and ``path``.
            path: tokens picked in this cycle before this position.

        Raises:
            DraftwoodError: NaN logits, every token forbidden, or a failing logits processor.
        """
        position = self.num_output + len(path)
        scores = self.process(logits, path)
        best = float(scores.max())
        if isnan(best) or best == -torch.inf:
            raise DraftwoodError(bad_scores(best, position))
        if self.noise is None:
            return self._report(logits, int(scores.argmax()))
        # No other token can win: the noise is bounded.
        (ids,) = torch.nonzero(scores >= best - _NOISE_RANGE, as_tuple=True)
        drawn = (scores[ids].double() + self.noise.gumbel(position, ids)).argmax()
        return self._report(logits, int(ids[drawn]))

    @property
    def _changes_scores(self) -> bool:
        p = self.params
        return bool(
            self.processors
            or p.logit_bias
            or p.repetition_penalty != 1
            or p.presence_penalty != 0
            or p.frequency_penalty != 0
            or p.bad_words
            or self.num_output < p.min_new_tokens
        )

    def _steer(self, scores: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        """Everything that depends on the tokens before, or on the token's identity."""
        p = self.params
        token_ids = self._token_ids(path, scores.device)
        for processor in self.processors:
            scores = _call(processor, token_ids, scores)
        if p.logit_bias:
            ids, values = _tensors(p.logit_bias, scores)
            scores[ids] += values
        if p.repetition_penalty != 1:
            scores = processing.penalize_repetition(scores, token_ids, p.repetition_penalty)
        if p.presence_penalty != 0 or p.frequency_penalty != 0:
            output = token_ids[self._prompt_len :]
            scores = processing.penalize_presence(
                scores, output, p.presence_penalty, p.frequency_penalty
            )
        before = [*self._tokens[-self._reach :], *path] if self._reach else path
        banned = processing.completed_by(before, p.bad_words)
        if self.num_output + len(path) < p.min_new_tokens:
            banned += self._stops
        if banned:
            scores[banned] = -torch.inf
        return scores

    def _token_ids(self, path: Sequence[int], device: torch.device) -> torch.Tensor:
        """[L] prompt, output and path on ``device``; only what is new is copied."""
        size = len(self._tokens) + len(path)
        if self._buffer.device != device or len(self._buffer) < size:
            self._buffer = torch.empty(2 * size, dtype=torch.int64, device=device)
            self._num_copied = 0
        new = [*self._tokens[self._num_copied :], *path]
        self._buffer[self._num_copied : size] = torch.tensor(new, device=device)
        self._num_copied = len(self._tokens)
        return self._buffer[:size]

    def _report(self, logits: torch.Tensor, token_id: int) -> Pick:
        count = self.params.logprobs
        if count is None:
            return Pick(token_id)
        logprobs = logits.double().log_softmax(-1)
        values, ids = logprobs.topk(min(count, len(logprobs)))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return Pick(token_id, float(logprobs[token_id]), top)


def bad_scores(best: float, position: int) -> str:
    """Message for a row of scores without a winner; ``best`` is its NaN or −inf maximum."""
    if isnan(best):
        return (
            f"the target's scores for output token {position} contain NaN; the model overflowed "
            "(try a wider dtype) or a logits processor is wrong"
        )
    return (
        f"every token is forbidden at output token {position}; relax logit_bias, bad_words, "
        "min_new_tokens or the logits processors"
    )


def _call(processor: Processor, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    name = getattr(processor, "__name__", type(processor).__name__)
    try:
        result = processor(token_ids[None], scores[None])
    except Exception as error:  # user code: one sequence fails, the batch goes on
        raise DraftwoodError(f"logits processor {name} failed: {error!r}") from error
    shape = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
    if shape != (1, len(scores)):
        raise DraftwoodError(
            f"logits processor {name} returned {shape}; it must return scores (1, {len(scores)})"
        )
    return result[0]


def _tensors(values: Mapping[int, float], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor(list(values), dtype=torch.int64, device=like.device)
    return ids, torch.tensor(list(values.values()), dtype=like.dtype, device=like.device)
