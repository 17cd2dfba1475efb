"""Pruning: the distillation target, the race between layers, the loop and its baselines."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from hypothesis import given
from hypothesis import strategies as st
from test_train_cli import passes, prompts

from draftwood.draft.independent import IndependentDrafter
from draftwood.draft.independent_checkpoint import load_independent, save_independent
from draftwood.draft.independent_layers import BodyMLP
from draftwood.draft.independent_network import IndependentNetwork
from draftwood.target.model import Target
from draftwood.train.distill import DistillObjective, distillation_loss, smallest_share
from draftwood.train.evaluate import anchor_hidden, loop_cycles
from draftwood.train.layer_choice import ORDERS, _Response, race, rank_layers
from draftwood.train.loss import LossConfig
from draftwood.train.prune import PruneConfig, _begin_round, _Run, prune_drafter
from draftwood.train.prune_cost import PassSeconds, pass_seconds, seconds_in_turn
from draftwood.train.prune_settings import begun_precision
from draftwood.train.prune_table import Table, best_stage
from draftwood.train.target_side import ResponseRow, as_example, split_rows
from draftwood.train.train_config import TrainConfig
from tiny import tiny_model
from tiny_drafter import tiny_independent_network
from tiny_folder import save_tiny_folder

VOCAB = 61
NAN = float("nan")
RNG = np.random.default_rng(3)
ROWS = [ResponseRow(tuple(RNG.integers(3, VOCAB, size=12 + i).tolist()), 4, "x") for i in range(16)]
EXAMPLES = [as_example(row) for row in ROWS]

# ---- the distillation target --------------------------------------------------------------


@given(
    st.lists(st.floats(0, 1), min_size=2, max_size=6),
    st.integers(0, 5),
    st.floats(0, 1),
)
def test_the_label_leads_by_the_margin_and_no_more(
    weights: list[float], label: int, margin: float
) -> None:
    probs = np.array(weights) + 1e-9
    probs /= probs.sum()
    label %= len(probs)
    other = float(np.delete(probs, label).max())
    share = float(
        smallest_share(
            torch.tensor(probs[label], dtype=torch.float64),
            torch.tensor(other, dtype=torch.float64),
            margin,
        )
    )
    assert 0 <= share <= 1

    def lead(eta: float) -> float:
        mixed = (1 - eta) * probs + eta * (np.arange(len(probs)) == label)
        return float(mixed[label] - np.delete(mixed, label).max())

    assert lead(share) >= margin - 1e-9
    if share > 1e-6:
        assert lead(share * (1 - 1e-3)) < margin
    else:
        assert lead(0.0) >= margin - 1e-5


def test_a_confident_and_right_teacher_is_left_alone() -> None:
    scores = torch.tensor([[5.0, 0.0, 0.0]], dtype=torch.float64)
    student = torch.tensor([[0.3, -0.2, 0.9]], dtype=torch.float64)
    loss = distillation_loss(student, scores, torch.tensor([0]), 0.1)
    expected = -(scores.softmax(-1) * student.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(loss, expected)


def test_with_the_whole_margin_only_the_label_counts() -> None:
    scores = torch.tensor([[5.0, 0.0, 0.0]], dtype=torch.float64)
    student = torch.tensor([[0.3, -0.2, 0.9]], dtype=torch.float64)
    loss = distillation_loss(student, scores, torch.tensor([1]), 1.0)
    torch.testing.assert_close(loss, -student.log_softmax(-1)[:, 1])


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab=VOCAB, dtype=torch.float32), probe=False)


@pytest.fixture(scope="module", params=[0, 6], ids=["alone", "markov"])
def network(target: Target, request: pytest.FixtureRequest) -> IndependentNetwork:
    return tiny_independent_network(target, block_size=4, num_layers=3, markov_rank=request.param)


def test_a_sample_of_every_column_is_the_whole_loss(network: IndependentNetwork) -> None:
    objective = DistillObjective(
        network.without(1), network, LossConfig(autoregressive=0.5), margin=0.2
    )

    def loss(negatives: int) -> float:
        batch = objective.draw(
            EXAMPLES[:2], [np.array([3, 8]), np.array([4, 6])], block_size=4,
            num_negatives=negatives, rng=np.random.default_rng(0), device="cpu",
        )  # fmt: skip
        return float(objective(*batch)[0])

    assert loss(VOCAB) == pytest.approx(loss(0), rel=1e-5)


@pytest.mark.parametrize("negatives", [0, 8])
def test_rows_that_know_the_token_before_count_as_much(target: Target, negatives: int) -> None:
    """With a Markov head that changes nothing both halves of the block loss are the same."""
    losses = []
    for rank, idle in ((0, True), (6, True), (6, False)):
        network = tiny_independent_network(target, block_size=4, num_layers=3, markov_rank=rank)
        if network.markov is not None and idle:
            network.markov.reset()
        objective = DistillObjective(network.without(1), network, LossConfig(autoregressive=0.5))
        batch = objective.draw(
            EXAMPLES[:2], [np.array([3, 8]), np.array([4, 6])], block_size=4,
            num_negatives=negatives, rng=np.random.default_rng(0), device="cpu",
        )  # fmt: skip
        losses.append(float(objective(*batch)[0]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] != pytest.approx(losses[0], rel=1e-3)


def test_a_margin_outside_the_unit_interval_is_refused(network: IndependentNetwork) -> None:
    with pytest.raises(ValueError, match="margin must be"):
        DistillObjective(network, network, LossConfig(), margin=1.5)


# ---- the choice of layers -----------------------------------------------------------------


def test_removing_a_layer_shares_the_others(network: IndependentNetwork) -> None:
    smaller = network.without(1)
    assert smaller.config.layers == (0, 2)
    assert smaller.stack()[1] is network.stack()[2]
    assert len(network.layers) == 3
    with pytest.raises(ValueError, match="at least one layer"):
        network.keeping([])


def test_the_race_finds_the_best_and_stops_the_worst_early() -> None:
    asked: list[int] = []
    noise = np.random.default_rng(0)

    def cycles_of(layer: int, _: object) -> int:
        asked.append(layer)
        return [12, 10, 20, 11][layer] + int(noise.integers(0, 3))

    ranking = race(cycles_of, range(4), EXAMPLES * 4)
    assert ranking[0].layer == 1
    assert ranking[-1].layer == 2
    assert asked.count(2) < len(EXAMPLES) < asked.count(1) == 4 * len(EXAMPLES)


def test_equal_layers_are_never_stopped() -> None:
    ranking = race(lambda layer, _: 5, range(3), EXAMPLES)
    assert [one.num_responses for one in ranking] == [len(EXAMPLES)] * 3
    assert [one.layer for one in ranking] == [0, 1, 2]


@pytest.mark.parametrize("budget", [0, 20])
def test_what_candidates_share_changes_no_score(
    network: IndependentNetwork, target: Target, budget: int
) -> None:
    ranking = rank_layers(network, "acceptance", EXAMPLES, budget=budget)
    tokens = sum(one.num_anchors for one in EXAMPLES)
    for one in ranking:
        alone = network.without(one.layer)
        cycles = sum(loop_cycles(alone, example, budget) for example in EXAMPLES)
        assert one.score == tokens / cycles
    assert len({one.score for one in ranking}) > 1


@pytest.mark.parametrize("layers", [range(7), (0, 2, 5, 6), (6, 0, 3, 3, 5, 1, 4, 2)])
def test_what_comes_before_a_layer_is_run_once(
    target: Target, monkeypatch: pytest.MonkeyPatch, layers: Sequence[int]
) -> None:
    deep = tiny_independent_network(target, block_size=4, num_layers=7)
    response = _Response(deep, EXAMPLES[0])
    run: list[int] = []
    one_layer = _Response._run

    def watched(self: _Response, x: torch.Tensor, layer: int) -> torch.Tensor:
        run.append(layer)
        return one_layer(self, x, layer)

    monkeypatch.setattr(_Response, "_run", watched)
    last = 0
    for layer in layers:
        run.clear()
        hidden, _ = response.without(layer)
        assert torch.equal(hidden, anchor_hidden(deep.without(layer), EXAMPLES[0])[0])
        begin = last if layer >= last else 0  # out of order it starts over
        assert run == [*range(begin, layer), *range(layer + 1, 7)]
        last = layer


def test_a_layer_that_does_nothing_goes_first(network: IndependentNetwork, target: Target) -> None:
    idle = tiny_independent_network(target, block_size=4, num_layers=3)
    idle.stack()[1].self_attn.o_proj.weight.data.zero_()
    idle.stack()[1].self_attn.o_proj.bias.data.zero_()
    idle.stack()[1].mlp.down_proj.weight.data.zero_()
    assert rank_layers(idle, "cosine", EXAMPLES, budget=0)[0].layer == 1
    assert rank_layers(idle, "last", [], budget=0)[0].layer == 2
    orders = {
        tuple(one.layer for one in rank_layers(idle, "random", [], budget=0, seed=seed))
        for seed in range(20)
    }
    assert len(orders) > 3
    with pytest.raises(ValueError, match="order must be one of"):
        rank_layers(idle, "best", EXAMPLES, budget=0)


# ---- the loop -----------------------------------------------------------------------------

RECOVERY = TrainConfig(
    max_steps=2, warmup_steps=1, blocks=8, blocks_per_response=4, head_negatives=8,
    loss=LossConfig(autoregressive=1.0),
)  # fmt: skip


def settings(**changes: object) -> PruneConfig:
    return PruneConfig(
        **{"recovery": RECOVERY, "held_out_percent": 40.0, "context_len": 16, **changes}
    )


@pytest.fixture(scope="module")
def drafter(network: IndependentNetwork, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter") / "draft"
    return save_independent(folder, network.config, network.state_dict())


@pytest.mark.parametrize("order", ORDERS)
def test_every_depth_is_recorded_and_loads(
    drafter: Path, target: Target, tmp_path: Path, order: str
) -> None:
    table = prune_drafter(drafter, target, ROWS, tmp_path, settings(order=order))
    assert [one.depth for one in table.stages] == [3, 2, 1]
    for before, after in zip(table.stages, table.stages[1:], strict=False):
        assert set(before.layers) - set(after.layers) == set(after.removed)
        assert len(after.removed) == 1
        config = load_independent(after.folder).config
        assert config.layers == after.layers
        assert config.markov_rank == load_independent(drafter).config.markov_rank
        assert min(after.draft_s, after.plain_s, after.verify_s) > 0
        assert after.tau >= 1
    for one in table.stages:
        passes_s = one.draft_s + one.verify_s
        assert one.speedup == pytest.approx(one.tau * one.plain_s / passes_s)
    logs = [(Path(one.folder).parent / "log.jsonl").read_text() for one in table.stages[1:]]
    seeds = [json.loads(log.splitlines()[0])["config"]["seed"] for log in logs]
    assert len(set(seeds)) == len(seeds)  # each recovers on other replies
    assert best_stage(table).speedup == max(one.speedup for one in table.stages)


@pytest.mark.parametrize("rows", [0, 2])
def test_the_second_of_a_round_is_chosen_without_the_first(
    target: Target, tmp_path: Path, rows: int
) -> None:
    deep = tiny_independent_network(target, block_size=4, num_layers=5)
    start = save_independent(tmp_path / "start", deep.config, deep.state_dict(), dtype=deep.dtype)
    config = settings(recovery=None, per_round=2, min_depth=2, ranking_block=rows)
    table = prune_drafter(start, target, ROWS, tmp_path / "run", config)
    assert [one.depth for one in table.stages] == [5, 3, 2]  # the last round is a short one
    held = [as_example(row) for row in split_rows(ROWS, config.held_out_percent)[1]]
    left, expected = deep, []
    for _ in range(3):
        best = rank_layers(left, "acceptance", held, budget=0, block_size=rows or None)[0].layer
        expected.append(left.config.layers[best])
        left = left.without(best)
    assert [one.removed for one in table.stages] == [(), tuple(expected[:2]), (expected[2],)]
    assert table.stages[-1].layers == left.config.layers


def test_shorter_blocks_accept_no_more_than_they_draft(network: IndependentNetwork) -> None:
    def score(block_size: int | None) -> float:
        return max(
            one.score
            for one in rank_layers(network, "acceptance", EXAMPLES, budget=0, block_size=block_size)
        )

    assert score(2) <= 2
    assert score(4) == score(None)


@pytest.mark.parametrize("order", ORDERS)
def test_only_layers_of_the_shortlist_compete(network: IndependentNetwork, order: str) -> None:
    whole = rank_layers(network, order, EXAMPLES, budget=0)
    among = rank_layers(network, order, EXAMPLES, budget=0, among=[2, 0])
    assert {one.layer for one in among} == {0, 2}
    assert set(among) <= set(whole)


def test_without_recovery_the_weights_stay(drafter: Path, target: Target, tmp_path: Path) -> None:
    table = prune_drafter(
        drafter, target, ROWS, tmp_path, settings(order="last", recovery=None, min_depth=2)
    )
    last = table.stages[-1]
    assert last.layers == (0, 1)
    assert last.tau == last.tau_without
    kept = load_independent(last.folder).state_dict()
    whole = load_independent(drafter).state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in kept.items())


def test_mixed_precision_is_that_of_layers_not_of_scores(
    drafter: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prune_drafter(drafter, target, ROWS, tmp_path / "whole", settings(min_depth=2))
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    layer, logits = BodyMLP.forward, IndependentNetwork.logits

    def watched_layer(self: BodyMLP, x: torch.Tensor) -> torch.Tensor:
        out = layer(self, x)
        seen.append((out.dtype, torch.bfloat16))
        return out

    def watched_logits(self: IndependentNetwork, hidden: torch.Tensor) -> torch.Tensor:
        out = logits(self, hidden)
        if not torch.is_grad_enabled():
            seen.append((out.dtype, torch.float32))
        return out

    monkeypatch.setattr(BodyMLP, "forward", watched_layer)
    monkeypatch.setattr(IndependentNetwork, "logits", watched_logits)
    monkeypatch.setattr("draftwood.train.prune.pass_seconds", lambda *_, **__: PassSeconds(1, 1, 1))
    table = prune_drafter(
        drafter, target, ROWS, tmp_path / "mixed", settings(min_depth=2),
        accelerator=Accelerator(cpu=True, mixed_precision="bf16"),
    )  # fmt: skip
    assert len({want for _, want in seen}) == 2
    assert all(dtype == want for dtype, want in seen)
    assert table.stages[0].tau == pytest.approx(whole.stages[0].tau, rel=0.05)


def test_an_interrupted_run_continues(
    drafter: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prune_drafter(drafter, target, ROWS, tmp_path / "whole", settings())
    prune_drafter(drafter, target, ROWS, tmp_path / "parts", settings(min_depth=2))

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("draftwood.train.prune._Run._add", fails)
        with pytest.raises(KeyboardInterrupt):
            prune_drafter(drafter, target, ROWS, tmp_path / "parts", settings())
    # recovered already: nothing is chosen or trained again
    monkeypatch.setattr("draftwood.train.prune.rank_layers", fails)
    monkeypatch.setattr("draftwood.train.trainer.Trainer.step", fails)
    parts = prune_drafter(drafter, target, ROWS, tmp_path / "parts", settings())
    assert [(s.layers, s.tau) for s in parts.stages] == [(s.layers, s.tau) for s in whole.stages]
    with pytest.raises(ValueError, match=r"margin: 0\.1 there, 0\.5 given"):
        prune_drafter(drafter, target, ROWS, tmp_path / "parts", settings(margin=0.5))


def test_a_depth_that_is_reached_in_another_way_is_begun_anew(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tiny_independent_network(target, block_size=4, num_layers=6)
    start = save_independent(tmp_path / "start", deep.config, deep.state_dict(), dtype=deep.dtype)

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    def prune(folder: str, depth: int) -> Table:
        config = settings(per_round=2, min_depth=depth, ranking_block=2)
        return prune_drafter(start, target, ROWS, tmp_path / folder, config)

    prune("a", 6)
    with monkeypatch.context() as patch:
        patch.setattr("draftwood.train.prune._Run._add", fails)
        with pytest.raises(KeyboardInterrupt):
            prune("a", 4)  # recovered, but not in the table
    for folder in "ab":
        prune(folder, 5)
    one, other = (prune(folder, 4) for folder in "ab")
    assert [s.layers for s in one.stages] == [s.layers for s in other.stages]
    weights = [load_independent(table.stages[-1].folder).state_dict() for table in (one, other)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_runs_of_before_there_were_rounds_continue(
    drafter: Path, target: Target, tmp_path: Path
) -> None:
    config = settings(recovery=None, order="last", min_depth=2)
    prune_drafter(drafter, target, ROWS, tmp_path, config)
    file = tmp_path / "prune.json"
    raw = json.loads(file.read_text())
    for name in ("per_round", "ranking_block"):
        del raw["settings"][name]
    raw["stages"][0]["removed"], raw["stages"][1]["removed"] = None, 2
    file.write_text(json.dumps(raw))
    table = prune_drafter(drafter, target, ROWS, tmp_path, replace(config, min_depth=1))
    assert [one.removed for one in table.stages] == [(), (2,), (1,)]


@pytest.mark.parametrize("layers", [[], [1, 77], [-1, 0], ["x"]])
def test_a_damaged_ranking_is_named(
    drafter: Path, target: Target, tmp_path: Path, layers: list[object]
) -> None:
    config = settings(recovery=None, per_round=2)
    begin = _Run(str(drafter), target, ROWS[:3], EXAMPLES[3:5], tmp_path, config, None)
    where = tmp_path / "depth-01"
    _begin_round(where, begin.table.stages[0].layers)
    kept = [{"layer": layer, "score": 1.0} for layer in layers]
    (where / "ranking-0.json").write_text(json.dumps(kept))
    with pytest.raises(ValueError, match=r"ranking-0\.json is damaged"):
        begin.next_stage()


def test_depths_without_their_table_are_refused(
    drafter: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    config = settings(recovery=None, order="last", min_depth=2)
    with monkeypatch.context() as patch:
        patch.setattr("draftwood.train.prune._Run._ranking", fails)
        with pytest.raises(KeyboardInterrupt):
            prune_drafter(drafter, target, ROWS, tmp_path, config)
    assert (tmp_path / "depth-02").is_dir()
    table = tmp_path / "prune.json"
    table.rename(tmp_path / "aside")
    with pytest.raises(ValueError, match=r"no prune\.json; restore it, or choose another") as info:
        prune_drafter(drafter, target, ROWS, tmp_path, config)
    assert str(tmp_path) in str(info.value)
    assert not table.exists()
    (tmp_path / "aside").rename(table)
    assert len(prune_drafter(drafter, target, ROWS, tmp_path, config).stages) == 2


def test_a_moved_run_continues_but_not_with_other_weights(
    network: IndependentNetwork, target: Target, tmp_path: Path
) -> None:
    start = tmp_path / "draft"
    save_independent(start, network.config, network.state_dict())
    config = settings(recovery=None, order="last", min_depth=2)
    prune_drafter(start, target, ROWS, tmp_path / "run", config)
    (tmp_path / "run").rename(tmp_path / "moved")
    start.rename(tmp_path / "elsewhere")
    final = settings(recovery=None, order="last")
    table = prune_drafter(tmp_path / "elsewhere", target, ROWS, tmp_path / "moved", final)
    assert [one.depth for one in table.stages] == [3, 2, 1]
    for one in table.stages:
        assert load_independent(one.folder).config.layers == one.layers
    noise = {name: torch.randn_like(value) for name, value in network.state_dict().items()}
    save_independent(start, network.config, noise)
    with pytest.raises(ValueError, match="weights"):
        prune_drafter(start, target, ROWS, tmp_path / "moved", final)
    with pytest.raises(ValueError, match="replies"):
        prune_drafter(tmp_path / "elsewhere", target, ROWS[1:], tmp_path / "moved", final)
    shutil.rmtree(tmp_path / "moved" / "depth-01")
    with pytest.raises(ValueError, match="depth-01/draft, which is gone"):
        prune_drafter(tmp_path / "elsewhere", target, ROWS, tmp_path / "moved", final)


def begun(drafter: Path, target: Target, folder: Path, accelerator: Any = None) -> PruneConfig:
    """A run that stopped after one removal; the settings to continue it with."""
    config = settings(recovery=None, order="last")
    first = replace(config, min_depth=2)
    prune_drafter(drafter, target, ROWS, folder, first, accelerator=accelerator)
    return config


def test_a_continued_run_needs_its_target(drafter: Path, target: Target, tmp_path: Path) -> None:
    config = begun(drafter, target, tmp_path)
    model = tiny_model("llama", vocab=VOCAB, dtype=torch.float32)
    # as a fine-tune of the attention leaves them, embeddings, norms and head are the same
    model.get_submodule("model.layers.2.self_attn.q_proj").weight.data *= 1.01
    with pytest.raises(ValueError, match="target's weights have changed"):
        prune_drafter(drafter, Target(model, probe=False), ROWS, tmp_path, config)
    half = tiny_model("llama", vocab=VOCAB, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match='dtype: "float32" there, "bfloat16" given'):
        prune_drafter(drafter, Target(half, probe=False), ROWS, tmp_path, config)
    # the same weights in another object
    same = Target(tiny_model("llama", vocab=VOCAB, dtype=torch.float32), probe=False)
    assert len(prune_drafter(drafter, same, ROWS, tmp_path, config).stages) == 3


def test_a_continued_run_needs_its_precision(drafter: Path, target: Target, tmp_path: Path) -> None:
    def accelerator(precision: str) -> Accelerator:
        AcceleratorState._reset_state(reset_partial_state=True)
        return Accelerator(cpu=True, mixed_precision=precision)

    config = begun(drafter, target, tmp_path / "whole")
    begun(drafter, target, tmp_path / "mixed", accelerator("bf16"))
    for folder, other in (("whole", accelerator("bf16")), ("mixed", None)):
        with pytest.raises(ValueError, match="precision: "):
            prune_drafter(drafter, target, ROWS, tmp_path / folder, config, accelerator=other)
    for folder, same in (("whole", "no"), ("mixed", "bf16")):
        table = prune_drafter(
            drafter, target, ROWS, tmp_path / folder, config, accelerator=accelerator(same)
        )
        assert len(table.stages) == 3
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        "{",
        '{"settings": {}, "stages": [{"depth": 1}]}',
        '{"stages": [3]}',
        '{"settings": 3, "stages": []}',
        '{"settings": {}, "plain_s": 1, "verify_s": 1, "stages": []}',
    ],
)
def test_a_damaged_table_is_named(
    drafter: Path, target: Target, tmp_path: Path, content: str
) -> None:
    (tmp_path / "prune.json").write_text(content)
    with pytest.raises(ValueError, match=r"prune\.json is damaged"):
        prune_drafter(drafter, target, ROWS, tmp_path, settings(recovery=None))


@pytest.mark.parametrize("name", ["tau", "draft_s", "plain_s", "verify_s", "speedup"])
@pytest.mark.parametrize("value", [None, "x", 0, float("nan")])
def test_a_table_without_one_of_its_numbers_is_named(
    drafter: Path, target: Target, tmp_path: Path, name: str, value: object
) -> None:
    stage: dict[str, object] = {
        "depth": 3, "layers": [0, 1, 2], "removed": [], "tau_without": None, "tau": 1.2,
        "draft_s": 1.0, "plain_s": 1.0, "verify_s": 1.0, "speedup": 0.6, "folder": "",
    }  # fmt: skip
    file = tmp_path / "prune.json"
    file.write_text(json.dumps({"settings": {}, "stages": [stage]}))
    with pytest.raises(ValueError, match="other settings"):  # as it is, it can be read
        prune_drafter(drafter, target, ROWS, tmp_path, settings(recovery=None))
    file.write_text(json.dumps({"settings": {}, "stages": [{**stage, name: value}]}))
    with pytest.raises(ValueError, match=r"prune\.json is damaged"):
        prune_drafter(drafter, target, ROWS, tmp_path, settings(recovery=None))
    del stage[name]
    file.write_text(json.dumps({"settings": {}, "stages": [stage]}))
    with pytest.raises(ValueError, match=r"prune\.json is damaged"):
        prune_drafter(drafter, target, ROWS, tmp_path, settings(recovery=None))


@pytest.mark.parametrize(
    "change", [{"max_steps": -1}, {"max_steps": None, "max_minutes": float("nan")},
               {"learning_rate": 0.0}, {"learning_rate": float("nan")}],
)  # fmt: skip
def test_a_bad_recovery_is_refused_before_anything_is_done(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        settings(recovery=replace(RECOVERY, **change))


@pytest.mark.parametrize(
    ("name", "value"),
    [("margin", -0.1), ("margin", 1.5), ("margin", NAN), ("confidence", 0.0), ("confidence", NAN),
     ("keep_tau", 1.5), ("keep_tau", NAN), ("speedup", 0.0), ("speedup", NAN),
     ("num_ranking", 0), ("num_validation", 0), ("budget", -1), ("min_depth", 0),
     ("min_depth", 1.5), ("min_depth", NAN), ("max_len", 1), ("context_len", 0),
     ("held_out_percent", 0.0), ("held_out_percent", 100.0), ("held_out_percent", NAN),
     ("per_round", 0), ("ranking_block", 1), ("ranking_block", -2)],
)  # fmt: skip
def test_a_bad_setting_is_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be .*, got {value}$"):
        settings(**{name: value})


def test_short_blocks_are_for_layers_that_draft_to_compete() -> None:
    with pytest.raises(ValueError, match=r"^ranking_block must be 0 .*cosine"):
        settings(order="cosine", ranking_block=4)


def test_targets_end_the_run(drafter: Path, target: Target, tmp_path: Path) -> None:
    kept = prune_drafter(drafter, target, ROWS, tmp_path / "a", settings(speedup=1e-9))
    assert len(kept.stages) == 1
    table = prune_drafter(
        drafter, target, ROWS, tmp_path / "b", settings(keep_tau=1.0, recovery=None)
    )
    assert all(one.tau >= table.stages[0].tau for one in table.stages[:-1])
    assert table.stages[-1].depth == 1 or table.stages[-1].tau < table.stages[0].tau


# ---- the estimate -------------------------------------------------------------------------


class Clock:
    """Seconds that only passes take, on a machine that gets slower by the lap."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slowness: Callable[[int], float]) -> None:
        self.now, self.laps, self._slowness = 0.0, 0, slowness
        fake = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr("draftwood.train.prune_cost.time", fake)

    def pass_of(self, seconds: float) -> Callable[[], None]:
        def once() -> None:
            self.now += seconds * self._slowness(self.laps)
            self.laps += 1

        return once


