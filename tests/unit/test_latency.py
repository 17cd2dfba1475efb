"""The online latency model on synthetic machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from draftwood.tree.calibration import Calibration
from draftwood.tree.latency import OnlineLatency

Curve = Callable[[int], float]


def linear(width: int) -> float:
    return 0.03 + 0.001 * width


def staircase(width: int) -> float:
    return (0.03 if width <= 8 else 0.06) + 0.0005 * width


class Machine:
    """Feeds an OnlineLatency cycles of a known machine and keeps its errors."""

    def __init__(self, model: OnlineLatency, noise: float = 0.05, seed: int = 0) -> None:
        self.model = model
        self.noise = noise
        self.rng = np.random.default_rng(seed)

    def run(
        self, curve: Curve, widths: Iterable[int], context_len: float = 100.0, extra_s: float = 0.0
    ) -> np.ndarray:
        """Relative errors of predicted whole cycles against the noise-free truth."""
        errors = []
        for width in widths:
            truth = curve(width) + 0.005 + 0.001
            predicted = (
                self.verify_s(width, context_len)
                + self.model.draft_s(context_len, 1)
                + self.model.other_s()
            )
            errors.append(abs(predicted / truth - 1.0))
            wobble = np.exp(self.noise * self.rng.standard_normal(2))
            self.model.observe(
                width=width, context_len=context_len, num_seqs=1,
                verify_s=curve(width) * wobble[0] + extra_s, draft_s=0.005 * wobble[1],
                other_s=0.001,
            )  # fmt: skip
        return np.array(errors)

    def widths(self, count: int, widest: int = 64) -> list[int]:
        return self.rng.integers(1, widest + 1, count).tolist()

    def verify_s(self, width: int, context_len: float = 100.0) -> float:
        return float(self.model.verify_s(np.array([width]), context_len, 1)[0])


@pytest.mark.parametrize("curve", [linear, staircase])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.15])
def test_learns_any_curve_without_calibration(curve: Curve, noise: float) -> None:
    machine = Machine(OnlineLatency(), noise)
    machine.run(curve, machine.widths(60))
    assert np.median(machine.run(curve, machine.widths(200))) <= 0.02 + 0.5 * noise


def test_staircase_is_not_smoothed_away() -> None:
    machine = Machine(OnlineLatency())
    machine.run(staircase, machine.widths(300, widest=16))
    assert machine.verify_s(9) / machine.verify_s(8) > 1.6  # truth 1.9
    assert machine.verify_s(8) / machine.verify_s(6) < 1.2


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_new_regime_is_followed_within_20_cycles(factor: float) -> None:
    machine = Machine(OnlineLatency())
    machine.run(linear, machine.widths(150))
    errors = machine.run(lambda width: factor * linear(width), machine.widths(60))
    assert errors[0] > 0.3
    assert np.median(errors[10:20]) <= 0.15
    assert np.mean(errors[20:] <= 0.15) > 0.9


def test_shape_change_is_followed() -> None:
    machine = Machine(OnlineLatency())
    machine.run(linear, machine.widths(150, widest=24))
    errors = machine.run(lambda width: 0.03 + 0.004 * width, machine.widths(200, widest=24))
    assert np.median(errors[20:60]) <= 0.15
    assert np.median(errors[100:]) <= 0.08


def test_a_stall_of_seconds_does_not_poison() -> None:
    machine = Machine(OnlineLatency())
    machine.run(linear, machine.widths(100))
    machine.run(linear, [17, 33], extra_s=4.0)
    assert machine.run(linear, [17, 18, 33, 5, 64]).max() < 0.25
    assert np.median(machine.run(linear, machine.widths(50))) < 0.08


def test_context_is_extrapolated_linearly() -> None:
    def at(context_len: float) -> Curve:
        return lambda width: linear(width) * (1 + 3e-4 * context_len)

    machine = Machine(OnlineLatency())
    for context_len in range(50, 1500, 4):
        machine.run(at(context_len), machine.widths(1), context_len)
    for context_len in (100.0, 3000.0):
        assert machine.verify_s(16, context_len) == pytest.approx(at(context_len)(16), rel=0.12)


def test_calibration_is_believed_until_contradicted() -> None:
    widths = (1, 8, 9, 64)
    model = OnlineLatency(Calibration(widths, tuple(staircase(width) for width in widths)))
    machine = Machine(model)
    for width in (1, 4, 9, 30, 64):
        assert machine.verify_s(width) == pytest.approx(staircase(width), rel=1e-6)
    assert machine.verify_s(128) > machine.verify_s(64)
    machine.run(linear, machine.widths(300))
    assert np.median(machine.run(linear, machine.widths(50))) < 0.08


def test_sane_before_any_data() -> None:
    model = OnlineLatency()
    verify = model.verify_s(np.arange(1, 300), 1000.0, 4)
    assert np.isfinite(verify).all()
    assert (verify > 0).all()
    assert (np.diff(verify) >= 0).all()
    assert 0 < model.other_s() < verify[0]
    assert 0 < model.draft_s(1000.0, 4) < verify[0]


def test_draft_seconds_follow_the_batch_size() -> None:
    model = OnlineLatency()
    for _ in range(10):
        for num_seqs, draft_s in ((1, 0.004), (8, 0.02)):
            model.observe(
                width=num_seqs * 8, context_len=50, num_seqs=num_seqs, verify_s=0.04,
                draft_s=draft_s, other_s=0.001,
            )  # fmt: skip
    assert model.draft_s(50, 1) == pytest.approx(0.004, rel=0.1)
    assert model.draft_s(50, 8) == pytest.approx(0.02, rel=0.1)


def test_zero_seconds_are_survived() -> None:
    model = OnlineLatency()
    for _ in range(20):
        model.observe(width=1, context_len=0, num_seqs=1, verify_s=0.0, draft_s=0.0, other_s=0.0)
    assert np.isfinite(model.verify_s(np.array([1, 100]), 10, 1)).all()
    assert np.isfinite(model.draft_s(10, 1))
