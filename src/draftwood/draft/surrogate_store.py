"""What was learned about a drafter's probabilities, kept from one run to the next."""

from __future__ import annotations

import contextlib
import hashlib
import json
import weakref
from pathlib import Path
from typing import Any

import draftwood
from draftwood.draft.load import drafter_folder
from draftwood.draft.surrogate import Surrogate
from draftwood.target.model import Target
from draftwood.target.store import cache_dir, write_text

FORMAT = 1


def stored_surrogate(drafter: str, target: Target) -> Surrogate:
    """The surrogate of a drafter on a target, as an earlier run left it, or a new one.

    It stores itself every few dozen cycles and when it is dropped; of processes that run at the
    same time the last one to write wins. A file that is invalid in any way is ignored.

    Args:
        drafter: the name it was loaded by; a changed checkpoint in a local folder, or in this
            package, is another one.
        target: the model it drafts for.
    """
    key = surrogate_key(drafter, target)
    path = surrogate_path(key)

    def keep(state: dict[str, Any]) -> None:
        # A cache that cannot be written only costs what was learned.
        with contextlib.suppress(OSError):
            write_text(path, json.dumps({"format": FORMAT, "key": key, "state": state}))

    surrogate = Surrogate(keep)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] == FORMAT and content["key"] == key:
            surrogate.restore(content["state"])
    return surrogate


def keep_at_end(owner: object, surrogate: Surrogate) -> None:
    """Store ``surrogate`` once more when ``owner`` is gone or the interpreter ends."""
    weakref.finalize(owner, surrogate.store)


def surrogate_key(drafter: str, target: Target) -> dict[str, str]:
    """Identity of a drafter and a target."""
    folder = drafter_folder(drafter, target)
    files = sorted(folder.iterdir()) if folder is not None else []
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    stamps = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return {
        "drafter": drafter,
        "folder": str(folder.resolve()) if folder is not None else "",
        "drafter_files": repr(stamps),
        "target": str(getattr(target.model.config, "name_or_path", "")),
        "target_shape": f"{target.num_layers} {target.hidden_size} {target.vocab_size}",
        "draftwood": draftwood.__version__,
    }


def surrogate_path(key: dict[str, str]) -> Path:
    """Where the surrogate of ``key`` is kept."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return cache_dir() / "surrogates" / f"{digest}.json"
