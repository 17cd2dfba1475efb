"""What a run that is continued must repeat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftwood.train.kept import damaged, read_kept, require_same, write_kept

RUN = "run.json"
HELD_OUT = "held_out_percent"
MARKOV_RANK = "markov_rank"


def write_run(folder: Path, recipe: Mapping[str, Any], vocabulary: list[int] | None) -> None:
    """What a continued run must repeat, and the vocabulary, which later rows must not change."""
    write_kept(folder / RUN, {"recipe": dict(recipe), "vocabulary": vocabulary})


def read_run(folder: Path, recipe: Mapping[str, Any]) -> list[int] | None:
    """The stored vocabulary of a run whose recipe must be this one."""
    file = folder / RUN
    if not file.is_file():
        raise ValueError(f"{folder} has checkpoints but no {RUN}; choose another folder")
    stored = read_kept(file)
    try:
        old, vocabulary = dict(stored["recipe"]), stored["vocabulary"]
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(file, repr(error)) from error
    wanted = json.loads(json.dumps(dict(recipe)))
    # What a newer version also writes down was not a choice then.
    old.setdefault(HELD_OUT, wanted.get(HELD_OUT))
    if not wanted.get(MARKOV_RANK):
        old.setdefault(MARKOV_RANK, wanted.get(MARKOV_RANK))
    require_same({name: old.get(name) for name in wanted}, wanted, folder, "a run")
    return vocabulary
