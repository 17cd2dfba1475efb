"""Recordings and replays: exact about tokens and cycles, the same every time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import draftwood as dw
from draftwood.cli.app import app
from draftwood.draft.blend import BlendDrafter
from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.draft.lookup import LookupDrafter
from draftwood.draft.ranking import Ranker
from draftwood.draft.surrogate import Surrogate
from draftwood.engine import Engine
from draftwood.replay.compare import compare
from draftwood.replay.machines import (
    GPUS,
    Peaks,
    flat_machine,
    measured_machine,
    roofline_machine,
    staircase_machine,
    steep_machine,
)
from draftwood.replay.record import record
from draftwood.replay.recording import RecordedText, Recording, load_recording, save_recording
from draftwood.replay.reliability import promises, reliability
from draftwood.replay.replay import BUDGETS, best_fixed, replay
from draftwood.target.model import Target
from draftwood.tree.budget import Chain, Fixed, Off, Online
from draftwood.tree.enumerate import top_prefixes
from draftwood.tree.policy import BudgetPolicy
from oracle import NoisyOracleDrafter
from tiny import tiny_model
from tiny_drafter import tiny_draft_network
from tiny_folder import save_tiny_folder

HORIZON, MAX_NODES = 6, 64
PROMPTS = [[5, 20, 7, 33], [60, 8, 2], [9, 9, 4, 31, 77]]
CURVE = {"widths": [1, 8, 9, 64], "seconds": [0.04, 0.045, 0.06, 0.2], "context_len": 32,
         "draft_s": None}  # fmt: skip
SHAPE = {"num_layers": 30, "hidden_size": 576, "query_size": 576, "kv_size": 192, "num_heads": 9,
         "ffn_size": 1536, "vocab_size": 49152, "bytes_per_value": 4}  # fmt: skip
DETAILS = {"target": "t", "drafter": "d", "drafter_type": "BlockDiffusionDrafter",
           "name": "made up", "temperature": 0.0,
           "max_nodes": MAX_NODES, "horizon": HORIZON, "target_shape": SHAPE,
           "draft_shape": {**SHAPE, "num_layers": 2}, "block_size": HORIZON + 1, "curve": CURVE,
           "device": "cpu", "other_s": 0.001, "walk_s": 0.008}  # fmt: skip


def made_up(seed: int, lengths: tuple[int, ...] = (40, 25), ease: float = 0.2) -> Recording:
    """A recording of a drafter whose probabilities come true."""
    rng = np.random.default_rng(seed)
    return Recording([_text(rng, length, ease) for length in lengths], DETAILS)


def _text(rng: np.random.Generator, length: int, ease: float) -> RecordedText:
    rows = []
    for position in range(length):
        probs = rng.dirichlet(np.full(20, ease), (1, HORIZON)).clip(1e-9)
        scored = top_prefixes(np.log(probs), MAX_NODES)
        chain = top_prefixes(np.log(probs), HORIZON, max_width=1)
        picks = [int(rng.choice(20, p=row / row.sum())) for row in probs[0]]
        path, node = [], -1
        for pick in picks[: length - position]:
            found = np.flatnonzero((scored.parents[0] == node) & (scored.token_ids[0] == pick))
            if not len(found):
                break
            node = int(found[0])
            path.append(node)
        best = probs[0].argmax(axis=1)
        good = int(np.cumprod(best == picks)[: length - position].sum())
        rows.append((
            scored.log_probs[0].astype(np.float32), scored.parents[0].astype(np.int16),
            np.pad(np.array(path, np.int16), (0, HORIZON - len(path)), constant_values=-1),
            chain.log_probs[0].astype(np.float32), np.int16(good), np.float32(0.01),
        ))  # fmt: skip
    return RecordedText(10, *(np.stack(column) for column in zip(*rows, strict=True)))


# ---- against the engine -------------------------------------------------------------------


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama"))


def oracle(target: Target, params: dw.SamplingParams) -> NoisyOracleDrafter:
    longer = replace(params, max_new_tokens=60)
    outputs = Engine(target).generate(PROMPTS, longer)
    return NoisyOracleDrafter({
        tuple(output.prompt_token_ids): output.token_ids for output in outputs
    })  # fmt: skip


GREEDY = dw.SamplingParams(max_new_tokens=30, ignore_eos=True)


@pytest.mark.parametrize("policy", [Fixed(3), Fixed(12), Chain(), Off()])
def test_a_replay_takes_the_cycles_of_the_engine(target: Target, policy: BudgetPolicy) -> None:
    drafter = oracle(target, GREEDY)
    recording = record(target, drafter, PROMPTS, GREEDY, max_nodes=32)
    live = [Engine(target, drafter, policy).generate([p], GREEDY)[0] for p in PROMPTS]
    found = replay(recording, policy, measured_machine(recording))
    for text, output in zip(found.texts, live, strict=True):
        assert text.num_tokens == len(output.token_ids)
        assert text.num_cycles == output.num_cycles
        assert text.num_drafted == sum(cycle.num_drafted for cycle in output.cycles)


def test_a_block_diffusion_replay_takes_the_cycles_of_the_engine(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At temperature 1, where drafts are ranked by the noise of their positions too."""
    # Recording shows a ranker every position and the loop one per cycle, so neither learns here.
    monkeypatch.setattr(Ranker, "learn", lambda *_: None)
    params = dw.SamplingParams(temperature=1.0, seed=5, max_new_tokens=12)

    def drafter() -> BlockDiffusionDrafter:
        return BlockDiffusionDrafter(tiny_draft_network(target), target)

    recording = record(target, drafter(), PROMPTS, params, max_nodes=16)
    found = replay(recording, Fixed(16), measured_machine(recording))
    for index, prompt in enumerate(PROMPTS):
        setting = replace(params, seed=5 + index)
        output = Engine(target, drafter(), Fixed(16)).generate([prompt], setting)[0]
        assert found.texts[index].num_cycles == output.num_cycles
        assert found.texts[index].num_tokens == len(output.token_ids)


