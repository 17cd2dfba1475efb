"""Where things are on a machine is nobody's business: paths in what is written down."""

from __future__ import annotations

import os
import re
from pathlib import Path

# Paths that say where they are, as a whole argument or behind "=", ":", "," or a short option.
_PLACE = re.compile(r"(?:(?<![^=:,])|(?<=^-[A-Za-z]))(?:/|~|\.\.(?=[/\\]|$))[^=:,]*")


def without_places(argument: str) -> str:
    """An argument whose paths are relative to the working directory, or bare names if outside."""
    return _PLACE.sub(lambda found: _relative(found[0]), argument)


def _relative(text: str) -> str:
    path = Path(os.path.abspath(os.path.expanduser(text)))
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return path.name or text


def last_name(model: str) -> str:
    """A model's name without the folders above it, where the name says where it is."""
    return Path(model).name or model if model.startswith(("/", "~", "..")) else model
