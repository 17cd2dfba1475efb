"""What a measurement depends on besides its settings: code, versions, machine, weights."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from draftwood.bench.places import without_places
from draftwood.target.choices import processor_name
from draftwood.target.gguf import sha256

PACKAGES = ("torch", "transformers", "numpy", "tokenizers", "safetensors")
VARIES = ("load_before", "memory_bytes")  # without a change that anyone made
WEIGHTS = ("*.safetensors", "*.st", "*.bin", "*.gguf")


def provenance() -> dict[str, Any]:
    """Command, time, versions, commit and hardware, as JSON; no names of hosts, users, folders."""
    import draftwood

    return {
        "command": _command(sys.argv),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "draftwood": draftwood.__version__,
            "python": platform.python_version(),
            **{name: found for name in PACKAGES if (found := _version(name))},
        },
        "commit": _commit(Path(draftwood.__file__).parent),
        "hardware": _hardware(),
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two commands that may change speeds, in words.

    Args:
        before, now: as ``provenance`` gives them.
    """
    pairs = [("commit", before.get("commit"), now.get("commit"))]
    for part in ("versions", "hardware"):
        old, new = before.get(part, {}), now.get(part, {})
        pairs += [(name, old.get(name), new.get(name)) for name in {**old, **new}]
    return [
        f"{name.replace('_', ' ')} {old} then, {new} now"
        for name, old, new in pairs
        if old != new and name not in VARIES
    ]


def _command(arguments: list[str]) -> str:
    program = Path(arguments[0]).name
    name = "draftwood" if program == "__main__.py" else program
    return shlex.join([name, *map(without_places, arguments[1:])])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit(folder: Path) -> str | None:
    """Commit of the checkout the package runs from, ``-dirty`` if tracked files of it differ.

    Of the package: results that a benchmark has just written elsewhere change no measurement.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return f"{commit}-dirty" if changed or changed is None else commit


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints in a folder; None where it fails."""
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def _hardware() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor_name(),
        "logical_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": _memory_bytes(),
        "load_before": _load(),
    }
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(count)]
        found["cuda"] = torch.version.cuda
    return found


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _load() -> float | None:
    """Other work on the machine: processes that wanted to run during the last minute."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def weights_checksums(name: str) -> dict[str, str]:
    """SHA-256 of every weights file behind a model name; {} for what has none.

    Args:
        name: folder, GGUF file or hub id that has been loaded before, or ``demo``.
    """
    path = _local(name)
    if path is None:
        return {}
    files = [path] if path.is_file() else sorted(f for p in WEIGHTS for f in path.glob(p))
    return {file.name: sha256(file) for file in files}


def _local(name: str) -> Path | None:
    if name == "demo":
        from draftwood.target.demo import ensure_demo

        return ensure_demo()
    path = Path(name).expanduser()
    if path.exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(WEIGHTS), local_files_only=True))
    except (ValueError, HfHubHTTPError, LocalEntryNotFoundError):
        return None
