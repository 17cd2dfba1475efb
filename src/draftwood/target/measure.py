"""Seconds of target passes by width, measured at load and kept for the next one."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

import draftwood
from draftwood.target.choices import processor_name
from draftwood.target.model import Target
from draftwood.target.store import cache_dir
from draftwood.tree.calibration import (
    CALIBRATION_WIDTHS,
    Calibration,
    calibrate,
    load_calibration,
    save_calibration,
)
from draftwood.tree.tree import NO_PARENT, DraftTree

CONTEXT_LEN = 128
LIMIT_S = 5.0
# Fewer widths at load, so that there is time for a second round.
LOAD_WIDTHS = (1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 128, 256)
NOISE_LIMIT = 0.3  # of a measurement that is believed and kept


def calibrated(
    target: Target,
    taps: Sequence[int] = (),
    *,
    widths: Sequence[int] = LOAD_WIDTHS,
    limit_s: float = LIMIT_S,
    refresh: bool = False,
) -> Calibration:
    """The target's width curve: the stored one, or measured now and stored.

    A measurement that other work on the machine disturbed is not stored: see ``is_reliable``.

    Args:
        target: the model to measure.
        taps: decoder layers whose outputs a drafter wants, as in decoding.
        widths: rows to measure.
        limit_s: seconds a measurement may take, roughly; widths it has no time for are left out.
        refresh: measure even if there is a stored curve.
    """
    key = calibration_key(target)
    path = calibration_path(key)
    found = None if refresh else load_calibration(path, key)
    if found is not None:
        return found
    result = measured(target, taps, widths=widths, limit_s=limit_s)
    if is_reliable(result):
        # A cache that cannot be written only costs the next load a few seconds.
        with contextlib.suppress(OSError):
            save_calibration(path, key, result)
    return result


def is_reliable(curve: Calibration) -> bool:
    """Whether the rounds of a measurement agree."""
    return curve.noise <= NOISE_LIMIT


def measured(
    target: Target,
    taps: Sequence[int] = (),
    *,
    widths: Sequence[int] = CALIBRATION_WIDTHS,
    limit_s: float = LIMIT_S,
) -> Calibration:
    """Measure the width curve behind a context of some hundred tokens, for one sequence.

    On an accelerator the head is part of a pass: it runs on all rows.
    """
    context_len = min(CONTEXT_LEN, max(target.max_len // 2, 1)) if target.max_len else CONTEXT_LEN
    rng = np.random.default_rng(0)
    context = rng.integers(0, target.vocab_size, context_len)
    cache = target.new_cache()
    target.forward(DraftTree.chain(context.tolist()), [cache])
    cache.commit(np.arange(context_len))
    trees = {
        width: _bushy(rng.integers(0, target.vocab_size, width))
        for width in widths
        if _fits(width, target)
    }

    def measure(width: int) -> float:
        _wait(target.device)
        begin = time.perf_counter()
        out = target.forward(trees[width], [cache], taps)
        if target.device.type != "cpu":
            target.logits(out.hidden)
        _wait(target.device)
        seconds = time.perf_counter() - begin
        cache.truncate(context_len)
        return seconds

    try:
        return calibrate(measure, list(trees), context_len=context_len, limit_s=limit_s)
    finally:
        cache.release()


def calibration_key(target: Target) -> dict[str, str]:
    """What a measurement holds for: machine, model, precision, versions and threads."""
    config = target.model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(name, None)
    device = target.device
    return {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type} {processor_name()}",
        "threads": str(torch.get_num_threads()) if device.type == "cpu" else "",
        "model": _digest(repr(sorted(config.items(), key=lambda item: item[0]))),
        "dtype": str(target.dtype).removeprefix("torch."),
        "kernels": f"{len(target.kernels.linears)} {target.kernels.num_lean_layers}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "draftwood": draftwood.__version__,
    }


def calibration_path(key: dict[str, str]) -> Path:
    """Where the measurement of ``key`` is kept."""
    return cache_dir() / "calibrations" / f"{_digest(repr(sorted(key.items())))}.json"


def _fits(width: int, target: Target) -> bool:
    return target.max_len is None or 2 * width < target.max_len


def _bushy(token_ids: np.ndarray) -> DraftTree:
    """A tree in which every node has up to three children: masks as draft trees have them."""
    at = np.arange(len(token_ids))
    parents = np.where(at > 0, (at - 1) // 3, NO_PARENT)
    depths = np.zeros(len(at), dtype=np.int64)
    for node in at[1:]:
        depths[node] = depths[parents[node]] + 1
    return DraftTree(
        token_ids.astype(np.int64), parents, depths, np.zeros_like(at), np.array([0, len(at)])
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]
