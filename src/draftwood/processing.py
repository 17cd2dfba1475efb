"""Changes to one row of next-token scores: pure functions, transformers' and OpenAI's definitions.

Every function takes scores [V] (float32 or float64) and returns new or changed scores [V]. Those
named ``*_`` work in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import torch


def penalize_repetition(
    scores: torch.Tensor, token_ids: torch.Tensor, penalty: float
) -> torch.Tensor:
    """Divide positive and multiply negative scores of seen tokens, once per token.

    CTRL (1909.05858) as in transformers' ``RepetitionPenaltyLogitsProcessor``.

    Args:
        token_ids: [L] int64, prompt and output.
    """
    seen = scores[token_ids]
    return scores.index_put((token_ids,), torch.where(seen < 0, seen * penalty, seen / penalty))


def penalize_presence(
    scores: torch.Tensor, token_ids: torch.Tensor, presence: float, frequency: float
) -> torch.Tensor:
    """Subtract ``presence`` once and ``frequency`` per occurrence: OpenAI's definition.

    Args:
        token_ids: [L] int64, output only.
    """
    seen, counts = token_ids.unique(return_counts=True)
    return scores.index_put((seen,), scores[seen] - (counts * frequency + presence))


def completed_by(token_ids: Sequence[int], sequences: Sequence[Sequence[int]]) -> list[int]:
    """The last tokens of those sequences whose other tokens end ``token_ids``."""
    size = len(token_ids)
    return [
        seq[-1]
        for seq in sequences
        if len(seq) - 1 <= size and list(token_ids[size - len(seq) + 1 :]) == list(seq[:-1])
    ]


def keep_top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    """−inf for all below the k-th largest; ties with it stay (``TopKLogitsWarper``)."""
    if k >= len(scores):
        return scores
    return scores.masked_fill(scores < scores.topk(k).values[-1], -torch.inf)


def keep_top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest most probable tokens with total probability ≥ ``top_p``, at least one.

    transformers' ``TopPLogitsWarper``: in ascending order, tokens go while the cumulative
    probability is ≤ 1 − top_p. Tokens of probability ≤ (1 − top_p) / V cannot add up to more than
    that, so they go unsorted. Sums are float64 (transformers' are in the dtype of the scores).
    """
    probs = scores.softmax(-1).double()
    limit = 1.0 - top_p
    (large,) = torch.nonzero(probs > limit / len(scores), as_tuple=True)
    if not len(large):  # NaN; the caller reports it
        return scores
    ordered, order = probs[large].sort(stable=True)
    total = probs.sum()
    cumulative = (total - ordered.sum() + ordered.cumsum(-1)) / total
    kept = large[order[int((cumulative[:-1] <= limit).sum()) :]]
    return torch.full_like(scores, -torch.inf).index_put((kept,), scores[kept])


def keep_min_p(scores: torch.Tensor, min_p: float) -> torch.Tensor:
    """−inf for tokens less probable than ``min_p`` times the best (``MinPLogitsWarper``)."""
    return scores.masked_fill(scores < scores.max() + log(min_p), -torch.inf)
