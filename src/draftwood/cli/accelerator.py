"""The ``accelerate.Accelerator`` of a training command."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import typer

PRECISIONS = ("auto", "float32", "bfloat16")


def open_accelerator(device: str, precision: str) -> Any:
    """One for several processes (``accelerate launch``), a GPU or bfloat16; None otherwise."""
    import torch

    from draftwood.target.load import usable_device
    from draftwood.train.precision import has_fast_bfloat16

    if precision not in PRECISIONS:
        raise typer.BadParameter(
            f"expected {', '.join(map(repr, PRECISIONS))}, got {precision!r}",
            param_hint="--precision",
        )
    if device not in ("auto", "cpu"):
        usable_device(device)
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    on_gpu = torch.cuda.is_available() and device != "cpu"
    low = precision == "bfloat16"
    if precision == "auto":
        # Each process would time for itself, while others do: a CPU is tried alone only.
        low = (on_gpu or not several) and has_fast_bfloat16("cuda" if on_gpu else "cpu")
    if not (several or on_gpu or low):
        return None
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    # The first process computes the features while the others wait.
    patient = InitProcessGroupKwargs(timeout=timedelta(hours=24))
    return Accelerator(
        cpu=not on_gpu, mixed_precision="bf16" if low else "no", kwargs_handlers=[patient]
    )