def test_the_model_of_a_blend_is_what_takes_time(target: Target) -> None:
    model = BlockDiffusionDrafter(tiny_draft_network(target), target)
    drafter = BlendDrafter(model, LookupDrafter())
    params = dw.SamplingParams(max_new_tokens=6)
    recording = record(target, drafter, [[5, 6, 5, 6, 5, 6]], params, max_nodes=16)
    assert recording.details["block_size"] == model.config.block_size
    machine = roofline_machine(recording, "H100", GPUS["H100"])
    assert replay(recording, Chain(), machine).num_tokens == 6


# ---- properties ---------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.integers(0, 80), ease=st.floats(0.05, 1.0))
def test_any_replay_adds_up(seed: int, budget: int, ease: float) -> None:
    recording = made_up(seed, (25, 15), ease=ease)
    machine = measured_machine(recording)
    for surrogate in (None, Surrogate()):
        found = replay(recording, Fixed(budget), machine, surrogate=surrogate)
        assert found.num_tokens == recording.num_tokens
        assert len(found.texts) <= found.num_cycles <= found.num_tokens
        assert found.num_drafted <= budget * found.num_cycles
        if budget == 0:
            assert found.num_cycles == found.num_tokens
            assert found.speedup == pytest.approx(1.0)


def test_replays_are_repeatable() -> None:
    recording = made_up(3)
    machine = staircase_machine(recording)
    first, second = (replay(recording, Online(), machine, surrogate=Surrogate()) for _ in range(2))
    assert first == second


def test_seconds_are_those_of_the_machine() -> None:
    recording = made_up(1, (1,))
    machine = measured_machine(recording)
    (text,) = replay(recording, Fixed(7), machine).texts
    assert text.seconds == pytest.approx(0.045 + 0.01 + 0.001 + 0.008)
    assert text.plain_s == pytest.approx(0.04 + 0.001 + 0.008)
    on_gpu = Recording(recording.texts, {**DETAILS, "device": "cuda"})
    assert measured_machine(on_gpu).walk_s(3) == 0.0  # there the head is part of the pass


def test_the_oracle_is_the_best_of_the_fixed_budgets() -> None:
    recording = made_up(2)
    machine = steep_machine(recording)
    budget, best = best_fixed(recording, machine)
    speeds = {n: replay(recording, Fixed(n), machine).speedup for n in BUDGETS}
    assert speeds[budget] == max(speeds.values()) == best.speedup
    table = compare(recording, machine)
    assert table["oracle"].speedup == best.speedup
    assert table["off"].speedup == pytest.approx(1.0)
    assert {"auto", "convex", "roofline", "chain", "8"} <= table.keys()


@pytest.mark.parametrize("make", [measured_machine, flat_machine, steep_machine, staircase_machine])
def test_auto_is_near_the_oracle_in_the_long_run(make) -> None:
    recording = made_up(4, (160, 160, 160))
    machine = make(recording)
    _, best = best_fixed(recording, machine, (2, 4, 8, 16, 64))
    auto = replay(recording, Online(is_calibrated=True), machine, surrogate=Surrogate())
    assert auto.speedup >= 0.97 * best.speedup


# ---- machines -----------------------------------------------------------------------------


def test_rooflines_follow_the_peaks() -> None:
    recording = made_up(0, (5,))
    slow = roofline_machine(recording, "slow", Peaks(1e12, 1e11))
    fast = roofline_machine(recording, "fast", Peaks(2e12, 2e11))
    widths = np.array([1, 16, 256])
    np.testing.assert_allclose(
        slow.verify_s(widths, 50, 1), 2 * fast.verify_s(widths, 50, 1), rtol=1e-9
    )
    assert slow.draft_s(50, 1) == pytest.approx(2 * fast.draft_s(50, 1))
    assert slow.draft_s(50, 1) < slow.verify_s(widths, 50, 1)[0]
    # 134.5 million 16-bit weights at 100 GB/s, and the embedding table.
    assert 2.6e-3 < slow.verify_s(widths, 0, 1)[0] < 4e-3
    assert (slow.verify_s(widths, 5000, 1) > slow.verify_s(widths, 50, 1)).all()
    assert roofline_machine(recording, "A100", GPUS["A100"]).is_simulation
    with pytest.raises(ValueError, match="peak"):
        Peaks(0, 1e12)
    other = {**DETAILS, "draft_shape": None, "drafter": "some/model", "drafter_type": "Other"}
    unknown = Recording(recording.texts, other)
    with pytest.raises(ValueError, match="some/model"):
        roofline_machine(unknown, "A100", GPUS["A100"])


