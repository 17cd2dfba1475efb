"""The user's cache of converted models: complete folders only, each built by one process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout
from platformdirs import user_cache_dir
from rich.console import Console

from draftwood.errors import DraftwoodError


def cache_dir() -> Path:
    """Where converted models are kept: ``$DRAFTWOOD_CACHE``, else the user's cache folder."""
    override = os.environ.get("DRAFTWOOD_CACHE")
    return Path(override).expanduser() if override else Path(user_cache_dir("draftwood"))


def find(key: str) -> Path | None:
    """The folder stored under ``key``, or None."""
    folder = cache_dir() / key
    return folder if (folder / "config.json").is_file() else None


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole or not at all, its folder too.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def build_once(key: str, build: Callable[[Path], None]) -> Path:
    """The folder stored under ``key``, built first if it is not there yet.

    Of several processes one builds and the others wait; what an interrupted one left is removed.

    Args:
        key: name of the folder; says everything that its content depends on.
        build: gets a temporary folder and puts the result in its ``model`` subfolder, which takes
            its final name when ``build`` is done. Everything else there is scratch.

    Raises:
        DraftwoodError: the cache folder cannot be written.
    """
    found = find(key)
    if found is not None:
        return found
    root = cache_dir()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{key}.lock"):
            return find(key) or _build(root, key, build)
    except OSError as error:
        raise DraftwoodError(
            f"cannot prepare the model in {root}: {error}. "
            "Free some space there, or set DRAFTWOOD_CACHE to another folder."
        ) from error


def _build(root: Path, key: str, build: Callable[[Path], None]) -> Path:
    # We hold the lock: no other process is at work on this key.
    for leftover in root.glob(f"{key}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    final = root / key
    shutil.rmtree(final, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{key}.partial-", dir=root) as scratch:
        result = Path(scratch) / "model"
        result.mkdir()
        build(Path(scratch))
        os.replace(result, final)
    return final


def _locked(path: Path) -> AcquireReturnProxy:
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        Console(stderr=True).print("Waiting for another process that prepares the same model …")
        return lock.acquire()
