"""Which nodes of a tree have to be encoded so that blocks can start behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftwood.tree.tree import DraftTree, IntArray


@dataclass(frozen=True)
class Outcomes:
    """The possible continuations of one sequence that blocks were drafted for.

    Attributes:
        start: position of the tree's first node.
        nodes: (token, parent) of the nodes that some block follows, parents first; they are the
            rows behind the cache.
        branches: per block, the tokens from the first node to its anchor, and which of ``nodes``
            its anchor follows, −1 for none.
        where: per block, its index among all anchors of the call.
    """

    start: int
    nodes: tuple[tuple[int, int], ...]
    branches: tuple[tuple[tuple[int, ...], int], ...]
    where: tuple[int, ...]

    @staticmethod
    def of(tree: DraftTree, index: int, anchors: IntArray, start: int) -> Outcomes:
        """The outcomes of sequence ``index`` of ``tree`` among ``anchors``."""
        where = np.flatnonzero(tree.seq[anchors] == index)
        paths = [_path(tree, int(anchors[i])) for i in where]
        needed = sorted({node for path in paths for node in path[:-1]})
        slot = {node: i for i, node in enumerate(needed)}
        tokens = tree.token_ids
        nodes = tuple((int(tokens[n]), slot.get(int(tree.parents[n]), -1)) for n in needed)
        branches = tuple(
            (tuple(int(tokens[n]) for n in path), slot[path[-2]] if len(path) > 1 else -1)
            for path in paths
        )
        return Outcomes(start, nodes, branches, tuple(where.tolist()))

    def path(self, token_ids: Sequence[int]) -> list[int]:
        """Nodes along ``token_ids``, as far as they are encoded."""
        children = {(parent, token): i for i, (token, parent) in enumerate(self.nodes)}
        found: list[int] = []
        for token_id in token_ids:
            node = children.get((found[-1] if found else -1, token_id))
            if node is None:
                break
            found.append(node)
        return found


def _path(tree: DraftTree, node: int) -> list[int]:
    """Packed nodes from the first of the sequence down to ``node``."""
    path = [node]
    while tree.parents[path[-1]] >= 0:
        path.append(int(tree.parents[path[-1]]))
    return path[::-1]
