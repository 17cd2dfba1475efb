"""Files in which a folder keeps what it was made with, so that a run continues as it began."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_MOST_SHOWN = 3


def read_kept(file: Path) -> Any:
    """The JSON value in a file.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise damaged(file, error) from error


def write_kept(file: Path, value: Any) -> None:
    """Write a JSON value, whole or not at all."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(file)


def damaged(file: Path, why: object) -> ValueError:
    """The error about a file that is not as it was written."""
    return ValueError(
        f"{file} is damaged or of another version ({why}); restore it, or choose another folder"
    )


def require_same(kept: Mapping[str, Any], now: Mapping[str, Any], folder: Path, what: str) -> None:
    """Refuse to continue what was begun with other settings.

    Args:
        kept, now: settings as JSON values.
        what: that is in the folder, e.g. "replies".

    Raises:
        ValueError: they differ; the first differences are named with both values.
    """
    found = list(differences(kept, now))
    if found:
        more = len(found) - _MOST_SHOWN
        shown = "; ".join(found[:_MOST_SHOWN]) + (f"; {more} more" if more > 0 else "")
        raise ValueError(
            f"{folder} holds {what} made with other settings: {shown}. Repeat those to continue, "
            "or choose another folder"
        )


def differences(kept: Any, now: Any, name: str = "") -> Iterator[str]:
    """What differs between two JSON values, one phrase each: "NAME: OLD there, NEW given"."""
    if isinstance(kept, Mapping) and isinstance(now, Mapping):
        for key in sorted({*kept, *now}):
            yield from differences(kept.get(key), now.get(key), str(key))
    elif isinstance(kept, list) and isinstance(now, list) and len(kept) == len(now):
        for old, new in zip(kept, now, strict=True):
            yield from differences(old, new, name)
    elif isinstance(kept, Mapping) or isinstance(now, Mapping):
        old, new = ("none" if value is None else "some" for value in (kept, now))
        yield f"{name}: {old} there, {new} given"
    elif kept != now:
        yield f"{name}: {_shown(kept)} there, {_shown(now)} given"


def _shown(value: Any) -> str:
    return "the default" if value is None else json.dumps(value, ensure_ascii=False)
