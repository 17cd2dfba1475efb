"""Training independent drafters: the joint objective, and the command from replies to decoding."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_train_cli import invoke, passes, prompts

import draftwood as dw
from draftwood import train
from draftwood.draft import independent_network
from draftwood.draft.independent import IndependentDrafter
from draftwood.draft.independent_checkpoint import load_independent
from draftwood.draft.independent_network import IndependentNetwork
from draftwood.target.model import Target
from draftwood.train.accepted import CHAIN
from draftwood.train.evaluate import evaluate, loop_cycles, replay
from draftwood.train.independent import IndependentRecipe, TokenSource, build_independent
from draftwood.train.joint import JointObjective, next_tokens
from draftwood.train.loss import LossConfig
from draftwood.train.target_side import ResponseRow, as_example
from draftwood.train.train_config import TrainConfig
from draftwood.train.trainer import Trainer
from draftwood.tree.budget import Chain
from tiny import tiny_model
from tiny_drafter import tiny_independent_network
from tiny_folder import save_tiny_folder

VOCAB = 61
MASK = 200
RNG = np.random.default_rng(3)
ROWS = [
    ResponseRow(tuple(RNG.integers(3, VOCAB, size=10 + i).tolist()), 4, "ab"[i % 2])
    for i in range(6)
]
ANCHORS = [np.array([3, 7]), np.array([5, 9])]


@pytest.fixture(scope="module", params=[0, 6], ids=["alone", "markov"])
def network(request: pytest.FixtureRequest) -> IndependentNetwork:
    target = Target(tiny_model("llama", vocab=VOCAB), probe=False)
    return tiny_independent_network(target, block_size=4, markov_rank=request.param)


def loss_of(
    network: IndependentNetwork, weight: float, *, negatives: int = 0, block_size: int = 4
) -> torch.Tensor:
    objective = JointObjective(network, LossConfig(gamma=2.0, autoregressive=weight))
    batch = objective.draw(
        [as_example(ROWS[0]), as_example(ROWS[1])], ANCHORS, block_size=block_size,
        num_negatives=negatives, rng=np.random.default_rng(0), device="cpu",
    )  # fmt: skip
    total, one, _, _ = objective(*batch)
    return total / one


def by_hand(network: IndependentNetwork) -> tuple[float, float]:
    """(L_diff, L_AR), each block and each response on its own.

    With a Markov head every block counts twice, alone and knowing the tokens before.
    """
    total = weight = ar = count = 0.0
    for row, anchors in zip(ROWS[:2], ANCHORS, strict=True):
        ids = torch.tensor([row.token_ids])
        context, _ = network(ids, ids[:, :0], ids[:, :0, None].expand(1, 0, 4))
        scores = network.logits(context)[0].log_softmax(-1)
        for position in range(row.response_start, len(row.token_ids)):
            ar -= float(scores[position - 1, row.token_ids[position]])
            count += 1
        for anchor in anchors.tolist():
            block = torch.zeros(1, 1, 4, dtype=torch.int64)
            block[0, 0, 0] = row.token_ids[anchor]
            hidden = network(ids[:, : anchor + 1], torch.tensor([[anchor]]), block)[1]
            known = [*row.token_ids[anchor + 1 : anchor + 4], 0, 0, 0][:3]
            passes = [hidden[0, 0]]
            if network.markov is not None:
                passes.append(network.after(hidden[0, 0], torch.tensor(known)))
            for one in passes:
                rows = network.logits(one).log_softmax(-1)
                for j in range(1, min(4, len(row.token_ids) - anchor)):
                    w = np.exp(-(j - 1) / 2.0)
                    total -= w * float(rows[j - 1, row.token_ids[anchor + j]])
                    weight += w
    return total / weight, ar / count


def test_the_joint_loss_is_both_means(network: IndependentNetwork) -> None:
    blocks, language = by_hand(network)
    assert float(loss_of(network, 0.0)) == pytest.approx(blocks, abs=1e-6)
    assert float(loss_of(network, 0.7)) == pytest.approx(blocks + 0.7 * language, abs=1e-6)


def test_a_head_sample_of_everything_is_the_head(network: IndependentNetwork) -> None:
    whole = float(loss_of(network, 1.0))
    assert float(loss_of(network, 1.0, negatives=VOCAB)) == pytest.approx(whole, abs=1e-6)


def test_only_response_tokens_are_asked_for(network: IndependentNetwork) -> None:
    objective = JointObjective(network, LossConfig(autoregressive=1.0))
    batch, _ = objective.draw(
        [as_example(ROWS[0]), as_example(ROWS[3])], ANCHORS, block_size=4, num_negatives=0,
        rng=np.random.default_rng(0), device="cpu",
    )  # fmt: skip
    ids, known = next_tokens(batch)
    for g, row in enumerate((ROWS[0], ROWS[3])):
        assert ids[g][known[g]].tolist() == list(row.token_ids[row.response_start :])


def test_offline_acceptance_is_a_replay_of_the_loop(network: IndependentNetwork) -> None:
    """On greedy replies the chain's acceptance follows from the reply alone."""
    target = Target(tiny_model("llama", vocab=VOCAB), probe=False)
    params = dw.SamplingParams(max_new_tokens=24)
    prompt = list(range(5, 12))
    engine = dw.Engine(target, IndependentDrafter(network, target), Chain())
    output = engine.generate([prompt], params)[0]
    row = ResponseRow((*prompt, *output.token_ids), len(prompt), "x")
    found = evaluate(network, [as_example(row)], (CHAIN,))["all"]
    # the loop's last cycle may be cut by the limit, the replay's is not
    assert found.num_tokens == 24
    assert abs(found.num_cycles[CHAIN] - len(output.cycles)) <= 1


