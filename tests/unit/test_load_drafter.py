"""From a name to a drafter, and what is said when there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftwood.draft import load
from draftwood.draft.autoregressive import AutoregressiveDrafter
from draftwood.draft.base import NullDrafter
from draftwood.draft.blend import BlendDrafter
from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.draft.checkpoint import save_draft
from draftwood.draft.load import load_drafter
from draftwood.draft.lookup import LookupDrafter
from draftwood.engine import Engine
from draftwood.sampling import SamplingParams
from draftwood.target.load import load_target
from draftwood.target.model import Target
from draftwood.tree.budget import Fixed
from tiny import tiny_model
from tiny_drafter import tiny_draft_network
from tiny_folder import save_tiny_folder

PROMPT = [5, 6, 7, 8, 5, 6, 7, 9]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(str(save_tiny_folder(tmp_path_factory.mktemp("target"))))


@pytest.fixture
def dflash(target: Target, tmp_path: Path) -> Path:
    network = tiny_draft_network(target)
    return save_draft(tmp_path / "drafter", network.config, network, dtype=torch.float32)


def test_names(target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(load, "_SHIPPED", tmp_path / "nothing")
    assert isinstance(load_drafter(None, target), NullDrafter)
    assert isinstance(load_drafter("none", target), NullDrafter)
    assert isinstance(load_drafter("lookup", target), LookupDrafter)
    assert isinstance(load_drafter("auto", target), LookupDrafter)
    own = LookupDrafter(horizon=3)
    assert load_drafter(own, target) is own


@pytest.mark.parametrize("as_path", [True, False])
def test_dflash_folder(target: Target, dflash: Path, as_path: bool) -> None:
    drafter = load_drafter(dflash if as_path else str(dflash), target)
    assert isinstance(drafter, BlockDiffusionDrafter)
    settings = SamplingParams(max_new_tokens=12)
    (output,) = Engine(target, drafter, Fixed(6)).generate([PROMPT], settings)
    assert output.token_ids == Engine(target).generate([PROMPT], settings)[0].token_ids


def test_causal_language_model_folder(target: Target, tmp_path: Path) -> None:
    folder = save_tiny_folder(tmp_path / "small", family="qwen2")
    drafter = load_drafter(str(folder), target)
    assert isinstance(drafter, AutoregressiveDrafter)
    settings = SamplingParams(max_new_tokens=12)
    (output,) = Engine(target, drafter, Fixed(6)).generate([PROMPT], settings)
    assert output.token_ids == Engine(target).generate([PROMPT], settings)[0].token_ids


def test_auto_takes_the_shipped_drafter_that_fits(
    target: Target, dflash: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_SHIPPED", dflash.parent)
    assert isinstance(load_drafter("shipped", target), BlockDiffusionDrafter)
    both = load_drafter("auto", target)
    assert isinstance(both, BlendDrafter)
    assert isinstance(both.model, BlockDiffusionDrafter)
    assert isinstance(both.lookup, LookupDrafter)
    other = Target(tiny_model("llama", dtype=torch.float32), probe=False)
    assert isinstance(load_drafter("auto", other), LookupDrafter)
    with pytest.raises(ValueError, match="no drafter is shipped"):
        load_drafter("shipped", other)


def test_any_drafter_with_lookup(target: Target, dflash: Path) -> None:
    drafter = load_drafter(f"{dflash}+lookup", target)
    assert isinstance(drafter, BlendDrafter)
    settings = SamplingParams(max_new_tokens=12)
    (output,) = Engine(target, drafter, Fixed(6)).generate([PROMPT], settings)
    assert output.token_ids == Engine(target).generate([PROMPT], settings)[0].token_ids


def test_what_does_not_fit_is_refused(target: Target, dflash: Path, tmp_path: Path) -> None:
    other = Target(tiny_model("llama", dtype=torch.float32), probe=False)
    with pytest.raises(ValueError, match="trained for this target"):
        load_drafter(dflash, other)
    small = save_tiny_folder(tmp_path / "small")
    with pytest.raises(ValueError, match="target's tokenizer"):
        load_drafter(str(small), other)


def test_what_is_not_there_is_said(target: Target, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no drafter 'lokup'"):
        load_drafter("lokup", target)
    with pytest.raises(ValueError, match="no drafter"):
        load_drafter(str(tmp_path / "missing"), target)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_drafter(tmp_path, target)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_drafter(tmp_path, target)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="as a draft model"):
        load_drafter(tmp_path, target)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DFlashDraftModel"]}))
    with pytest.raises(ValueError, match="drafter"):
        load_drafter(tmp_path, target)
    with pytest.raises(ValueError, match="int is no drafter"):
        load_drafter(3, target)  # type: ignore[arg-type]


def test_unknown_hub_ids(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> str:
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(ValueError, match="could not be fetched from the hub: offline"):
        load_drafter("owner/name", target)
