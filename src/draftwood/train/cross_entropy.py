"""Cross-entropy against a few weighted tokens, whose gradient is ready when the loss is.

Elementwise passes over [rows, vocabulary] cost more than the product that makes the scores. Here
scores are read and their gradient is written once, in the product's dtype; what lies between is
done on chunks of rows that stay in cache, so nothing else of that size is ever stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from draftwood.draft.mixed import exact_dtype

# Scores of a chunk: two megabytes in float32 for a CPU's cache; a GPU has launches to save instead.
_CHUNK_CPU, _CHUNK_GPU = 2**19, 2**26


class _CrossEntropy(torch.autograd.Function):
    """See ``cross_entropy``."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        offsets: torch.Tensor | None,
        targets: torch.Tensor,
        shares: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = logits.shape
        exact = exact_dtype(logits)
        limit = _CHUNK_CPU if logits.device.type == "cpu" else _CHUNK_GPU
        pull = shares * weights[:, None]
        losses = torch.empty(rows, dtype=exact, device=logits.device)
        best = torch.empty(rows, dtype=torch.int64, device=logits.device)
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        step = max(1, limit // columns)
        for first in range(0, rows, step):
            chunk = slice(first, first + step)
            scores = logits[chunk].to(exact)
            if offsets is not None:
                scores = scores + offsets
            top = scores.max(dim=-1, keepdim=True)
            best[chunk] = top.indices[:, 0]
            probs = scores.softmax(dim=-1)
            # the largest probability is never tiny: its logarithm is exact
            log_total = top.values - probs.gather(-1, top.indices).log()
            behind = log_total - scores.gather(-1, targets[chunk])
            losses[chunk] = (behind * pull[chunk]).sum(dim=-1)
            if gradient is not None:
                steep = probs.mul_(weights[chunk, None])
                gradient[chunk] = steep.scatter_add_(-1, targets[chunk], -pull[chunk])
        # rows without weight may hold anything, also infinities: 0 · inf would poison the sum
        idle = (weights == 0).nonzero()[:, 0]
        ctx.gradient = None if gradient is None else gradient.index_fill_(0, idle, 0.0)
        ctx.mark_non_differentiable(best)
        return losses.index_fill_(0, idle, 0.0).sum(), best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # a number, because a tensor would be rounded to the dtype of the gradient
        return ctx.gradient * float(upstream[0]), None, None, None, None


def cross_entropy(
    logits: torch.Tensor,
    offsets: torch.Tensor | None,
    targets: torch.Tensor,
    shares: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ_r w_r Σ_k share_rk · −log softmax(logits_r + offsets)[target_rk], for gradients of logits.

    Args:
        logits: [R, c].
        offsets: [c] added to every row, or None.
        targets: [R, K] columns.
        shares: [R, K]; those of a row sum to one.
        weights: [R]; rows of weight 0 have neither loss nor gradient, whatever they hold.

    Returns:
        The sum, in float32 at least, and [R] the best column of each row.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _CrossEntropy.apply(
        logits, offsets, targets, shares, weights
    )
    return result
