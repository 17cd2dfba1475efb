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
            ["depth", "removed_layer", "tau_before_recovery", "tau", "share_of_tau", "draft_ms",
             "speedup_estimate", "layers"]
        )  # fmt: skip
        for one in table.stages:
            writer.writerow(_line(one, first))
    return file


def write_plot(tables: Mapping[str, Table], file: Path) -> Path:
    """τ, draft latency and estimated speedup by depth, one line per run.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for name, table in tables.items():
        depths = [one.depth for one in table.stages]
        axes[0].plot(depths, [one.tau for one in table.stages], marker="o", label=name)
        axes[1].plot(depths, [1e3 * one.draft_s for one in table.stages], marker="o", label=name)
        axes[2].plot(depths, [one.speedup for one in table.stages], marker="o", label=name)
    titles = ("tokens per cycle (τ)", "draft, ms", "estimated speedup")
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
        "" if one.removed is None else str(one.removed),
        "" if one.tau_without is None else f"{one.tau_without:.4f}",
        f"{one.tau:.4f}",
        f"{one.tau / first_tau:.4f}",
        f"{1e3 * one.draft_s:.3f}",
        f"{one.speedup:.4f}",
        " ".join(map(str, one.layers)),
    ]
