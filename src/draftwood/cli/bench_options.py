"""Options of ``draftwood bench``, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from draftwood.bench.methods import Method, Outside


def writable_results(folder: Path) -> Path:
    """Refuse a folder that cannot be written or continued before the work, not after it."""
    from draftwood.bench.store import FILE, check_writable, read_lines

    try:
        check_writable(folder)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if (folder / FILE).is_file():
        read_lines(folder / FILE)  # damaged, or of another format?
    return folder


def parse_methods(text: str) -> list[Method]:
    """Methods separated by commas; a wrong one is a usage error."""
    from draftwood.bench.methods import parse_method

    try:
        return [parse_method(name) for name in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--methods") from None


def parse_numbers(text: str, kind: type[Any], hint: str) -> list[Any]:
    """Numbers separated by commas, each at least 0 (whole ones at least 1)."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"expected numbers, got {text!r}", param_hint=hint) from None
    if not all((1 if kind is int else 0) <= number < 1e6 for number in found):
        raise typer.BadParameter(f"out of range: {text!r}", param_hint=hint)
    return list(dict.fromkeys(found))


def parse_engines(specs: Sequence[str]) -> dict[str, Outside]:
    """NAME=PYTHON:MODEL of every outside engine."""
    from draftwood.bench.engines.worker import SCRIPTS
    from draftwood.bench.methods import Outside

    found = {}
    for spec in specs:
        name, _, place = spec.partition("=")
        python, _, model = place.partition(":")
        if name not in SCRIPTS or not python or not model:
            raise typer.BadParameter(
                f"expected NAME=PYTHON:MODEL with NAME one of {', '.join(SCRIPTS)}, got {spec!r}",
                param_hint="--engine",
            )
        found[name] = Outside(python, model)
    return found
