"""A draft tree that an autoregressive model grows in a few passes, most probable nodes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftwood.draft.ranking import Ranked
from draftwood.tree.tree import NO_PARENT, DraftTree, ScoredPrefixes


@dataclass(eq=False, slots=True)
class Node:
    """A prefix; expanded once the drafter has scored its children.

    Attributes:
        log_prob: log-probability of the whole prefix.
        ranked, row: where its children were ranked; None while it is a candidate.
        children: token id → child.
    """

    token_id: int
    parent: Node | None
    depth: int
    log_prob: float
    ranked: Ranked | None = None
    row: int = 0
    children: dict[int, Node] | None = None


class Growth:
    """The tree of one sequence while it is drafted.

    Args:
        anchor: last committed token, the root.
        position: of the anchor.
        max_nodes, max_depth: limits of the proposal.
    """

    def __init__(self, anchor: int, position: int, max_nodes: int, max_depth: int) -> None:
        self.position = position
        self.root = Node(anchor, None, 0, 0.0)
        self.window: list[Node] = []  # nodes of the last tree pass, in packed order
        self._max_nodes = max_nodes
        self._max_depth = max_depth
        self._expanded: list[Node] = []
        self._best: list[Node] = []  # the best prefixes found so far, best first

    def frontier(self, num_nodes: int) -> list[Node]:
        """The most probable nodes that are worth expanding, at most ``num_nodes``.

        Only the children of the ``max_nodes`` best prefixes can be among them.
        """
        if not self._expanded:
            return [self.root]
        open_nodes = [n for n in self._best if n.ranked is None and n.depth < self._max_depth]
        return open_nodes[:num_nodes]

    def expand(self, nodes: Sequence[Node], ranked: Ranked) -> None:
        """Add the ranked candidates as children of ``nodes``, one row each."""
        for row, node in enumerate(nodes):
            pairs = zip(ranked.token_ids[row].tolist(), ranked.log_probs[row].tolist(), strict=True)
            node.ranked, node.row = ranked, row
            node.children = {
                token_id: Node(token_id, node, node.depth + 1, node.log_prob + log_prob)
                for token_id, log_prob in pairs
                if log_prob > -np.inf
            }
            self._expanded.append(node)
            self._best.extend(node.children.values())
        # Stable, and children come later: a parent stays before an equally probable child.
        self._best.sort(key=lambda node: -node.log_prob)
        del self._best[self._max_nodes :]

    def tree(self, nodes: Sequence[Node]) -> DraftTree:
        """All expanded nodes, then ``nodes``; becomes the window."""
        self.window = [*self._expanded, *nodes]
        index = {id(node): i for i, node in enumerate(self.window)}
        parents = [NO_PARENT if n.parent is None else index[id(n.parent)] for n in self.window]
        return DraftTree(
            np.array([node.token_id for node in self.window], dtype=np.int64),
            np.array(parents, dtype=np.int64),
            np.array([node.depth for node in self.window], dtype=np.int64),
            np.zeros(len(self.window), dtype=np.int64),
            np.array([0, len(self.window)], dtype=np.int64),
        )

    def prefixes(self) -> ScoredPrefixes:
        """The best prefixes, as a proposal."""
        index = {id(node): i for i, node in enumerate(self._best)}
        best = self._best
        return ScoredPrefixes(
            np.array([[node.token_id for node in best]], dtype=np.int64),
            np.array([[index.get(id(node.parent), NO_PARENT) for node in best]], dtype=np.int64),
            np.array([[node.depth for node in best]], dtype=np.int64),
            np.array([[node.log_prob for node in best]], dtype=np.float64),
            np.array([len(best)], dtype=np.int64),
        )

    def window_rows(self, token_ids: Sequence[int]) -> list[int]:
        """Rows of the last pass that hold the path ``token_ids`` from the anchor, as far as known.

        Args:
            token_ids: [anchor, accepted tokens …].
        """
        index = {id(node): i for i, node in enumerate(self.window)}
        if token_ids[0] != self.root.token_id:
            return []
        rows: list[int] = []
        node: Node | None = self.root
        for token_id in [*token_ids[1:], None]:
            if node is None or id(node) not in index:
                break
            rows.append(index[id(node)])
            node = (node.children or {}).get(token_id) if token_id is not None else None
        return rows
