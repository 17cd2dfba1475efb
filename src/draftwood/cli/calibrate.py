"""``draftwood calibrate``: seconds of target passes by width on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftwood.cli import options
from draftwood.cli.console import note

if TYPE_CHECKING:
    from rich.table import Table

    from draftwood.tree.calibration import Calibration

BAR = 36


def calibrate(
    target: options.Target = "demo",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    limit_s: Annotated[
        float, typer.Option("--limit", min=0.1, help="Seconds to measure for, roughly.")
    ] = 15.0,
    png: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, callback=options.writable, help="Draw the curve to this file as well."
        ),
    ] = None,
) -> None:
    """Measure how long the target takes for 1 to 256 rows, and keep it for budget 'auto'.

    'draftwood.load' does the same in a few seconds when it finds no measurement.
    """
    from rich.console import Console

    from draftwood.cli.options import quiet_libraries
    from draftwood.cli.threads import choose_threads
    from draftwood.target.load import load_target
    from draftwood.target.measure import (
        calibrated,
        calibration_key,
        calibration_path,
        is_reliable,
    )
    from draftwood.tree.calibration import CALIBRATION_WIDTHS

    quiet_libraries()
    choose_threads()
    model = load_target(target, dtype=dtype, device=device)
    curve = calibrated(model, widths=CALIBRATION_WIDTHS, limit_s=limit_s, refresh=True)
    key = calibration_key(model)
    console = Console(highlight=False)
    console.print(curve_table(curve))
    where = f"{key['device']}, {key['threads']} threads" if key["threads"] else key["device"]
    console.print(f"{target}, {key['dtype']}, {where}", style="dim", markup=False)
    if is_reliable(curve):
        note(f"kept in {calibration_path(key)}")
    else:
        note(
            f"not kept: rounds differ by {curve.noise:.0%}, something else keeps the machine busy; "
            "try again when it is quiet"
        )
    if png is not None:
        draw(curve, png, f"{target} on {where}")
        note(f"drawn to {png}")


def curve_table(curve: Calibration) -> Table:
    """Width, milliseconds, multiples of one row, and a bar."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"target pass after {curve.context_len} tokens", box=box.SIMPLE_HEAD,
        title_justify="left", padding=(0, 1, 0, 0),
    )  # fmt: skip
    for heading in ("rows", "ms", "× one row", "ms per row"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    longest = max(curve.seconds)
    for width, seconds in zip(curve.widths, curve.seconds, strict=True):
        table.add_row(
            str(width),
            f"{seconds * 1e3:.2f}",
            f"{seconds / curve.seconds[0]:.2f}",
            f"{seconds / width * 1e3:.2f}",
            "█" * max(1, round(BAR * seconds / longest)),
        )
    return table


def draw(curve: Calibration, path: Path, title: str) -> None:
    """The curve as a picture.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'draftwood[bench]'") from error
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(curve.widths, [seconds * 1e3 for seconds in curve.seconds], marker="o", ms=3)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="rows of the target pass", ylabel="ms", ylim=(0, None), title=title)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
