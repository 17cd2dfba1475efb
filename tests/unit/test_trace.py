"""What a trace says about the run it is of."""

from __future__ import annotations

import json
from pathlib import Path

import draftwood as dw
from draftwood.target.model import Target
from draftwood.trace import tracing
from tiny import tiny_model
from tiny_folder import save_tiny_folder, tiny_tokenizer


def target_in_header(engine: dw.Engine, path: Path) -> str:
    with tracing(engine, path):
        pass
    name: str = json.loads(path.read_text(encoding="utf-8").splitlines()[0])["target"]
    return name


def test_the_target_is_called_as_the_user_called_it(tmp_path: Path) -> None:
    folder = save_tiny_folder(tmp_path / "tiny")
    named = folder.parent / "elsewhere" / ".." / "tiny"
    (folder.parent / "elsewhere").mkdir()
    engine = dw.load(str(named), "none")
    assert target_in_header(engine, tmp_path / "trace.jsonl") == str(named)


def test_a_target_without_a_name_is_called_as_its_model(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", vocab=len(tokenizer))
    model.config.name_or_path = "somebody/tiny"
    engine = dw.load(Target(model, tokenizer, probe=False), "none")
    assert target_in_header(engine, tmp_path / "trace.jsonl") == "somebody/tiny"
    engine = dw.load(Target(model, tokenizer, probe=False, name="demo"), "none")
    assert target_in_header(engine, tmp_path / "trace.jsonl") == "demo"
