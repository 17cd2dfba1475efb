"""Drafter folders: every documented layout, strictness, atomic saving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_network import HIDDEN, VOCAB, features, tiny_config, tiny_network

from draftwood.draft import folder as files
from draftwood.draft.checkpoint import check_compatible, load_draft, save_draft
from draftwood.draft.config import FULL, SLIDING
from draftwood.draft.config_json import config_to_json, parse_config

LAYER_KEYS: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "model_type": "qwen3",
}


def z_lab() -> dict[str, Any]:
    """A z-lab config.json as written with transformers 4."""
    return {
        **LAYER_KEYS,
        "architectures": ["DFlashDraftModel"],
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "block_size": 5,
        "num_target_layers": 4,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 3]},
    }


def speculators() -> dict[str, Any]:
    """A speculators config.json."""
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": {**LAYER_KEYS, "rope_parameters": {"rope_theta": 10_000.0}},
        "aux_hidden_state_layer_ids": [2, 4],
        "block_size": 5,
        "mask_token_id": 7,
        "draft_vocab_size": 40,
        "sliding_window_non_causal": False,
    }


def weights(**extra: torch.Tensor) -> dict[str, torch.Tensor]:
    """Weight file of a two-layer drafter without tables of its own, named by hand."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    out = {"fc.weight": normal(HIDDEN, 2 * HIDDEN), "hidden_norm.weight": normal(HIDDEN)}
    out["norm.weight"] = normal(HIDDEN)
    for i in range(2):
        p = f"layers.{i}."
        out[p + "input_layernorm.weight"] = normal(HIDDEN)
        out[p + "post_attention_layernorm.weight"] = normal(HIDDEN)
        out[p + "self_attn.q_proj.weight"] = normal(32, HIDDEN)
        out[p + "self_attn.k_proj.weight"] = normal(16, HIDDEN)
        out[p + "self_attn.v_proj.weight"] = normal(16, HIDDEN)
        out[p + "self_attn.o_proj.weight"] = normal(HIDDEN, 32)
        out[p + "self_attn.q_norm.weight"] = normal(8)
        out[p + "self_attn.k_norm.weight"] = normal(8)
        out[p + "mlp.gate_proj.weight"] = normal(48, HIDDEN)
        out[p + "mlp.up_proj.weight"] = normal(48, HIDDEN)
        out[p + "mlp.down_proj.weight"] = normal(HIDDEN, 48)
    return {**out, **extra}


def own_tables() -> dict[str, torch.Tensor]:
    chosen = torch.arange(5, 85, 2)
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[chosen] = True
    return {
        "embed_tokens.weight": torch.randn(VOCAB, HIDDEN),
        "lm_head.weight": torch.randn(40, HIDDEN),
        "d2t": chosen - torch.arange(40),
        "t2d": mask,
    }


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def draft_logits(folder: Path, table: torch.Tensor | None = None) -> torch.Tensor:
    _, network = load_draft(folder)
    if table is not None:
        network.borrow(table, table)
    where = torch.arange(6)[None]
    kv = network.context_kv(features(6, torch.float32), where)
    return network.draft(torch.tensor([4]), torch.tensor([6]), kv, where)


def test_z_lab_layout(tmp_path: Path) -> None:
    config, network = load_draft(write(tmp_path / "d", z_lab(), weights()))
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (5, 7, (1, 3))
    assert config.layer_types == (FULL, FULL)
    assert config.is_causal == (False, False)
    assert not config.own_embeddings
    assert not config.own_head
    assert torch.equal(network.fc.weight, weights()["fc.weight"])
    assert not any(p.requires_grad for p in network.parameters())


def test_equivalent_spellings_give_the_same_drafter(tmp_path: Path) -> None:
    table = torch.randn(VOCAB, HIDDEN)
    base = z_lab()
    inside = json.loads(json.dumps(base))
    inside["dflash_config"]["block_size"] = inside.pop("block_size")
    new_rope = {k: v for k, v in base.items() if not k.startswith("rope")}
    new_rope["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    flat = {**base, **base["dflash_config"]}
    del flat["dflash_config"]
    expected = draft_logits(write(tmp_path / "base", base, weights()), table)
    for i, other in enumerate((inside, new_rope, flat)):
        got = draft_logits(write(tmp_path / str(i), other, weights()), table)
        assert torch.equal(got, expected)


def test_rope_parameters_decide_and_theta_matters(tmp_path: Path) -> None:
    table = torch.randn(VOCAB, HIDDEN)
    base = draft_logits(write(tmp_path / "a", z_lab(), weights()), table)
    other = {**z_lab(), "rope_theta": 100.0}
    assert not torch.allclose(draft_logits(write(tmp_path / "b", other, weights()), table), base)
    both = {**other, "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"}}
    assert torch.equal(draft_logits(write(tmp_path / "c", both, weights()), table), base)


def test_rope_scaling_of_transformers_4() -> None:
    raw = {**z_lab(), "rope_scaling": {"type": "linear", "factor": 2.0}}
    config = parse_config(raw, has_embeddings=False, has_head=False)
    assert (config.rope.kind, config.rope.theta) == ("linear", 10_000.0)
    assert config.rope.parameters["factor"] == 2.0


