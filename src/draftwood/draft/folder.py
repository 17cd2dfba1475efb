"""Files of a drafter's folder: fetched, read strictly, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MARKOV = "markov_head.st"
"""Weights of a Markov head (safetensors). Other engines read every ``*.safetensors`` of a folder
and refuse weights they do not know; without this one it is a plain DFlash drafter to them."""

MARKOV_PREFIX = "markov."
"""Of the names of these weights in a network."""

# Written by speculators for its own use; the drafter needs none of them.
_IGNORED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Whatever is wrong with what ``file`` says becomes a ValueError that names it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    except (TypeError, AttributeError, KeyError, ArithmeticError) as error:
        raise ValueError(f"{file} describes no drafter ({error}); restore the file") from error


def find_folder(path: str | os.PathLike[str], revision: str | None) -> Path:
    """A local folder, or that of a hub id, fetched."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists() or str(path).count("/") != 1 or str(path).startswith((".", "/", "~")):
        raise ValueError(
            f"{str(path)!r} is no drafter folder; give a folder or a hub id (owner/name)"
        )
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", MARKOV]
        return Path(snapshot_download(str(path), revision=revision, allow_patterns=patterns))
    except Exception as error:
        raise ValueError(
            f"{str(path)!r} is no local folder and could not be fetched from the hub: {error}"
        ) from error


def instead(folder: Path) -> str:
    """What to do about a folder that is neither a drafter nor a model."""
    inner = folder / "draft"  # of a training or pruning run
    if (inner / CONFIG).is_file():
        return f"the drafter of this run is {inner}"
    return "it is neither a drafter nor a model folder"


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``; anything else is a ValueError."""
    if not file.is_file():
        raise ValueError(f"{file.parent} has no {file.name}; {instead(file.parent)}")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON ({error}); restore the file") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file} must hold a JSON object; restore the file")
    return raw


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files."""
    files = [folder / WEIGHTS]
    if not files[0].is_file() and (folder / INDEX).is_file():
        with reading(folder / INDEX):
            names = set(read_json(folder / INDEX).get("weight_map", {}).values())
            files = [folder / name for name in sorted(names)]
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        if not file.is_file():
            raise ValueError(f"{folder} has no {file.name}; copy or train the drafter again")
        weights.update(read_tensors(file))
    return {name: value for name, value in weights.items() if name not in _IGNORED}


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}); copy it again") from error


def read_markov(folder: Path) -> dict[str, torch.Tensor]:
    """Weights of the folder's Markov head, under their names in the network; none without one."""
    file = folder / MARKOV
    if not file.is_file():
        return {}
    ours = read_tensors(file)
    strange = sorted(name for name in ours if not name.startswith(MARKOV_PREFIX))
    if strange:
        raise ValueError(f"{file} holds {strange}, which are no part of a Markov head")
    return ours


def markov_apart(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, bytes]]:
    """The weights that every engine knows, and the file of those of a Markov head, if any."""
    ours = {name: value for name, value in tensors.items() if name.startswith(MARKOV_PREFIX)}
    rest = {name: value for name, value in tensors.items() if name not in ours}
    return rest, {MARKOV: save(ours)} if ours else {}


def on_disk(state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Contiguous CPU copies, floating-point ones in ``dtype``."""
    return {
        name: value.detach().to("cpu", dtype if value.is_floating_point() else None).contiguous()
        for name, value in state.items()
    }


def write_folder(
    path: str | os.PathLike[str],
    raw: Mapping[str, Any],
    tensors: dict[str, torch.Tensor],
    extra_files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write ``config.json``, weights and further files as one folder, whole or not at all."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        (temporary / CONFIG).write_text(json.dumps(raw, indent=2) + "\n")
        for name, content in (extra_files or {}).items():
            (temporary / name).write_bytes(content)
        replace_folder(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def replace_folder(temporary: Path, target: Path) -> None:
    """Sync ``temporary`` to disk and make it ``target``; the old folder goes only afterwards."""
    for file in temporary.iterdir():
        file.chmod(0o644)
        _sync(file)
    _sync(temporary)
    temporary.chmod(0o755)
    if not target.exists():
        temporary.rename(target)
    else:
        old = temporary.with_suffix(".old")
        target.rename(old)
        temporary.rename(target)
        shutil.rmtree(old)
    _sync(target.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
