"""Measuring the width curve and keeping it on disk."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest

from draftwood.tree.calibration import (
    Calibration,
    calibrate,
    load_calibration,
    save_calibration,
)

KEY = {"device": "cpu", "dtype": "float32", "model": "tiny"}


def test_median_of_rounds_ignores_a_disturbed_one() -> None:
    calls: list[int] = []

    def measure(width: int) -> float:
        calls.append(width)
        disturbed = 4 < len(calls) <= 7  # the second round, after one warm-up pass
        return width * 0.001 + (4.0 if disturbed else 0.0)

    found = calibrate(measure, [1, 4, 9], context_len=7)
    assert found.widths == (1, 4, 9)
    assert found.seconds == pytest.approx((0.001, 0.004, 0.009))
    assert found.context_len == 7
    assert found.noise > 100


def test_noise_is_how_much_rounds_differ() -> None:
    laps = iter([1.0, *(1.0, 2.0), *(1.1, 2.2), *(1.2, 2.0)])
    found = calibrate(lambda width: next(laps), [1, 4])
    assert found.noise == pytest.approx(0.15)
    assert calibrate(lambda width: 1.0, [1, 4], repeats=1).noise == 0.0


def test_calibration_ends_in_time() -> None:
    def measure(width: int) -> float:
        time.sleep(0.02)
        return 0.02

    found = calibrate(measure, list(range(1, 1000)), limit_s=0.1)
    assert 1 <= len(found.widths) < 100


def test_there_is_time_to_compare_rounds() -> None:
    laps = itertools.count(1)

    def measure(width: int) -> float:
        time.sleep(0.02)
        return float(next(laps))

    assert calibrate(measure, list(range(1, 1000)), limit_s=0.3).noise > 0


@pytest.mark.parametrize(
    ("widths", "seconds"),
    [((), ()), ((1, 2), (0.1,)), ((2, 1), (0.1, 0.2)), ((0,), (0.1,)), ((1,), (0.0,)),
     ((1,), (float("nan"),))],
)  # fmt: skip
def test_nonsense_is_refused(widths: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="got"):
        Calibration(widths, seconds)


def test_cache_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "curve.json"
    calibration = Calibration((1, 8), (0.01, 0.02), 64, draft_s=0.003)
    save_calibration(path, KEY, calibration)
    assert load_calibration(path, KEY) == calibration
    assert list(path.parent.iterdir()) == [path]


def test_invalid_caches_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    assert load_calibration(path, KEY) is None
    save_calibration(path, KEY, Calibration((1, 8), (0.01, 0.02)))
    assert load_calibration(path, KEY | {"dtype": "bfloat16"}) is None
    good = json.loads(path.read_text())
    for bad in (
        "{", "[]", "3", json.dumps(good | {"seconds": [0.01]}),
        json.dumps(good | {"seconds": [0.01, -1]}), json.dumps(good | {"widths": None}),
        json.dumps({k: v for k, v in good.items() if k != "widths"}),
    ):  # fmt: skip
        path.write_text(bad)
        assert load_calibration(path, KEY) is None
