"""What pruning gave: a CSV next to the table, and a plot where matplotlib is installed."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from draftwood.train.prune_table import Stage, Table

CSV = "prune.csv"
PLOT = "prune.png"


def write_csv(table: Table, folder: Path) -> Path:
    """One line per depth."""
    file = folder / CSV
    first = table.stages[0].tau
    with file.open("w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(
            ["depth", "removed_layers", "tau_before_recovery", "tau", "share_of_tau", "draft_ms",
             "plain_ms", "verify_ms", "draft_passes", "speedup_estimate", "layers"]
        )  # fmt: skip
        for one in table.stages:
            writer.writerow(_line(one, first))
    return file


def write_plot(tables: Mapping[str, Table], file: Path) -> Path:
    """τ, draft latency twice and estimated speedup by depth, one line per run.

    The latency is in milliseconds, and in plain target passes of the same seconds, in which depths
    compare.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(15, 3.6), layout="constrained")
    for name, table in tables.items():
        depths = [one.depth for one in table.stages]
        figures = (
            [one.tau for one in table.stages],
            [1e3 * one.draft_s for one in table.stages],
            [one.draft_passes for one in table.stages],
            [one.speedup for one in table.stages],
        )
        for axis, values in zip(axes, figures, strict=True):
            axis.plot(depths, values, marker="o", label=name)
    titles = ("tokens per cycle (τ)", "draft, ms", "draft, target passes", "estimated speedup")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title)
        axis.set_xlabel("layers")
        axis.invert_xaxis()
        axis.grid(alpha=0.3)
    if len(tables) > 1:
        axes[0].legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return file


def _line(one: Stage, first_tau: float) -> list[str]:
    return [
        str(one.depth),
        " ".join(map(str, one.removed)),
        "" if one.tau_without is None else f"{one.tau_without:.4f}",
        f"{one.tau:.4f}",
        f"{one.tau / first_tau:.4f}",
        f"{1e3 * one.draft_s:.3f}",
        f"{1e3 * one.plain_s:.3f}",
        f"{1e3 * one.verify_s:.3f}",
        f"{one.draft_passes:.4f}",
        f"{one.speedup:.4f}",
        " ".join(map(str, one.layers)),
    ]
