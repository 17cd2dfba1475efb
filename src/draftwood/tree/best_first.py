"""Best-first enumeration of prefixes with a heap, one sequence at a time (DDTree, 2604.12989)."""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush, heapreplace
from math import inf
from typing import NamedTuple

import numpy as np

from draftwood.tree.tree import NO_PARENT, FloatArray, IntArray, ScoredPrefixes


def best_first(costs: FloatArray, ids: IntArray, max_nodes: int) -> ScoredPrefixes:
    """The ``max_nodes`` cheapest prefixes of each sequence.

    Args:
        costs: [S, L, K] −log q of the candidates of each depth, ascending; +inf for none.
        ids: [S, L, K] their token ids.
        max_nodes: ≥ 1.
    """
    found = [_one(rows, max_nodes) for rows in costs.tolist()]
    counts = np.array([len(nodes.costs) for nodes in found], dtype=np.int64)
    if len(found) == 1:
        return _record(found[0], ids[0], counts)
    return ScoredPrefixes.stack(
        [_record(*row) for row in zip(found, ids, counts[:, None], strict=True)]
    )


def _record(nodes: _Nodes, ids: IntArray, counts: IntArray) -> ScoredPrefixes:
    depths = np.array(nodes.depths, dtype=np.int64)
    return ScoredPrefixes(
        ids[depths, np.array(nodes.ranks, dtype=np.int64)][None],
        np.array([nodes.parents], dtype=np.int64),
        depths[None] + 1,
        0.0 - np.array([nodes.costs]),
        counts,
    )


class _Nodes(NamedTuple):
    """Nodes in the order found; depths and ranks from 0."""

    costs: list[float]
    parents: list[int]
    depths: list[int]
    ranks: list[int]


def _one(costs: list[list[float]], max_nodes: int) -> _Nodes:
    """One sequence. A popped prefix offers its next sibling and its first child, each once."""
    for row in costs:
        del row[bisect_left(row, inf) :]
    nodes = _Nodes([], [], [], [])
    scores, parents, depths, ranks = nodes
    # (cost, order of arrival, depth from 0, rank, parent node, parent's cost)
    heap = [(costs[0][0], 0, 0, 0, NO_PARENT, 0.0)] if costs and costs[0] else []
    arrival, node, horizon = 0, 0, len(costs)
    while heap and node < max_nodes:
        cost, _, depth, rank, parent, above = heap[0]
        scores.append(cost)
        parents.append(parent)
        depths.append(depth)
        ranks.append(rank)
        row = costs[depth]
        rank += 1
        arrival += 1
        if rank < len(row):
            heapreplace(heap, (above + row[rank], arrival, depth, rank, parent, above))
        else:
            heappop(heap)
        depth += 1
        if depth < horizon and costs[depth]:
            arrival += 1
            heappush(heap, (cost + costs[depth][0], arrival, depth, 0, node, cost))
        node += 1
    return nodes
