"""Scores of the most probable prefixes of many blocks at once: where the edge of a tree lies."""

from __future__ import annotations

import numpy as np
import torch


def best_prefixes(log_probs: torch.Tensor, count: int) -> torch.Tensor:
    """[A, count] scores of each anchor's most probable prefixes, in decreasing order.

    The i-th best prefix with the j-th best token (from 0) has at least (i + 1)(j + 1) − 1
    prefixes of its own length above it: only pairs with (i + 1)(j + 1) ≤ count can matter.
    """
    width = min(count, log_probs.shape[-1])
    tokens = log_probs.topk(width, dim=-1).values
    i, j = np.meshgrid(np.arange(count), np.arange(width), indexing="ij")
    pairs = np.argwhere((i + 1) * (j + 1) <= count)
    index = torch.from_numpy(pairs).to(log_probs.device)
    beam = torch.full_like(log_probs[:, :1, 0].expand(-1, count), float("-inf")).clone()
    beam[:, 0] = 0.0
    found = []
    for depth in range(log_probs.shape[1]):
        scores = beam[:, index[:, 0]] + tokens[:, depth][:, index[:, 1]]
        beam = scores.topk(count, dim=-1).values
        found.append(beam)
    return torch.cat(found, dim=-1).topk(count, dim=-1).values
