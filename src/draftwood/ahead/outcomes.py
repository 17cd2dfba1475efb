"""What may come of a verification: where the walk ends, and with which bonus token.

With π(u) the probability of reaching node u of tree T, the outcome (u, b) has probability
π(u) · r(b), which is that of the prefix u·b: the outcomes with a known bonus are the enumerated
prefixes outside T whose parent is in T, in the order in which they were enumerated. What u has
left, after its children in T and these, is "ends at u with some other token". All sum to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftwood.tree.tree import (
    NO_PARENT,
    BoolArray,
    DraftTree,
    FloatArray,
    IntArray,
    ScoredPrefixes,
)

UNKNOWN = -1


@dataclass(frozen=True)
class Outcomes:
    """Possible ends of the walks of S sequences.

    Attributes:
        seq: [M] sequence.
        nodes: [M] last accepted node, counted within its sequence; 0 is the anchor.
        bonus: [M] the token after it, or ``UNKNOWN``: any that no other outcome names.
        probs: [M] probability among the outcomes of its sequence.
        depths: [M] depth of the node.
    """

    seq: IntArray
    nodes: IntArray
    bonus: IntArray
    probs: FloatArray
    depths: IntArray

    def __len__(self) -> int:
        return len(self.seq)

    @property
    def is_known(self) -> BoolArray:
        """[M] whether the bonus token is named."""
        return self.bonus != UNKNOWN

    def take(self, index: IntArray | BoolArray) -> Outcomes:
        """Some of them, in the given order."""
        return Outcomes(
            self.seq[index], self.nodes[index], self.bonus[index], self.probs[index],
            self.depths[index],
        )  # fmt: skip

    @staticmethod
    def join(parts: Sequence[Outcomes]) -> Outcomes:
        """All of them, one part after the other."""
        if not parts:
            none = np.zeros(0, dtype=np.int64)
            return Outcomes(none, none, none, np.zeros(0), none)
        return Outcomes(
            *(np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS)
        )


_FIELDS = ("seq", "nodes", "bonus", "probs", "depths")


def columns_of(scored: ScoredPrefixes, s: int, tree: DraftTree, index: int) -> IntArray:
    """[n] the column of ``scored`` that each drafted node of a sequence is; −1 if it is none.

    Args:
        scored: prefixes, of which row ``s`` is the sequence's.
        tree: packed nodes, of which sequence ``index`` is verified.
    """
    count = int(scored.counts[s])
    parents, tokens = scored.parents[s, :count].tolist(), scored.token_ids[s, :count].tolist()
    known = {key: column for column, key in enumerate(zip(parents, tokens, strict=True))}
    start, end = tree.span(index)
    found = [NO_PARENT]  # of the anchor: parent of the first prefixes
    for parent, token in zip(
        (tree.parents[start + 1 : end] - start).tolist(),
        tree.token_ids[start + 1 : end].tolist(),
        strict=True,
    ):
        lost = parent > 0 and found[parent] < 0
        found.append(-1 if lost else known.get((found[parent], token), -1))
    return np.array(found[1:], dtype=np.int64)


def frontier(scored: ScoredPrefixes, columns: Sequence[IntArray]) -> Outcomes:
    """All outcomes of verifying part of the enumerated prefixes; per sequence they sum to 1.

    Args:
        scored: the prefixes of S sequences, more than are verified.
        columns: per sequence the columns of its tree nodes, parents first; a node that was not
            enumerated (−1) is taken never to be reached.

    Returns:
        Sequence by sequence; the known ones in the order of ``scored``, then the unknown.
    """
    return Outcomes.join([_frontier(scored, s, tree) for s, tree in enumerate(columns)])


def _frontier(scored: ScoredPrefixes, s: int, tree: IntArray) -> Outcomes:
    count = int(scored.counts[s])
    probs = _probs(scored, s)
    found = tree >= 0
    # Node of each entry, −1 if it is not verified; one more entry for the anchor.
    node_of = np.full(count + 1, UNKNOWN)
    node_of[tree[found]] = np.flatnonzero(found) + 1
    node_of[count] = 0
    parents = scored.parents[s, :count]
    above = node_of[np.where(parents < 0, count, parents)]
    below = above != UNKNOWN
    outside = np.flatnonzero(below & (node_of[:count] == UNKNOWN))
    mass, depths = np.zeros(len(tree) + 1), np.zeros(len(tree) + 1, dtype=np.int64)
    mass[0] = 1.0
    mass[1:][found], depths[1:][found] = probs[tree[found]], scored.depths[s, tree[found]]
    taken = np.bincount(above[below], weights=probs[below], minlength=len(mass))
    nodes = np.concatenate([above[outside], np.arange(len(mass))]).astype(np.int64)
    return Outcomes(
        np.full(len(nodes), s, dtype=np.int64),
        nodes,
        np.concatenate([scored.token_ids[s, outside], np.full(len(mass), UNKNOWN)]),
        np.concatenate([probs[outside], np.maximum(mass - taken, 0.0)]),
        depths[nodes],
    )


def _probs(scored: ScoredPrefixes, s: int) -> FloatArray:
    """[n] probabilities of the prefixes of row ``s``, siblings together at most their parent's.

    Scores that are calibrated one by one need not add up.
    """
    count = int(scored.counts[s])
    parents, depths = scored.parents[s, :count], scored.depths[s, :count]
    logs = np.append(scored.log_probs[s, :count], 0.0)  # the last one is the anchor: parent −1
    shares = np.exp(np.minimum(logs[:-1] - logs[parents], 0.0))
    sums = np.bincount(parents + 1, weights=shares, minlength=count + 1)
    shares /= np.maximum(sums, 1.0)[parents + 1]
    probs = np.ones(count + 1)
    for depth in range(1, int(depths.max(initial=0)) + 1):
        here = np.flatnonzero(depths == depth)
        probs[here] = shares[here] * probs[parents[here]]
    return probs[:-1]


def branch_tree(tree: DraftTree, outcomes: Outcomes) -> tuple[DraftTree, IntArray]:
    """The verified tree with the bonus tokens as further nodes, and the node of each outcome.

    Args:
        tree: nodes of the S sequences.
        outcomes: of the same sequences.

    Returns:
        The tree, and [M] packed nodes to draft from: the bonus token, or the last accepted node
        where the bonus is unknown.
    """
    parts: list[DraftTree] = []
    anchors = np.zeros(len(outcomes), dtype=np.int64)
    offset = 0
    for s in range(tree.num_seqs):
        start, end = tree.span(s)
        size = end - start
        here = np.flatnonzero(outcomes.seq == s)
        known = here[outcomes.bonus[here] != UNKNOWN]
        anchors[here] = offset + outcomes.nodes[here]
        anchors[known] = offset + size + np.arange(len(known))
        above = tree.parents[start:end]
        parts.append(
            DraftTree(
                np.concatenate([tree.token_ids[start:end], outcomes.bonus[known]]),
                np.concatenate([np.where(above < 0, above, above - start), outcomes.nodes[known]]),
                np.concatenate([tree.depths[start:end], outcomes.depths[known] + 1]),
                np.zeros(size + len(known), dtype=np.int64),
                np.array([0, size + len(known)], dtype=np.int64),
            )
        )
        offset += size + len(known)
    return DraftTree.pack(parts), anchors
