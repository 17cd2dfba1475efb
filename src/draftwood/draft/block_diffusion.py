"""Block diffusion drafting (DFlash, 2602.06036): one pass predicts the whole next block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from draftwood.draft.base import Committed, DraftContext, DraftLimits
from draftwood.draft.block_pass import BlockPass
from draftwood.draft.block_ranking import BlockRanking
from draftwood.draft.checkpoint import check_compatible
from draftwood.draft.context_cache import ContextCache
from draftwood.draft.markov import MarkovTables
from draftwood.draft.network import DraftNetwork
from draftwood.draft.ranking import Ranked
from draftwood.draft.steering import Columns
from draftwood.target.model import Target
from draftwood.tree.tree import ScoredPrefixes

# Committed tokens wait for the next draft, but no more than this many: one by one, as in plain
# decoding, they would cost a few percent of every cycle.
_MOST_WAITING = 64


@dataclass(eq=False, slots=True)
class _State:
    """One sequence: keys and values of its committed tokens, and the proposal being verified.

    Attributes:
        cache: of the tokens encoded so far.
        waiting: features of the tokens after them.
        length: number of committed tokens.
        anchor: position at which ``ranked`` was proposed.
        ranked: the proposal.
    """

    cache: ContextCache
    waiting: list[torch.Tensor] = field(default_factory=list)
    length: int = 0
    anchor: int = -1
    ranked: tuple[Ranked, ...] = ()

    @property
    def num_waiting(self) -> int:
        return self.length - self.cache.length


class BlockDiffusionDrafter:
    """Drafts trees from the per-position marginals of one block-diffusion pass.

    Conditioned on the target's hidden states at ``taps``: every committed token is projected to
    keys and values once, its features are then dropped. The block always has ``block_size`` rows,
    whatever the budget and however little room is left.

    Args:
        network: the drafter; embeddings and head it lacks are the target's.
        target: the model it drafts for.
        use_noise: at temperature > 0, rank by the request's noise too (see ``ranking``).

    Raises:
        ValueError: the drafter was not made for this target.
    """

    def __init__(self, network: DraftNetwork, target: Target, *, use_noise: bool = True) -> None:
        config = network.config
        check_compatible(
            config,
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
        )
        self.config = config
        self._pass = BlockPass(network)
        own_table, own_head = network.embed_tokens, network.lm_head
        table = own_table.weight if own_table is not None else target.input_embeddings()
        head = own_head.weight if own_head is not None else target.output_embeddings()
        self._table, head = table.detach(), head.detach()
        self._mask_row = self._embed([config.mask_token_id])
        columns = Columns(len(head), target.vocab_size, network.target_ids(), device=head.device)
        markov = None
        if network.markov is not None:
            rows = self._embed(columns.token_ids.tolist())
            markov = MarkovTables.of(network.markov, rows, head[: len(rows)], config.logit_scale)
        self._ranking = BlockRanking(
            head,
            columns,
            use_noise=use_noise,
            scale=config.logit_scale,
            softcap=config.logit_softcap,
            markov=markov,
        )
        self._states: dict[int, _State] = {}

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    @property
    def horizon(self) -> int:
        return self.config.horizon

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext], limits: DraftLimits) -> ScoredPrefixes:
        """The most probable prefixes of each context under its block's marginals."""
        scored, rankings = self._ranking.draft(
            contexts, limits, self.horizon, lambda depth: self._hidden(contexts, depth)
        )
        for context, ranked in zip(contexts, rankings, strict=False):  # none without a pass
            state = self._states[context.seq_id]
            state.anchor, state.ranked = state.length, ranked
        return scored

    @torch.inference_mode()
    def observe(self, committed: Sequence[Committed]) -> None:
        """Take in the features of the committed tokens, and learn from the target's picks."""
        states = [self._state(record.seq_id) for record in committed]
        for state, record in zip(states, committed, strict=True):
            assert record.features is not None, "a block-diffusion drafter needs its taps"
            assert len(record.features) == len(record.token_ids)
            assert record.start == state.length, (
                f"tokens {state.length}..{record.start} were never reported"
            )
            self._learn(state, record)
            state.waiting.append(record.features)
            state.length += len(record.features)
        self._encode([state for state in states if state.num_waiting >= _MOST_WAITING])

    @torch.inference_mode()
    def truncate(self, seq_id: int, length: int) -> None:
        """Forget tokens at positions ≥ ``length``."""
        state = self._states.get(seq_id)
        if state is not None:
            self._encode([state])
            state.cache.truncate(length)
            state.length, state.ranked = state.cache.length, ()

    def release(self, seq_id: int) -> None:
        """Free the context of a sequence; only the ranking weights outlive it."""
        self._states.pop(seq_id, None)

    def _state(self, seq_id: int) -> _State:
        if seq_id not in self._states:
            self._states[seq_id] = _State(self._pass.new_cache())
        return self._states[seq_id]

    def _hidden(self, contexts: Sequence[DraftContext], depth: int) -> torch.Tensor:
        """[S, depth, H] one pass over all blocks; the rows that predict depths 1 … depth."""
        states = [self._state(context.seq_id) for context in contexts]
        self._encode(states)
        caches = [state.cache for state in states]
        for cache, context in zip(caches, contexts, strict=True):
            anchor = len(context.token_ids) - 1
            assert cache.length == anchor, f"{cache.length} of {anchor} committed tokens are known"
        block = self._mask_row.repeat(len(contexts), self.config.block_size, 1)
        block[:, 0] = self._embed([context.token_ids[-1] for context in contexts])
        return self._pass.hidden(block, caches, depth)

    def _encode(self, states: Sequence[_State]) -> None:
        """Project the features that wait to keys and values, of all ``states`` at once."""
        states = [state for state in states if state.waiting]
        if not states:
            return
        ends = [(state.cache.length, state.length) for state in states]
        features = torch.cat([part for state in states for part in state.waiting])
        positions = torch.cat([torch.arange(*span) for span in ends]).to(self._pass.device)
        new = self._pass.context(features, positions)
        sizes = [end - start for start, end in ends]
        for state, part in zip(states, new.split(sizes, dim=3), strict=True):
            state.cache.append(part)
            state.waiting.clear()

    def _embed(self, token_ids: list[int]) -> torch.Tensor:
        """[n, H] block rows of target token ids."""
        rows = self._table[torch.tensor(token_ids, device=self._table.device)]
        rows = rows.to(self._pass.device, self._pass.dtype)
        scale = self.config.embedding_scale
        return rows if scale == 1.0 else rows * scale

    def _learn(self, state: _State, record: Committed) -> None:
        ranked, state.ranked = state.ranked, ()
        if state.anchor == record.start:
            self._ranking.learn(ranked, record.picks)
