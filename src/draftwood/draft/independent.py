"""An independent block-diffusion drafter (D3D): it needs only token ids of the target.

A causal language model of the target's tokenizer. Its prefix is encoded causally, with a cache of
its own; a block [anchor, mask, …] attends to that prefix and, in both directions, to itself. One
packed pass encodes what was committed since the last one and predicts the next block, so a cycle
costs one pass; nothing of the target is read, so blocks can be drafted for tokens that are not
verified yet (``draft_branches``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftwood.draft.base import Committed, DraftContext, DraftLimits
from draftwood.draft.block_ranking import BlockRanking
from draftwood.draft.branches import BranchDraft
from draftwood.draft.context_cache import ContextCache
from draftwood.draft.independent_branches import Outcomes
from draftwood.draft.independent_checkpoint import check_fits
from draftwood.draft.independent_network import IndependentNetwork
from draftwood.draft.independent_pass import Rows, new_cache, plan_rows, run_rows
from draftwood.draft.markov import MarkovTables
from draftwood.draft.ranking import Ranked
from draftwood.draft.steering import Columns
from draftwood.target.model import Target
from draftwood.tree.tree import DraftTree, IntArray, ScoredPrefixes

_CHUNK_LEN = 512  # committed tokens encoded in one pass


@dataclass(eq=False, slots=True)
class _State:
    """One sequence.

    Attributes:
        cache: keys and values of its tokens; may lag behind the committed ones.
        known: committed tokens reported so far.
        anchor, ranked: the proposal being verified, until its outcome is reported.
        outcomes: tokens encoded behind the cache that may be committed.
    """

    cache: ContextCache
    known: int = 0
    anchor: int = -1
    ranked: tuple[Ranked, ...] = ()
    outcomes: Outcomes | None = None


class IndependentDrafter:
    """Drafts trees from the per-position marginals of its own language model.

    Args:
        network: the drafter; tables it borrows are the target's.
        target: the model it drafts for.
        use_noise: at temperature > 0, rank by the request's noise too (see ``ranking``).

    Raises:
        ValueError: another tokenizer or vocabulary than the target's.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self, network: IndependentNetwork, target: Target, *, use_noise: bool = True
    ) -> None:
        check_fits(network.config, target)
        if network.config.borrows:
            network.borrow(target.input_embeddings(), target.output_embeddings())
        self.config = network.config
        self._network = network
        network.hasten()
        head = network.head_weight().detach()
        columns = Columns(len(head), target.vocab_size, device=head.device)
        markov = None
        if network.markov is not None:
            markov = MarkovTables.of(network.markov, network.embed(columns.token_ids), head)
        self._ranking = BlockRanking(head, columns, use_noise=use_noise, markov=markov)
        self._states: dict[int, _State] = {}

    @property
    def horizon(self) -> int:
        return self.config.horizon

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext], limits: DraftLimits) -> ScoredPrefixes:
        """The most probable prefixes of each context under its block's marginals."""
        deepest = limits.max_depth
        horizon = self.horizon if deepest is None else min(deepest, self.horizon)
        scored, rankings = self._ranking.draft(
            contexts, limits, horizon, lambda depth: self._blocks(contexts, horizon)[:, :depth]
        )
        for context, ranked in zip(contexts, rankings, strict=False):  # none without a pass
            state = self._states[context.seq_id]
            state.anchor, state.ranked = len(context.token_ids) - 1, ranked
        return scored

    @torch.inference_mode()
    def draft_branches(
        self,
        contexts: Sequence[DraftContext],
        tree: DraftTree,
        anchors: IntArray,
        num_rows: int | None = None,
    ) -> list[BranchDraft]:
        """Draft one block per anchor in one packed pass; see ``BranchDrafter``."""
        outcomes = [
            Outcomes.of(tree, index, anchors, len(context.token_ids) - 1)
            for index, context in enumerate(contexts)
        ]
        asked = [(c, one) for c, one in zip(contexts, outcomes, strict=True) if one.branches]
        plans, caches = [], []
        for context, one in asked:
            state, chain = self._caught_up(context)
            blocks = [(token_ids[-1], above) for token_ids, above in one.branches]
            plans.append(self._plan(chain, one.nodes, blocks, self.horizon))
            caches.append(state.cache)
        hidden = run_rows(self._network, plans, caches) if asked else []
        drafts: dict[int, BranchDraft] = {}
        for (context, one), plan, rows in zip(asked, plans, hidden, strict=True):
            state = self._states[context.seq_id]
            state.cache.commit(range(plan.num_kept - len(one.nodes)))
            state.outcomes = one
            made = self._branch_drafts(context.seq_id, one, rows[plan.num_kept :], num_rows)
            drafts.update(zip(one.where, made, strict=True))
        return [drafts[where] for where in range(len(anchors))]

    @torch.inference_mode()
    def adopt(
        self,
        contexts: Sequence[DraftContext],
        drafts: Sequence[BranchDraft],
        limits: DraftLimits,
    ) -> ScoredPrefixes:
        """What ``propose`` would return for contexts that came true, without a pass."""
        rows = [self._adopt(*pair, limits) for pair in zip(contexts, drafts, strict=True)]
        return rows[0] if len(rows) == 1 else ScoredPrefixes.stack(rows)

    def observe(self, committed: Sequence[Committed]) -> None:
        """Keep what is already encoded of the committed tokens, and learn from the picks."""
        for record in committed:
            state = self._state(record.seq_id)
            assert record.start == state.known, (
                f"tokens {state.known}..{record.start} were never reported"
            )
            state.known += len(record.token_ids)
            ranked, state.ranked = state.ranked, ()
            if state.anchor == record.start:
                self._ranking.learn(ranked, record.picks)
            outcomes, state.outcomes = state.outcomes, None
            if outcomes is not None and outcomes.start == record.start == state.cache.length:
                with torch.inference_mode():
                    state.cache.commit(outcomes.path(record.token_ids))

    def truncate(self, seq_id: int, length: int) -> None:
        """Forget tokens at positions ≥ ``length``."""
        state = self._states.get(seq_id)
        if state is not None:
            state.cache.truncate(length)
            state.known = min(state.known, length)
            state.ranked, state.outcomes = (), None

    def release(self, seq_id: int) -> None:
        """Free the cache of a sequence; only the ranking weights outlive it."""
        self._states.pop(seq_id, None)

    def _adopt(
        self, context: DraftContext, draft: BranchDraft, limits: DraftLimits
    ) -> ScoredPrefixes:
        behind = draft.serves(context)
        assert behind is not None, "this draft is for another continuation"
        max_depth = min(self.horizon - behind, context.max_depth)
        depth = min(max_depth, limits.max_nodes)
        if depth <= 0:
            return ScoredPrefixes.empty(1)
        hidden, logits = draft.hidden[None, behind:], draft.logits[None, behind:]
        markov = self._network.markov
        if behind and markov is not None:
            # the block had a mask where the token that came true is known now
            anchor = self._network.embed(torch.tensor(context.token_ids[-1:]))
            first = markov(hidden[:, :1], anchor[None]).to(hidden)
            hidden = torch.cat([first, hidden[:, 1:]], dim=1)
            logits = torch.cat([self._ranking.logits(first), logits[:, 1:]], dim=1)
        scored, rankings = self._ranking.best(
            hidden[:, :depth], [context], limits, [max_depth], logits
        )
        state = self._state(context.seq_id)
        state.anchor, state.ranked = len(context.token_ids) - 1, rankings[0]
        return scored

    def _blocks(self, contexts: Sequence[DraftContext], horizon: int) -> torch.Tensor:
        """[S, horizon, H] one pass over what is not cached yet and the blocks of all contexts."""
        caches, plans = [], []
        for context in contexts:
            state, chain = self._caught_up(context)
            caches.append(state.cache)
            plans.append(self._plan(chain, [], [(context.token_ids[-1], -1)], horizon))
        hidden = run_rows(self._network, plans, caches)
        for cache, plan in zip(caches, plans, strict=True):
            cache.commit(range(plan.num_kept))
        return torch.stack([rows[-horizon:] for rows in hidden])

    def _caught_up(self, context: DraftContext) -> tuple[_State, list[int]]:
        """The state, and the last committed tokens before the anchor that it lacks."""
        state = self._state(context.seq_id)
        state.outcomes = None
        anchor = len(context.token_ids) - 1
        assert state.known == anchor, f"{state.known} of {anchor} committed tokens are known"
        while anchor - state.cache.length > _CHUNK_LEN:
            start = state.cache.length
            chunk = context.token_ids[start : start + _CHUNK_LEN]
            run_rows(self._network, [self._plan(chunk, [], [], self.horizon)], [state.cache])
            state.cache.commit(range(len(chunk)))
        return state, list(context.token_ids[state.cache.length : anchor])

    def _plan(
        self,
        chain: Sequence[int],
        nodes: Sequence[tuple[int, int]],
        blocks: Sequence[tuple[int, int]],
        horizon: int,
    ) -> Rows:
        return plan_rows(chain, nodes, blocks, horizon + 1, self.config.mask_token_id)

    def _branch_drafts(
        self, seq_id: int, outcomes: Outcomes, rows: torch.Tensor, num_rows: int | None
    ) -> list[BranchDraft]:
        """One per branch; rows [branches · B, H]."""
        hidden = rows.view(-1, self.config.block_size, rows.shape[-1])[:, 1:]
        first = self.horizon if num_rows is None else min(num_rows, self.horizon)
        logits = self._ranking.logits(hidden[:, :first])
        return [
            BranchDraft(seq_id, outcomes.start, token_ids, hidden[i], logits[i])
            for i, (token_ids, _) in enumerate(outcomes.branches)
        ]

    def _state(self, seq_id: int) -> _State:
        if seq_id not in self._states:
            self._states[seq_id] = _State(new_cache(self._network))
        return self._states[seq_id]
