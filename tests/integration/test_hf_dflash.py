"""Our drafters in transformers' own DFlash loop: the same tokens and the same cycles as ours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import draftwood as dw
from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.draft.checkpoint import load_draft, save_draft
from draftwood.draft.config import FULL, SLIDING, DraftConfig
from draftwood.draft.hf_adapter import DFlashAssistant, DraftRows
from draftwood.engine import Engine
from draftwood.target.model import Target
from draftwood.train import DataUse, Recipe, TrainConfig, train_drafter
from draftwood.train.target_side import ResponseRow
from draftwood.tree.budget import parse_budget
from tiny import tiny_model
from tiny_drafter import tiny_draft_network

PROMPTS = ([5, 9, 11, 3, 9, 9, 20], [7], [4, 8, 15, 16, 23, 42, 4, 8, 15, 16, 23])
NUM_NEW = 40


@dataclass
class Case:
    """A tiny target and a folder with a drafter that knows its replies to ``PROMPTS`` well."""

    target: Target
    folder: Path


class Cycles:
    """A streamer that counts the tokens handed out together; the first are the prompt."""

    def __init__(self) -> None:
        self.lens: list[int] = []

    def put(self, token_ids: torch.Tensor) -> None:
        self.lens.append(token_ids.numel())

    def end(self) -> None:
        pass


def make_case(family: str, draft_vocab: int | None, folder: Path) -> Case:
    target = Target(tiny_model(family))
    engine = Engine(target)
    params = dw.SamplingParams(max_new_tokens=NUM_NEW)
    outputs = [engine.generate(prompt, params)[0] for prompt in PROMPTS]
    rows = [
        ResponseRow((*prompt, *out.token_ids), len(prompt), "")
        for prompt, out in zip(PROMPTS, outputs, strict=True)
    ]
    recipe = Recipe(96, layers=(0, 2), block_size=6, draft_vocab_size=draft_vocab)
    config = TrainConfig(
        learning_rate=5e-3, warmup_steps=5, max_steps=60, blocks=48, blocks_per_response=16
    )
    use = DataUse(held_out_percent=0, cache_features=False, top_k=0)
    train_drafter(tiny_model(family).float(), rows, folder, recipe, config, use=use)
    return Case(target, folder / "draft")


@pytest.fixture(scope="module", params=[("llama", None), ("qwen3", 60)], ids=str)
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(*request.param, tmp_path_factory.mktemp("run"))


def theirs(case: Case, assistant: DFlashAssistant, prompt: list[int], **settings: Any) -> Any:
    """(tokens, tokens per cycle) of transformers' loop."""
    cycles = Cycles()
    ids = case.target.model.generate(
        torch.tensor([prompt]), assistant_model=assistant, speculation_type="dflash",
        max_new_tokens=NUM_NEW, streamer=cycles, **{"do_sample": False, **settings},
    )  # fmt: skip
    return ids[0, len(prompt) :].tolist(), cycles.lens[1:]


def check_same_cycles(case: Case, folder: Path) -> float:
    """Compare both loops on all prompts; returns tokens per cycle."""
    assistant = DFlashAssistant.from_pretrained(folder, dtype=torch.float64)
    _, network = load_draft(folder, dtype=torch.float64)
    engine = Engine(case.target, BlockDiffusionDrafter(network, case.target), parse_budget("chain"))
    all_lens: list[int] = []
    for prompt in PROMPTS:
        tokens, lens = theirs(case, assistant, prompt)
        # their first cycle takes one token from the prompt's own pass and drafts nothing
        assert lens[0] == 1
        params = dw.SamplingParams(max_new_tokens=NUM_NEW - 1)
        ours = engine.generate([*prompt, tokens[0]], params)[0]
        assert tokens == [tokens[0], *ours.token_ids]
        assert lens[1:] == [cycle.num_committed for cycle in ours.cycles]
        all_lens += lens[1:]
    return sum(all_lens) / len(all_lens)


def test_same_tokens_and_acceptance_lengths(case: Case) -> None:
    tau = check_same_cycles(case, case.folder)
    assert tau > 1.5, tau  # the comparison says something


@pytest.mark.parametrize("causal", [False, True])
def test_sliding_draft_layers(case: Case, causal: bool, tmp_path: Path) -> None:
    config, network = load_draft(case.folder)
    changed: DraftConfig = replace(
        config, layer_types=(SLIDING, FULL), sliding_window=9, is_causal=(causal, False)
    )
    folder = save_draft(tmp_path / "sliding", changed, network, dtype=torch.float32)
    assert check_same_cycles(case, folder) > 1.1


def test_sampling_runs_and_one_assistant_serves_many_calls(case: Case) -> None:
    assistant = DFlashAssistant.from_pretrained(case.folder, dtype=torch.float64)
    first = theirs(case, assistant, PROMPTS[0])
    torch.manual_seed(0)
    sampled, lens = theirs(case, assistant, PROMPTS[0], do_sample=True, temperature=0.8)
    assert len(sampled) == sum(lens) == NUM_NEW
    assert theirs(case, assistant, PROMPTS[0]) == first


def test_own_head_travels_with_the_rows() -> None:
    rows = DraftRows.of(torch.randn(1, 4, 8), lambda hidden: hidden.sum(-1, keepdim=True))
    weight = torch.randn(30, 8)
    scores = torch.nn.Linear(8, 30, bias=False)(rows[:, 1:].to(weight.device))
    assert type(scores) is torch.Tensor
    assert torch.equal(scores, rows.as_subclass(torch.Tensor)[:, 1:].sum(-1, keepdim=True))
    assert type(rows + 1) is torch.Tensor


def test_refusals() -> None:
    target = Target(tiny_model("llama"))
    network = tiny_draft_network(target)  # taps the last layer
    with pytest.raises(ValueError, match="last layer"):
        DFlashAssistant(network)
    network.config = replace(network.config, target_layer_ids=(0, 1), embedding_scale=8.0)
    with pytest.raises(ValueError, match="embedding"):
        DFlashAssistant(network)
