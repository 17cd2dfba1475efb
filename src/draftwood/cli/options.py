"""Options that several commands share, and what they are turned into."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwood.cli.console import note, stderr
from draftwood.cli.reply import heeded

if TYPE_CHECKING:
    from draftwood.ahead.choice import Grid
    from draftwood.ahead.planner import AheadOptions
    from draftwood.engine import Engine
    from draftwood.sampling import SamplingParams

MODEL = "Model"
SAMPLING = "Sampling"
AHEAD = "Drafting ahead"

Target = Annotated[
    str,
    typer.Option(
        "--target", "-t", rich_help_panel=MODEL,
        help="Hub id, local folder, GGUF file, or 'demo' (SmolLM2-135M-Instruct).",
    ),
]  # fmt: skip
Drafter = Annotated[
    str,
    typer.Option(
        "--drafter", "-d", rich_help_panel=MODEL,
        help="'auto', 'lookup', 'none', or a hub id or folder: a DFlash or independent "
        "drafter or a smaller causal language model.",
    ),
]  # fmt: skip
Budget = Annotated[
    str,
    typer.Option(
        "--budget", "-b", rich_help_panel=MODEL,
        help="Drafted nodes verified per cycle: 'auto', a number, 'chain', 'off', or another rule: "
        "'convex', 'roofline'.",
    ),
]  # fmt: skip
Ahead = Annotated[
    str | None,
    typer.Option(
        "--async", "--drafter-device", metavar="WHERE", rich_help_panel=AHEAD,
        help="Draft while the target verifies, on a device ('cuda:1', 'cpu'), in a 'thread' or in "
        "a 'process' with a core of its own. For drafters that need only tokens.",
    ),
]  # fmt: skip
AheadBranches = Annotated[
    int | None,
    typer.Option(
        "--async-branches", min=1, rich_help_panel=AHEAD,
        help="Branches per pass; as many as fit beside a verification if not given.",
    ),
]  # fmt: skip
AheadGrid = Annotated[
    str | None,
    typer.Option(
        "--async-grid", metavar="C,F", rich_help_panel=AHEAD,
        help="Draft for the D3D paper's grid ('4,8', or 'auto': the likeliest that fits) instead "
        "of the most probable outcomes.",
    ),
]  # fmt: skip
AheadTimeout = Annotated[
    float | None,
    typer.Option(
        "--async-timeout", metavar="SECONDS", rich_help_panel=AHEAD,
        help="Give up a worker that does not answer for so long; 60 if not given.",
    ),
]  # fmt: skip
Dtype = Annotated[
    str, typer.Option(rich_help_panel=MODEL, help="'auto', 'float32', 'bfloat16' or 'float16'.")
]
Device = Annotated[
    str, typer.Option(rich_help_panel=MODEL, help="'auto', 'cpu', 'cuda', 'cuda:1', …")
]
Temperature = Annotated[
    float, typer.Option("--temperature", "-T", rich_help_panel=SAMPLING, help="0 is greedy.")
]
TopK = Annotated[int, typer.Option(rich_help_panel=SAMPLING, help="0 is off.")]
TopP = Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="1 is off.")]
MinP = Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="0 is off.")]
RepetitionPenalty = Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="1 is off.")]
Seed = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=SAMPLING,
        help="Same seed, same text, with any drafter and budget. Drawn and shown if not given.",
    ),
]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", "-n", rich_help_panel=SAMPLING, help="Longest output.")
]
Stop = Annotated[
    list[str] | None,
    typer.Option(rich_help_panel=SAMPLING, help="End before this text. May be given repeatedly."),
]


def sampling_params(*, stop: list[str] | None, **settings: Any) -> SamplingParams:
    """Sampling settings; a value out of range is a usage error."""
    from draftwood.sampling import SamplingParams

    try:
        return SamplingParams(stop=tuple(stop or ()), **settings)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def open_engine(
    target: str,
    drafter: str,
    budget: str,
    *,
    dtype: str,
    device: str,
    ahead: str | None = None,
    ahead_options: AheadOptions | None = None,
) -> Engine:
    """Load target and drafter; a malformed budget is a usage error found before loading."""
    with heeded():
        from draftwood.api import load
        from draftwood.tree.budget import is_constant

        try:
            is_constant(budget)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--budget") from None
        quiet_libraries()
        if ahead == "process":
            from draftwood.ahead.load import spare_core

            ahead = ":".join(["process", *map(str, spare_core())])
        if stderr().is_terminal:
            note(f"loading {target} …")
        return load(
            target, drafter, budget, dtype=dtype, device=device,
            ahead=ahead, ahead_options=ahead_options,
        )  # fmt: skip


def how_ahead(
    where: str | None, branches: int | None, grid: str | None, timeout_s: float | None
) -> AheadOptions | None:
    """How to draft ahead, None if not at all; what cannot be is a usage error."""
    from draftwood.ahead.choice import Likeliest
    from draftwood.ahead.planner import AheadOptions

    if where is None:
        if (branches, grid, timeout_s) != (None, None, None):
            raise typer.BadParameter("nothing is drafted ahead; say where, with --async")
        return None
    try:
        options = AheadOptions(Likeliest() if grid is None else _grid(grid), branches)
        return options if timeout_s is None else replace(options, timeout_s=timeout_s)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _grid(text: str) -> Grid:
    from draftwood.ahead.choice import Grid

    if text == "auto":
        return Grid()
    try:
        positions, alternatives = map(int, text.split(","))
    except ValueError:
        raise ValueError(f"a grid is C,F as in '4,8', or 'auto', got {text!r}") from None
    return Grid(positions, alternatives)


def writable(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before the work, not after it."""
    if path is not None:
        folder = path if path.is_dir() else path.parent
        if not folder.is_dir():
            raise typer.BadParameter(f"{folder} is no folder; make it first")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise typer.BadParameter(f"{path} cannot be written; choose another place")
    return path


def quiet_libraries() -> None:
    """Keep progress bars, hints and retries of the libraries out of the user's terminal."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