def chain(network: IndependentNetwork, rows: torch.Tensor) -> Iterator[int]:
    """The best next token after each, from the rows [L, H] of a block."""
    known = [0] * len(rows)
    for depth in range(len(rows)):
        aware = rows if network.markov is None else network.after(rows, torch.tensor(known))
        known[depth] = int(network.logits(aware[depth]).argmax())
        yield known[depth]


@pytest.mark.parametrize("budget", [CHAIN, 3])
def test_cycles_alone_are_those_of_the_replay(network: IndependentNetwork, budget: int) -> None:
    """On replies with drafted tokens in them, so that chains of every length are accepted."""
    row, chains = ROWS[0], set()
    for length in range(8):
        example = as_example(ResponseRow(row.token_ids, 4, "x"))
        found = replay(network, example, (budget,))
        assert loop_cycles(network, example, budget) == found.cycles[budget]
        chains.add(found.num_tokens - found.cycles[budget])
        _, hidden = network(
            torch.tensor([row.token_ids]), torch.tensor([[4 + length]]),
            torch.tensor([[[row.token_ids[4 + length], *[network.config.mask_token_id] * 3]]]),
        )  # fmt: skip
        drafted = list(chain(network, hidden[0, 0]))
        start = 5 + length
        row = ResponseRow((*row.token_ids[:start], *drafted, *row.token_ids[start + 3 :]), 4, "x")
    assert len(chains) > 2


def test_resume_continues_exactly(tmp_path: Path) -> None:
    config = TrainConfig(
        warmup_steps=1, max_steps=4, blocks=4, blocks_per_response=2, log_steps=1,
        head_negatives=8, ema_decay=0.9, loss=LossConfig(autoregressive=1.0),
    )  # fmt: skip

    def trainer(folder: Path) -> Trainer:
        body = tiny_model("llama", vocab=VOCAB, dtype=torch.float32)
        made = build_independent(body, IndependentRecipe(2, block_size=4))
        objective = JointObjective(made, config.loss)
        held_out = TokenSource(ROWS[:1])
        return Trainer(objective, TokenSource(ROWS), lambda: [held_out.example(0)], folder, config)

    whole = trainer(tmp_path / "whole")
    whole.run()
    first = trainer(tmp_path / "parts")
    first.step()
    first.step()
    first.save()
    second = trainer(tmp_path / "parts")
    assert second.progress.step == 2
    second.run()
    for name, value in whole.weights().items():
        assert torch.equal(value, second.weights()[name]), name


def test_frozen_tables_stay(tmp_path: Path) -> None:
    config = TrainConfig(max_steps=2, blocks=4, blocks_per_response=2, train_head=False)
    body = tiny_model("llama", vocab=VOCAB, dtype=torch.float32)
    made = build_independent(body, IndependentRecipe(2, block_size=4))
    before = {name: value.clone() for name, value in made.state_dict().items()}
    run = Trainer(JointObjective(made, config.loss), TokenSource(ROWS), list, tmp_path, config)
    run.step()
    run.step()
    changed = {n for n, value in made.state_dict().items() if not torch.equal(value, before[n])}
    assert changed
    assert not any("embed" in name or "head" in name for name in changed)