def test_sliding_layers_are_causal_unless_told_otherwise() -> None:
    raw = {**z_lab(), "layer_types": [SLIDING, FULL], "sliding_window": 6}
    config = parse_config(raw, has_embeddings=False, has_head=False)
    assert config.is_causal == (True, False)
    assert (config.window(0), config.window(1)) == (6, None)
    for key, value, expected in (
        ("is_causal", False, (False, False)),
        ("is_causal", True, (True, True)),
        ("sliding_window_non_causal", True, (False, False)),
    ):
        changed = parse_config({**raw, key: value}, has_embeddings=False, has_head=False)
        assert changed.is_causal == expected


def test_window_without_sliding_layers_is_ignored() -> None:
    raw = {**z_lab(), "layer_types": [FULL, FULL], "sliding_window": 4096}
    assert parse_config(raw, has_embeddings=False, has_head=False).sliding_window is None


def test_speculators_layout(tmp_path: Path) -> None:
    tables = own_tables()
    folder = write(tmp_path / "s", speculators(), weights(**tables))
    config, network = load_draft(folder)
    assert config.target_layer_ids == (1, 3)
    assert config.own_embeddings
    assert config.own_head
    assert torch.equal(network.target_ids(), torch.arange(5, 85, 2))
    same = {**z_lab(), "draft_vocab_size": 40}
    native = write(tmp_path / "z", same, weights(**tables))
    assert torch.equal(draft_logits(folder), draft_logits(native))


def test_whole_vocabulary_needs_no_map(tmp_path: Path) -> None:
    raw = {**speculators(), "draft_vocab_size": VOCAB}
    own = {"lm_head.weight": torch.randn(VOCAB, HIDDEN)}
    config, network = load_draft(write(tmp_path / "s", raw, weights(**own)))
    assert config.draft_vocab_size is None
    assert network.target_ids() is None


