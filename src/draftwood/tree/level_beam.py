"""Exact enumeration of prefixes depth by depth, all sequences at once, for accelerators."""

from __future__ import annotations

import torch

from draftwood.tree.tree import NO_PARENT, ScoredPrefixes


def level_beam(costs: torch.Tensor, ids: torch.Tensor, max_nodes: int) -> ScoredPrefixes:
    """The ``max_nodes`` cheapest prefixes of each sequence.

    Of the prefixes of depth d−1 sorted by cost, the i-th extended by the j-th best candidate
    (from 0) costs at least as much as the (i+1)(j+1)−1 pairs left and above of it, so only pairs
    with (i+1)(j+1) ≤ n can be among the n best. All shapes are known beforehand: no value is
    read back before the end.

    Args:
        costs: [S, L, K] float64, −log q of the candidates of each depth, ascending; +inf for none.
        ids: [S, L, K] their token ids, on the same device.
        max_nodes: ≥ 1.
    """
    num_seqs, horizon, num_cands = costs.shape
    beam = costs.new_zeros((num_seqs, 1))  # the anchor
    nodes = costs.new_full((num_seqs, 1), NO_PARENT, dtype=torch.int64)
    scores, parents, tokens, depths = [], [], [], []
    num_found = 0
    for depth in range(horizon):
        above, rank = _pairs(beam.shape[1], num_cands, max_nodes, costs.device)
        sums = beam[:, above] + costs[:, depth, rank]
        beam, chosen = sums.topk(min(max_nodes, sums.shape[1]), dim=1, largest=False)
        parents.append(nodes.gather(1, above[chosen]))
        tokens.append(ids[:, depth].gather(1, rank[chosen]))
        scores.append(beam)
        depths.append(torch.full_like(chosen, depth + 1))
        nodes = torch.arange(num_found, num_found + beam.shape[1], device=costs.device)
        nodes = nodes.expand(num_seqs, -1)
        num_found += beam.shape[1]
    # Stable, and shallow levels come first: a parent stays before its children under ties.
    cost, order = torch.cat(scores, dim=1).sort(dim=1, stable=True)
    new_index = order.argsort(dim=1)
    keep = order[:, :max_nodes]
    parent = torch.cat(parents, dim=1).gather(1, keep)
    moved = new_index.gather(1, parent.clamp(min=0))
    packed = torch.stack(
        [
            torch.cat(tokens, dim=1).gather(1, keep),
            torch.where(parent == NO_PARENT, NO_PARENT, moved),
            torch.cat(depths, dim=1).gather(1, keep),
        ]
    )
    return _record(packed.cpu(), cost[:, :max_nodes].cpu())


def _pairs(
    num_above: int, num_cands: int, max_nodes: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks (i, j), i < num_above and j < num_cands, with (i+1)(j+1) ≤ max_nodes."""
    above = torch.arange(1, num_above + 1, device=device)
    cand = torch.arange(1, num_cands + 1, device=device)
    i, j = torch.nonzero(above[:, None] * cand <= max_nodes, as_tuple=True)
    return i, j


def _record(packed: torch.Tensor, cost: torch.Tensor) -> ScoredPrefixes:
    counts = torch.isfinite(cost).sum(dim=1)
    width = int(counts.max())
    valid = torch.isfinite(cost[:, :width])
    tokens, parents, depths = packed[:, :, :width]
    return ScoredPrefixes(
        torch.where(valid, tokens, 0).numpy(),
        torch.where(valid, parents, NO_PARENT).numpy(),
        torch.where(valid, depths, 0).numpy(),
        -cost[:, :width].numpy(),
        counts.numpy(),
    )