def test_recipes_that_cannot_work_are_refused(tmp_path: Path) -> None:
    body = tiny_model("llama", vocab=VOCAB, dtype=torch.float32)
    with pytest.raises(ValueError, match="bos_token_id"):
        build_independent(body, IndependentRecipe(1))
    config = TrainConfig(max_steps=1, loss=LossConfig(distill=0.5))
    with pytest.raises(ValueError, match="set distill and tree to 0"):
        train.train_drafter(body, ROWS, tmp_path, IndependentRecipe(2), config)
    with pytest.raises(ValueError, match="autoregressive must be"):
        replace(config.loss, autoregressive=-1.0)


def test_long_and_short_contexts_train_alike(
    network: IndependentNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Causal attention with its weights kept, and by ``sdpa``."""
    network = copy.deepcopy(network).requires_grad_()
    results = []
    for limit in (512, 0):
        monkeypatch.setattr(independent_network, "_FEW_TOKENS", limit)
        loss = loss_of(network, 0.7)
        results.append([loss, *torch.autograd.grad(loss, list(network.layers.parameters()))])
    for kept, again in zip(*results, strict=True):
        torch.testing.assert_close(kept, again)


def test_mixed_precision_trains_too() -> None:
    body = tiny_model("llama", vocab=VOCAB, dtype=torch.float32)
    made = build_independent(body, IndependentRecipe(2, block_size=4))
    exact = float(loss_of(made, 1.0))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = loss_of(made, 1.0)
    rounded.backward()
    assert float(rounded) == pytest.approx(exact, rel=0.05)
    assert all(bool(p.grad.isfinite().all()) for p in made.parameters() if p.grad is not None)


# ---- the command --------------------------------------------------------------------------

SMALL = (
    "--kind", "independent", "--layers", "0,-1", "--block-size", 4, "--mask-token", MASK,
    "--blocks", 12, "--anchors", 6, "--head-negatives", 8, "--held-out", 25,
    "--warmup-steps", 1, "--log-steps", 1, "--max-steps", 2,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and its replies."""
    folder = tmp_path_factory.mktemp("all")
    save_tiny_folder(folder / "target")
    file = prompts(folder / "sums.jsonl", 12)
    passes("data", "--target", folder / "target", "--jsonl", file, "--out", folder / "r", "-n", 20)
    return folder


def run(folder: Path, out: Path, *args: object) -> None:
    where = ("--target", folder / "target", "--data", folder / "r", "--out", out)
    passes("train", *where, *SMALL, *args)


@pytest.mark.parametrize(
    "extra",
    [(), ("--ar-weight", 0), ("--no-warm",), ("--borrow",), ("--markov-rank", 4)],
    ids=lambda e: str(e[:1]),
)
def test_one_command_trains_every_variant(folder: Path, tmp_path: Path, extra: tuple) -> None:
    run(folder, tmp_path, *extra)
    start = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert start["config"]["loss"]["autoregressive"] == (0.0 if "--ar-weight" in extra else 1.0)
    network = load_independent(tmp_path / "draft")
    assert network.config.borrows == ("--borrow" in extra)
    assert network.config.markov_rank == (4 if "--markov-rank" in extra else 0)
    if network.markov is not None:
        assert network.markov.out.weight.abs().max() > 0  # it has learned
    assert network.config.layers == (0, 3)
    engine = dw.load(str(folder / "target"), str(tmp_path / "draft"), "chain")
    assert isinstance(engine.drafter, IndependentDrafter)
    plain = dw.load(str(folder / "target"), None)
    params = dw.SamplingParams(max_new_tokens=12)
    ours, theirs = (e.generate("What is 7?", params)[0] for e in (engine, plain))
    assert ours.token_ids == theirs.token_ids


def test_evaluation_continuing_and_dry_run(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path, "--max-steps", 3)
    run(folder, tmp_path, "--max-steps", 4)  # continues
    where = ("--target", folder / "target", "--data", folder / "r")
    shown = passes("eval-drafter", "--drafter", tmp_path / "draft", *where, "--json")
    found = json.loads(shown.stdout)["all"]
    assert found["tau"]["8"] >= found["tau"]["chain"] >= 1
    plan = passes("train", *where, "--out", tmp_path / "plan", *SMALL, "--dry-run")
    assert "layers.1.mlp.down_proj.weight" in plan.stdout
    assert "feature" not in plan.stdout


@pytest.mark.parametrize(
    "wrong",
    [("--kind", "other"), ("--taps", "0,1"), ("--distill", 0.5), ("--borrow", "--body", "x")],
    ids=lambda w: w[0],
)
def test_usage_errors(folder: Path, tmp_path: Path, wrong: tuple) -> None:
    where = ("--target", folder / "target", "--data", folder / "r", "--out", tmp_path)
    assert invoke("train", *where, *SMALL, *wrong).exit_code == 2
