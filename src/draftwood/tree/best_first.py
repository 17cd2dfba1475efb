"""Best-first enumeration of prefixes with a heap, one sequence at a time (DDTree, 2604.12989)."""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace
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
    num_valid = np.isfinite(costs).sum(axis=2)
    nodes = [
        _one(
            [row[:valid] for row, valid in zip(costs[s].tolist(), num_valid[s], strict=True)],
            max_nodes,
        )
        for s in range(len(costs))
    ]
    counts = np.array([len(found.costs) for found in nodes], dtype=np.int64)
    shape = (len(costs), int(counts.max(initial=0)))
    token_ids = np.zeros(shape, dtype=np.int64)
    parents = np.full(shape, NO_PARENT, dtype=np.int64)
    depths = np.zeros(shape, dtype=np.int64)
    log_probs = np.full(shape, -np.inf)
    for s, (found, count) in enumerate(zip(nodes, counts, strict=True)):
        depth = np.array(found.depths, dtype=np.int64)
        token_ids[s, :count] = ids[s, depth, np.array(found.ranks, dtype=np.int64)]
        parents[s, :count] = found.parents
        depths[s, :count] = depth + 1
        log_probs[s, :count] = found.costs
    return ScoredPrefixes(token_ids, parents, depths, -np.abs(log_probs), counts)


class _Nodes(NamedTuple):
    """Nodes in the order found; depths and ranks from 0."""

    costs: list[float]
    parents: list[int]
    depths: list[int]
    ranks: list[int]


def _one(costs: list[list[float]], max_nodes: int) -> _Nodes:
    """One sequence. A popped prefix offers its next sibling and its first child, each once."""
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
