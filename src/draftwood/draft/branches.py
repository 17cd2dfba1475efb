"""Drafting for several possible outcomes of one cycle: what drafting ahead builds on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from draftwood.draft.base import DraftContext, Drafter, DraftLimits
from draftwood.tree.tree import DraftTree, IntArray, ScoredPrefixes


@dataclass(frozen=True, eq=False)
class BranchDraft:
    """The block drafted for one possible continuation of a sequence.

    Attributes:
        seq_id: the engine's id.
        start: position of ``token_ids[0]``.
        token_ids: tokens that were not committed when this was drafted: [the anchor of that time,
            path …, the block's anchor].
        hidden: [horizon, H] row j − 1 predicts the j-th token after the block's anchor.
        logits: [r, V] raw scores of the first r ≤ horizon of these rows.
    """

    seq_id: int
    start: int
    token_ids: tuple[int, ...]
    hidden: torch.Tensor
    logits: torch.Tensor

    def serves(self, context: DraftContext) -> int | None:
        """How many tokens past the block's anchor are committed in ``context``; None: a miss.

        0 is a hit. 1 is a soft hit: the block was anchored at the last accepted node, the bonus
        token was not known to it.
        """
        known = tuple(context.token_ids[self.start : self.start + len(self.token_ids)])
        behind = len(context.token_ids) - self.start - len(self.token_ids)
        return behind if context.seq_id == self.seq_id and known == self.token_ids else None


class BranchDrafter(Drafter, Protocol):
    """A drafter that needs nothing but tokens, so that it can draft before they are committed.

    Calls do not overlap: a ``draft_branches`` that runs beside the target must have returned
    before ``observe`` or anything else is called (it may run in another thread). ``observe`` keeps
    what ``draft_branches`` computed of the tokens that were then committed, hit or miss.
    """

    def draft_branches(
        self,
        contexts: Sequence[DraftContext],
        tree: DraftTree,
        anchors: IntArray,
        num_rows: int | None = None,
    ) -> list[BranchDraft]:
        """Draft one block per anchor in one packed pass.

        Args:
            contexts: the S sequences, as they were proposed for; none of ``tree`` but the first
                node of each sequence is committed.
            tree: nodes that blocks may start from: the verified tree of each sequence (its node 0
                is ``contexts[s].token_ids[-1]``), with possible bonus tokens as further nodes.
            anchors: [M] packed nodes of ``tree``. A block [node, mask, …] sees the committed
                tokens and the node's ancestors; what anchors have in common is encoded once.
            num_rows: rows of each block that go through the head now; the others follow in
                ``adopt`` if they can matter. None takes them all.

        Returns:
            One draft per anchor, in that order.
        """
        ...

    def adopt(
        self,
        contexts: Sequence[DraftContext],
        drafts: Sequence[BranchDraft],
        limits: DraftLimits,
    ) -> ScoredPrefixes:
        """What ``propose`` would return for contexts that came true, without a pass.

        Args:
            contexts: after the cycle; ``drafts[s].serves(contexts[s])`` is not None.
            drafts: one per context. A soft hit has fewer depths left than a hit.
        """
        ...