def test_passes_compare_on_a_machine_that_slows_down(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda lap: 1.02**lap)
    costs = (0.01, 0.02, 0.03)
    found = seconds_in_turn([clock.pass_of(cost) for cost in costs])
    for seconds, cost in zip(found, costs, strict=True):
        assert seconds / found[0] == pytest.approx(cost / costs[0], rel=0.05)


@pytest.mark.parametrize(("cost", "rounds"), [(20.0, 5), (0.11, 10), (0.001, 31)])
def test_a_measurement_ends(monkeypatch: pytest.MonkeyPatch, cost: float, rounds: int) -> None:
    clock = Clock(monkeypatch, lambda _: 1.0)
    seconds_in_turn([clock.pass_of(cost)] * 3)
    assert clock.laps == 3 * (1 + rounds)  # the first warms up


@pytest.mark.parametrize(("budget", "max_len"), [(0, 512), (12, 512), (12, 20), (0, 14)])
def test_a_target_runs_its_passes_in_turn_with_the_drafter(
    network: IndependentNetwork, monkeypatch: pytest.MonkeyPatch, budget: int, max_len: int
) -> None:
    model = tiny_model("llama", vocab=VOCAB, dtype=torch.float32, max_position_embeddings=max_len)
    target = Target(model, probe=False)
    seen: list[tuple[str, int, int]] = []
    forward, propose = Target.forward, IndependentDrafter.propose

    def watched_forward(self: Target, tree: Any, caches: Any, taps: Any = ()) -> Any:
        seen.append(("target", len(tree.token_ids), caches[0].length))
        return forward(self, tree, caches, taps)

    def watched_propose(self: IndependentDrafter, contexts: Any, limits: Any) -> Any:
        seen.append(("draft", limits.max_nodes, len(contexts[0].token_ids)))
        return propose(self, contexts, limits)

    monkeypatch.setattr(Target, "forward", watched_forward)
    monkeypatch.setattr(IndependentDrafter, "propose", watched_propose)
    nodes = budget or network.config.horizon
    found = pass_seconds(network, target, nodes, 256, is_chain=budget == 0)
    assert min(found.plain_s, found.verify_s, found.draft_s) > 0
    (_, context_len, _), _, *passes = seen  # the prompt of both
    assert context_len == min(256, max_len - max(nodes + 1, 3 + network.config.block_size))
    anchor = context_len + 3
    assert anchor + network.config.block_size <= max_len
    one_round = [("target", 1, context_len), ("target", nodes + 1, context_len)]
    one_round.append(("draft", nodes, anchor + 1))
    assert len(passes) >= 3 * 6
    assert passes == one_round * (len(passes) // 3)


def test_a_slow_hour_does_not_change_the_estimate(
    drafter: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowness = {3: 1.0, 2: 5.0, 1: 0.5}

    def measured(network: IndependentNetwork, *_: object, **__: object) -> PassSeconds:
        depth = len(network.layers)
        now = slowness[depth]
        return PassSeconds(plain_s=2 * now, verify_s=3 * now, draft_s=depth * now)

    monkeypatch.setattr("draftwood.train.prune.pass_seconds", measured)
    config = settings(recovery=None, order="last")
    for _ in range(2):  # as it is made, and as it is read
        table = prune_drafter(drafter, target, ROWS, tmp_path, config)
        for one in table.stages:
            assert one.draft_s == one.depth * slowness[one.depth]
            assert one.draft_passes == pytest.approx(one.depth / 2)
            assert one.speedup == pytest.approx(one.tau * 2 / (3 + one.depth))


@pytest.mark.parametrize("begun", ["float32", "bfloat16"])
def test_a_continued_command_keeps_its_precision(
    drafter: Path, target: Target, tmp_path: Path, begun: str
) -> None:
    assert begun_precision(tmp_path) is None
    mixed = Accelerator(cpu=True, mixed_precision="bf16") if begun == "bfloat16" else None
    config = settings(recovery=None, order="last", min_depth=3)
    prune_drafter(drafter, target, ROWS, tmp_path, config, accelerator=mixed)
    assert begun_precision(tmp_path) == begun


def test_the_command(tmp_path: Path) -> None:
    save_tiny_folder(tmp_path / "target")
    file = prompts(tmp_path / "sums.jsonl", 16)
    where = ("--target", tmp_path / "target")
    passes("data", *where, "--jsonl", file, "--out", tmp_path / "r", "-n", 12)
    where = (*where, "--data", tmp_path / "r", "--held-out", 30)
    small = ("--head-negatives", 8, "--blocks", 8, "--anchors", 4, "--warmup-steps", 1)
    passes(
        "train", *where, *small, "--out", tmp_path / "run", "--kind", "independent",
        "--layers", "0,1,-1", "--block-size", 4, "--mask-token", 200, "--max-steps", 1, "--borrow",
    )  # fmt: skip
    result = passes(
        "prune", *where, *small, "--drafter", tmp_path / "run" / "draft", "--out", tmp_path / "p",
        "--depth", 2, "--steps", 1, "--budget", 8,
    )  # fmt: skip
    best = Path(result.stdout.strip().splitlines()[-1])
    assert load_independent(best).config.borrows
    rows = list(csv.DictReader((tmp_path / "p" / "prune.csv").open()))
    assert [row["depth"] for row in rows] == ["3", "2"]
    for row in rows:
        plain, verify, draft = (float(row[f"{name}_ms"]) for name in ("plain", "verify", "draft"))
        assert float(row["draft_passes"]) == pytest.approx(draft / plain, rel=0.01)
        speedup = float(row["tau"]) * plain / (draft + verify)
        assert float(row["speedup_estimate"]) == pytest.approx(speedup, rel=0.01)
    assert len(json.loads((tmp_path / "p" / "prune.json").read_text())["stages"]) == 2
