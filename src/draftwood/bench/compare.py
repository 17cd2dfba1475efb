"""When do two computations of the same text agree? The rule for rounding errors.

Decoding from draft trees gives the target's own tokens. In floating point the same logits come out
of differently shaped computations a rounding error apart, and where the two best tokens are that
close, another one may win. From then on the texts differ. So two outputs are compared up to their
first divergence, which is put down to rounding only if the numbers prove it: with Δ the largest
difference of the two rows of logits there,

- Δ ≤ ``MAX_DELTA``, and
- the two tokens are within 2Δ/T of each other (T the temperature, 1 for greedy decoding) in the
  scores that the draw maximises, noise included; or the token that only one of them may draw sits
  within 2Δ/T of the edge where top-k, top-p or min-p cut,

and if at most ``MAX_SHARE`` of all compared tokens are such divergences. The rule is for float32;
float64 must show none, and in bfloat16 Δ is too large to promise more than the same law.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import expm1, log

import torch

from draftwood.sampling import Sampler, SamplingParams

MAX_DELTA = 1e-3
MAX_SHARE = 1e-3


@dataclass(frozen=True)
class Divergence:
    """The first position where two outputs of one prompt differ.

    Attributes:
        position: number of equal output tokens before it.
        tokens: what either one has there; None where it had ended.
        delta: Δ, largest difference of the two rows of raw logits; NaN if they are unknown.
        gap: how far the other's token is behind in the first one's noisy scores; inf if it is cut.
        allowance: 2Δ/T, measured on the processed scores without truncation.
        at_edge: the token that is cut in one of them sits within the allowance of the edge.
        reproduced: the rows really give the two tokens.
    """

    position: int
    tokens: tuple[int | None, int | None]
    delta: float = float("nan")
    gap: float = float("nan")
    allowance: float = float("nan")
    at_edge: bool = False
    reproduced: bool = False

    @property
    def is_rounding(self) -> bool:
        """Whether the rule accepts it."""
        explained = self.gap <= self.allowance or self.at_edge
        return self.reproduced and self.delta <= MAX_DELTA and explained

    def __str__(self) -> str:
        why = "rounding" if self.is_rounding else "NOT ROUNDING"
        return (
            f"output token {self.position}: {self.tokens[0]} or {self.tokens[1]}, "
            f"Δ {self.delta:.1e}, gap {self.gap:.1e} (allowed {self.allowance:.1e}), "
            f"{'at a truncation edge, ' if self.at_edge else ''}"
            f"{'' if self.reproduced else 'not reproduced, '}{why}"
        )


@dataclass
class Tally:
    """Comparisons so far.

    Attributes:
        num_tokens: tokens compared, up to and including each divergence.
        divergences: (what was compared, where it diverged).
    """

    num_tokens: int = 0
    divergences: list[tuple[str, Divergence]] = field(default_factory=list)

    def add(
        self,
        name: str,
        left: Sequence[int],
        right: Sequence[int],
        explain: Callable[[int], Divergence],
    ) -> Divergence | None:
        """Compare two outputs; ``explain`` is asked about the position where they diverge."""
        position = first_divergence(left, right)
        self.num_tokens += len(left) if position is None else position + 1
        if position is None:
            return None
        divergence = explain(position)
        self.divergences.append((name, divergence))
        return divergence

    @property
    def unexplained(self) -> list[tuple[str, Divergence]]:
        """Divergences that are no rounding."""
        return [(name, one) for name, one in self.divergences if not one.is_rounding]

    @property
    def is_exact(self) -> bool:
        """Whether nothing but rounding was seen, and little of it."""
        few = len(self.divergences) <= MAX_SHARE * self.num_tokens
        return not self.unexplained and few


def first_divergence(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first difference, None if there is none; an early end is a difference too."""
    shared = min(len(left), len(right))
    for position in range(shared):
        if left[position] != right[position]:
            return position
    return None if len(left) == len(right) else shared


