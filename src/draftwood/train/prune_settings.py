"""What a continued pruning run must repeat: its choices, drafter, replies and target."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from draftwood.draft.folder import find_folder
from draftwood.target.model import Target
from draftwood.train.anchors import Example
from draftwood.train.kept import read_kept, require_same
from draftwood.train.prune_table import TABLE
from draftwood.train.start import checksum

_WEIGHTS, _REPLIES, _TARGET = "drafter's weights", "replies", "target's weights"
_DIGESTS = (_WEIGHTS, _REPLIES, _TARGET)
_STOPS = ("min_depth", "keep_tau", "speedup")
_PRECISIONS = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}
_NEWER = {"per_round": 1, "ranking_block": 0}  # no choices once, and this was done
_SAMPLES = 64  # values of each weight that tell targets apart


def run_settings(
    choices: Mapping[str, Any],
    drafter: str,
    target: Target,
    examples: Iterable[Example],
    accelerator: Any,
) -> dict[str, Any]:
    """All but where to stop, as JSON values that hold wherever the folders and the device are.

    Args:
        choices: the fields of a ``PruneConfig``.
        drafter: folder of the unpruned drafter.
        target: whose dtype the drafter is timed in, and whose tables it may borrow.
        examples: the replies of the run, recovered on and held out.
        accelerator: of the mixed precision; None is none.
    """
    mixed = "no" if accelerator is None else str(accelerator.mixed_precision)
    settings = {
        **{name: value for name, value in choices.items() if name not in _STOPS},
        "dtype": str(target.dtype).removeprefix("torch."),
        "precision": _PRECISIONS.get(mixed, mixed),
        _WEIGHTS: checksum(find_folder(drafter, None)),
        _REPLIES: _digest(example.token_ids.tobytes() for example in examples),
        _TARGET: target_digest(target),
    }
    kept: dict[str, Any] = json.loads(json.dumps(settings))
    return kept


def require_continued(kept: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Refuse to continue a run with other settings.

    Raises:
        ValueError: they differ; the message says in what.
    """
    # the choices first: weights in another dtype are other weights too
    require_same({**_NEWER, **_choices(kept)}, _choices(now), folder, "a pruning run")
    for what in _DIGESTS:
        if kept.get(what) != now[what]:
            raise ValueError(
                f"the {what} have changed since the pruning run in {folder} began; restore "
                "them, or choose another folder"
            )


def begun_precision(folder: Path) -> str | None:
    """Precision of the run in a folder; None if there is none.

    A machine's products are timed anew at every start, and may then seem to prefer another.
    """
    file = folder / TABLE
    if not file.is_file():
        return None
    try:
        precision = read_kept(file)["settings"]["precision"]
    except (KeyError, TypeError):
        return None  # the run itself says what is wrong with the file
    return str(precision) if precision in _PRECISIONS.values() else None


def target_digest(target: Target) -> str:
    """Of the shape and some values of every weight, in float32: the same on any device."""

    def parts() -> Iterable[bytes]:
        for weight in target.model.parameters():
            flat = weight.detach().reshape(-1)
            some = flat[:: max(len(flat) // _SAMPLES, 1)][:_SAMPLES]
            yield repr(tuple(weight.shape)).encode()
            yield some.float().cpu().numpy().tobytes()

    return _digest(parts())


def _choices(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in _DIGESTS}


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]
