"""Folders of independent drafters: written, read back, refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftwood.cli.info import drafter_facts
from draftwood.draft.independent import IndependentDrafter
from draftwood.draft.independent_checkpoint import (
    fingerprint,
    load_independent,
    network_from_model,
    save_independent,
)
from draftwood.draft.independent_config import FAMILIES
from draftwood.draft.independent_network import IndependentNetwork
from draftwood.draft.load import load_drafter
from draftwood.target.model import Target
from tiny import tiny_model
from tiny_folder import tiny_tokenizer

VOCAB = 61
IDS = torch.arange(3, 15)[None]
BLOCK = torch.tensor([[[14, 0, 0, 0]]])
PLAIN = {"use_sliding_window": False, "layer_types": None, "sliding_window": None}


def made(
    family: str = "llama", *, borrows: bool = False, markov_rank: int = 0, **extra: object
) -> IndependentNetwork:
    body = tiny_model(family, vocab=VOCAB, dtype=torch.float32, **PLAIN, **extra)
    return network_from_model(
        body, block_size=4, mask_token_id=0, layers=[0, 2, 3], borrows=borrows,
        markov_rank=markov_rank,
    )  # fmt: skip


def save(folder: Path, network: IndependentNetwork) -> Path:
    return save_independent(folder, network.config, network.state_dict(), dtype=torch.float32)


def target_of(vocab: int = VOCAB, **extra: object) -> Target:
    return Target(tiny_model("llama", vocab=vocab, dtype=torch.float32, **extra), probe=False)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_loads_back_and_is_still_a_language_model(
    tmp_path: Path, family: str, tied: bool
) -> None:
    network = made(family, tie_word_embeddings=tied)
    loaded = load_independent(save(tmp_path / "draft", network))
    assert loaded.config == network.config
    body = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32).eval()
    with torch.no_grad():
        anchor = torch.tensor([[11]])
        context, block = loaded(IDS, anchor, BLOCK)
        torch.testing.assert_close(block, network(IDS, anchor, BLOCK)[1])
        torch.testing.assert_close(loaded.logits(context), body(IDS).logits, rtol=0.0, atol=1e-4)


def test_a_markov_head_is_a_file_that_others_need_not_know(tmp_path: Path) -> None:
    network, alone = made(markov_rank=3), made()
    assert network.markov is not None
    torch.nn.init.normal_(network.markov.out.weight)
    save(tmp_path / "alone", alone)
    folder = save(tmp_path / "draft", network)
    loaded = load_independent(folder)
    assert loaded.config.markov_rank == 3
    assert loaded.state_dict().keys() == network.state_dict().keys()
    for name, value in network.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])
    files = [(one / "model.safetensors").read_bytes() for one in (folder, tmp_path / "alone")]
    assert files[0] == files[1]  # what transformers reads
    assert drafter_facts(str(folder))["Markov head"] == "rank 3"

    raw = json.loads((folder / "config.json").read_text())
    for rank, named in ((0, "unknown: markov"), (10**6, "hidden size"), (1.5, "whole number")):
        section = {**raw["draftwood"], "markov_rank": rank}
        (folder / "config.json").write_text(json.dumps({**raw, "draftwood": section}))
        with pytest.raises(ValueError, match=named):
            load_independent(folder)
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "markov_head.st").unlink()
    with pytest.raises(ValueError, match=r"missing: markov\..* markov_head|markov_head\.st"):
        load_independent(folder)


def test_borrowing_saves_no_tables(tmp_path: Path) -> None:
    target, network = target_of(), made(borrows=True)
    folder = save(tmp_path / "draft", network)
    drafter = load_drafter(folder, target)
    assert isinstance(drafter, IndependentDrafter)
    assert (folder / "model.safetensors").stat().st_size < 4.05 * sum(
        weight.numel() for weight in network.parameters()
    ) + 4096
    network.borrow(target.input_embeddings(), target.output_embeddings())
    with torch.no_grad():
        expected = network.logits(network(IDS, torch.tensor([[11]]), BLOCK)[1])
        mine = drafter._network.logits(drafter._network(IDS, torch.tensor([[11]]), BLOCK)[1])
    torch.testing.assert_close(mine, expected)


def test_its_facts_are_shown(tmp_path: Path) -> None:
    facts = drafter_facts(str(save(tmp_path / "draft", made(borrows=True))))
    assert facts["block size"] == "4 (drafts 3 tokens)"
    assert facts["layers"] == "3 (of its body: 0 2 3)"
    assert facts["embeddings and head"] == "the target's"


def test_other_vocabularies_and_tokenizers_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "draft", made())
    with pytest.raises(ValueError, match="61 tokens, the target's 62"):
        load_drafter(folder, target_of(62))
    raw = json.loads((folder / "config.json").read_text())
    tokenizer = tiny_tokenizer()
    raw["draftwood"]["tokenizer"] = fingerprint(tokenizer)
    (folder / "config.json").write_text(json.dumps(raw))
    target = target_of()
    assert isinstance(load_drafter(folder, target), IndependentDrafter)  # nothing to compare with
    target.tokenizer = tokenizer
    assert isinstance(load_drafter(folder, target), IndependentDrafter)
    swapped = {**tokenizer.get_vocab(), "a": 5, "b": 4}
    target.tokenizer = SimpleNamespace(get_vocab=lambda: swapped)
    with pytest.raises(ValueError, match="tokenizer"):
        load_drafter(folder, target)


def test_a_borrower_of_another_width_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "draft", made(borrows=True))
    with pytest.raises(ValueError, match="hidden size is 32 and the target's 48"):
        load_drafter(folder, target_of(hidden_size=48))


SECTION = {
    "kind": "independent", "layers": [0, 2, 3], "block_size": 8, "mask_token_id": 1,
    "borrows": False, "tokenizer": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 4}, "num_hidden_layers = 4 but keeps layers"),
        ({"model_type": "gemma2"}, "of type 'gemma2'"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"draftwood": {**SECTION, "block_size": None}}, "lacks 'block_size'"),
        ({"draftwood": {**SECTION, "block_size": 8.5}}, "'block_size' .* whole number, got 8.5"),
        ({"draftwood": {**SECTION, "mask_token_id": "x"}}, "'mask_token_id' .* got 'x'"),
        ({"draftwood": {**SECTION, "layers": "all"}}, "'layers' .* list of numbers, got 'all'"),
        (
            {"draftwood": {k: v for k, v in SECTION.items() if k != "tokenizer"}},
            "lacks 'tokenizer'",
        ),
        ({"draftwood": {**SECTION, "kind": "other"}}, "not of kind 'independent'"),
        ({"draftwood": None}, "not of kind 'independent'"),
        ({"draftwood": {**SECTION, "borrows": "no"}}, "'borrows' .* true or false, got 'no'"),
        ({"hidden_size": -576}, r"config\.json: hidden_size must be"),
        ({"hidden_size": [1]}, r"config\.json describes no drafter"),
        ({"num_key_value_heads": -3}, r"config\.json: num_key_value_heads must be"),
        ({"rope_parameters": "x"}, r"config\.json describes no drafter"),
    ],
)
def test_configurations_that_cannot_be_run_are_refused(
    tmp_path: Path, change: dict, message: str
) -> None:
    folder = save(tmp_path / "draft", made())
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(ValueError, match=message):
        load_independent(folder)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    network = made()
    state = {k: v for k, v in network.state_dict().items() if k != "layers.1.mlp.up_proj.weight"}
    folder = save_independent(tmp_path / "draft", network.config, state)
    with pytest.raises(ValueError, match=r"missing: layers.1.mlp.up_proj.weight"):
        load_independent(folder)
