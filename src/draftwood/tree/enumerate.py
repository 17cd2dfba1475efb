"""The exactly most probable prefixes of a block of independent per-depth distributions.

The probability of a prefix is the product of its tokens' marginals, Φ(n) the sum over the n most
probable ones; those are the tree of n nodes with the highest expected acceptance (DDTree,
2604.12989). A few best candidates of each depth are looked at first; the prefixes that leave the
best path once are enough of them to tell which further tokens could matter at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from draftwood.tree.best_first import best_first
from draftwood.tree.level_beam import level_beam
from draftwood.tree.topk import at_least, top_k
from draftwood.tree.tree import NO_PARENT, FloatArray, IntArray, ScoredPrefixes

Array = torch.Tensor | NDArray

_FIRST = 32  # candidates per depth looked at first, up to twice as many for large budgets
# Nodes in all from which an accelerator's ~100 launches beat ~1 µs per node of the heap.
_MIN_NODES_ON_DEVICE = 2048
_MAX_LOG_PROB = 1e-3  # rounding of a log-softmax, not more


def top_prefixes(
    log_probs: Array,
    max_nodes: int,
    *,
    max_width: int | None = None,
    max_depths: Sequence[int] | None = None,
    token_map: Array | None = None,
) -> ScoredPrefixes:
    """The ``max_nodes`` most probable prefixes of each sequence, best first.

    Sums run left to right in float64. Tokens of probability 0 (and NaN) are never proposed.
    Under ties which of the equal prefixes are taken is unspecified; Φ is not affected.

    Args:
        log_probs: [S, L, V] natural logs of each depth's distribution, any float type and device.
        max_nodes: most prefixes per sequence; 0 gives none.
        max_width: only the ``max_width`` best tokens of each depth; 1 is the single chain.
        max_depths: [S] deepest prefix per sequence; L if not given.
        token_map: [V] target token id of each column (a reduced draft vocabulary), best kept on
            the device of ``log_probs``.

    Raises:
        ValueError: a wrong shape, ``max_width`` below 1, or values that are no log-probabilities.
    """
    scores = torch.as_tensor(log_probs)
    if scores.ndim != 3:
        raise ValueError(f"log_probs must be [S, L, V], got shape {tuple(scores.shape)}")
    if max_width is not None and max_width < 1:
        raise ValueError(f"max_width must be ≥ 1 or None, got {max_width}")
    num_seqs, horizon, vocab_size = scores.shape
    # A prefix of depth d needs d nodes, and deeper rows than asked for need not be searched.
    deepest = horizon if max_depths is None else max(max_depths, default=0)
    horizon = min(horizon, max_nodes, deepest)
    if num_seqs == 0 or horizon <= 0 or vocab_size == 0:
        return ScoredPrefixes.empty(num_seqs)
    scores = scores[:, :horizon]
    full = min(max_nodes, vocab_size, max_width or vocab_size)
    first = min(full, max(_FIRST, min(4 * max_nodes // horizon, 2 * _FIRST)))
    values, ids = top_k(scores.reshape(-1, vocab_size), first)
    shape = (num_seqs, horizon, first)
    costs, tokens = _costs(_host(values).reshape(shape), max_depths), _host(ids).reshape(shape)
    if first < full:
        costs, tokens = _extended(scores, costs, tokens, max_nodes, full)
    if token_map is not None:
        tokens = _host(token_map)[tokens].astype(np.int64)
    return _enumerate(costs, tokens, max_nodes, scores.device)


def top_prefixes_from_candidates(
    log_probs: Array,
    ids: Array,
    max_nodes: int,
    *,
    max_depths: Sequence[int] | None = None,
) -> ScoredPrefixes:
    """The ``max_nodes`` most probable prefixes made of the given candidates, best first.

    Args:
        log_probs: [S, L, K] natural logs of the candidates' probabilities, each row in
            non-increasing order; −inf for none.
        ids: [S, L, K] their token ids.
        max_nodes: most prefixes per sequence; 0 gives none.
        max_depths: [S] deepest prefix per sequence; L if not given.

    Raises:
        ValueError: values that are no log-probabilities in non-increasing order.
    """
    device = log_probs.device if isinstance(log_probs, torch.Tensor) else torch.device("cpu")
    scores, tokens = _host(log_probs), _host(ids)
    if scores.ndim != 3 or scores.shape != tokens.shape:
        raise ValueError(
            f"candidates must be [S, L, K] with as many ids, got shapes "
            f"{scores.shape} and {tokens.shape}"
        )
    if scores.size == 0 or max_nodes <= 0:
        return ScoredPrefixes.empty(len(scores))
    costs = _costs(scores, max_depths)
    if (costs[..., 1:] < costs[..., :-1]).any():
        raise ValueError("candidates must be sorted by non-increasing log-probability")
    return _enumerate(costs, tokens, max_nodes, device)


def _extended(
    scores: torch.Tensor, costs: FloatArray, ids: IntArray, max_nodes: int, full: int
) -> tuple[FloatArray, IntArray]:
    """Candidates [S, L, K'] that the ``max_nodes`` best prefixes are sure to be made of.

    A prefix that takes candidate j at depth d costs at least the best path to d−1 plus that
    candidate. The prefixes for which it is exactly that are all different, so the
    ``max_nodes``-th of them bounds the cost of the last one wanted: candidates beyond the bound
    are dropped, and rows whose last candidate is within it are read again for the rest of theirs.
    """
    above = np.zeros(costs.shape[:2])
    np.cumsum(costs[:, :-1, 0], axis=1, out=above[:, 1:])
    bound = _bound(above, costs, max_nodes)
    # From the top: what depth 1 has to add may already settle the others.
    last = above + costs[:, :, -1]
    for depth in np.flatnonzero((last < bound[:, None]).any(axis=0)):
        short = np.flatnonzero(last[:, depth] < bound)
        if len(short) == 0:
            continue
        floors = above[short, depth] - bound[short]
        floors = np.maximum(floors - 1e-6 * np.abs(floors), -1e30)  # rounded to the scores' type
        rows = scores[torch.from_numpy(short).to(scores.device), depth]
        values, more = at_least(rows, torch.from_numpy(floors).to(rows), full)
        room = ((0, 0), (0, 0), (0, max(values.shape[1] - costs.shape[2], 0)))
        costs = np.pad(costs, room, constant_values=np.inf)
        ids = np.pad(ids, room)
        costs[short, depth, : values.shape[1]] = np.maximum(-values.astype(np.float64), 0.0)
        ids[short, depth, : values.shape[1]] = more
        bound = _bound(above, costs, max_nodes)
    costs[above[:, :, None] + costs > bound[:, None, None]] = np.inf
    return costs, ids


def _bound(above: FloatArray, costs: FloatArray, max_nodes: int) -> FloatArray:
    """[S] cost of the ``max_nodes``-th of the prefixes that leave the best path at their end."""
    single = (above[:, :, None] + costs).reshape(len(costs), -1)
    if single.shape[1] < max_nodes:
        return np.full(len(costs), np.inf)
    return np.partition(single, max_nodes - 1, axis=1)[:, max_nodes - 1]


def _host(array: Array) -> NDArray:
    """As numpy; half precision, which numpy lacks or is slow at, as double."""
    if not isinstance(array, torch.Tensor):
        return np.asarray(array)
    array = array.detach()
    return (array.double() if array.dtype.itemsize == 2 else array).cpu().numpy()


def _costs(log_probs: NDArray, max_depths: Sequence[int] | None) -> FloatArray:
    """[S, L, K] float64 −log q ≥ 0; +inf for impossible tokens and below ``max_depths``."""
    costs = -log_probs.astype(np.float64)
    costs[np.isnan(costs)] = np.inf
    lowest = costs.min()
    if lowest < -_MAX_LOG_PROB:
        raise ValueError(f"log-probabilities must be ≤ 0, got {-lowest:.3g}; apply log_softmax")
    np.maximum(costs, 0.0, out=costs)
    if max_depths is not None:
        costs[np.arange(costs.shape[1]) >= np.asarray(max_depths)[:, None]] = np.inf
    return costs


def _enumerate(
    costs: FloatArray, ids: NDArray, max_nodes: int, device: torch.device
) -> ScoredPrefixes:
    """Chosen by measurement (benchmarks/enumerate.py): the heap everywhere on a CPU."""
    if costs.shape[2] == 1:
        return _chain(costs[:, :, 0], ids[:, :, 0], max_nodes)
    if device.type == "cuda" and len(costs) * max_nodes >= _MIN_NODES_ON_DEVICE:
        there = torch.from_numpy(costs).to(device), torch.from_numpy(ids).to(device)
        return level_beam(*there, max_nodes)
    return best_first(costs, ids, max_nodes)


def _chain(costs: FloatArray, ids: NDArray, max_nodes: int) -> ScoredPrefixes:
    """One candidate per depth: costs and ids [S, L]."""
    total = np.cumsum(costs[:, :max_nodes], axis=1)
    counts = np.isfinite(total).sum(axis=1)
    length = int(counts.max())
    depths = np.arange(1, length + 1)
    valid = depths <= counts[:, None]
    return ScoredPrefixes(
        ids[:, :length] * valid,
        np.where(valid, depths - 2, NO_PARENT),
        depths * valid,
        -total[:, :length],
        counts,
    )
