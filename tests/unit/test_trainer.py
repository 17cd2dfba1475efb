"""Trainer: exact resume, safe failures, what is trained; warm start and offline acceptance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_network import HIDDEN, VOCAB, tiny_network
from test_train_batches import example

from draftwood.draft.checkpoint import load_draft
from draftwood.draft.network import DraftNetwork
from draftwood.errors import DraftwoodError
from draftwood.train import state
from draftwood.train.accepted import CHAIN, accepted_lengths, count_cycles
from draftwood.train.anchors import Example
from draftwood.train.evaluate import evaluate
from draftwood.train.loss import UNKNOWN, LossConfig
from draftwood.train.state import RunLog
from draftwood.train.train_config import TrainConfig
from draftwood.train.trainer import Trainer
from draftwood.train.warm_start import draft_vocabulary, match_norms, set_vocabulary, warm_start


class Listed:
    """Training responses held in a list."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = list(examples)

    def refresh(self) -> None:
        pass

    def __len__(self) -> int:
        return len(self.examples)

    def num_anchors(self, index: int) -> int:
        return self.examples[index].num_anchors

    def name(self, index: int) -> str:
        return f"response-{index}"

    def example(self, index: int) -> Example:
        return self.examples[index]


CONFIG = TrainConfig(
    learning_rate=3e-3,
    warmup_steps=2,
    max_steps=6,
    blocks=6,
    blocks_per_response=3,
    log_steps=1,
    short_block=3,
    short_share=0.4,
    head_negatives=8,
    ema_decay=0.9,
    loss=LossConfig(gamma=3.0, distill=0.5),
)


def responses(count: int = 9) -> list[Example]:
    return [example(12 + i, 4, seed=i) for i in range(count)]


def trainer(folder: Path, config: TrainConfig = CONFIG, **changes: object) -> Trainer:
    network = tiny_network(torch.float32, **changes)
    if network.d2t is not None:
        network.d2t.copy_(torch.arange(40) + 10)
    return Trainer(network, Listed(responses()), lambda: responses(2), folder, config)


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "train"]


