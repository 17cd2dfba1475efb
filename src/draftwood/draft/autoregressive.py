"""The classic draft model: a smaller causal language model of the same vocabulary.

Leviathan et al. (2211.17192) draft a chain with it. Here it grows a tree best first: every pass
expands the most probable prefixes found so far, so that a few passes find the likely tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draftwood.draft.base import Committed, DraftContext, DraftLimits
from draftwood.draft.growth import Growth, Node
from draftwood.draft.ranking import Ranker
from draftwood.draft.steering import Columns
from draftwood.target.cache import KVCache
from draftwood.target.model import Target
from draftwood.tree.tree import DraftTree, ScoredPrefixes

_CHUNK_LEN = 512  # prompt tokens per pass


@dataclass(eq=False, slots=True)
class _State:
    """One sequence.

    Attributes:
        cache: the draft model's own; may lag behind the committed tokens.
        known: committed tokens reported so far.
        growth: the last proposal, until its outcome is reported.
    """

    cache: KVCache
    known: int = 0
    growth: Growth | None = None


class AutoregressiveDrafter:
    """Drafts with a smaller causal language model.

    Args:
        model: the draft model.
        target: the model it drafts for; the vocabularies must be the same.
        num_passes: passes of the draft model per proposal, and the deepest prefix.
        expand_per_pass: prefixes expanded in one pass.
        use_noise: at temperature > 0, rank by the request's noise too (see ``ranking``).

    Raises:
        ValueError: another vocabulary, or a number < 1.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self,
        model: Target,
        target: Target,
        *,
        num_passes: int = 6,
        expand_per_pass: int = 4,
        use_noise: bool = True,
    ) -> None:
        if num_passes < 1 or expand_per_pass < 1:
            raise ValueError(
                f"num_passes and expand_per_pass must be ≥ 1, got {num_passes}, {expand_per_pass}"
            )
        check_same_vocabulary(model, target)
        self.horizon = num_passes
        self._model = model
        self._expand_per_pass = expand_per_pass
        columns = Columns(model.vocab_size, target.vocab_size, device=model.device)
        self._ranker = Ranker(columns, use_noise=use_noise)
        self._states: dict[int, _State] = {}

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext], limits: DraftLimits) -> ScoredPrefixes:
        """The best prefixes found in ``num_passes`` passes over all contexts together."""
        growths = [self._begin(context, limits) for context in contexts]
        active = [i for i, growth in enumerate(growths) if growth is not None]
        for number in range(self.horizon):
            work: list[tuple[DraftContext, Growth, list[Node]]] = []
            for i in active:
                growth = growths[i]
                nodes = growth.frontier(self._expand_per_pass) if growth is not None else []
                if growth is not None and nodes:
                    work.append((contexts[i], growth, nodes))
            if not work:
                break
            logits = self._first_logits(work) if number == 0 else self._tree_logits(work)
            width = min(limits.max_nodes, limits.max_width or limits.max_nodes)
            for (context, growth, nodes), rows in zip(work, logits, strict=True):
                depths = [node.depth + 1 for node in nodes]
                growth.expand(nodes, self._ranker.rank(rows, depths, context, width))
        rows_of = [ScoredPrefixes.empty(1) if g is None else g.prefixes() for g in growths]
        return rows_of[0] if len(rows_of) == 1 else ScoredPrefixes.stack(rows_of)

    def observe(self, committed: Sequence[Committed]) -> None:
        """Keep what the draft model already computed of the committed tokens, and learn."""
        for record in committed:
            state = self._state(record.seq_id)
            assert record.start == state.known, (
                f"tokens {state.known}..{record.start} were never reported"
            )
            state.known += len(record.token_ids)
            growth, state.growth = state.growth, None
            if growth is None or growth.position != record.start:
                continue
            self._learn(growth, record.picks)
            if growth.window:
                with torch.inference_mode():
                    state.cache.commit(np.array(growth.window_rows(record.token_ids)))

    def truncate(self, seq_id: int, length: int) -> None:
        """Forget tokens at positions ≥ ``length``."""
        state = self._states.get(seq_id)
        if state is not None:
            state.known = min(state.known, length)
            state.cache.truncate(min(state.cache.length, length))
            state.growth = None

    def release(self, seq_id: int) -> None:
        """Free the cache of a sequence; only the ranking weights outlive it."""
        state = self._states.pop(seq_id, None)
        if state is not None:
            state.cache.release()

    def _state(self, seq_id: int) -> _State:
        if seq_id not in self._states:
            self._states[seq_id] = _State(self._model.new_cache())
        return self._states[seq_id]

    def _begin(self, context: DraftContext, limits: DraftLimits) -> Growth | None:
        """A new tree, with all but the anchor in the cache; None where there is no room for one."""
        state = self._state(context.seq_id)
        state.growth = None
        anchor = len(context.token_ids) - 1
        assert state.known == anchor, f"{state.known} of {anchor} committed tokens are known"
        room = self._model.max_len - len(context.token_ids)
        max_depth = min(self.horizon, context.max_depth, room)
        if max_depth <= 0 or limits.max_nodes <= 0:
            return None
        while anchor - state.cache.length > _CHUNK_LEN:
            start = state.cache.length
            chunk = self._ids(context.token_ids[start : start + _CHUNK_LEN])
            self._model.forward(DraftTree.chain(chunk), [state.cache])
            state.cache.commit(np.arange(len(chunk)))
        root = self._ids(context.token_ids[-1:])[0]
        state.growth = Growth(root, anchor, limits.max_nodes, max_depth)
        return state.growth

    def _first_logits(
        self, work: Sequence[tuple[DraftContext, Growth, list[Node]]]
    ) -> list[torch.Tensor]:
        """Logits [1, V] after each anchor; commits the tokens before it that were missing."""
        caches = [self._states[context.seq_id].cache for context, _, _ in work]
        chains = [
            DraftTree.chain(self._ids(context.token_ids[cache.length :]))
            for (context, _, _), cache in zip(work, caches, strict=True)
        ]
        hidden = self._model.forward(DraftTree.pack(chains), caches).hidden
        for chain, cache in zip(chains, caches, strict=True):
            cache.commit(np.arange(len(chain) - 1))
        last = np.cumsum([len(chain) for chain in chains]) - 1
        return list(self._model.logits(hidden[torch.from_numpy(last)])[:, None])

    def _tree_logits(
        self, work: Sequence[tuple[DraftContext, Growth, list[Node]]]
    ) -> list[torch.Tensor]:
        """Logits [len(nodes), V] after the nodes of each tree."""
        caches = [self._states[context.seq_id].cache for context, _, _ in work]
        trees = [growth.tree(nodes) for _, growth, nodes in work]
        hidden = self._model.forward(DraftTree.pack(trees), caches).hidden
        ends = np.cumsum([len(tree) for tree in trees])
        counts = [len(nodes) for _, _, nodes in work]
        rows = [np.arange(end - n, end) for end, n in zip(ends, counts, strict=True)]
        logits = self._model.logits(hidden[torch.from_numpy(np.concatenate(rows))])
        return list(logits.split(counts))

    def _ids(self, token_ids: Sequence[int]) -> list[int]:
        """Ids within the draft model's table, which may lack padding ids of the target's."""
        return [min(token_id, self._model.vocab_size - 1) for token_id in token_ids]

    def _learn(self, growth: Growth, picks: Sequence[int]) -> None:
        node: Node | None = growth.root
        for token_id in picks:
            if node is None or node.ranked is None:
                return
            self._ranker.learn(node.ranked, [token_id], node.row)
            node = (node.children or {}).get(token_id)


def check_same_vocabulary(model: Target, target: Target) -> None:
    """Refuse a draft model whose token ids mean something else.

    With tokenizers, every id that both know must be the same token (heads may be padded and
    special tokens added differently); without them the sizes must agree.

    Raises:
        ValueError: naming the first difference.
    """
    remedy = "use a draft model with the target's tokenizer"
    if model.tokenizer is None or target.tokenizer is None:
        if model.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft model has {model.vocab_size} tokens, the target {target.vocab_size}; "
                + remedy
            )
        return
    ours, theirs = (
        {token_id: token for token, token_id in one.tokenizer.get_vocab().items()}
        for one in (model, target)
    )
    different = sorted(i for i in ours.keys() & theirs.keys() if ours[i] != theirs[i])
    if different:
        first = different[0]
        raise ValueError(
            f"the draft model's tokenizer differs from the target's in {len(different)} tokens: "
            f"id {first} is {ours[first]!r} there and {theirs[first]!r} here; {remedy}"
        )
