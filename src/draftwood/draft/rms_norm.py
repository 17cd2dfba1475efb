"""x / rms(x) · weight, whose backward pass reads its rows as few times as it can.

Autograd takes the norm apart into elementwise operations, each with a backward of its own: on a
CPU a dozen passes over the rows, which cost as much as the product after it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from draftwood.draft.mixed import exact_dtype, products_dtype


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows x [..., H] normed; where gradients are taken, in the dtype of the product that follows.

    Args:
        weight: [H]; in mixed precision its dtype is not that of ``x``.
    """
    if torch.is_grad_enabled():
        normed: torch.Tensor = _RMSNorm.apply(x, weight, eps, products_dtype(x))
        return normed
    weight = weight.to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """See ``rms_norm``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        exact = x.to(exact_dtype(x))
        length = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        inverse = (length.square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, inverse)
        return (exact * inverse).mul_(weight).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        size = x.shape[-1]
        rows, scale = x.to(inverse.dtype).reshape(-1, size), inverse.view(-1, 1)
        # a copy, as it is worked on in place
        steep = upstream[0].to(inverse.dtype, copy=True).reshape(-1, size)
        both = steep * rows
        with torch.autocast(x.device.type, enabled=False):
            to_weight = (scale.t() @ both).view(size).to(weight.dtype)
            along = (both @ weight.to(both.dtype))[:, None] * scale.pow(3) / size
        steep.mul_(weight).mul_(scale).addcmul_(rows, along, value=-1)
        return steep.view(x.shape).to(x.dtype), to_weight, None, None