def test_resume_continues_exactly(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole")
    whole.run()
    first = trainer(tmp_path / "parts")
    for _ in range(3):
        first.step()
    first.save()
    first.step()  # lost: not saved
    second = trainer(tmp_path / "parts")
    assert second.progress.step == 3
    second.run()
    assert losses(tmp_path / "whole")[3:] == losses(tmp_path / "parts")
    assert whole.progress.positions == second.progress.positions
    for name, value in whole.weights().items():
        assert torch.equal(value, second.weights()[name]), name


def test_training_lowers_the_loss_and_ships_a_loadable_folder(tmp_path: Path) -> None:
    run = trainer(tmp_path, replace(CONFIG, max_steps=60, ema_decay=0.0, head_negatives=0))
    run.run()
    values = losses(tmp_path)
    assert np.mean(values[-5:]) < np.mean(values[:5]) - 0.3
    config, network = load_draft(tmp_path / "draft")
    assert config == run.network.config
    torch.testing.assert_close(
        network.fc.weight, run.network.fc.weight.detach(), atol=0.02, rtol=0.02
    )


def test_time_budget_ends_the_schedule(tmp_path: Path) -> None:
    run = trainer(tmp_path, replace(CONFIG, max_steps=None, max_minutes=0.01))
    run.run()
    assert run.progress.elapsed_s >= 0.6
    assert run.schedule.rate(run.progress.step, run.progress.elapsed_s) < 0.05 * 3e-3


def test_frozen_and_borrowed_tables_stay(tmp_path: Path) -> None:
    run = trainer(tmp_path, replace(CONFIG, train_head=False))
    assert run.network.lm_head is not None
    head, lent = run.network.lm_head.weight.clone(), run.network._lent["input"].clone()
    body = run.network.fc.weight.clone()
    run.run()
    assert torch.equal(run.network.lm_head.weight, head)
    assert torch.equal(run.network._lent["input"], lent)
    assert not torch.equal(run.network.fc.weight, body)
    tied = trainer(
        tmp_path / "tied", replace(CONFIG, head_negatives=0), draft_vocab_size=None, own_head=False
    )
    tied.run()
    assert not any("embed" in n or "lm_head" in n for n, _ in tied.network.named_parameters())


def test_head_sampling_needs_an_own_head(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="head_negatives"):
        trainer(tmp_path, draft_vocab_size=None, own_head=False)


def test_non_finite_loss_stops_and_names_the_batch(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.step()
    run.save()
    good = {k: v.clone() for k, v in run.network.state_dict().items()}
    broken = responses()
    for item in broken:
        item.features[2] = float("nan")
    run.batches.source = Listed(broken)
    with pytest.raises(DraftwoodError, match="response-"):
        run.run()
    assert trainer(tmp_path).progress.step == 1
    for name, value in run.network.state_dict().items():
        assert torch.equal(value, good[name]), name


def test_interrupted_save_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(tmp_path)
    run.step()
    run.save()
    run.step()

    def disk_full(value: object, handle: object) -> None:
        handle.write(b"half")  # type: ignore[attr-defined]
        raise OSError("no space left on device")

    monkeypatch.setattr(state.torch, "save", disk_full)
    with pytest.raises(OSError, match="no space"):
        run.save()
    monkeypatch.undo()
    assert trainer(tmp_path).progress.step == 1
    (tmp_path / "step-00000002.tmp").write_bytes(b"half")  # as a kill would leave it
    assert trainer(tmp_path).progress.step == 1


def test_no_usable_response_is_an_error(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.batches.source = Listed([example(5, 5)])
    run.batches.source.examples = [replace(run.batches.source.examples[0], response_start=5)]
    with pytest.raises(ValueError, match="no training response"):
        run.step()


def target_weights(layers: int = 2) -> dict[str, torch.Tensor]:
    """A Llama-style target of the tiny drafter's shape with one key/value head."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    out = {"model.norm.weight": normal(HIDDEN), "model.embed_tokens.weight": normal(VOCAB, HIDDEN)}
    shapes = {"q": (32, HIDDEN), "k": (8, HIDDEN), "v": (8, HIDDEN), "o": (HIDDEN, 32)}
    for i in range(layers):
        p = f"model.layers.{i}."
        out[p + "input_layernorm.weight"] = normal(HIDDEN).abs() + 0.5
        out[p + "post_attention_layernorm.weight"] = normal(HIDDEN)
        for name, shape in shapes.items():
            out[f"{p}self_attn.{name}_proj.weight"] = normal(*shape)
        for name in ("gate_proj", "up_proj"):
            out[f"{p}mlp.{name}.weight"] = normal(48, HIDDEN)
        out[p + "mlp.down_proj.weight"] = normal(HIDDEN, 48)
    return out


def test_warm_start_reproduces_the_targets_context_values() -> None:
    network = tiny_network(torch.float32)
    assert network.d2t is not None
    target = target_weights()
    set_vocabulary(network, torch.arange(40) * 2)
    warm_start(network, target, (1, 0), tap=1)
    network.fc.weight.data[:, :HIDDEN] = 0  # the small noise on the other tap and on this one
    network.fc.weight.data[:, HIDDEN:] = torch.eye(HIDDEN)
    state_in = torch.randn(6, HIDDEN)
    features = torch.cat([torch.randn(6, HIDDEN), state_in], -1)
    for layer, source in zip(network.layers, (1, 0), strict=True):
        p = f"model.layers.{source}."
        normed = torch.nn.functional.rms_norm(
            state_in, (HIDDEN,), target[p + "input_layernorm.weight"], 1e-5
        )
        want = normed @ target[p + "self_attn.v_proj.weight"].t()
        fused = network.hidden_norm(network.fc(features))
        got = layer.self_attn.v_proj(fused)
        torch.testing.assert_close(got, want.repeat(1, 2), atol=1e-4, rtol=1e-4)
    assert network.lm_head is not None
    torch.testing.assert_close(
        network.lm_head.weight, target["model.embed_tokens.weight"][torch.arange(40) * 2]
    )
    match_norms(network, features, torch.randn(5, HIDDEN))
    assert (network.layers[0].self_attn.k_norm.weight > 0).all()


def test_draft_vocabulary_takes_the_heaviest_tokens() -> None:
    weights = np.array([0.0, 5.0, 1.0, 5.0, 0.0, 2.0])
    assert draft_vocabulary(weights, 3).tolist() == [1, 3, 5]
    assert draft_vocabulary(weights, 5).tolist() == [0, 1, 2, 3, 5]
    with pytest.raises(ValueError, match="7"):
        draft_vocabulary(weights, 7)


def brute_force(log_probs: torch.Tensor, labels: list[int], budget: int) -> int:
    """Accepted length in the tree of the ``budget`` most probable prefixes, by enumeration."""
    prefixes: dict[tuple[int, ...], float] = {(): 0.0}
    level = dict(prefixes)
    for row in log_probs:
        level = {(*p, v): s + float(row[v]) for p, s in level.items() for v in range(len(row))}
        prefixes |= level
    del prefixes[()]
    tree = set(sorted(prefixes, key=lambda p: -prefixes[p])[:budget])
    depth = 0
    while depth < len(labels) and tuple(labels[: depth + 1]) in tree:
        depth += 1
    return depth


def test_offline_acceptance_equals_the_enumerated_tree() -> None:
    torch.manual_seed(1)
    log_probs = (2 * torch.randn(30, 3, 5)).log_softmax(-1)
    labels = torch.distributions.Categorical(logits=log_probs).sample()
    labels[::7, 1:] = UNKNOWN
    found = accepted_lengths(log_probs, labels, (CHAIN, 1, 4, 20, 200))
    for a in range(30):
        known = [v for v in labels[a].tolist() if v != UNKNOWN]
        best = log_probs[a].argmax(-1).tolist()
        chain = 0
        while chain < len(known) and known[chain] == best[chain]:
            chain += 1
        assert found[CHAIN][a] == chain
        for budget in (1, 4, 20, 200):
            assert found[budget][a] == brute_force(log_probs[a], known, budget)
    assert found[20].mean() > found[4].mean() > found[1].mean()


def test_cycles_are_replayed() -> None:
    # anchors 0…5; accepting 2 at anchor 0 leads to anchor 3
    assert count_cycles(np.array([2, 0, 0, 0, 9, 0])) == 3
    assert count_cycles(np.array([0, 0, 0])) == 3
    assert count_cycles(np.array([], dtype=np.int64)) == 0


def perfect(items: Sequence[Example]) -> DraftNetwork:
    """A drafter whose block rows always predict token 7 (the mask itself)."""
    network = tiny_network(torch.float32, draft_vocab_size=None, own_head=False)
    for layer in network.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    return network


def test_evaluate_reports_by_domain() -> None:
    items = [replace(example(14, 4, seed=i), domain="ab"[i % 2]) for i in range(4)]
    for item in items[::2]:
        item.token_ids[4:] = 7
    result = evaluate(perfect(items), items, (CHAIN, 8))
    assert set(result) == {"all", "a", "b"}
    assert result["a"].accuracy == (1.0, 1.0, 1.0, 1.0)
    # ten tokens, five per cycle
    assert result["a"].num_cycles[CHAIN] == 4
    assert result["a"].tau(CHAIN) == 5.0
    assert result["b"].tau(CHAIN) == 1.0
    assert result["all"].num_tokens == 40


def test_a_log_forgets_the_steps_that_were_lost(tmp_path: Path) -> None:
    log = RunLog(tmp_path, tensorboard=False)
    for step in range(5):
        log.write("train", step, {"loss": float(step)})
    log.close()
    with (tmp_path / "log.jsonl").open("a") as handle:
        handle.write('{"kind": "train", "st')  # killed meanwhile
    again = RunLog(tmp_path, step=2, tensorboard=False)
    again.write("train", 3, {"loss": 7.0})
    again.close()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 7.0)]


def test_a_log_starts_anew_without_a_checkpoint_and_names_damage(tmp_path: Path) -> None:
    RunLog(tmp_path, tensorboard=False).write("start", 0, {})
    RunLog(tmp_path, tensorboard=False).write("start", 0, {})
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1
    for line in ("nonsense", '{"kind": "train"}', "[]"):
        (tmp_path / "log.jsonl").write_text(line + "\n")
        with pytest.raises(ValueError, match=r"log\.jsonl is damaged"):
            RunLog(tmp_path, step=2, tensorboard=False)
