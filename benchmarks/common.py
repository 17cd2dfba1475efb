"""What the scripts in this folder share: prompts, drafters by name, result files."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from draftwood.draft.base import Drafter
from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.draft.load import load_drafter
from draftwood.request import encode
from draftwood.target.model import Target

HERE = Path(__file__).parent
RESULTS = HERE / "results"
sys.path.insert(0, str(HERE.parent / "tests"))  # the oracle and the random drafter are test helpers


def read_prompts(count: int | None = None) -> list[str]:
    """The first ``count`` prompts of ``prompts.jsonl``."""
    lines = (HERE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["turns"][0] for line in lines[:count]]


def encode_prompts(target: Target, count: int | None = None) -> list[list[int]]:
    """The same as token ids, in the target's chat template."""
    return [encode(target, text, raw=False) for text in read_prompts(count)]


def named_drafter(
    name: str, target: Target, futures: Mapping[tuple[int, ...], Sequence[int]] | None = None
) -> Drafter:
    """A new drafter: ``oracle`` (needs ``futures``), ``random``, or what ``draftwood.load`` knows.

    ``random`` is a two-layer block-diffusion network with random weights: the cost of a real one.

    Raises:
        ValueError: there is no such drafter for this target.
    """
    if name == "oracle":
        from oracle import NoisyOracleDrafter

        assert futures is not None
        return NoisyOracleDrafter(futures)
    if name == "random":
        from tiny_drafter import tiny_draft_network

        return BlockDiffusionDrafter(tiny_draft_network(target), target)
    return load_drafter(name, target)


def machine() -> dict[str, Any]:
    """What a measurement depends on besides the code."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }


def save(name: str, folder: Path = RESULTS, **content: Any) -> Path:
    """Write ``results/<name>.json``."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
