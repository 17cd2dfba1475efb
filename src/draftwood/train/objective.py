"""What a drafter is trained for: one differentiable pass over a batch, through all or part of the
head. The trainer knows objectives only; which network there is inside does not concern it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from draftwood.draft.layers import project
from draftwood.draft.network import DraftNetwork
from draftwood.train.anchors import BlockBatch, Example, make_batch
from draftwood.train.loss import (
    UNKNOWN,
    LossConfig,
    LossTerms,
    block_loss,
    draft_ids,
    inverse_map,
)
from draftwood.train.networks import Network, block_hidden
from draftwood.train.shapes import filled_up
from draftwood.tree.tree import IntArray

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

    def rows(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The columns' rows of a head [head_size, H], and the offsets of their products.

        Columns that are ruled out fill them up to one of few sizes.
        """
        missing = filled_up(len(self.columns)) - len(self.columns)
        offsets = F.pad(self.offsets, (0, missing), value=float("-inf"))
        return table[F.pad(self.columns, (0, missing))], offsets


def sample_head(
    batch: BlockBatch,
    to_draft: torch.Tensor,
    head_size: int,
    num_negatives: int,
    rng: np.random.Generator,
    also: torch.Tensor | None = None,
) -> HeadSample:
    """Draw the columns for a batch: sampled softmax with the exact positives.

    The log-sum-exp over all columns is estimated from the wanted ones plus ``num_negatives``
    uniform draws (without replacement) from the rest, each weighted by rest / draws.

    Args:
        also: further target ids that need a column.
    """
    wanted = [draft_ids(batch.labels, to_draft)[batch.valid]]
    if also is not None:
        wanted.append(draft_ids(also, to_draft))
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


class Objective(nn.Module):
    """The network with its loss as one module, so that wrappers see a single forward call.

    ``forward(batch, head)`` returns the fields of ``LossTerms``.
    """

    network: Network

    def __init__(self, network: Network, config: LossConfig) -> None:
        super().__init__()
        self.network = network
        self.config = config
        vocab = network.config.vocab_size
        table = inverse_map(network.target_ids(), vocab)
        self.to_draft: torch.Tensor
        self.register_buffer(
            "to_draft", torch.arange(vocab) if table is None else table, persistent=False
        )

    @property
    def needs_whole_response(self) -> bool:
        """Whether tokens behind the last anchor matter."""
        return False

    @property
    def can_sample_head(self) -> bool:
        """Whether a step may compute part of the head only."""
        return True

    def train_tables(self, trained: bool) -> None:
        """Whether the drafter's own head and embeddings are trained."""
        raise NotImplementedError

    def labels(self, batch: BlockBatch) -> torch.Tensor | None:
        """Target ids that are asked for beside the blocks' labels, or None."""
        return None

    def draw(
        self,
        examples: Sequence[Example],
        anchors: Sequence[IntArray],
        *,
        block_size: int,
        num_negatives: int,
        rng: np.random.Generator,
        device: torch.device | str,
    ) -> tuple[BlockBatch, HeadSample | None]:
        """The arguments of ``forward`` for some responses and block starts."""
        config = self.network.config
        batch = make_batch(
            examples, anchors, block_size=block_size, mask_token_id=config.mask_token_id,
            whole=self.needs_whole_response, fill_up=True,
        ).to(device)  # fmt: skip
        if not num_negatives:
            return batch, None
        table = self.to_draft.to(device)
        also = self.labels(batch)
        return batch, sample_head(batch, table, config.head_size, num_negatives, rng, also)


class BlockObjective(Objective):
    """Block denoising of a DFlash drafter.

    With a Markov head rows that know the token before have a loss of the same weight. That of the
    rows alone stays: they choose the candidates.
    """

    network: DraftNetwork

    @property
    def can_sample_head(self) -> bool:
        return self.network.lm_head is not None

    def train_tables(self, trained: bool) -> None:
        for table in (self.network.embed_tokens, self.network.lm_head):
            if table is not None:
                table.weight.requires_grad_(trained)

    def forward(
        self, batch: BlockBatch, head: HeadSample | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The fields of ``LossTerms`` for a batch, through all of the head or a sample of it."""
        hidden = block_hidden(self.network, batch)
        terms = self._loss(hidden, batch, head)
        if self.network.markov is None:
            return terms.total, terms.weight, terms.correct, terms.counted
        follow = self._loss(self.network.after(hidden, batch.labels), batch, head)
        total, weight = terms.total + follow.total, terms.weight + follow.weight
        return total, weight, terms.correct, terms.counted

    def _loss(self, hidden: torch.Tensor, batch: BlockBatch, head: HeadSample | None) -> LossTerms:
        network = self.network
        if head is None:
            return block_loss(network.logits(hidden), batch, self.to_draft, self.config)
        assert network.lm_head is not None
        weight, offsets = head.rows(network.lm_head.weight)
        logits = network.shape_logits(project(hidden, weight))
        return block_loss(logits, batch, head.to_column, self.config, offsets)
