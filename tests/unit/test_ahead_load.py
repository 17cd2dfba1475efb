"""Drafting ahead from the outside: ``load(ahead=…)``, ``--async``, traces."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import draftwood as dw
from draftwood.ahead.channel import InProcess
from draftwood.ahead.drafter import AheadDrafter
from draftwood.ahead.load import TargetCard
from draftwood.ahead.planner import AheadOptions
from draftwood.ahead.policy import AheadBudget
from draftwood.cli.app import app
from draftwood.draft.checkpoint import save_draft
from draftwood.draft.load import _SHIPPED, named_taps
from draftwood.draft.surrogate import Surrogate
from draftwood.target.load import load_target
from draftwood.trace import tracing
from tiny_drafter import tiny_draft_network
from tiny_folder import save_tiny_folder

PROMPT = "abcabcabcabcab"
PARAMS = dw.SamplingParams(max_new_tokens=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("tiny"))


def text_of(engine: dw.Engine) -> list[int]:
    return engine.generate([PROMPT], PARAMS, raw=True)[0].token_ids


@pytest.mark.parametrize("where", ["thread", "cpu", "process"])
def test_a_smaller_model_drafts_ahead(folder: Path, where: str) -> None:
    """The target's own folder as draft model: all its drafts are right."""
    engine = dw.load(str(folder), str(folder), 6, ahead=where)
    assert isinstance(engine.drafter, AheadDrafter)
    (output,) = engine.generate([PROMPT], PARAMS, raw=True)
    assert output.token_ids == text_of(dw.load(str(folder), "none"))
    assert engine.drafter.counters == {"starts": 1}
    assert output.acceptance_length > 2
    before = threading.active_count()
    engine.drafter.close()
    # A thread in torch when the interpreter ends would abort the process.
    assert threading.active_count() == before - (where != "process")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("process:9999", "cores are 0 to"),
        ("process:-1", "cores are 0 to"),
        ("process:x", "cores are numbers"),
        ("process:0,0", "twice"),
        ("cuda:77", "cuda:77"),
        ("somewhere", "not 'somewhere'"),
    ],
)
def test_places_that_there_are_not_are_refused(folder: Path, where: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dw.load(str(folder), str(folder), 6, ahead=where)


def test_the_automatic_budget_is_the_one_for_drafting_ahead(folder: Path) -> None:
    engine = dw.load(str(folder), "lookup", "auto", ahead="thread", calibrate=False)
    assert isinstance(engine.policy, AheadBudget)
    assert text_of(engine) == text_of(dw.load(str(folder), "none"))


def test_a_slow_start_is_a_warning_and_the_text_is_the_same(folder: Path) -> None:
    options = AheadOptions(start_wait_s=1e-3)
    with pytest.warns(UserWarning, match="still starting"):
        engine = dw.load(str(folder), "lookup", 4, ahead="process", ahead_options=options)
    assert text_of(engine) == text_of(dw.load(str(folder), "none"))
    assert isinstance(engine.drafter, AheadDrafter)
    engine.drafter.close()


def test_a_worker_that_fails_at_the_start_is_an_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        dw.load(str(folder), str(tmp_path / "nowhere"), 4, ahead="process")


def test_a_drafter_that_reads_the_target_is_refused_before_a_process_starts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(str(folder))
    network = tiny_draft_network(target)
    save_draft(tmp_path / "draft", network.config, network.state_dict())
    monkeypatch.setattr(InProcess, "__call__", lambda _: pytest.fail("a process was started"))
    for name in ("draft", "draft+lookup"):
        with pytest.raises(ValueError, match="not verified yet"):
            dw.load(target, str(tmp_path / name), 4, ahead="process")


def test_the_layers_a_name_reads_are_known_without_its_weights(folder: Path) -> None:
    target = load_target(str(folder))
    (shipped,) = (path.parent for path in _SHIPPED.glob("*/config.json"))
    config = json.loads((shipped / "config.json").read_text())
    taps = named_taps(str(shipped), target)
    assert taps == tuple(config["dflash_config"]["target_layer_ids"])
    assert named_taps(f"{shipped}+lookup", target) == taps
    for name in ("lookup", "none", "auto", str(folder)):
        assert named_taps(name, target) == ()


@pytest.mark.parametrize("where", [True, 3, torch.device("cpu")])
def test_a_place_is_a_name(folder: Path, where: object) -> None:
    with pytest.raises(ValueError, match="ahead is a name"):
        dw.load(str(folder), "lookup", 4, ahead=where)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="AheadOptions"):
        dw.load(str(folder), "lookup", 4, ahead="thread", ahead_options=where)  # type: ignore[arg-type]


