"""The norm and the rotation of training: the plain formulas and their gradients."""

from __future__ import annotations

import pytest
import torch

from draftwood.draft.rms_norm import rms_norm
from draftwood.draft.rope import rotate


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_the_norm_and_its_gradient() -> None:
    x, weight = rows(2, 3, 8), rows(8)
    with torch.no_grad():
        plain = rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), plain)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, weight))
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, weight.detach(), 1e-5), (x,))


def test_a_row_of_zeros_stays() -> None:
    x, weight = torch.zeros(1, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    normed = rms_norm(x, weight, 1e-6)
    normed.sum().backward()
    assert not normed.any()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_the_norm_of_no_rows() -> None:
    x, weight = rows(0, 4), rows(4)
    rms_norm(x, weight, 1e-6).sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_the_rotation_and_its_gradient() -> None:
    x, angles = rows(2, 3, 4, 8), torch.randn(2, 3, 1, 4, dtype=torch.float64)
    with torch.no_grad():
        plain = rotate(x, angles.cos(), angles.sin())
    torch.testing.assert_close(rotate(x, angles.cos(), angles.sin()), plain)
    assert torch.autograd.gradcheck(lambda x: rotate(x, angles.cos(), angles.sin()), (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_mixed_precision_they_have_the_dtype_of_products(dtype: torch.dtype) -> None:
    x = torch.randn(5, 8).to(dtype).requires_grad_()
    weight, angle = torch.ones(8, requires_grad=True), torch.randn(5, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = rotate(rms_norm(x, weight, 1e-6), angle.cos(), angle.sin())
    assert mixed.dtype == torch.bfloat16
    mixed.float().square().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
