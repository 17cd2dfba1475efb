"""Fine-tuning: a run starts from the weights of a drafter that is trained already."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_train_cli import SMALL, fails, invoke, passes, prompts

from draftwood import train
from draftwood.draft import load as draft_load
from draftwood.draft.checkpoint import load_draft, save_draft
from draftwood.draft.independent_checkpoint import load_independent, save_independent
from draftwood.draft.independent_network import IndependentNetwork
from draftwood.draft.network import DraftNetwork
from draftwood.target.model import Target
from draftwood.train.start import TrainedStart, checksum
from draftwood.train.target_side import ResponseRow
from tiny import tiny_model
from tiny_drafter import tiny_draft_network, tiny_independent_network
from tiny_folder import save_tiny_folder

VOCAB = 61
RNG = np.random.default_rng(5)
ROWS = [
    ResponseRow(tuple(RNG.integers(3, VOCAB, size=14 + i).tolist()), 4, "ab"[i % 2])
    for i in range(12)
]
CONFIG = train.TrainConfig(
    learning_rate=3e-3, warmup_steps=1, max_steps=4, blocks=6, blocks_per_response=3, log_steps=1,
    train_head=False,
)  # fmt: skip
USE = train.DataUse(held_out_percent=40, cache_features=False, top_k=0)
KINDS = ("dflash", "independent", "borrowing")


def tiny_target(**changes: int) -> Target:
    return Target(tiny_model("llama", vocab=VOCAB, dtype=torch.float32, **changes), probe=False)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def folders(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A drafter of every kind, saved as training would."""
    where = tmp_path_factory.mktemp("drafters")
    save_draft(where / "dflash", (one := tiny_draft_network(target, block_size=4)).config, one)
    for name in KINDS[1:]:
        two = tiny_independent_network(target, block_size=4, borrows=name == "borrowing")
        save_independent(where / name, two.config, two.state_dict())
    return {name: where / name for name in KINDS}


