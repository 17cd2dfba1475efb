"""From prompts to a drafter on the command line, on a tiny random target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import draftwood as dw
from draftwood import train
from draftwood.cli.app import app
from draftwood.cli.data import parse_hub
from draftwood.draft.checkpoint import load_draft
from draftwood.draft.ranking import Ranker
from draftwood.target.load import load_target
from draftwood.train.target_side import ResponseRow
from tiny_folder import save_tiny_folder, tiny_tokenizer

RUNNER = CliRunner()
MASK = 200
SMALL = (
    "--layers", "0,-1", "--taps", "0,2", "--block-size", 4, "--draft-vocab", 64,
    "--mask-token", MASK, "--blocks", 12, "--head-negatives", 8, "--held-out", 25,
    "--warmup-steps", 1, "--log-steps", 1,
)  # fmt: skip


def invoke(*args: object) -> Result:
    return RUNNER.invoke(app, [str(arg) for arg in args])


def passes(*args: object) -> Result:
    result = invoke(*args)
    assert result.exit_code == 0, result.output
    return result


def fails(*args: object) -> str:
    """The one line that says why."""
    result = invoke(*args)
    assert result.exit_code == 1, result.output
    lines = result.stderr.strip().splitlines()
    assert lines[-1].startswith("error: "), result.stderr
    assert "Traceback" not in result.output
    return lines[-1]


def prompts(path: Path, count: int) -> Path:
    turns = [f"What is {i} plus {i * i}, and why?" for i in range(count)]
    path.write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in turns))
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def replies(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    file = prompts(folder / "sums.jsonl", 12)
    passes("data", "--target", target, "--jsonl", file, "--out", folder / "r", "-n", 20)
    return folder / "r"


def run(target: Path, replies: Path, out: Path, *args: object) -> Result:
    return passes("train", "--target", target, "--data", replies, "--out", out, *SMALL, *args)


@pytest.fixture(scope="module")
def trained(target: Path, replies: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    result = run(target, replies, out, "--max-steps", 3)
    assert result.stdout.strip().endswith("draft")
    assert result.stderr.count("loss") == 3
    return out


# ---- data ---------------------------------------------------------------------------------


def test_data_are_the_targets_greedy_replies(target: Path, replies: Path) -> None:
    rows = train.load_rows(replies)
    assert len(rows) == 12
    assert {row.domain for row in rows} == {"sums"}
    engine = dw.load(str(target), None)
    row = rows[5]
    prompt = list(row.token_ids[: row.response_start])
    want = engine.generate(prompt, dw.SamplingParams(max_new_tokens=20))[0]
    assert list(row.token_ids[row.response_start :]) == want.token_ids


def test_data_continues_and_leaves_out_evaluation_prompts(target: Path, tmp_path: Path) -> None:
    file = prompts(tmp_path / "p.jsonl", 4)
    held = prompts(tmp_path / "eval.jsonl", 1)
    command = ("data", "--target", target, "--jsonl", file, "--out", tmp_path / "r", "-n", 6)
    first = passes(*command, "--limit", 3, "--exclude", held)
    assert "1 of 3 prompts share text with evaluation" in first.stderr
    assert len(train.load_rows(tmp_path / "r")) == 2
    second = passes(*command)
    assert "2 were there already" in second.stderr
    assert len(train.load_rows(tmp_path / "r")) == 4


def test_data_samples_and_refuses_to_mix_settings(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    file = prompts(tmp_path / "p.jsonl", 2)
    command = ("data", "--target", target, "--out", out, "-n", 5, "--max-batch", 3)
    passes(*command, "--jsonl", file, "--samples", 3, "-T", 1)
    assert len(train.load_rows(out)) == 6
    assert "other settings" in fails(*command, "--jsonl", file)
    assert "temperature 0" in fails(*command, "--jsonl", file, "--samples", 2)


def test_synthesised_prompts_are_kept_for_a_continued_run(target: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").mkdir()
    prompts(tmp_path / "prompts" / "synthesised-3-7.jsonl", 3)
    passes("data", "-t", target, "--out", tmp_path, "-n", 4, "--synthesise", 3, "--seed", 7)
    assert len(train.load_rows(tmp_path)) == 3


def test_data_needs_prompts(target: Path, tmp_path: Path) -> None:
    assert invoke("data", "--target", target, "--out", tmp_path / "r").exit_code == 2
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"turns": ["fine"]}\n{"words": 3}\n')
    assert f"{bad}:2" in fails("data", "--target", target, "--jsonl", bad, "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_hub_names() -> None:
    assert parse_hub("openai/gsm8k@main:test") == ("openai/gsm8k", "main", "test")
    assert parse_hub("owner/set") == ("owner/set", None, None)
    for bad in ("owner/set:", "@main", ""):
        assert invoke("data", "--hub", bad, "--out", "never").exit_code == 2


# ---- train --------------------------------------------------------------------------------


def test_the_drafter_has_the_recipe_and_decodes(target: Path, trained: Path) -> None:
    config, network = load_draft(trained / "draft")
    assert (config.block_size, config.mask_token_id) == (4, MASK)
    assert config.target_layer_ids == (0, 2)
    assert network.target_ids() is not None
    options = ("--target", target, "--budget", 8, "-n", 16, "--json", "What is 3 plus 9, and why?")
    fast = json.loads(passes("generate", "--drafter", trained / "draft", *options).stdout)
    plain = json.loads(passes("generate", "--drafter", "none", *options).stdout)
    assert fast["token_ids"] == plain["token_ids"]
    assert any(cycle["num_drafted"] for cycle in fast["cycles"])


def test_a_continued_run_takes_up_where_it_stopped(
    target: Path, replies: Path, trained: Path
) -> None:
    again = run(target, replies, trained, "--max-steps", 5)
    assert "from step 3" in again.stderr
    assert again.stderr.count("loss") == 2
    other = ("train", "--target", target, "--data", replies, "--out", trained, *SMALL)
    assert "block_size" in fails(*other, "--max-steps", 6, "--block-size", 5)


def test_later_replies_do_not_change_the_draft_vocabulary(
    target: Path, replies: Path, tmp_path: Path
) -> None:
    rows = train.load_rows(replies)
    recipe = train.Recipe(MASK, layers=(0,), taps=(0, 2), block_size=3, draft_vocab_size=20)
    use = train.DataUse(held_out_percent=0, cache_features=False)
    model = load_target(str(target)).model
    config = train.TrainConfig(max_steps=2, blocks=4, blocks_per_response=4)
    first = train.prepare(model, rows[:6], tmp_path, recipe, config, use=use)
    first.run()
    added = [ResponseRow((7, 7, *[201] * 500), 1, "")] * 3
    second = train.prepare(model, [*rows, *added], tmp_path, recipe, config, use=use)
    ids = second.network.target_ids()
    assert ids is not None
    assert torch.equal(ids, load_draft(tmp_path / "draft")[1].target_ids())
    assert 201 not in ids.tolist()
    assert second.objective.to_draft[ids].tolist() == list(range(20))


def test_live_features_train_the_same_drafter(
    target: Path, replies: Path, trained: Path, tmp_path: Path
) -> None:
    run(target, replies, tmp_path / "kept", "--max-steps", 1, "--draft-vocab", 0)
    run(target, replies, tmp_path / "live", "--max-steps", 1, "--draft-vocab", 0, "--no-cache")
    assert not (tmp_path / "live" / "features").exists()
    kept, live = (load_draft(tmp_path / name / "draft")[1] for name in ("kept", "live"))
    for (name, one), two in zip(kept.state_dict().items(), live.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, atol=2e-3, rtol=2e-2, msg=name)


def test_dry_run_shows_sizes_and_writes_nothing(
    target: Path, replies: Path, tmp_path: Path
) -> None:
    result = run(target, replies, tmp_path / "run", "--dry-run")
    assert not (tmp_path / "run").exists()
    assert "fc.weight" in result.stdout
    for fact in ("parameters", "weights and optimizer", "feature cache", "tokens/s"):
        assert fact in result.stdout


def test_bad_training_input(target: Path, replies: Path, tmp_path: Path) -> None:
    base = ("train", "--target", target, "--out", tmp_path / "run")
    given = (*base, "--data", replies)
    assert invoke(*given).exit_code == 2  # no end
    empty = tmp_path / "empty"
    empty.mkdir()
    steps = ("--max-steps", 1, "--mask-token", MASK)
    assert "no response rows" in fails(*base, "--data", empty, *steps)
    assert "layer 9" in fails(*given, *steps, "--layers", "9", "--draft-vocab", 64)
    assert "pad_token_id" in fails(*given, "--max-steps", 1, "--mask-token", 0)
    assert "mask token" in fails(*given, "--max-steps", 1)  # every special token has a meaning
    assert "at most 3 tokens" in fails(*given, *steps, "--max-len", 3)
    assert not (tmp_path / "run").exists()
    assert invoke(*given, *steps, "--layers", "0;1").exit_code == 2
    assert invoke(*given, "--max-steps", 1, "--mask-token", "<nothing>").exit_code == 2


def test_a_mask_token_is_special_and_unused() -> None:
    tokenizer = tiny_tokenizer()
    vocab = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a>", "<b>"]})
    assert train.unused_token(tokenizer, vocab + 2, []) == vocab + 1
    row = ResponseRow((5, vocab + 1), 1, "")
    assert train.unused_token(tokenizer, vocab + 2, [row]) == vocab
    rows = [ResponseRow((vocab, vocab + 1), 1, "")]
    assert train.unused_token(tokenizer, vocab + 4, rows) == vocab + 3
    with pytest.raises(ValueError, match="mask token"):
        train.unused_token(tokenizer, vocab + 2, rows)


# ---- eval-drafter -------------------------------------------------------------------------


def test_evaluation_agrees_with_the_loop(
    target: Path, replies: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the loop also calibrates the marginals while it runs; a replay knows nothing of that
    monkeypatch.setattr(Ranker, "learn", lambda *_: None)
    command = ("eval-drafter", "--drafter", trained / "draft", "--target", target)
    found = json.loads(passes(*command, "--data", replies, "-b", 8, "--json").stdout)
    assert set(found) == {"all", "sums"}
    everything = found["all"]
    assert everything["num_responses"] == 12
    assert len(everything["accuracy"]) == 3
    assert 1 <= everything["tau"]["chain"] <= everything["tau"]["8"] <= 4
    for budget in ("chain", 8):
        engine = dw.load(str(target), str(trained / "draft"), budget)
        tokens = cycles = 0
        for row in train.load_rows(replies):
            prompt, reply = row.token_ids[: row.response_start], row.token_ids[row.response_start :]
            # a limit past the reply's end: close to it the loop spends its budget on the depths
            # that are left, which a replay of the reply cannot know
            params = dw.SamplingParams(max_new_tokens=len(reply) + 4)
            out = engine.generate(list(prompt), params)[0]
            starts = np.cumsum([0] + [cycle.num_committed for cycle in out.cycles])[:-1]
            tokens, cycles = tokens + len(reply), cycles + int((starts < len(reply)).sum())
        assert everything["tau"][str(budget)] == pytest.approx(tokens / cycles)


def test_evaluation_tables_and_splits(target: Path, replies: Path, trained: Path) -> None:
    command = ("eval-drafter", "--drafter", trained / "draft", "--target", target)
    table = passes(*command, "--data", replies, "--limit", 2).stdout
    for heading in ("τ", "chain", "512", "accuracy by position", "sums"):
        assert heading in table
    held = passes(*command, "--data", replies, "-b", 8, "--json", "--held-out", 25).stdout
    assert 0 < json.loads(held)["all"]["num_responses"] < 12
    assert "no reply" in fails(*command, "--data", replies, "--held-out", 0)


def test_bad_evaluation_input(target: Path, replies: Path, trained: Path, tmp_path: Path) -> None:
    data = ("--data", replies)
    assert "no drafter" in fails("eval-drafter", "--drafter", tmp_path / "x", "-t", target, *data)
    other = shutil.copytree(trained / "draft", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_target_layers": 77}))
    assert "77 layers" in fails("eval-drafter", "--drafter", other, "-t", target, *data)


def test_options_of_the_other_kind_are_usage_errors(
    target: Path, replies: Path, tmp_path: Path
) -> None:
    base = ("train", "--target", target, "--data", replies, "--out", tmp_path / "r")
    steps = ("--max-steps", 1)
    for option in (("--body", "x"), ("--borrow",), ("--ar-weight", 0.5)):
        assert invoke(*base, *steps, *option).exit_code == 2
    for option in (("--taps", "0"), ("--distill", 0.5), ("--draft-vocab", 9), ("--no-cache",)):
        assert invoke(*base, *steps, "--kind", "independent", *option).exit_code == 2
    for option in (("--precision", "half"), ("--add-layers", 1), ("--add-layers", -1)):
        assert invoke(*base, *steps, *option).exit_code == 2
    for wrong in ("nan", "inf", "-1", "0"):
        assert "must be positive" in fails(*base, "--lr", wrong, *steps)
    assert not (tmp_path / "r").exists()
    (tmp_path / "r").write_text("a file")
    assert invoke(*base, *steps).exit_code == 2


def test_evaluation_names_what_there_is(
    target: Path, replies: Path, trained: Path, tmp_path: Path
) -> None:
    base = ("eval-drafter", "--target", target)
    assert "no trained drafter" in fails(*base, "--data", replies, "--drafter", "lookup")
    assert "is shipped for this target" in fails(*base, "--data", replies, "--drafter", "shipped")
    assert str(trained / "draft") in fails(*base, "--data", replies, "--drafter", trained)
    draft = trained / "draft"
    prompts_only = prompts(tmp_path / "p.jsonl", 2)
    assert "draftwood data" in fails(*base, "--data", prompts_only, "--drafter", draft)
    nobody = fails(*base, "--data", replies, "--drafter", draft, "--held-out", 0)
    assert "0 % held out" in nobody
    assert "--kind independent" in fails(
        "prune", "--target", target, "--data", replies, "--held-out", 30, "--drafter", draft,
        "--out", tmp_path / "p", "--steps", 0,
    )  # fmt: skip
