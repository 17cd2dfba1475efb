"""Best-first enumeration of prefixes whose depths depend on the token before."""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush, heapreplace
from math import inf

import numpy as np

from draftwood.tree.tree import NO_PARENT, FloatArray, IntArray, ScoredPrefixes

_Row = tuple[list[int], list[float]]


def markov_prefixes(
    first: FloatArray,
    later: FloatArray,
    ids: IntArray,
    max_nodes: int,
    *,
    max_width: int | None = None,
    max_depth: int | None = None,
) -> ScoredPrefixes:
    """The ``max_nodes`` most probable prefixes of one sequence, best first; sums in float64.

    Best-first search is exact here as for independent depths: a child is never more probable than
    its parent, so what the heap yields next is the best of all that is left.

    Args:
        first: [K] natural logs of the candidates of depth 1.
        later: [L − 1, K, K] of the candidates of depths 2 … L after each candidate of the depth
            before.
        ids: [L, K] token ids.
        max_nodes: most prefixes; 0 gives none.
        max_width: only the best so many after each prefix; 1 is the chain of the best next token.
        max_depth: deepest prefix; L if not given.
    """
    horizon = len(ids) if max_depth is None else min(max_depth, len(ids))
    if max_nodes <= 0 or horizon <= 0 or first.size == 0:
        return ScoredPrefixes.empty(1)
    rows = _Rows(first, later, max_width)
    scores: list[float] = []
    parents: list[int] = []
    depths: list[int] = []
    columns: list[int] = []
    _, costs = rows.at(0, 0)
    # (cost, order of arrival, depth from 0, rank, parent node, its column, its cost)
    heap = [(costs[0], 0, 0, 0, NO_PARENT, 0, 0.0)] if costs else []
    arrival = node = 0
    while heap and node < max_nodes:
        cost, _, depth, rank, parent, above, before = heap[0]
        order, costs = rows.at(depth, above)
        column = order[rank]
        scores.append(-cost)
        parents.append(parent)
        depths.append(depth + 1)
        columns.append(column)
        rank += 1
        arrival += 1
        if rank < len(costs):
            sibling = (before + costs[rank], arrival, depth, rank, parent, above, before)
            heapreplace(heap, sibling)
        else:
            heappop(heap)
        if depth + 1 < horizon:
            costs = rows.at(depth + 1, column)[1]
            if costs:
                arrival += 1
                heappush(heap, (cost + costs[0], arrival, depth + 1, 0, node, column, cost))
        node += 1
    at = np.array(depths, dtype=np.int64)
    return ScoredPrefixes(
        ids[at - 1, columns][None],
        np.array([parents], dtype=np.int64),
        at[None],
        np.array([scores]),
        np.array([node], dtype=np.int64),
    )


class _Rows:
    """Candidates after each candidate, the best first; lists are made when they are asked for."""

    def __init__(self, first: FloatArray, later: FloatArray, max_width: int | None) -> None:
        costs = -first[None], -later
        for part in costs:
            part[np.isnan(part)] = inf
        self._costs = costs[0], *costs[1]
        self._orders = [costs.argsort(axis=-1)[:, :max_width] for costs in self._costs]
        self._known: dict[tuple[int, int], _Row] = {}

    def at(self, depth: int, column: int) -> _Row:
        """(columns, costs) at a depth from 0, after ``column`` of the depth before."""
        row = self._known.get((depth, column))
        if row is None:
            order = self._orders[depth][column]
            costs = self._costs[depth][column, order].tolist()
            row = order.tolist(), costs[: bisect_left(costs, inf)]
            self._known[depth, column] = row
        return row