def prepared(target: Target, start: TrainedStart, folder: Path, **changes: object) -> train.Trainer:
    use = changes.pop("use", USE)
    config = train.TrainConfig(**{**vars(CONFIG), **changes})  # type: ignore[arg-type]
    assert isinstance(use, train.DataUse)
    return train.prepare(target.model, ROWS, folder, start, config, use=use)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_starts_as_good_as_the_drafter_is(
    target: Target, folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    start = train.trained_start(folders[kind], target)
    config = train.TrainConfig(**{**vars(CONFIG), "max_steps": 1})
    train.train_drafter(target.model, ROWS, tmp_path, start, config, use=USE)
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    first = next(record for record in records if record["kind"] == "eval")
    known = train.evaluate_drafter(
        folders[kind], target, ROWS, budgets=(0, 8, 32), held_out_percent=40
    )["all"]
    assert first["step"] == 0
    assert first["tokens"] == known.num_tokens > 0
    assert (first["tau_chain"], first["tau_8"]) == (known.tau(0), known.tau(8))
    assert tuple(first[f"accuracy_{i}"] for i in (1, 2, 3)) == known.accuracy


@pytest.mark.parametrize("kind", KINDS)
def test_training_moves_the_weights_but_no_frozen_table(
    target: Target, folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    run = prepared(target, train.trained_start(folders[kind], target), tmp_path)
    before = {name: value.clone() for name, value in run.network.state_dict().items()}
    given = load_draft(folders[kind])[1] if kind == "dflash" else load_independent(folders[kind])
    for name, value in given.state_dict().items():
        assert torch.equal(value, before[name]), name
    run.run()
    after = run.network.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {n for n in before if "embed" not in n and "lm_head" not in n}


def test_own_tables_of_a_block_drafter_follow_train_head(target: Target, tmp_path: Path) -> None:
    lent = tiny_draft_network(target, block_size=4)
    config = lent.config.__class__(
        **{**vars(lent.config), "own_embeddings": True, "own_head": True, "draft_vocab_size": 40}
    )
    network = DraftNetwork(config)
    assert network.d2t is not None
    network.d2t.fill_(10)
    save_draft(tmp_path / "own", config, network)
    start = train.trained_start(tmp_path / "own", target)
    assert start.can_sample_head
    tables = {"embed_tokens.weight", "lm_head.weight"}
    for trained in (False, True):
        run = prepared(target, start, tmp_path / str(trained), train_head=trained, head_negatives=4)
        ids = run.network.target_ids()
        assert ids is not None
        assert ids.tolist() == list(range(10, 50))
        free = {name for name, value in run.network.named_parameters() if value.requires_grad}
        assert (tables <= free) == trained
        assert bool(tables & free) == trained


@pytest.mark.parametrize("kind", KINDS)
def test_resume_continues_exactly(
    target: Target, folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    start = train.trained_start(folders[kind], target)
    whole = prepared(target, start, tmp_path / "whole")
    whole.run()
    first = prepared(target, start, tmp_path / "parts")
    first.step()
    first.step()
    first.save()
    moved = shutil.copytree(folders[kind], tmp_path / "elsewhere")  # the weights count, not where
    second = prepared(target, train.trained_start(moved, target), tmp_path / "parts")
    assert second.progress.step == 2
    second.run()
    for name, value in whole.weights().items():
        assert torch.equal(value, second.weights()[name]), name


def test_features_on_disk_are_those_of_the_drafters_taps(
    target: Target, folders: dict[str, Path], tmp_path: Path
) -> None:
    start = train.trained_start(folders["dflash"], target)
    run = prepared(target, start, tmp_path, use=train.DataUse(held_out_percent=40, top_k=4))
    meta = json.loads((tmp_path / "features" / "meta.json").read_text())
    assert isinstance(run.network, DraftNetwork)
    assert tuple(meta["taps"]) == run.network.config.target_layer_ids
    run.step()


def test_a_continued_run_must_start_from_the_same_weights(
    target: Target, folders: dict[str, Path], tmp_path: Path
) -> None:
    start = train.trained_start(folders["dflash"], target)
    run = prepared(target, start, tmp_path / "run")
    run.step()
    run.save()
    other = tiny_draft_network(target, block_size=4, seed=7)
    save_draft(tmp_path / "other", other.config, other)
    with pytest.raises(ValueError, match="init"):
        prepared(target, train.trained_start(tmp_path / "other", target), tmp_path / "run")
    recipe = train.Recipe(2, taps=(0, 2), block_size=4, draft_vocab_size=None)
    with pytest.raises(ValueError, match="other settings"):
        train.prepare(target.model, ROWS, tmp_path / "run", recipe, CONFIG, use=USE)
    save_draft(tmp_path / "run" / "draft", other.config, other)
    with pytest.raises(ValueError, match="overwrite"):
        prepared(target, train.trained_start(tmp_path / "run" / "draft", target), tmp_path / "run")


def test_a_folder_that_changes_after_it_was_chosen_is_refused(
    target: Target, tmp_path: Path
) -> None:
    one, two = (tiny_draft_network(target, block_size=4, seed=seed) for seed in (0, 1))
    save_draft(tmp_path / "d", one.config, one)
    start = train.trained_start(tmp_path / "d", target)
    save_draft(tmp_path / "d", two.config, two)
    with pytest.raises(ValueError, match="changed"):
        prepared(target, start, tmp_path / "run")
    save_draft(tmp_path / "d", one.config, one)
    assert checksum(tmp_path / "d") == start.checksum


def test_drafters_that_do_not_fit_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    wide, deep = tiny_target(hidden_size=64), tiny_target(num_hidden_layers=6)
    with pytest.raises(ValueError, match="size 32"):
        train.trained_start(folders["dflash"], wide)
    with pytest.raises(ValueError, match="6"):
        train.trained_start(folders["dflash"], deep)
    with pytest.raises(ValueError, match="hidden size"):
        train.trained_start(folders["borrowing"], wide)
    train.trained_start(folders["independent"], wide)  # it needs tokens only
    with pytest.raises(ValueError, match="no drafter folder"):
        train.trained_start(tmp_path / "nothing", deep)
    with pytest.raises(ValueError, match="shipped"):
        train.trained_start("shipped", deep)


def test_replies_with_the_mask_token_are_refused(
    target: Target, folders: dict[str, Path], tmp_path: Path
) -> None:
    start = train.trained_start(folders["dflash"], target)
    mask = start.mask_token_id
    prompt, reply = ResponseRow((mask, 4, 5, 6), 2, ""), ResponseRow((4, 5, 6, mask, 8), 2, "")
    with pytest.raises(ValueError, match=f"1 replies contain the drafter's mask token {mask}"):
        train.prepare(target.model, [*ROWS, reply], tmp_path, start, CONFIG, use=USE)
    train.prepare(target.model, [*ROWS, prompt], tmp_path, start, CONFIG, use=USE)


def test_an_independent_drafter_has_no_distillation(
    target: Target, folders: dict[str, Path], tmp_path: Path
) -> None:
    start = train.trained_start(folders["independent"], target)
    with pytest.raises(ValueError, match="set distill and tree to 0"):
        prepared(target, start, tmp_path, loss=train.LossConfig(distill=0.5))


# ---- the command --------------------------------------------------------------------------

STEPS = ("--blocks", 12, "--held-out", 25, "--warmup-steps", 1, "--log-steps", 1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, its replies, and a trained drafter of each kind."""
    folder = tmp_path_factory.mktemp("made")
    save_tiny_folder(folder / "target")
    file = prompts(folder / "sums.jsonl", 12)
    passes("data", "--target", folder / "target", "--jsonl", file, "--out", folder / "r", "-n", 20)
    passes("train", *where(folder), "--out", folder / "block", *SMALL, "--max-steps", 1)
    alone = ("--kind", "independent", "--borrow", "--layers", 0, "--block-size", 4)
    passes(
        "train", *where(folder), "--out", folder / "alone", *alone, "--mask-token", 200, *STEPS,
        "--max-steps", 1,
    )  # fmt: skip
    return folder


def where(folder: Path) -> tuple[object, ...]:
    return ("--target", folder / "target", "--data", folder / "r")


@pytest.mark.parametrize("kind", ["block", "alone"])
def test_the_command_goes_on_with_a_drafter(made: Path, tmp_path: Path, kind: str) -> None:
    init = made / kind / "draft"
    command = ("train", *where(made), "--out", tmp_path, "--init", init, *STEPS)
    plan = passes(*command, "--dry-run")
    assert "parameters" in plan.stdout
    assert not list(tmp_path.iterdir())
    shown = passes(*command, "--max-steps", 2)
    assert "step 0 · held out" in shown.stderr
    assert "mask token 200" in shown.stderr
    again = passes(*command, "--max-steps", 3)
    assert "from step 2" in again.stderr
    loaded = (load_draft(init)[1], load_draft(tmp_path / "draft")[1]) if kind == "block" else (
        load_independent(init), load_independent(tmp_path / "draft"))  # fmt: skip
    old, new = loaded
    assert old.config == new.config
    assert isinstance(new, IndependentNetwork) == (kind == "alone")
    assert not torch.equal(old.norm.weight, new.norm.weight)


def test_shipped_is_the_drafter_inside_the_package(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("train", *where(made), "--out", tmp_path / "run", "--init", "shipped", *STEPS)
    assert "no drafter is shipped" in fails(*command, "--max-steps", 1)
    shutil.copytree(made / "block" / "draft", tmp_path / "weights" / "tiny")
    monkeypatch.setattr(draft_load, "_SHIPPED", tmp_path / "weights")
    passes(*command, "--max-steps", 1)
    assert load_draft(tmp_path / "run" / "draft")[0].block_size == 4


@pytest.mark.parametrize(
    "option",
    [
        ("--kind", "dflash"), ("--body", "x"), ("--layers", "0"), ("--taps", "0"),
        ("--block-size", 4), ("--mask-token", 200), ("--no-warm",),
        ("--warm",), ("--borrow",),
    ],
    ids=lambda option: option[0],
)  # fmt: skip
def test_options_that_the_drafter_has_decided_are_usage_errors(
    made: Path, tmp_path: Path, option: tuple[object, ...]
) -> None:
    init = ("--init", made / "block" / "draft", "--max-steps", 1)
    result = invoke("train", *where(made), "--out", tmp_path / "run", *init, *option)
    assert result.exit_code == 2
    assert "--init" in result.stderr
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_gone_on_with(made: Path, tmp_path: Path) -> None:
    command = ("train", *where(made), "--out", tmp_path / "run", "--max-steps", 1)
    alone = ("--init", made / "alone" / "draft", "--distill", 0.5)
    assert invoke(*command, *alone).exit_code == 2
    no_head = ("--init", made / "block" / "draft", "--markov-rank", 0)
    assert invoke(*command, *no_head).exit_code == 2
    assert "no drafter" in fails(*command, "--init", tmp_path / "nothing")
    assert fails(*command, "--init", made / "target")  # a language model is no drafter
    assert not (tmp_path / "run").exists()


def test_new_layers_change_nothing_before_they_are_trained(
    target: Target, folders: dict[str, Path], tmp_path: Path
) -> None:
    same, grown = (
        prepared(target, train.trained_start(folders["dflash"], target, add_layers=n), tmp_path / f)
        for n, f in ((0, "same"), (2, "grown"))
    )
    count = same.network.config.num_hidden_layers
    assert grown.network.config.num_hidden_layers == count + 2
    assert len(grown.network.layers) == count + 2
    assert outputs(same) == outputs(grown)
    silent = [f"layers.{count - 1}.{part}.weight" for part in ("self_attn.o_proj", "mlp.down_proj")]
    weights = grown.network.state_dict()
    assert not any(weights[name].any() for name in silent)
    grown.run()
    assert all(grown.network.state_dict()[name].any() for name in silent), "they learn"
    config, again = load_draft(tmp_path / "grown" / "draft")
    assert config.num_hidden_layers == len(again.layers) == count + 2


def test_a_markov_head_changes_nothing_before_it_is_trained(
    target: Target, folders: dict[str, Path], tmp_path: Path
) -> None:
    runs = [
        prepared(
            target,
            train.trained_start(folders["dflash"], target, markov_rank=rank, draft_vocab_size=50),
            tmp_path / str(rank),
            head_negatives=12,
            max_steps=6,
        )
        for rank in (0, 6, 6)
    ]
    plain, grown, again = runs
    alone, both = outputs(plain), outputs(grown)
    assert both == [2 * value for value in alone], "rows with and without the token before"
    before = {name: value.clone() for name, value in grown.network.state_dict().items()}
    assert all(torch.equal(value, again.network.state_dict()[k]) for k, value in before.items())
    grown.run()
    after = grown.network.state_dict()
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert {name for name in before if name.startswith("markov.")} <= moved, "all of it learns"
    assert any(name.startswith("layers.") for name in moved)
    config, _ = load_draft(tmp_path / "6" / "draft")
    assert (config.markov_rank, config.draft_vocab_size) == (6, 50)
    # a drafter that has one goes on with it
    start = train.trained_start(tmp_path / "6" / "draft", target)
    assert prepared(target, start, tmp_path / "on").network.config.markov_rank == 6  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="rank 6"):
        train.trained_start(tmp_path / "6" / "draft", target, markov_rank=4)


def test_runs_from_before_markov_heads_go_on(target: Target, tmp_path: Path) -> None:
    recipe = train.Recipe(mask_token_id=2, block_size=4, draft_vocab_size=None)
    config = train.TrainConfig(**{**vars(CONFIG), "max_steps": 1})
    train.train_drafter(target.model, ROWS, tmp_path, recipe, config, use=USE)
    file = tmp_path / "run.json"
    raw = json.loads(file.read_text())
    del raw["recipe"]["markov_rank"]
    file.write_text(json.dumps(raw))
    train.train_drafter(target.model, ROWS, tmp_path, recipe, config, use=USE)
    with pytest.raises(ValueError, match="markov_rank"):
        train.train_drafter(
            target.model, ROWS, tmp_path, replace(recipe, markov_rank=3), config, use=USE
        )


def test_a_new_drafter_may_have_a_markov_head(target: Target, tmp_path: Path) -> None:
    recipe = train.Recipe(mask_token_id=2, block_size=4, draft_vocab_size=None, markov_rank=5)
    config = train.TrainConfig(**{**vars(CONFIG), "max_steps": 2})
    found = train.train_drafter(target.model, ROWS, tmp_path, recipe, config, use=USE)
    assert found["all"].tau(8) >= 1.0
    assert load_draft(tmp_path / "draft")[0].markov_rank == 5


def outputs(run: train.Trainer) -> list[float]:
    """What a drafter achieves, and the sum of its normed block states on one batch."""
    batch, head, _ = run.batches.draw(run.progress, 4)
    with torch.no_grad():
        total, weight, *_ = run.objective(batch, head)
    return [float(total), float(weight)]


def test_a_vocabulary_chosen_anew_keeps_known_rows(target: Target, tmp_path: Path) -> None:
    lent = tiny_draft_network(target, block_size=4)
    config = lent.config.__class__(
        **{**vars(lent.config), "own_head": True, "draft_vocab_size": 30}
    )
    network = DraftNetwork(config)
    assert network.d2t is not None
    assert network.lm_head is not None
    network.d2t.fill_(10)
    torch.nn.init.normal_(network.lm_head.weight)
    save_draft(tmp_path / "own", config, network, dtype=torch.float32)
    start = train.trained_start(tmp_path / "own", target, draft_vocab_size=50)
    changed = prepared(target, start, tmp_path / "run").network
    assert isinstance(changed, DraftNetwork)
    ids = changed.target_ids()
    assert ids is not None
    assert changed.lm_head is not None
    assert ids.tolist() == sorted(set(ids.tolist()))
    assert len(ids) == changed.config.draft_vocab_size == 50
    seen = {token for row in ROWS for token in row.token_ids}
    assert len(seen & set(ids.tolist())) >= min(len(seen), 50) - 12, "those of the replies"
    for row, token in enumerate(ids.tolist()):
        known = 10 <= token < 40
        origin = network.lm_head.weight[token - 10] if known else target.output_embeddings()[token]
        assert torch.equal(changed.lm_head.weight[row], origin), token
    continued = prepared(target, start, tmp_path / "run").network
    assert torch.equal(continued.d2t, changed.d2t)  # type: ignore[arg-type]


def test_a_borrowed_head_becomes_a_reduced_one(
    target: Target, folders: dict[str, Path], tmp_path: Path
) -> None:
    start = train.trained_start(folders["dflash"], target, draft_vocab_size=20)
    assert start.can_sample_head
    network = prepared(target, start, tmp_path, head_negatives=4).network
    ids = network.target_ids()
    assert ids is not None
    assert torch.equal(network.lm_head.weight, target.output_embeddings()[ids])  # type: ignore[union-attr]


def test_what_grows_must_be_repeated_and_fit(
    target: Target, folders: dict[str, Path], tmp_path: Path
) -> None:
    run = prepared(target, train.trained_start(folders["dflash"], target, add_layers=1), tmp_path)
    run.run()
    for other in ({}, {"add_layers": 2}, {"add_layers": 1, "draft_vocab_size": 20}):
        with pytest.raises(ValueError, match="other settings"):
            prepared(target, train.trained_start(folders["dflash"], target, **other), tmp_path)
    prepared(target, train.trained_start(folders["dflash"], target, add_layers=1), tmp_path)
    for wrong in (
        {"add_layers": -1}, {"draft_vocab_size": 0}, {"draft_vocab_size": VOCAB + 1},
        {"markov_rank": -1},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"must (be|have)"):
            train.trained_start(folders["dflash"], target, **wrong)
    for kind in KINDS[1:]:
        for change in ({"add_layers": 1}, {"draft_vocab_size": 20}):
            with pytest.raises(ValueError, match="independent"):
                train.trained_start(folders[kind], target, **change)
        with pytest.raises(ValueError, match="markov_rank must be between 0 and"):
            train.trained_start(folders[kind], target, markov_rank=10**6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_a_trained_drafter_gets_changes_nothing_at_first(
    target: Target, folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    start = train.trained_start(folders[kind], target, markov_rank=4)
    old = prepared(target, train.trained_start(folders[kind], target), tmp_path / "old").network
    trainer = prepared(target, start, tmp_path / "new")
    new = trainer.network
    assert new.markov is not None
    assert {name for name in new.state_dict() if name not in old.state_dict()} == {
        f"markov.{name}" for name in new.markov.state_dict()
    }
    assert all(torch.equal(v, new.state_dict()[name]) for name, v in old.state_dict().items())
    assert float(new.markov.out.weight.detach().abs().max()) == 0
    trainer.run()
    assert float(new.markov.out.weight.detach().abs().max()) > 0
    again = prepared(target, start, tmp_path / "new")  # continues
    with pytest.raises(ValueError, match="other settings"):
        prepared(target, train.trained_start(folders[kind], target), tmp_path / "new")
    assert again.network.config.markov_rank == 4


def test_training_in_bfloat16_keeps_float32_weights(
    target: Target, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Products in bfloat16: other gradients than in float32, near them, same kind of weights."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    losses = {}
    for precision in ("no", "bf16"):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        start = train.trained_start(folders["dflash"], target)
        run = train.prepare(
            target.model, ROWS, tmp_path / precision, start, CONFIG, use=USE,
            accelerator=accelerator,
        )  # fmt: skip
        losses[precision] = [run.step()["loss"] for _ in range(3)]
        assert {value.dtype for value in run.network.parameters()} == {torch.float32}
    AcceleratorState._reset_state(reset_partial_state=True)
    assert losses["bf16"] != losses["no"]
    assert losses["bf16"] == pytest.approx(losses["no"], rel=0.02)


@pytest.mark.parametrize("kind", ["dflash", "independent"])
def test_a_continued_run_needs_its_replies_and_its_split(
    target: Target, folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    start = train.trained_start(folders[kind], target)
    run = prepared(target, start, tmp_path)
    run.step()
    run.save()
    with pytest.raises(ValueError, match="replies"):
        train.prepare(target.model, ROWS[:6], tmp_path, start, CONFIG, use=USE)
    other = train.DataUse(held_out_percent=10, cache_features=False, top_k=0)
    with pytest.raises(ValueError, match="held_out_percent: 40 there, 10 given"):
        prepared(target, start, tmp_path, use=other)
    assert prepared(target, start, tmp_path).progress.step == 1