def test_what_is_learned_with_a_constant_budget_is_kept_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path))
    first = dw.load(str(folder), str(folder), 4, ahead="thread")
    assert isinstance(first.drafter, AheadDrafter)
    first.generate([PROMPT], PARAMS, raw=True)
    state = first.drafter.planner.surrogate.state()
    first.drafter.planner.surrogate.store()
    again = dw.load(str(folder), str(folder), 4, ahead="thread")
    assert isinstance(again.drafter, AheadDrafter)
    assert again.drafter.planner.surrogate.state() == state != Surrogate().state()


def test_options_need_a_place_and_few_rows_of_the_head_are_the_default_on_a_cpu(
    folder: Path,
) -> None:
    options = AheadOptions(num_branches=2)
    with pytest.raises(ValueError, match="say where"):
        dw.load(str(folder), "lookup", 4, ahead_options=options)
    engine = dw.load(str(folder), "lookup", 4, ahead="thread", ahead_options=options)
    assert isinstance(engine.drafter, AheadDrafter)
    rows = engine.drafter.options.head_rows
    assert engine.drafter.options == replace(options, head_rows=rows)
    assert rows is not None
    planner = engine.drafter.planner
    assert [planner.head_rows(m) for m in (rows, rows // 2, 10 * rows)] == [1, 2, 1]
    engine.drafter.close()
    asked = dw.load(
        str(folder), "lookup", 4, ahead="thread", ahead_options=AheadOptions(head_rows=3)
    )
    assert isinstance(asked.drafter, AheadDrafter)
    assert asked.drafter.options.head_rows == 3


def test_branches_are_weighed_by_what_was_learned_before(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path))
    first = dw.load(str(folder), str(folder), "auto", ahead="thread")
    for seed in range(4):
        first.generate([PROMPT], dw.SamplingParams(max_new_tokens=24, seed=seed), raw=True)
    assert first.surrogate is not None
    first.surrogate.store()
    again = dw.load(str(folder), str(folder), 4, ahead="thread")
    assert isinstance(again.drafter, AheadDrafter)
    assert again.drafter.planner.surrogate.state() == first.surrogate.state()
    assert again.drafter.planner.surrogate.state() != Surrogate().state()


def test_a_card_is_all_that_a_drafter_needs(folder: Path) -> None:
    target = load_target(str(folder))
    card = TargetCard.of(target, torch.device("cpu"))
    assert card.vocab_size == target.vocab_size
    assert torch.equal(card.output_embeddings(), target.output_embeddings())
    assert not card.input_embeddings().requires_grad


def test_traces_say_where_drafts_came_from(folder: Path, tmp_path: Path) -> None:
    engine = dw.load(str(folder), "lookup", 4, ahead="thread")
    with tracing(engine, tmp_path / "trace.jsonl"):
        (output,) = engine.generate([PROMPT], PARAMS, raw=True)
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    told = [line["ahead"] for line in lines if line["kind"] == "cycle"]
    assert [one["source"] for one in told] == [c.ahead.source for c in output.cycles if c.ahead]
    assert 0.0 <= output.hit_rate <= 1.0


def test_the_command_line_drafts_ahead(folder: Path) -> None:
    options = ["generate", "-t", str(folder), "-d", "lookup", "-b", "4", "-n", "24", PROMPT]
    plain = CliRunner().invoke(app, options)
    ahead = CliRunner().invoke(app, [*options, "--async", "thread"])
    assert ahead.exit_code == 0, ahead.output
    assert ahead.stdout == plain.stdout
    assert "drafted ahead" in ahead.stderr
    assert "drafted ahead" not in plain.stderr
    how = ["--async-branches", "2", "--async-grid", "2,3", "--async-timeout", "9"]
    device = CliRunner().invoke(app, [*options, "--drafter-device", "cpu", *how])
    assert device.exit_code == 0, device.output
    assert device.stdout == plain.stdout
    assert "drafted ahead" in device.stderr
    there = ["--async", "cpu"]
    grids = [[*there, "--async-grid", grid] for grid in ("2x3", "0,1")]
    for usage in (how, *grids, [*there, "--async-timeout", "inf"]):
        assert CliRunner().invoke(app, [*options, *usage]).exit_code == 2
    told = CliRunner().invoke(app, [*options, "--async", "thread", "--json"])
    found = json.loads(told.stdout)
    assert found["hit_rate"] is not None
    assert {cycle["ahead"]["source"] for cycle in found["cycles"]} <= {"hit", "soft", "miss"}
    wrong = CliRunner().invoke(app, [*options, "--async", "nowhere"])
    assert wrong.exit_code == 1
    assert "process" in wrong.stderr
