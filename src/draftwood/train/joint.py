"""The objective of independent drafters (D3D): predict blocks, and stay a language model."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from draftwood.draft.independent_network import IndependentNetwork
from draftwood.draft.mixed import exact_dtype
from draftwood.train.anchors import BlockBatch
from draftwood.train.cross_entropy import cross_entropy
from draftwood.train.loss import block_loss
from draftwood.train.objective import HeadSample, Objective
from draftwood.train.shapes import filled_up


class JointObjective(Objective):
    """L = L_diff + λ · L_AR from one packed pass.

    L_diff is the mean over block rows, weighted by exp(−(j − 1)/γ), L_AR the mean over the
    response's tokens as the unmasked prefix rows predict them; λ = ``config.autoregressive``.
    Prefix rows see no block, so L_AR is that of the plain language model. With a Markov head the
    block rows count twice in L_diff, alone and knowing the token before, as in ``BlockObjective``.
    """

    network: IndependentNetwork

    @property
    def needs_whole_response(self) -> bool:
        return self.config.autoregressive > 0

    def train_tables(self, trained: bool) -> None:
        for table in (self.network.embed_tokens, self.network.lm_head):
            if table is not None:
                table.weight.requires_grad_(trained)

    def labels(self, batch: BlockBatch) -> torch.Tensor | None:
        if not self.needs_whole_response:
            return None
        next_ids, known = next_tokens(batch)
        return next_ids[known]

    def forward(
        self, batch: BlockBatch, head: HeadSample | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(L, 1, correct, counted), see ``LossTerms``."""
        network = self.network
        context, hidden = network(batch.context_ids, batch.anchor_positions, batch.block_ids)
        if head is None:
            rows, offsets, to_column = None, None, self.to_draft
        else:
            rows, offsets = head.rows(network.head_weight())
            to_column = head.to_column
        terms = block_loss(self._scores(hidden, rows), batch, to_column, self.config, offsets)
        total, weight = terms.total, terms.weight
        if network.markov is not None:
            scores = self._scores(network.after(hidden, batch.labels), rows)
            follow = block_loss(scores, batch, to_column, self.config, offsets)
            total, weight = total + follow.total, weight + follow.weight
        total = total / weight.clamp_min(1e-6)
        if self.config.autoregressive > 0:
            next_ids, known = next_tokens(batch)
            # only response rows go through the head, and others of weight 0 to fill them up
            chosen = known.flatten().nonzero()[:, 0]
            count = len(chosen)
            chosen = F.pad(chosen, (0, filled_up(count) - count))
            scores = self._scores(context[:, :-1].flatten(0, 1)[chosen], rows)
            weights = torch.zeros(len(chosen), dtype=exact_dtype(scores), device=scores.device)
            weights[:count] = 1 / max(count, 1)
            label = to_column[next_ids.flatten()[chosen]].clamp_min(0)[:, None]
            share = torch.ones_like(label, dtype=weights.dtype)
            language, _ = cross_entropy(scores, offsets, label, share, weights)
            total = total + self.config.autoregressive * language
        return total, torch.ones_like(total), terms.correct, terms.counted

    def _scores(self, hidden: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """[..., c] logits through all of the head or some rows of it."""
        if rows is None:
            return self.network.logits(hidden)
        # flat, because hidden is a slice: a product of it takes a copy of ``rows`` for each block
        flat = hidden.reshape(-1, hidden.shape[-1])
        scores = F.linear(flat, rows.to(hidden.device, hidden.dtype))
        return scores.view(*hidden.shape[:-1], len(rows))


def next_tokens(batch: BlockBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """[G, C − 1] the token after each context row, and whether it is one of the response."""
    following = batch.context_ids[:, 1:]
    where = torch.arange(1, batch.context_ids.shape[1], device=following.device)
    known = (where >= batch.response_starts[:, None]) & (where < batch.lengths[:, None])
    return following, known