# ---- files --------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path) -> None:
    recording = made_up(7)
    path = tmp_path / "r.npz"
    save_recording(path, recording)
    again = load_recording(path)
    assert again.details == recording.details
    machine = measured_machine(recording)
    assert replay(again, Fixed(9), machine) == replay(recording, Fixed(9), machine)
    assert path.stat().st_size < 700 * recording.num_tokens


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.npz"
    save_recording(path, made_up(7, (6,)))
    good = path.read_bytes()
    for bad in (b"", b"text", good[: len(good) // 2], good[:-30]):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="draftwood record"):
            load_recording(path)
    with np.load(_written(path, good)) as archive:
        arrays = dict(archive)
    for change in (
        {"lengths": arrays["lengths"] + 1}, {"parents": arrays["parents"] + 99},
        {"header": np.frombuffer(b'{"format": 2}', np.uint8)},
        {"header": np.frombuffer(b"[]", np.uint8)},
        {"header": np.frombuffer(b'{"format": 1}', np.uint8)},
    ):  # fmt: skip
        np.savez_compressed(path, **{**arrays, **change})
        with pytest.raises(ValueError, match="draftwood record"):
            load_recording(path)


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# ---- reliability --------------------------------------------------------------------------


def test_an_honest_drafter_is_reliable() -> None:
    recording = made_up(11, (400,))
    curves = reliability([recording])
    assert [(c.kind, c.is_calibrated) for c in curves] == [
        ("spine", False), ("spine", True), ("sibling", False), ("sibling", True),
    ]  # fmt: skip
    for curve in curves:
        assert curve.error < 0.06
        assert all(one.low <= one.stated <= one.high + 1e-9 for one in curve.bins)
        assert sum(one.count for one in curve.bins) > 300


def test_calibration_helps_a_boaster() -> None:
    recording = made_up(12, (400,), ease=0.6)
    # The same outcomes, with probabilities that claim more of the first choice than comes true.
    text = recording.texts[0]
    boasts = replace(
        text, log_probs=(text.log_probs * 0.5).astype(np.float32)
    )  # square roots of what is true
    boaster = Recording([boasts], DETAILS)
    before, after = (
        {c.kind: c for c in reliability([boaster]) if c.is_calibrated is flag}
        for flag in (False, True)
    )
    assert after["spine"].error < 0.6 * before["spine"].error
    assert after["spine"].log_loss < before["spine"].log_loss
    errors = {
        flag: np.mean(
            [abs(p.phi - p.accepted) for p in promises([boaster]) if p.is_calibrated is flag]
        )
        for flag in (False, True)
    }
    assert errors[True] < 0.5 * errors[False]


# ---- commands -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("tiny"))


def invoke(*args: object):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_calibrate_command(folder: Path, tmp_path: Path) -> None:
    png = tmp_path / "curve.png"
    result = invoke("calibrate", "--target", folder, "--limit", 0.3, "--png", png)
    assert result.exit_code == 0, result.output
    assert "× one row" in result.stdout
    if "not kept" not in result.stderr:  # a busy machine
        kept = Path(result.stderr.split("kept in ")[1].splitlines()[0])
        assert json.loads(kept.read_text())["widths"][0] == 1
    assert png.read_bytes()[:4] == b"\x89PNG"


def test_record_and_simulate_commands(folder: Path, tmp_path: Path) -> None:
    prompts, path = tmp_path / "toy.jsonl", tmp_path / "toy.npz"
    prompts.write_text('{"turns": ["abcabcabcabcabc"]}\n{"turns": ["xyxyxyxy", "more"]}\n')
    result = invoke("record", prompts, "-o", path, "--target", folder, "--drafter", "lookup",
                    "--max-new-tokens", 16)  # fmt: skip
    assert result.exit_code == 0, result.output
    shown = invoke("simulate", path, "--gpu", "H100", "--tflops", 10, "--gb-per-s", 100)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.count("SIMULATION") == 4  # every table, and the remark
    for word in ("measured", "H100", "mine", "auto", "oracle", "roofline"):
        assert word in shown.stdout
    data = json.loads(invoke("simulate", path, "--gpu", "none", "--json").stdout)
    assert data["kind"] == "SIMULATION"
    assert [one["machine"] for one in data["replays"]] == ["measured"]
    assert data["replays"][0]["policies"]["off"]["speedup"] == pytest.approx(1.0)


def test_simulate_says_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "r.npz"
    path.write_bytes(b"no")
    assert "draftwood record" in invoke("simulate", path).stderr
    save_recording(path, made_up(0, (3,)))
    assert invoke("simulate", path, "--gpu", "H9").exit_code == 2
    assert invoke("simulate", path, "--tflops", 3).exit_code == 2
