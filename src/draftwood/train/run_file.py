"""What a run that is continued must repeat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RUN = "run.json"


def write_run(folder: Path, recipe: Mapping[str, Any], vocabulary: list[int] | None) -> None:
    """What a continued run must repeat, and the vocabulary, which later rows must not change."""
    partial = folder / f"{RUN}.partial"
    partial.write_text(json.dumps({"recipe": dict(recipe), "vocabulary": vocabulary}) + "\n")
    partial.replace(folder / RUN)


def read_run(folder: Path, recipe: Mapping[str, Any]) -> list[int] | None:
    """The stored vocabulary of a run whose recipe must be this one."""
    file = folder / RUN
    if not file.is_file():
        raise ValueError(f"{folder} has checkpoints but no {RUN}; choose another folder")
    stored = json.loads(file.read_text())
    wanted = json.loads(json.dumps(dict(recipe)))
    changed = sorted(name for name in wanted if wanted[name] != stored["recipe"].get(name))
    if changed:
        raise ValueError(
            f"{folder} holds a run with another recipe ({', '.join(changed)}); repeat that one to "
            "continue it, or choose another folder"
        )
    vocabulary: list[int] | None = stored["vocabulary"]
    return vocabulary
