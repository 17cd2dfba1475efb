"""From a name to a drafter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from draftwood.draft.autoregressive import AutoregressiveDrafter
from draftwood.draft.base import Drafter, NullDrafter
from draftwood.draft.blend import BlendDrafter
from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.draft.checkpoint import check_compatible, load_draft
from draftwood.draft.config import DraftConfig
from draftwood.draft.config_json import parse_config
from draftwood.draft.folder import CONFIG, WEIGHTS, instead
from draftwood.draft.independent import IndependentDrafter
from draftwood.draft.independent_checkpoint import load_independent
from draftwood.draft.independent_config import is_independent
from draftwood.draft.lookup import LookupDrafter
from draftwood.target.load import load_target
from draftwood.target.model import Target

_SHIPPED = Path(__file__).parents[1] / "weights"
_WITH_LOOKUP = "+lookup"
_METHODS = ("propose", "observe", "truncate", "release", "taps", "horizon")
_NAMES = ("auto", "lookup", "none")
_DFLASH_KEYS = ("dflash_config", "speculators_model_type")


def load_drafter(
    spec: str | Path | Drafter | None, target: Target, *, revision: str | None = None
) -> Drafter:
    """A drafter for ``target``, in its dtype and on its device.

    Args:
        spec: ``"auto"`` (``"shipped+lookup"`` if a drafter is shipped for this target, else
            ``"lookup"``), ``"none"`` or None, a DFlash checkpoint, an independent drafter or a
            smaller causal language model (folder or hub id), any of these with ``"+lookup"``
            behind it to merge it with prompt lookup, or a drafter, which is returned as it is.
        target: the model to draft for.
        revision: branch, tag or commit of a hub id.

    Raises:
        ValueError: nothing of that name, or it does not fit the target.
    """
    if spec is None or spec == "none":
        return NullDrafter()
    if not isinstance(spec, (str, Path)):
        return _checked(spec)
    name = str(spec)
    if name == "auto":
        name = "lookup" if shipped_folder(target) is None else f"shipped{_WITH_LOOKUP}"
    if name == "lookup":
        return LookupDrafter()
    if name.endswith(_WITH_LOOKUP):
        model = load_drafter(name.removesuffix(_WITH_LOOKUP), target, revision=revision)
        return BlendDrafter(model, LookupDrafter())
    if name == "shipped":
        return _shipped(target)
    config = read_config(name, revision, or_one_of=_NAMES)
    if _is_dflash(config):
        return _block_diffusion(name, target, revision)
    if is_independent(config):
        network = load_independent(
            name, revision=revision, dtype=target.dtype, device=target.device
        )
        return IndependentDrafter(network, target)
    return _autoregressive(name, target, revision)


def check_spec(spec: object) -> None:
    """Refuse a name that stands for no drafter, before a target is loaded for it.

    Raises:
        ValueError: there is no such folder, or the hub has no such id.
    """
    if isinstance(spec, (str, Path)):
        name = str(spec).removesuffix(_WITH_LOOKUP)
        if name not in (*_NAMES, "shipped"):
            read_config(name, None, or_one_of=_NAMES)


def _checked(drafter: Drafter) -> Drafter:
    missing = [name for name in _METHODS if not hasattr(drafter, name)]
    if missing:
        raise ValueError(
            f"{type(drafter).__name__} is no drafter: it lacks {', '.join(missing)}; give a name "
            "or an object with the methods of draftwood.draft.base.Drafter"
        )
    return drafter


def _shipped(target: Target) -> Drafter:
    folder = shipped_folder(target)
    if folder is None:
        raise ValueError("no drafter is shipped for this target; use 'auto', 'lookup' or a folder")
    return _block_diffusion(str(folder), target, None)


def drafter_folder(name: str, target: Target) -> Path | None:
    """The local folder that a name stands for, with or without lookup; None if there is none."""
    model = "shipped" if name == "auto" else name.removesuffix(_WITH_LOOKUP)
    if model == "shipped":
        return shipped_folder(target)
    folder = Path(model).expanduser()
    return folder if model not in ("lookup", "none") and folder.is_dir() else None


def named_taps(name: str | Path, target: Target) -> tuple[int, ...]:
    """Target layers that a drafter reads, by its configuration alone; () where that says none.

    Raises:
        ValueError: the configuration is unreadable or malformed.
    """
    folder = drafter_folder(str(name), target)
    model = str(name).removesuffix(_WITH_LOOKUP)
    if folder is None and model in (*_NAMES, "shipped"):
        return ()
    raw = read_config(str(folder or model), None, or_one_of=_NAMES)
    if not _is_dflash(raw):
        return ()
    # with a head or without, the layers are the same
    return parse_config(raw, has_embeddings=False, has_head=True).target_layer_ids


def shipped_folder(target: Target) -> Path | None:
    """Folder of the drafter inside the package that was made for a target of this shape, if any."""
    for folder in sorted(path.parent for path in _SHIPPED.glob(f"*/{CONFIG}")):
        raw = read_config(str(folder), None)
        if not _is_dflash(raw):
            continue
        with safe_open(folder / WEIGHTS, "pt") as weights:
            names = set(weights.keys())
        config = parse_config(
            raw,
            has_embeddings="embed_tokens.weight" in names,
            has_head="lm_head.weight" in names,
        )
        if _fits(config, target):
            return folder
    return None


def _fits(config: DraftConfig, target: Target) -> bool:
    try:
        check_compatible(
            config,
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
        )
    except ValueError:
        return False
    return True


def _block_diffusion(name: str, target: Target, revision: str | None) -> Drafter:
    _, network = load_draft(name, revision=revision, dtype=target.dtype, device=target.device)
    return BlockDiffusionDrafter(network, target)


def _autoregressive(name: str, target: Target, revision: str | None) -> Drafter:
    dtype = str(target.dtype).removeprefix("torch.")
    try:
        model = load_target(name, dtype=dtype, device=str(target.device), revision=revision)
    except ValueError as error:
        raise ValueError(
            f"cannot use {name!r} as a draft model: {str(error).rstrip('.')}. "
            "A drafter is 'auto', 'lookup', 'none', a DFlash checkpoint, or a causal language "
            "model with the target's tokenizer."
        ) from error
    return AutoregressiveDrafter(model, target)


def _is_dflash(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures") or []
    return any(key in config for key in _DFLASH_KEYS) or any("DFlash" in name for name in names)


def read_config(
    name: str, revision: str | None, *, or_one_of: Sequence[str] = ()
) -> Mapping[str, Any]:
    """The ``config.json`` of a folder or hub id; {} where there can be none (GGUF, demo).

    Args:
        or_one_of: names that the caller takes as well, for the message about an unknown one.
    """
    others = "".join(f"{other!r}, " for other in or_one_of)
    if not name:
        raise ValueError(f"the drafter's name is empty; use {others}a folder or a hub id")
    path = Path(name).expanduser()
    if path.is_dir():
        file = path / CONFIG
        if not file.is_file():
            raise ValueError(f"{name} has no {CONFIG}; {instead(path)}")
    elif path.is_file() or name == "demo":
        return {}
    elif name.count("/") == 1 and not name.startswith((".", "/", "~")):
        file = _fetch_config(name, revision)
    else:
        raise ValueError(
            f"there is no drafter {name!r}; use {others}an existing folder, or a hub id "
            "(owner/name)"
        )
    try:
        config = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON ({error}); restore the file") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object; restore the file")
    return config


def _fetch_config(name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, CONFIG, revision=revision))
    except Exception as error:
        raise ValueError(
            f"drafter {name!r} is no local folder and could not be fetched from the hub: {error}"
        ) from error