def judge(
    tokens: tuple[int, int],
    rows: tuple[torch.Tensor, torch.Tensor],
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    eos_token_ids: Sequence[int] = (),
) -> Divergence:
    """Measure a divergence on the two rows of logits that led to it.

    Args:
        tokens: what was drawn from either row.
        rows: raw logits [V] of the two computations, float32 or float64.
        params: of the request.
        prompt_ids: the prompt.
        output_ids: the output tokens before, equal in both.
        eos_token_ids: the target's.
    """
    free = dataclasses.replace(params, top_k=0, top_p=1.0, min_p=0.0)
    samplers = []
    for settings in (params, free):
        sampler = Sampler(
            settings, prompt_ids, vocab_size=len(rows[0]), eos_token_ids=eos_token_ids
        )
        sampler.commit(output_ids)
        samplers.append(sampler)
    cut = [samplers[0].process(row, ()).double() for row in rows]
    uncut = [samplers[1].process(row, ()).double() for row in rows]
    noisy = [scores + _noise(samplers[0], len(output_ids), scores) for scores in cut]
    allowance = 2 * _distance(*uncut)
    return Divergence(
        position=len(output_ids),
        tokens=tokens,
        delta=_distance(rows[0].double(), rows[1].double()),
        gap=float(noisy[0][tokens[0]] - noisy[0][tokens[1]]),
        allowance=allowance,
        at_edge=any(
            _is_cut(cut, token) and _at_edge(uncut[0], token, params, allowance) for token in tokens
        ),
        reproduced=all(int(n.argmax()) == t for n, t in zip(noisy, tokens, strict=True)),
    )


def explain(
    left: Sequence[int],
    right: Sequence[int],
    position: int,
    rows: tuple[torch.Tensor | None, torch.Tensor | None],
    params: SamplingParams,
    prompt_ids: Sequence[int],
    eos_token_ids: Sequence[int] = (),
) -> Divergence:
    """``judge`` two outputs that diverge at ``position``; one that only ends early is unexplained.

    Args:
        left, right: the outputs.
        rows: the raw logits [V] they were drawn from there, None where there are none.
    """
    first, second = (ids[position] if position < len(ids) else None for ids in (left, right))
    if first is None or second is None or rows[0] is None or rows[1] is None:
        return Divergence(position, (first, second))
    tokens, found = (first, second), (rows[0], rows[1])
    return judge(tokens, found, params, prompt_ids, left[:position], eos_token_ids)


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest difference; forbidden tokens (−inf in both) do not differ, NaN is infinitely far."""
    gaps = (left - right).abs().masked_fill(left == right, 0.0)
    return float(gaps.nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def _noise(sampler: Sampler, position: int, scores: torch.Tensor) -> torch.Tensor | float:
    if sampler.noise is None:
        return 0.0
    return sampler.noise.gumbel(position, torch.arange(len(scores), device=scores.device))


def _is_cut(cut: Sequence[torch.Tensor], token: int) -> bool:
    """Whether just one of the two computations drops the token."""
    return bool(torch.isinf(cut[0][token]) != torch.isinf(cut[1][token]))


def _at_edge(scores: torch.Tensor, token: int, params: SamplingParams, allowance: float) -> bool:
    """Whether errors of half the allowance in every score may move a token over an edge."""
    score = scores[token]
    if params.top_k > 0:
        edge = scores.topk(min(params.top_k, len(scores))).values[-1]
        if abs(float(score - edge)) <= allowance:
            return True
        scores = scores.masked_fill(scores < edge, -torch.inf)
    if params.min_p > 0 and abs(float(score - scores.max()) - log(params.min_p)) <= allowance:
        return True
    if params.top_p == 1:
        return False
    # The token stays if the more probable ones have less than top_p together. Errors move each
    # probability by at most exp(allowance) and swap the token with those as near.
    probs = scores.softmax(-1)
    low = float(probs[scores > score + allowance].sum())
    high = float(probs[scores >= score - allowance].sum() - probs[token])
    slack = expm1(allowance) * params.top_p
    return low - slack <= params.top_p <= high + slack
