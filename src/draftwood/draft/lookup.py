"""Prompt lookup: continue as the text did after earlier occurrences of its own end.

Saxena's prompt lookup decoding takes the continuation of one match. Here the occurrences of
several match lengths form a tree, and how far to trust each is learned while decoding.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from draftwood.draft.base import Committed, DraftContext, DraftLimits
from draftwood.draft.hit_rates import Guess, HitRates
from draftwood.draft.suffix_index import Occurrence, SuffixIndex
from draftwood.tree.tree import NO_PARENT, ScoredPrefixes

MAX_CHILDREN = 6  # guesses per node
MIN_LOG_PROB = math.log(1e-3)  # less likely prefixes are not worth any verification


@dataclass(eq=False, slots=True)
class _Node:
    """A prefix: its tokens, the occurrences that continue so, and its guesses once expanded."""

    path: tuple[int, ...]
    log_prob: float
    occurrences: list[Occurrence]
    index: int = NO_PARENT
    children: dict[int, _Node] | None = None
    guesses: list[Guess] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Sequence:
    """State of one sequence: its index, and the last proposal, whose outcome is awaited."""

    index: SuffixIndex = field(default_factory=SuffixIndex)
    anchor: int = -1  # position of the anchor of the last proposal
    root: _Node | None = None


class LookupDrafter:
    """Proposes continuations found in the prompt and the output so far; needs no model.

    Args:
        horizon: deepest prefix to propose.

    Raises:
        ValueError: ``horizon`` < 1.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, horizon: int = 16) -> None:
        if horizon < 1:
            raise ValueError(f"horizon must be ≥ 1, got {horizon}")
        self.horizon = horizon
        self._rates = HitRates()
        self._sequences: dict[int, _Sequence] = {}

    def propose(self, contexts: Sequence[DraftContext], limits: DraftLimits) -> ScoredPrefixes:
        """The best prefixes of each context; ``limits.max_width`` bounds the siblings of a node."""
        rows = [self._propose(context, limits) for context in contexts]
        return rows[0] if len(rows) == 1 else ScoredPrefixes.stack(rows)

    def observe(self, committed: Sequence[Committed]) -> None:
        """Learn which guesses the target confirmed, then index the new tokens."""
        for record in committed:
            sequence = self._sequences.setdefault(record.seq_id, _Sequence())
            if sequence.root is not None and sequence.anchor == record.start:
                self._learn(record.seq_id, sequence.root, record.picks)
            sequence.root = None
            known = len(sequence.index)
            assert record.start <= known, f"tokens {known}..{record.start} were never reported"
            sequence.index.extend(record.token_ids[known - record.start :])

    def truncate(self, seq_id: int, length: int) -> None:
        """Forget tokens at positions ≥ ``length``."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            sequence.index.truncate(length)
            sequence.root = None

    def release(self, seq_id: int) -> None:
        """Drop the index of a sequence; the learned hit rates stay."""
        self._sequences.pop(seq_id, None)
        self._rates.release(seq_id)

    def _propose(self, context: DraftContext, limits: DraftLimits) -> ScoredPrefixes:
        sequence = self._sequences.setdefault(context.seq_id, _Sequence())
        index = sequence.index
        index.extend(context.token_ids[i] for i in range(len(index), len(context.token_ids)))
        sequence.anchor = len(index) - 1
        sequence.root = _Node((), 0.0, index.matches())
        max_depth = min(self.horizon, context.max_depth)
        nodes = self._best_first(context.seq_id, sequence, max_depth, limits)
        return _to_prefixes(nodes)

    def _best_first(
        self, seq_id: int, sequence: _Sequence, max_depth: int, limits: DraftLimits
    ) -> list[tuple[_Node, int]]:
        """The most probable nodes with the index of their parents, in decreasing probability."""
        width = MAX_CHILDREN if limits.max_width is None else limits.max_width
        chosen: list[tuple[_Node, int]] = []
        heap: list[tuple[float, int, int, _Node]] = []  # the second entry breaks ties by age
        age = 0
        node, at = sequence.root, NO_PARENT
        assert node is not None
        while len(chosen) < limits.max_nodes:
            if len(node.path) < max_depth:
                self._expand(seq_id, sequence.index.token_ids, node)
                for child in list((node.children or {}).values())[:width]:
                    if child.log_prob >= MIN_LOG_PROB:
                        age += 1
                        heapq.heappush(heap, (-child.log_prob, age, at, child))
            if not heap:
                break
            _, _, parent, node = heapq.heappop(heap)
            at = len(chosen)
            chosen.append((node, parent))
        return chosen

    def _expand(self, seq_id: int, token_ids: list[int], node: _Node) -> None:
        """Group the node's occurrences by what followed; the best supported guess comes first."""
        depth = len(node.path)
        groups: dict[int, list[Occurrence]] = {}
        for occurrence in node.occurrences:
            groups.setdefault(_follower(token_ids, node.path, occurrence), []).append(occurrence)
        ranked = sorted(groups.items(), key=_support, reverse=True)[:MAX_CHILDREN]
        node.guesses = _to_guesses(ranked, depth)
        probs = self._rates.probs(seq_id, node.guesses)
        node.children = {
            token_id: _Node((*node.path, token_id), node.log_prob + math.log(prob), found)
            for (token_id, found), prob in zip(ranked, probs, strict=True)
        }

    def _learn(self, seq_id: int, root: _Node, picks: Sequence[int]) -> None:
        """Follow the target's own tokens through the guesses, verified or not."""
        node = root
        for token_id in picks:
            if node.children is None:
                return
            order = list(node.children)
            hit = order.index(token_id) if token_id in node.children else None
            self._rates.learn(seq_id, node.guesses, hit)
            if hit is None:
                return
            node = node.children[token_id]


def _follower(token_ids: list[int], path: tuple[int, ...], occurrence: Occurrence) -> int:
    """The token after ``path`` at an occurrence; past the end of the text the path goes on."""
    at = occurrence.position + len(path)
    return token_ids[at] if at < len(token_ids) else path[at - len(token_ids)]


def _support(group: tuple[int, list[Occurrence]]) -> tuple[int, int, int]:
    """Longest match first, then the number of agreeing occurrences, then the most recent."""
    _, found = group
    return max(found)[0], len(found), max(occurrence.position for occurrence in found)


def _to_guesses(ranked: list[tuple[int, list[Occurrence]]], depth: int) -> list[Guess]:
    lens = [max(found).match_len + depth for _, found in ranked] + [0]
    return [
        Guess(rank, lens[rank], lens[rank + 1], len(found))
        for rank, (_, found) in enumerate(ranked)
    ]


def _to_prefixes(chosen: list[tuple[_Node, int]]) -> ScoredPrefixes:
    return ScoredPrefixes(
        np.array([[node.path[-1] for node, _ in chosen]], dtype=np.int64),
        np.array([[parent for _, parent in chosen]], dtype=np.int64),
        np.array([[len(node.path) for node, _ in chosen]], dtype=np.int64),
        np.array([[node.log_prob for node, _ in chosen]], dtype=np.float64),
        np.array([len(chosen)], dtype=np.int64),
    )
