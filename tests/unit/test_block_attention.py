"""Attention of blocks in training: the plain formula and its gradients."""

from __future__ import annotations

import pytest
import torch

from draftwood.draft.block_attention import Masks, attend_blocks

G, KV, N, ROWS, SHARE, DIM, SIZE, CONTEXT = 2, 2, 3, 3, 2, 4, 4, 5


def inputs(context_len: int = CONTEXT) -> list[torch.Tensor]:
    shapes = [
        (G, KV, N, ROWS * SHARE, DIM),
        *[(G, KV, context_len, DIM)] * 2,
        *[(G, KV, N, SIZE, DIM)] * 2,
    ]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def masks(per_row: bool, in_block: bool, context_len: int = CONTEXT) -> Masks:
    context = torch.rand(G, 1, N, ROWS if per_row else 1, context_len) > 0.5
    block = torch.ones(ROWS, SIZE).triu(2).bool() if in_block else None
    context[0, 0, 0] = True  # a block may see nothing before it
    return context, block


def attend(given: list[torch.Tensor], hidden: Masks) -> torch.Tensor:
    query, keys, values, block_keys, block_values = given
    return attend_blocks(query, (keys, values), (block_keys, block_values), hidden, SHARE)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("in_block", [False, True])
def test_training_and_decoding_attend_alike(per_row: bool, in_block: bool) -> None:
    given, hidden = inputs(), masks(per_row, in_block)
    with torch.no_grad():
        plain = attend(given, hidden)
    torch.testing.assert_close(attend(given, hidden), plain)
    assert torch.autograd.gradcheck(lambda *x: attend(list(x), hidden), given)


def test_nothing_before_any_block() -> None:
    given, hidden = inputs(0), masks(False, False, 0)
    with torch.no_grad():
        plain = attend(given, hidden)
    mixed = attend(given, hidden)
    torch.testing.assert_close(mixed, plain)
    mixed.sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in given)


def test_products_have_the_dtype_of_mixed_precision() -> None:
    given, hidden = [x.detach().float().requires_grad_() for x in inputs()], masks(False, False)
    exact = attend(given, hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = attend(given, hidden)
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), exact, atol=0.05, rtol=0.05)
    mixed.sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in given)
