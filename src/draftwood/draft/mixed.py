"""Dtypes of a step in mixed precision: what products take, and what is added up in."""

from __future__ import annotations

import torch


def products_dtype(x: torch.Tensor) -> torch.dtype:
    """What a product with ``x`` has as its result here."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def exact_dtype(x: torch.Tensor) -> torch.dtype:
    """What long sums over ``x`` are computed in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
