"""The fused cross-entropy: the plain formula, its gradient, and rows that do not count."""

from __future__ import annotations

import pytest
import torch

from draftwood.train import cross_entropy as module
from draftwood.train.anchors import BlockBatch
from draftwood.train.cross_entropy import cross_entropy
from draftwood.train.loss import LossConfig, block_loss

ROWS, COLUMNS, K = 7, 11, 3


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_CPU", 2 * COLUMNS)


def plain(
    logits: torch.Tensor,
    offsets: torch.Tensor | None,
    targets: torch.Tensor,
    shares: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    scores = logits if offsets is None else logits + offsets
    log_probs = scores.log_softmax(-1)
    return -(weights * (shares * log_probs.gather(-1, targets)).sum(-1)).sum()


def case(rows: int = ROWS) -> tuple[torch.Tensor, ...]:
    logits = 3 * torch.randn(rows, COLUMNS, dtype=torch.float64)
    targets = torch.randint(0, COLUMNS, (rows, K))
    targets[:1, 1] = targets[:1, 0]  # a token may be the label and among the teacher's
    shares = torch.randn(rows, K, dtype=torch.float64).softmax(-1)
    weights = torch.rand(rows, dtype=torch.float64) + 0.1
    return logits.requires_grad_(), torch.randn(COLUMNS).double(), targets, shares, weights


@pytest.mark.parametrize("with_offsets", [False, True])
def test_value_gradient_and_best_column(with_offsets: bool) -> None:
    logits, offsets, *rest = case()
    shift = offsets if with_offsets else None
    total, best = cross_entropy(logits, shift, *rest)
    torch.testing.assert_close(total, plain(logits, shift, *rest))
    assert torch.equal(best, (logits + (offsets if with_offsets else 0)).argmax(-1))
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, shift, *rest)[0], (logits,))
    # the factor behind it arrives too
    (want,) = torch.autograd.grad(0.3 * plain(logits, shift, *rest), logits)
    (got,) = torch.autograd.grad(0.3 * total, logits)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_rows_without_weight_may_hold_anything(value: float) -> None:
    logits, offsets, targets, shares, weights = case()
    weights[2] = 0.0
    keep = torch.arange(ROWS) != 2
    want = plain(logits[keep], offsets, targets[keep], shares[keep], weights[keep])
    poisoned = logits.detach().clone()
    poisoned[2] = value
    total, _ = cross_entropy(poisoned.requires_grad_(), offsets, targets, shares, weights)
    torch.testing.assert_close(total, want)
    total.backward()
    (expected,) = torch.autograd.grad(want, logits)
    assert poisoned.grad is not None
    torch.testing.assert_close(poisoned.grad, expected)


def test_a_column_ruled_out_has_no_gradient() -> None:
    logits, offsets, targets, shares, weights = case()
    targets.clamp_max_(COLUMNS - 2)
    offsets[-1] = float("-inf")
    total, _ = cross_entropy(logits, offsets, targets, shares, weights)
    total.backward()
    assert torch.isfinite(total)
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[:, -1].any()


def test_no_rows() -> None:
    logits, *rest = case(0)
    total, best = cross_entropy(logits, *rest)
    assert total == 0
    assert best.shape == (0,)
    total.backward()


def test_products_in_bfloat16_add_up_in_float32() -> None:
    logits, offsets, targets, shares, weights = (x.to(torch.float32) for x in case())
    rounded = logits.detach().bfloat16().requires_grad_()
    given = (offsets, targets.long(), shares, weights)
    total, _ = cross_entropy(rounded, *given)
    exact = rounded.detach().float().requires_grad_()
    want = plain(exact, *given)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, want)
    (total / 3).backward()
    (want / 3).backward()
    assert rounded.grad is not None
    assert exact.grad is not None
    assert rounded.grad.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.grad.float(), exact.grad, rtol=0.01, atol=1e-6)


def batch(labels: torch.Tensor, valid: torch.Tensor, top: list[list[int]]) -> BlockBatch:
    none, rows = torch.zeros(1), labels.view(1, 1, -1)
    ids = torch.tensor(top).view(1, 1, len(top), -1)
    log_probs = torch.linspace(-0.5, -2.0, ids.shape[-1]).expand(ids.shape).contiguous()
    return BlockBatch(
        none, none, none, none, none, none, none, rows, valid.view(1, 1, -1), ids, log_probs
    )


def test_labels_and_teachers_outside_the_draft_vocabulary() -> None:
    """By hand: label known or not, the teacher's tokens known, in part, or not at all."""
    to_draft = torch.tensor([0, 1, 2, -1, -1])
    given = batch(
        torch.tensor([0, 3, 1, 2]), torch.tensor([True, True, True, False]),
        [[1, 3], [0, 1], [3, 4], [0, 1]],
    )  # fmt: skip
    logits = torch.randn(1, 1, 4, 3, dtype=torch.float64, requires_grad=True)
    terms = block_loss(logits, given, to_draft, LossConfig(gamma=2.0, distill=0.4))
    log_probs = logits[0, 0].log_softmax(-1)
    decay = torch.exp(-torch.arange(4) / 2.0)
    # row 0 has half a teacher, row 1 no loss, row 2 its label alone, row 3 is not valid
    want = -0.6 * log_probs[0, 0] - 0.4 * log_probs[0, 1] - decay[2] * log_probs[2, 1]
    torch.testing.assert_close(terms.total, want)
    assert float(terms.weight) == pytest.approx(float(1 + decay[2]))
    assert terms.counted.tolist() == [1, 1, 1, 0]
    (expected,) = torch.autograd.grad(want, logits, retain_graph=True)
    (got,) = torch.autograd.grad(terms.total, logits)
    torch.testing.assert_close(got, expected)
