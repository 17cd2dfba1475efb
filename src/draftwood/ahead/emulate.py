"""Branches for drafters that have no packed pass over them: one proposal after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftwood.ahead.messages import Opening, open_copy
from draftwood.draft.base import Committed, DraftContext, Drafter, DraftLimits
from draftwood.draft.branches import BranchDraft
from draftwood.tree.tree import DraftTree, IntArray, ScoredPrefixes

_NODES = 64  # per branch, before any proposal says what is wanted


@dataclass(frozen=True, eq=False)
class EmulatedDraft(BranchDraft):
    """A proposal made for a context that has not come true yet."""

    scored: ScoredPrefixes

    def serves(self, context: DraftContext) -> int | None:
        return 0 if super().serves(context) == 0 else None


class EmulatedBranches:
    """Gives any drafter without taps ``draft_branches``.

    Exact by the drafter's own contract: tokens are reported as if they were committed, the
    proposal is made, and ``truncate`` takes them back. In the end the proposals for the contexts
    themselves are repeated, so that the drafter learns from their outcome as usual. It costs one
    proposal per branch and cannot leave a bonus token open.
    """

    taps: tuple[int, ...] = ()
    has_soft = False

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._limits = DraftLimits(_NODES)

    @property
    def horizon(self) -> int:
        return self._drafter.horizon

    def propose(self, contexts: Sequence[DraftContext], limits: DraftLimits) -> ScoredPrefixes:
        self._limits = limits
        return self._drafter.propose(contexts, limits)

    def draft_branches(
        self,
        contexts: Sequence[DraftContext],
        tree: DraftTree,
        anchors: IntArray,
        num_rows: int | None = None,
    ) -> list[BranchDraft]:
        drafts: list[BranchDraft] = []
        for anchor in anchors.tolist():
            context = contexts[int(tree.seq[anchor])]
            drafts.append(self._draft(context, _path(tree, anchor)))
        self._drafter.propose(contexts, self._limits)
        return drafts

    def _draft(self, context: DraftContext, path: tuple[int, ...]) -> EmulatedDraft:
        """``path``: [anchor of the context, …, anchor of the block]."""
        start = len(context.token_ids) - 1
        extended = _extended(context, path[1:])
        told = Committed(context.seq_id, start, list(path[:-1]), None, [], 0)
        self._drafter.observe([told])
        scored = self._drafter.propose([extended], self._limits)
        self._drafter.truncate(context.seq_id, start)
        none = torch.empty(0)
        return EmulatedDraft(context.seq_id, start, path, none, none, scored)

    def adopt(
        self,
        contexts: Sequence[DraftContext],
        drafts: Sequence[BranchDraft],
        limits: DraftLimits,
    ) -> ScoredPrefixes:
        self._limits = limits
        rows = [draft.scored for draft in drafts if isinstance(draft, EmulatedDraft)]
        assert len(rows) == len(contexts)
        return ScoredPrefixes.stack(rows)

    def observe(self, committed: Sequence[Committed]) -> None:
        self._drafter.observe(committed)

    def truncate(self, seq_id: int, length: int) -> None:
        self._drafter.truncate(seq_id, length)

    def release(self, seq_id: int) -> None:
        self._drafter.release(seq_id)


def _path(tree: DraftTree, node: int) -> tuple[int, ...]:
    """Tokens from the first node of the sequence to ``node``."""
    tokens: list[int] = []
    while node >= 0:
        tokens.append(int(tree.token_ids[node]))
        node = int(tree.parents[node])
    return tuple(reversed(tokens))


def _extended(context: DraftContext, more: tuple[int, ...]) -> DraftContext:
    """The context as it will be after emitting ``more``."""
    sampler = context.sampler
    index = sampler.noise.sample_index if sampler.noise is not None else 0
    tokens = [*context.token_ids, *more]
    copy = open_copy(Opening(context.prompt_len, sampler.params, index), tokens)
    return DraftContext(
        context.seq_id, tokens, context.prompt_len, max(0, context.max_depth - len(more)),
        copy.sampler,
    )  # fmt: skip
