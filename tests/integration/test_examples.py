"""Every example runs and says what it promises; a tiny model stands in for the demo."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from draftwood.target import load
from tiny import tiny_model
from tiny_folder import tiny_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
# example → what its output must contain
SAYS = {
    "batch": "cancelled after",
    "generate": "cycles, τ = ",
    "stream": "",
    "trace": "lines in",
    "train_drafter": "the same text: True",
    "transformers_dropin": "identical: True",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with a special token that it never writes: training needs one to mask with."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<free>"], special_tokens=True)
    model = tiny_model("llama", dtype=torch.float32, vocab=len(tokenizer), eos_token_id=2)
    with torch.no_grad():
        model.get_output_embeddings().weight[-1] = 0
    path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_every_example_is_known() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_example(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load, "ensure_demo", lambda: folder)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.strip()
    assert SAYS[name] in printed
