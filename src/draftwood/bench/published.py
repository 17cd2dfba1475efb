"""Figures of the papers, to be set beside one's own: other hardware, other models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Published:
    """One published result."""

    set_name: str
    temperature: float
    model: str
    method: str
    speedup: float
    tau: float


@dataclass(frozen=True)
class Source:
    """Published results and where they are from."""

    source: str
    note: str
    rows: list[Published]


def published() -> Source:
    """The figures that ship with the package, each checked against its source."""
    content = json.loads(
        files("draftwood.bench").joinpath("published.json").read_text(encoding="utf-8")
    )
    rows = [Published(*row) for row in content["rows"]]
    return Source(content["source"], content["note"], rows)
