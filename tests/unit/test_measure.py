"""Measuring a target at load, and what ``load`` makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import draftwood as dw
from draftwood import api
from draftwood.target import measure
from draftwood.target.measure import calibrated, calibration_key, calibration_path
from draftwood.target.model import Target
from draftwood.target.shape import model_shape
from draftwood.target.store import cache_dir
from draftwood.tree.calibration import Calibration, load_calibration
from draftwood.tree.roofline import Roofline
from tiny import tiny_model
from tiny_folder import save_tiny_folder

GREEDY = dw.SamplingParams(max_new_tokens=24)
PROMPT = "abcabcabcabc"


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def num_measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one entry for every measurement; all of them are believed."""
    done: list[int] = []
    real = measure.measured

    def counted(*args, **options):
        done.append(1)
        return replace(real(*args, **{**options, "limit_s": 0.2}), noise=0.1)

    monkeypatch.setattr(measure, "measured", counted)
    return done


def test_measured_once_and_kept(target: Target, num_measured: list[int]) -> None:
    first = calibrated(target, (0, 2))
    assert first.widths[0] == 1
    assert len(first.widths) > 1
    assert first.context_len > 0
    assert calibrated(target) == first
    assert len(num_measured) == 1
    calibrated(target, refresh=True)
    assert len(num_measured) == 2
    path = calibration_path(calibration_key(target))
    path.write_text("{")
    calibrated(target)
    assert len(num_measured) == 3
    assert load_calibration(path, calibration_key(target)) is not None


def test_a_disturbed_measurement_is_not_kept(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy = Calibration((1, 2), (0.1, 0.2), noise=0.9)
    monkeypatch.setattr(measure, "measured", lambda *_args, **_options: noisy)
    assert calibrated(target) == noisy
    assert not calibration_path(calibration_key(target)).exists()


def test_measuring_leaves_the_target_as_it_was(target: Target) -> None:
    want = dw.Engine(target).generate([[5, 6, 7]], GREEDY)[0].token_ids
    measure.measured(target, limit_s=0.1)
    assert dw.Engine(target).generate([[5, 6, 7]], GREEDY)[0].token_ids == want


def test_short_contexts_are_measured_within_them() -> None:
    target = Target(tiny_model("llama", max_position_embeddings=32))
    found = measure.measured(target, limit_s=0.2)
    assert found.context_len + max(found.widths) <= 32


def test_another_model_or_precision_has_its_own_key(target: Target) -> None:
    wider = Target(tiny_model("llama", intermediate_size=56))
    single = Target(tiny_model("llama", dtype=torch.float32))
    keys = [calibration_key(t) for t in (target, wider, single)]
    assert len({json.dumps(key) for key in keys}) == 3
    assert calibration_key(Target(tiny_model("llama", seed=1))) == keys[0]  # weights cost alike


def test_shape_counts_the_weights(target: Target) -> None:
    shape = model_shape(target)
    per_layer = 2 * 32 * (48 + 24) + 3 * 32 * 48
    assert shape.flops(1.0, -1.0) == 2 * (4 * per_layer + 32 * 97)
    assert shape.bytes_per_value == 8
    assert model_shape(Target(tiny_model("qwen3_moe"))).ffn_size == 2 * 24


@pytest.mark.parametrize("budget", ["off", "chain", 8])
def test_constant_budgets_measure_and_keep_nothing(
    folder: Path, num_measured: list[int], budget: str | int
) -> None:
    engine = dw.load(str(folder), "lookup", budget)
    engine.generate(PROMPT, GREEDY)
    del engine
    assert not num_measured
    assert not cache_dir().exists()


def test_without_a_drafter_there_is_nothing_to_measure(
    folder: Path, num_measured: list[int]
) -> None:
    assert dw.load(str(folder), "none").surrogate is None
    assert not num_measured


def test_auto_measures_learns_and_keeps(folder: Path, num_measured: list[int]) -> None:
    engine = dw.load(str(folder), "lookup")
    text = engine.generate(PROMPT, GREEDY)[0].text
    assert num_measured
    assert engine.surrogate is not None
    learned = engine.surrogate.state()
    del engine
    again = dw.load(str(folder), "lookup")
    assert len(num_measured) == 1
    assert again.surrogate is not None
    assert again.surrogate.state() == learned
    assert again.generate(PROMPT, GREEDY)[0].text == text


def test_calibrate_false_leaves_nothing_behind(folder: Path, num_measured: list[int]) -> None:
    engine = dw.load(str(folder), "lookup", calibrate=False)
    engine.generate(PROMPT, GREEDY)
    del engine
    assert not num_measured
    assert not cache_dir().exists()


@pytest.mark.parametrize("budget", ["auto", "convex", "roofline", 8, "off"])
def test_every_budget_gives_the_same_text(folder: Path, budget: str | int) -> None:
    for params in (GREEDY, dw.SamplingParams(max_new_tokens=24, temperature=1.0, seed=3)):
        plain = dw.load(str(folder), "none").generate(PROMPT, params)[0]
        engine = dw.load(str(folder), "lookup", budget)
        for _ in range(3):
            assert engine.generate(PROMPT, params)[0].token_ids == plain.token_ids


def test_roofline_is_fitted_to_the_target(folder: Path, num_measured: list[int]) -> None:
    engine = dw.load(str(folder), "lookup", "roofline")
    assert isinstance(engine.policy, Roofline)
    assert engine.policy.fit.shape == model_shape(engine.target)
    assert len(num_measured) == 1
    with pytest.raises(ValueError, match="budget must be"):
        dw.load(str(folder / "missing"), budget="rooflines")
    assert api.fitted_roofline(engine.target) == engine.policy
