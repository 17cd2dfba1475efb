"""One differentiable pass over a batch of blocks, optionally through part of the head only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from draftwood.draft.layers import project
from draftwood.draft.network import DraftNetwork
from draftwood.train.anchors import BlockBatch
from draftwood.train.loss import (
    UNKNOWN,
    LossConfig,
    LossTerms,
    block_loss,
    draft_ids,
    inverse_map,
)

# Teacher tokens less likely than this do not need a column of their own in a sampled head.
_RARE = -5.0


@dataclass(frozen=True)
class HeadSample:
    """Columns of the head that one step computes.

    Attributes:
        columns: [c] draft ids: everything the batch asks for, then sampled others.
        offsets: [c] added to the logits; the sampled columns stand for all that were left out.
        to_column: [vocab] target id → column, ``UNKNOWN`` where there is none.
    """

    columns: torch.Tensor
    offsets: torch.Tensor
    to_column: torch.Tensor


def sample_head(
    batch: BlockBatch,
    to_draft: torch.Tensor,
    head_size: int,
    num_negatives: int,
    rng: np.random.Generator,
) -> HeadSample:
    """Draw the columns for a batch: sampled softmax with the exact positives.

    The log-sum-exp over all columns is estimated from the wanted ones plus ``num_negatives``
    uniform draws (without replacement) from the rest, each weighted by rest / draws.
    """
    wanted = [draft_ids(batch.labels, to_draft)[batch.valid]]
    if batch.top_ids is not None and batch.top_log_probs is not None:
        likely = (batch.top_log_probs > _RARE) & batch.valid[..., None]
        wanted.append(draft_ids(batch.top_ids, to_draft)[likely])
    positive = torch.cat(wanted).unique()
    positive = positive[positive != UNKNOWN]
    chosen = torch.zeros(head_size, dtype=torch.bool)
    chosen[positive.cpu()] = True
    rest = torch.from_numpy(rng.permutation(np.flatnonzero(~chosen.numpy())))
    negative = rest[:num_negatives].to(positive.device)
    columns = torch.cat([positive, negative])
    offsets = torch.zeros(len(columns), device=columns.device)
    if len(negative):
        offsets[len(positive) :] = float(np.log(len(rest) / len(negative)))
    of_draft = torch.full((head_size + 1,), UNKNOWN, dtype=torch.int64, device=columns.device)
    of_draft[columns] = torch.arange(len(columns), device=columns.device)
    # ``UNKNOWN`` = −1 reads the last, always unknown, entry
    return HeadSample(columns, offsets, of_draft[to_draft])


class BlockObjective(nn.Module):
    """The network with its loss as one module, so that wrappers see a single forward call."""

    def __init__(self, network: DraftNetwork, config: LossConfig) -> None:
        super().__init__()
        self.network = network
        self.config = config
        vocab = network.config.vocab_size
        table = inverse_map(network.target_ids(), vocab)
        self.to_draft: torch.Tensor
        self.register_buffer(
            "to_draft", torch.arange(vocab) if table is None else table, persistent=False
        )

    def forward(
        self, batch: BlockBatch, head: HeadSample | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The fields of ``LossTerms`` for a batch, through all of the head or a sample of it."""
        network = self.network
        kv = network.context_kv(batch.features, batch.key_positions)
        block = network.embed(batch.block_ids)
        hidden = network(block, batch.anchor_positions, kv, batch.key_positions)
        terms = self._loss(hidden, batch, head)
        return terms.total, terms.weight, terms.correct, terms.counted

    def _loss(self, hidden: torch.Tensor, batch: BlockBatch, head: HeadSample | None) -> LossTerms:
        network = self.network
        if head is None:
            return block_loss(network.logits(hidden), batch, self.to_draft, self.config)
        assert network.lm_head is not None
        weight = network.lm_head.weight[head.columns]
        logits = network.shape_logits(project(hidden, weight)) + head.offsets
        return block_loss(logits, batch, head.to_column, self.config)
