"""From a name to a target: a hub id, a local folder, a GGUF file, or ``demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftwood.target.demo import ensure_demo
from draftwood.target.gguf import dequantised, is_gguf
from draftwood.target.kernels import DEFAULT_KERNELS, KernelConfig
from draftwood.target.model import Target
from draftwood.target.progress import silent

DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


def load_target(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    probe: bool = True,
    kernels: KernelConfig | None = DEFAULT_KERNELS,
) -> Target:
    """Load a model and its tokenizer as a target.

    Args:
        name: hub id, local folder, GGUF file, or ``"demo"`` (SmolLM2-135M-Instruct).
        dtype: of the weights. ``"auto"``: float32 on a CPU, where lower precision is slower and
            the promise of identical text needs it; elsewhere the checkpoint's own.
        device: as torch names it. ``"auto"``: the first GPU, else the CPU.
        revision: branch, tag or commit of a hub id.
        probe: compare draft trees with the model's own forward before use.
        kernels: how to speed up a model on the CPU in float32; None: not at all.

    Raises:
        ValueError: the name, dtype or device is unknown, or the model cannot be a target.
        DraftwoodError: fetching or converting failed.
    """
    where = usable_device(device)
    kind = _dtype(dtype, where)
    folder, is_ours = _resolve(name, kind)
    options: dict[str, Any] = {"trust_remote_code": False}
    if isinstance(folder, str) and revision is not None:
        options["revision"] = revision
    if is_ours:
        with silent():
            model, tokenizer = _load(name, folder, kind, options)
    else:
        model, tokenizer = _load(name, folder, kind, options)
    return Target(model.to(where).eval(), tokenizer, probe=probe, kernels=kernels, name=name)


def usable_device(name: str) -> torch.device:
    """The device of a name, ``"auto"`` included; ValueError where there is none to compute on."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {name!r} is not available: {error}") from error
    if device.type == "meta":
        raise ValueError(f"device {name!r} computes nothing; use 'cpu', 'cuda' or 'auto'")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype | str:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; choose 'auto' or one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _resolve(name: str, dtype: torch.dtype | str) -> tuple[Path | str, bool]:
    """Local folder or hub id, and whether it is one of our own conversions."""
    if name == "demo":
        return ensure_demo(), True
    if not name:
        raise ValueError(
            "the target's name is empty; give a hub id, a local folder, a GGUF file, or 'demo'"
        )
    path = Path(name).expanduser()
    if is_gguf(path):
        return dequantised(path, dtype if isinstance(dtype, torch.dtype) else torch.bfloat16), True
    if path.is_dir():
        return path, False
    if path.is_file() or path.suffix == ".gguf" or name.startswith((".", "/", "~")):
        raise ValueError(f"{name} is neither a model folder nor a GGUF file")
    return name, False


def _load(
    name: str, folder: Path | str, dtype: torch.dtype | str, options: dict[str, Any]
) -> tuple[Any, Any]:
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"cannot load the target {name!r}: {reason.rstrip('.')}. "
            "A target is a hub id, a local folder, a GGUF file, or 'demo'."
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError):
        tokenizer = None  # a model without a tokenizer takes and gives token ids
    return model, tokenizer
