"""Training objectives over the rows of a batch of blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftwood.draft.mixed import exact_dtype
from draftwood.train.anchors import BlockBatch
from draftwood.train.cross_entropy import cross_entropy
from draftwood.train.prefixes import best_prefixes

UNKNOWN = -1
"""Draft id of a target token outside a reduced draft vocabulary."""


@dataclass(frozen=True)
class LossConfig:
    """What the drafter is asked for.

    Attributes:
        gamma: decay of the position weights w_j = exp(−(j − 1)/γ); small values care for the
            first positions, which every deeper acceptance depends on.
        autoregressive: weight λ of the language-model loss on the response's own tokens, beside
            the blocks' (independent drafters only).
        distill: share of the target's own (top-K, renormalised) distribution in the labels;
            0 is plain cross-entropy on the response.
        tree: weight of the tree-aware term (an experiment): expected number of tokens of the
            response's path that a tree of ``tree_budget`` nodes leaves out, softly.
        tree_budget: nodes of that tree.
        tree_softness: width, in nats, of the soft edge between inside and outside.
    """

    gamma: float = 4.0
    autoregressive: float = 0.0
    distill: float = 0.0
    tree: float = 0.0
    tree_budget: int = 32
    tree_softness: float = 1.0

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise ValueError(f"gamma must be positive, got {self.gamma}; 4 is a good start")
        if not self.autoregressive >= 0:
            raise ValueError(f"autoregressive must be ≥ 0, got {self.autoregressive}")
        if not 0 <= self.distill <= 1:
            raise ValueError(f"distill must be between 0 and 1, got {self.distill}")
        if self.tree < 0 or self.tree_budget < 1 or self.tree_softness <= 0:
            raise ValueError(
                "tree must be ≥ 0, tree_budget ≥ 1 and tree_softness > 0, got "
                f"{self.tree}, {self.tree_budget}, {self.tree_softness}"
            )


@dataclass(frozen=True)
class LossTerms:
    """A weighted sum and what to divide it by, so that parts of a batch add up exactly.

    Attributes:
        total: Σ w · cross-entropy (with gradient).
        weight: Σ w over the rows that have a loss.
        correct, counted: [B − 1] rows predicted right, and rows with a response token.
    """

    total: torch.Tensor
    weight: torch.Tensor
    correct: torch.Tensor
    counted: torch.Tensor


def draft_ids(target_ids: torch.Tensor, to_draft: torch.Tensor | None) -> torch.Tensor:
    """Draft ids of target ids, ``UNKNOWN`` where the draft vocabulary has no such token.

    Args:
        to_draft: [vocab] table, or None when the draft vocabulary is the target's.
    """
    return target_ids if to_draft is None else to_draft[target_ids]


def inverse_map(target_ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor | None:
    """[vocab_size] draft id of each target id for a network's ``target_ids()``."""
    if target_ids is None:
        return None
    table = torch.full((vocab_size,), UNKNOWN, dtype=torch.int64, device=target_ids.device)
    table[target_ids] = torch.arange(len(target_ids), device=target_ids.device)
    return table


def block_loss(
    logits: torch.Tensor,
    batch: BlockBatch,
    to_draft: torch.Tensor | None,
    config: LossConfig,
    offsets: torch.Tensor | None = None,
) -> LossTerms:
    """Cross-entropy against (1 − λ) · label + λ · target distribution, weighted by position.

    Rows whose label lies outside the draft vocabulary have no loss but count as wrong.

    Args:
        logits: [G, n, B − 1, head_size].
        offsets: [head_size] added to every row, or None.
    """
    exact = exact_dtype(logits)
    label = draft_ids(batch.labels, to_draft)
    known = batch.valid & (label != UNKNOWN)
    decay = torch.exp(-torch.arange(logits.shape[2], device=logits.device) / config.gamma)
    weights = decay.to(exact) * known
    targets, shares = _targets(label, batch, to_draft, config, exact)
    total, best = cross_entropy(
        logits.flatten(0, 2),
        offsets,
        targets.flatten(0, 2),
        shares.flatten(0, 2),
        weights.flatten(),
    )
    if config.tree > 0:
        scores = logits.to(exact) if offsets is None else logits.to(exact) + offsets
        picked = scores.gather(-1, targets[..., :1])[..., 0]
        left_out = _left_out(scores, picked, scores.logsumexp(dim=-1), known, config)
        total = total + config.tree * left_out
    correct = ((best.view(label.shape) == label) & known).sum(dim=(0, 1))
    return LossTerms(total, weights.sum(), correct, batch.valid.sum(dim=(0, 1)))


def _targets(
    label: torch.Tensor,
    batch: BlockBatch,
    to_draft: torch.Tensor | None,
    config: LossConfig,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[G, n, B − 1, 1 + K] draft ids and their shares of the label, the label's own first.

    The target's top-K inside the draft vocabulary share λ by their renormalised probabilities;
    where there is none of them, the label has all.
    """
    label = label.clamp_min(0)[..., None]
    own = torch.ones(label.shape, dtype=dtype, device=label.device)
    if config.distill == 0:
        return label, own
    if batch.top_ids is None or batch.top_log_probs is None:
        raise ValueError(
            "distill > 0 needs the target's top-k log-probabilities; store them in the feature "
            "cache (top_k > 0) or set distill = 0"
        )
    ids = draft_ids(batch.top_ids, to_draft)
    log_probs = batch.top_log_probs.masked_fill(ids == UNKNOWN, float("-inf"))
    empty = (log_probs == float("-inf")).all(dim=-1, keepdim=True)
    probs = log_probs.masked_fill(empty, 0.0).softmax(dim=-1).to(dtype)
    taught = own.masked_fill(empty, 0.0) * config.distill
    return torch.cat([label, ids.clamp_min(0)], -1), torch.cat([own - taught, taught * probs], -1)


def _left_out(
    scores: torch.Tensor,
    picked: torch.Tensor,
    log_total: torch.Tensor,
    known: torch.Tensor,
    config: LossConfig,
) -> torch.Tensor:
    """Σ over the path's prefixes of 1 − σ((log π − edge) / softness).

    π is the product of the marginals along the response, the edge the log-probability of the
    last node that the tree takes in. The edge moves with the marginals but gets no gradient:
    only the path is pulled inside.
    """
    path = (picked - log_total).masked_fill(~known, 0.0).cumsum(dim=-1)
    # a prefix counts as long as every token of it can be drafted
    possible = known.long().cumprod(dim=-1).bool()
    with torch.no_grad():
        flat = (scores - log_total[..., None]).detach().flatten(0, 1)
        edge = best_prefixes(flat, config.tree_budget)[:, -1].view(*path.shape[:2], 1)
    inside = torch.sigmoid((path - edge) / config.tree_softness)
    return torch.where(possible, 1.0 - inside, torch.zeros_like(inside)).sum()