REFUSED = {
    "mask id": ({"dflash_config": {"target_layer_ids": [1, 3]}}, "mask_token_id"),
    "taps": ({"dflash_config": {"mask_token_id": 7}}, "target_layer_ids"),
    "block size": ({"block_size": None}, "block_size"),
    "tiny block": ({"block_size": 1}, "block_size"),
    "rope": ({"rope_theta": None}, "rope_theta"),
    "dynamic rope": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    "anchor predicts": ({"sample_from_anchor": True}, "sample_from_anchor"),
    "other projector": ({"projector_type": "domino"}, "projector_type"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "vague windows": ({"use_sliding_window": True}, "layer_types"),
    "unknown layer": ({"layer_types": [FULL, "chunked_attention"]}, "chunked_attention"),
    "missing window": ({"layer_types": [FULL, SLIDING]}, "sliding_window"),
    "mask outside": (
        {"dflash_config": {"mask_token_id": VOCAB, "target_layer_ids": [1]}},
        "mask_token_id",
    ),
    "tap twice": (
        {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 1]}},
        "target_layer_ids",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_incomplete_or_foreign_configurations_are_refused(tmp_path: Path, name: str) -> None:
    change, naming = REFUSED[name]
    with pytest.raises(ValueError, match=naming):
        load_draft(write(tmp_path / "d", {**z_lab(), **change}, weights()))


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": [1]},
        {"rope_theta": 0, "rope_parameters": None},
        {"rope_theta": float("nan"), "rope_parameters": None},
        {"rope_scaling": {"rope_type": "linear", "factor": 0}, "rope_parameters": None},
        {"dflash_config": "x"},
        {"layer_types": 5},
        {"dflash_config": {"mask_token_id": 7, "target_layer_ids": 5}},
        {"dflash_config": {"mask_token_id": 1.7, "target_layer_ids": [1, 3]}},
        {"hidden_size": [1]},
        {"hidden_size": -576},
        {"hidden_size": "abc"},
        {"num_key_value_heads": -3},
        {"rms_norm_eps": "x"},
        {"rms_norm_eps": 0},
        {"block_size": 2.5},
        {"sliding_window": -3, "layer_types": [SLIDING, FULL]},
    ],
    ids=repr,
)
def test_what_a_configuration_must_not_say_names_the_file(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        load_draft(write(tmp_path / "d", {**z_lab(), **change}, weights()))


@pytest.mark.parametrize("text", ["[" * 100_000, b"\xff\xfe", "[1]", "{"])
def test_files_that_are_no_json_object(tmp_path: Path, text: str | bytes) -> None:
    path = write(tmp_path / "d", z_lab(), weights())
    (path / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_draft(path)


@pytest.mark.parametrize(
    "index", [{"weight_map": [1]}, {"weight_map": None}, {"weight_map": {"a": 3}}]
)
def test_a_damaged_index(tmp_path: Path, index: dict[str, Any]) -> None:
    path = write(tmp_path / "d", z_lab(), weights())
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json"):
        load_draft(path)


def test_embedding_tap_of_speculators_is_refused(tmp_path: Path) -> None:
    raw = {**speculators(), "aux_hidden_state_layer_ids": [0, 2]}
    with pytest.raises(ValueError, match="aux_hidden_state_layer_ids"):
        load_draft(write(tmp_path / "d", raw, weights(**own_tables())))
    with pytest.raises(ValueError, match="eagle3"):
        load_draft(write(tmp_path / "d", {**raw, "speculators_model_type": "eagle3"}, weights()))


def test_every_missing_and_unknown_weight_is_listed(tmp_path: Path) -> None:
    tensors = weights()
    tensors["model.norm.weight"] = tensors.pop("norm.weight")
    del tensors["layers.1.self_attn.q_norm.weight"]
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    with pytest.raises(ValueError, match="do not fit") as caught:
        load_draft(write(tmp_path / "d", z_lab(), tensors))
    text = str(caught.value)
    assert "missing: norm.weight" in text
    assert "missing: layers.1.self_attn.q_norm.weight" in text
    assert "unknown: model.norm.weight" in text
    assert "fc.weight is [32, 63]" in text


def test_reduced_vocabulary_needs_map_and_head(tmp_path: Path) -> None:
    raw = {**z_lab(), "draft_vocab_size": 40}
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        load_draft(write(tmp_path / "a", raw, weights()))
    head = {"lm_head.weight": own_tables()["lm_head.weight"]}
    with pytest.raises(ValueError, match="missing: d2t"):
        load_draft(write(tmp_path / "b", raw, weights(**head)))
    tables = {**own_tables(), "d2t": torch.full((40,), VOCAB)}
    with pytest.raises(ValueError, match="d2t"):
        load_draft(write(tmp_path / "c", raw, weights(**tables)))
    tables = {**own_tables(), "d2t": -torch.arange(40)}
    with pytest.raises(ValueError, match="distinct"):
        load_draft(write(tmp_path / "d", raw, weights(**tables)))


def test_damaged_or_absent_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no drafter folder"):
        load_draft(tmp_path / "nowhere" / "at" / "all")
    folder = tmp_path / "d"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"config\.json"):
        load_draft(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="valid JSON"):
        load_draft(folder)
    write(folder, z_lab(), weights())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged"):
        load_draft(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": (SLIDING, FULL), "sliding_window": 6, "is_causal": (True, False)},
        {"layer_types": (SLIDING, FULL), "sliding_window": 6, "is_causal": (False, False)},
        {"draft_vocab_size": None, "own_head": False},
        {"own_embeddings": True, "logit_softcap": 30.0, "embedding_scale": 2.0},
    ],
)
def test_save_and_load_round_trip(tmp_path: Path, changes: dict[str, Any]) -> None:
    network = tiny_network(torch.float32, **changes)
    if network.d2t is not None:
        network.d2t.copy_(torch.arange(3, 83, 2) - torch.arange(40))
    save_draft(tmp_path / "d", network.config, network, dtype=torch.float32)
    config, loaded = load_draft(tmp_path / "d")
    assert config == network.config
    for name, value in network.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    save_draft(tmp_path / "half", network.config, network)
    stored = load_file(tmp_path / "half" / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.bfloat16
    assert all(t.dtype == torch.int64 for n, t in stored.items() if n == "d2t")


def test_saved_configuration_reads_in_transformers(tmp_path: Path) -> None:
    from transformers import Qwen3Config

    config = tiny_config()
    read = Qwen3Config(**config_to_json(config))
    assert read.head_dim == config.head_dim
    assert read.rope_parameters["rope_theta"] == config.rope.theta
    assert list(read.layer_types) == [FULL, FULL]


def test_interrupted_save_keeps_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = tiny_network(torch.float32)
    network.d2t.copy_(torch.arange(40) - torch.arange(40))  # type: ignore[union-attr]
    folder = save_draft(tmp_path / "d", network.config, network, dtype=torch.float32)
    before = network.fc.weight.clone()
    network.fc.weight.data.zero_()

    def disk_full(tensors: object, file: Path, **_: object) -> None:
        Path(file).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(files, "save_file", disk_full)
    with pytest.raises(OSError, match="no space"):
        save_draft(folder, network.config, network, dtype=torch.float32)
    assert torch.equal(load_draft(folder)[1].fc.weight, before)
    with pytest.raises(OSError, match="no space"):
        save_draft(tmp_path / "new", network.config, network)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d"]
    monkeypatch.undo()
    save_draft(folder, network.config, network, dtype=torch.float32)
    assert not load_draft(folder)[1].fc.weight.any()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d"]


def test_check_compatible() -> None:
    config = tiny_config()
    right = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_layers": 4}
    check_compatible(config, **right)
    for change, naming in (
        ({"vocab_size": 91}, "91"),
        ({"hidden_size": 64}, "64"),
        ({"num_layers": 5}, "4 layers"),
    ):
        with pytest.raises(ValueError, match=naming):
            check_compatible(config, **{**right, **change})
    unrecorded = tiny_config(num_target_layers=None)
    with pytest.raises(ValueError, match=r"layers \[3\]"):
        check_compatible(unrecorded, vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=3)
