"""Two drafters as one: a trained drafter for what is new, lookup for what is being repeated.

Each proposes its best prefixes; a prefix is worth the weighted mean of what the two say. The
weight is a gate on how sure lookup is of its first token, learned online from which of the two
foresaw the target's own tokens better (the posterior of a mixture of two experts).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from draftwood.draft.base import Committed, DraftContext, Drafter, DraftLimits
from draftwood.draft.online_fit import OnlineFit, sigmoid
from draftwood.tree.tree import NO_PARENT, FloatArray, ScoredPrefixes

_PRIOR_GATE = np.array([-0.5, 1.0])  # log-odds of trusting lookup: level, per log-odds of its own
_PRECISION = np.array([10.0, 20.0])
_UNKNOWN = 0.05  # a path that leaves a drafter's prefixes is worth this much of where it left


@dataclass(eq=False, slots=True)
class _Node:
    """A prefix of either drafter with the probability each gives it (0: not among its best)."""

    model_prob: float = 0.0
    lookup_prob: float = 0.0
    children: dict[int, _Node] = field(default_factory=dict)


@dataclass(frozen=True)
class _Proposal:
    """What was proposed at an anchor, and is to be compared with the target's picks."""

    anchor: int
    root: _Node
    features: FloatArray
    sampled: bool


class BlendDrafter:
    """Proposes the best prefixes of a trained drafter and of prompt lookup, merged.

    Args:
        model: a drafter with probabilities.
        lookup: a drafter without a model, cheap enough to be asked every cycle.
    """

    def __init__(self, model: Drafter, lookup: Drafter) -> None:
        self.model, self.lookup = model, lookup
        self._gates: dict[bool, OnlineFit] = {}
        self._proposals: dict[int, _Proposal] = {}

    @property
    def taps(self) -> tuple[int, ...]:
        return self.model.taps

    @property
    def horizon(self) -> int:
        return max(self.model.horizon, self.lookup.horizon)

    def propose(self, contexts: Sequence[DraftContext], limits: DraftLimits) -> ScoredPrefixes:
        """The best prefixes of each context by the mixture of both drafters' probabilities."""
        ours = self.model.propose(contexts, limits)
        found = self.lookup.propose(contexts, limits)
        rows = [
            self._merge(context, ours.row(i), found.row(i), limits)
            for i, context in enumerate(contexts)
        ]
        return rows[0] if len(rows) == 1 else ScoredPrefixes.stack(rows)

    def observe(self, committed: Sequence[Committed]) -> None:
        """Learn whom to trust, then let both take in the tokens."""
        for record in committed:
            proposal = self._proposals.pop(record.seq_id, None)
            if proposal is not None and proposal.anchor == record.start:
                self._learn(proposal, record.picks)
        self.model.observe(committed)
        self.lookup.observe(committed)

    def truncate(self, seq_id: int, length: int) -> None:
        self._proposals.pop(seq_id, None)
        self.model.truncate(seq_id, length)
        self.lookup.truncate(seq_id, length)

    def release(self, seq_id: int) -> None:
        self._proposals.pop(seq_id, None)
        self.model.release(seq_id)
        self.lookup.release(seq_id)

    def _merge(
        self,
        context: DraftContext,
        ours: ScoredPrefixes,
        found: ScoredPrefixes,
        limits: DraftLimits,
    ) -> ScoredPrefixes:
        if found.counts[0] == 0:
            return ours
        root = _Node()
        for node, prob in _graft(root, ours):
            node.model_prob = prob
        for node, prob in _graft(root, found):
            node.lookup_prob = prob
        surest = max(node.lookup_prob for node in root.children.values())
        features = np.array([1.0, _log_odds(surest)])
        sampled = context.sampler.params.temperature > 0
        anchor = len(context.token_ids) - 1
        self._proposals[context.seq_id] = _Proposal(anchor, root, features, sampled)
        return _best_first(root, sigmoid(float(self._gate(sampled).mean @ features)), limits)

    def _learn(self, proposal: _Proposal, picks: Sequence[int]) -> None:
        model, lookup = _path_probs(proposal.root, picks)
        if model + lookup == 0.0:
            return
        gate = self._gate(proposal.sampled)
        weight = sigmoid(float(gate.mean @ proposal.features))
        posterior = weight * lookup / (weight * lookup + (1.0 - weight) * model)
        spread = weight * (1.0 - weight)
        outer = np.outer(proposal.features, proposal.features)
        gate.update((posterior - weight) * proposal.features, spread * outer)

    def _gate(self, sampled: bool) -> OnlineFit:
        return self._gates.setdefault(sampled, OnlineFit(_PRIOR_GATE, _PRECISION))


def _graft(root: _Node, scored: ScoredPrefixes) -> Iterator[tuple[_Node, float]]:
    """Add the prefixes of one record to the tree; yields each node with its probability."""
    nodes: list[_Node] = []
    count = int(scored.counts[0])
    probs = np.exp(scored.log_probs[0, :count]).tolist()
    tokens, parents = scored.token_ids[0].tolist(), scored.parents[0].tolist()
    for token_id, parent, prob in zip(tokens[:count], parents[:count], probs, strict=True):
        above = root if parent == NO_PARENT else nodes[parent]
        node = above.children.setdefault(token_id, _Node())
        nodes.append(node)
        yield node, prob


def _best_first(root: _Node, weight: float, limits: DraftLimits) -> ScoredPrefixes:
    """The most probable prefixes under the mixture. A parent is never less probable than a child
    for either drafter, so neither is it for the mixture."""
    chosen: list[tuple[int, int, int, float]] = []
    heap: list[tuple[float, int, int, int, int, _Node]] = []
    age, at, depth, node = 0, NO_PARENT, 0, root
    while len(chosen) < limits.max_nodes:
        ranked = sorted(
            ((weight * n.lookup_prob + (1.0 - weight) * n.model_prob, t, n)
             for t, n in node.children.items()),
            key=lambda entry: -entry[0],
        )  # fmt: skip
        for prob, token_id, child in ranked[: limits.max_width]:
            age += 1
            heapq.heappush(heap, (-prob, age, at, token_id, depth + 1, child))
        if not heap:
            break
        score, _, parent, token_id, depth, node = heapq.heappop(heap)
        at = len(chosen)
        chosen.append((token_id, parent, depth, math.log(max(-score, 1e-300))))
    columns = list(zip(*chosen, strict=True)) if chosen else [(), (), (), ()]
    token_ids, parents, depths = (np.array([c], dtype=np.int64) for c in columns[:3])
    log_probs = np.array([columns[3]], dtype=np.float64)
    return ScoredPrefixes(token_ids, parents, depths, log_probs, np.array([len(chosen)]))


def _path_probs(root: _Node, picks: Sequence[int]) -> tuple[float, float]:
    """What the model and lookup said of the target's tokens, as far as either had foreseen them."""
    model = lookup = 0.0
    node = root
    for token_id in picks:
        child = node.children.get(token_id)
        if child is None:
            break
        model = child.model_prob or _UNKNOWN * (model or 1.0)
        lookup = child.lookup_prob or _UNKNOWN * (lookup or 1.0)
        node = child
    return model, lookup


def _log_odds(prob: float) -> float:
    prob = min(max(prob, 1e-3), 1.0 - 1e-3)
    return math.log(prob / (1.0 - prob))
