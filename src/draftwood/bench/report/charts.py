"""The charts of a report: speed and budgets."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from draftwood.bench.measure import STAGES
from draftwood.bench.methods import REFERENCE
from draftwood.bench.report.style import (
    INK,
    LINE,
    MUTED,
    SERIES,
    Chart,
    legend,
    new_figure,
    whole_numbers,
)
from draftwood.bench.summary import ALL_SETS, Cell, Results, Turn
from draftwood.bench.throughput import throughputs

STAGE_NAMES = {"draft_s": "draft and enumerate", "verify_s": "verify", "walk_s": "head and walk",
               "commit_s": "commit", "other_s": "other"}  # fmt: skip

_LONGEST_LABEL = 24


def color_of(results: Results, method: str) -> str:
    """The same for a method in every chart."""
    place = results.methods.index(method)
    return SERIES[place % len(SERIES)]


def _turns(results: Results, method: str, temperature: float) -> list[Turn]:
    return [t for t in results.turns if (t.method, t.temperature) == (method, temperature)]


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_LABEL else f"{name[: _LONGEST_LABEL - 1]}…"


def speedups(results: Results, cells: Sequence[Cell], temperature: float) -> Chart | None:
    """Speedup with interval per set and method."""
    shown = [c for c in cells if c.temperature == temperature and c.speedup is not None]
    if not shown:
        return None
    sets = list(dict.fromkeys(cell.set_name for cell in shown))
    methods = list(dict.fromkeys(cell.method for cell in shown))
    figure, axes = new_figure(height=1.2 + 0.2 * len(sets) * (1 + 0.5 * len(methods)))
    rows = []
    for number, method in enumerate(methods):
        part = [cell for cell in shown if cell.method == method]
        places = [
            sets.index(c.set_name) + (number - (len(methods) - 1) / 2) * 0.7 / len(methods)
            for c in part
        ]
        found = [cell.speedup for cell in part if cell.speedup is not None]
        values = np.array([one.value for one in found])
        spans = np.array([[one.value - one.low, one.high - one.value] for one in found]).T
        axes.errorbar(
            values, places, xerr=np.maximum(spans, 0), fmt="o", markersize=4.5, linewidth=1.6,
            color=color_of(results, method), label=method,
        )  # fmt: skip
        rows += [
            (cell.set_name, method, one.value, one.low, one.high, one.num)
            for cell, one in zip(part, found, strict=True)
        ]
    axes.axvline(1, color=MUTED, linewidth=1)
    axes.set_yticks(range(len(sets)), [_short(name) for name in sets])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("speedup over plain decoding (seconds per token)")
    legend(axes)
    return Chart(
        f"speedup-T{temperature:g}", f"Speedup at temperature {temperature:g}",
        "Dots are means over prompts, lines 95 % bootstrap intervals. Right of 1 is faster than "
        "plain decoding on the same prompts.",
        figure, ("set", "method", "speedup", "low", "high", "prompts"), rows,
    )  # fmt: skip


def budget_curve(results: Results, cells: Sequence[Cell], temperature: float) -> Chart | None:
    """Speedup by the size of the tree, with the seconds that verifying takes."""
    top = ALL_SETS if len(results.sets) > 1 else results.sets[0]
    found = {c.method: c.speedup for c in cells
             if (c.set_name, c.temperature) == (top, temperature)}  # fmt: skip
    trees = sorted(
        (int(match[1]), found[m]) for m in found if (match := re.fullmatch(r"tree:(\d+)", m))
    )
    points = [(budget, one) for budget, one in trees if one is not None]
    latency = verify_latency([t for t in results.turns if t.temperature == temperature])
    if len(points) < 2 or len(latency) < 2:
        return None
    figure, axes = new_figure()
    budgets = [budget for budget, _ in points]
    color = color_of(results, f"tree:{budgets[0]}")
    axes.plot(budgets, [one.value for _, one in points], "o-", color=color, label="tree")
    lows, highs = [one.low for _, one in points], [one.high for _, one in points]
    axes.fill_between(budgets, lows, highs, color=color, alpha=0.18, linewidth=0)
    for method in ("chain", "auto"):
        one = found.get(method)
        if one is not None:
            shade = color_of(results, method)
            axes.axhline(one.value, color=shade, linewidth=1.4, label=method)
    axes.set(xlabel="budget: drafted nodes verified per cycle", ylabel="speedup")
    axes.set_xscale("log", base=2)
    other = axes.twinx()
    other.plot(*zip(*latency, strict=True), "s--", color=MUTED, markersize=3, linewidth=1,
               label="verify (right axis)")  # fmt: skip
    other.set_ylabel("milliseconds of the target pass")
    other.set_ylim(bottom=0)
    other.grid(visible=False)
    axes.set_xticks(budgets, [str(budget) for budget in budgets])
    axes.minorticks_off()
    handles = [*axes.get_legend_handles_labels()[0], *other.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=4)
    rows: list[tuple[Any, ...]] = []
    rows += [("speedup", budget, one.value, one.low, one.high) for budget, one in points]
    rows += [("verify_ms", nodes, value, "", "") for nodes, value in latency]
    return Chart(
        f"budget-T{temperature:g}", f"Speedup by budget at temperature {temperature:g}",
        "Acceptance grows with the budget, and so does the target pass (dashed, right axis): the "
        f"best budget is where they balance. On {top}; the band is the 95 % interval.",
        figure, ("curve", "nodes", "value", "low", "high"), rows,
    )  # fmt: skip


def verify_latency(turns: Sequence[Turn]) -> list[tuple[float, float]]:
    """(mean drafted nodes, median milliseconds) of target passes, by powers of two of the nodes."""
    groups: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for turn in turns:
        cycles = turn.sequence["cycles"]
        for nodes, ms in zip(cycles["drafted"], cycles["verify_ms"], strict=True) if cycles else ():
            if nodes:
                groups[int(np.log2(nodes) * 2)].append((nodes, ms))
    return [
        (float(np.mean([n for n, _ in part])), float(np.median([ms for _, ms in part])))
        for _, part in sorted(groups.items())
        if len(part) >= 5
    ]


def stages(results: Results, temperature: float) -> Chart | None:
    """Milliseconds per token of each method, by what they are spent on."""
    rows: list[tuple[Any, ...]] = []
    for method in results.methods:
        turns = [t for t in _turns(results, method, temperature) if t.record["stages"]]
        tokens = sum(len(turn.sequence["token_ids"]) for turn in turns)
        if tokens:
            sums = [sum(turn.record["stages"][stage] for turn in turns) for stage in STAGES]
            rows.append((method, *(1e3 * seconds / tokens for seconds in sums)))
    if not rows:
        return None
    figure, axes = new_figure(height=1.1 + 0.34 * len(rows))
    left = np.zeros(len(rows))
    shades = (SERIES[4], SERIES[2], SERIES[1], SERIES[5], SERIES[0])
    for number, (stage, shade) in enumerate(zip(STAGES, shades, strict=True), start=1):
        widths = np.array([row[number] for row in rows])
        axes.barh([row[0] for row in rows], widths, left=left, height=0.62, color=shade,
                  label=STAGE_NAMES[stage])  # fmt: skip
        left += widths
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:.3g}", va="center", color=INK, fontsize=8.5)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("milliseconds per token")
    legend(axes)
    return Chart(
        f"stages-T{temperature:g}", f"Where the time goes at temperature {temperature:g}",
        "Seconds of the decoding passes by stage, divided by the tokens they gave. Drafting pays "
        "where what it adds is less than what fewer target passes save.",
        figure, ("method", *STAGES), rows,
    )  # fmt: skip


def budgets_over_time(results: Results, temperature: float) -> Chart | None:
    """The budget that adaptive methods chose, cycle by cycle."""
    figure, axes = new_figure(height=2.7)
    rows: list[tuple[Any, ...]] = []
    for method in results.methods:
        every = [turn.sequence["cycles"] for turn in _turns(results, method, temperature)]
        lists = [cycles["drafted"] for cycles in every if cycles]
        adapts = not re.fullmatch(r"chain|ar|(\w+:)?\d+|\w+:(chain|off)", method)
        if not lists or not adapts or method == REFERENCE:
            continue
        num = sorted(map(len, lists))[-max(1, len(lists) // 4)]
        bands = [
            np.quantile([one[cycle] for one in lists if len(one) > cycle], [0.25, 0.5, 0.75])
            for cycle in range(num)
        ]
        low, middle, high = np.array(bands).T
        shade = color_of(results, method)
        axes.step(range(num), middle, where="mid", color=shade, linewidth=1.4, label=method)
        axes.fill_between(range(num), low, high, step="mid", color=shade, alpha=0.16, linewidth=0)
        rows += [(method, cycle, *band) for cycle, band in enumerate(np.array(bands).tolist())]
    if not rows:
        return None
    axes.set(xlabel="cycle", ylabel="nodes verified")
    whole_numbers(axes)
    axes.set_ylim(bottom=0)
    legend(axes)
    return Chart(
        f"budget-time-T{temperature:g}", f"Budget chosen over time at temperature {temperature:g}",
        "Median over requests, with quartiles. 0 is a plain cycle.",
        figure, ("method", "cycle", "low", "median", "high"), rows,
    )  # fmt: skip


def concurrency(results: Results, temperature: float) -> Chart | None:
    """Output tokens per second by the number of requests at once."""
    found = [one for one in throughputs(results) if one.temperature == temperature]
    if len({one.concurrency for one in found}) < 2:
        return None
    figure, axes = new_figure()
    for method in results.methods:
        part = [one for one in found if one.method == method]
        if not part:
            continue
        shade, places = color_of(results, method), [one.concurrency for one in part]
        spans = [one.tokens_per_s for one in part]
        axes.plot(places, [one.value for one in spans], "o-", color=shade, label=method)
        axes.fill_between(places, [one.low for one in spans], [one.high for one in spans],
                          color=shade, alpha=0.16, linewidth=0)  # fmt: skip
    axes.set_xscale("log", base=2)
    ticks = sorted({one.concurrency for one in found})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel="requests at once", ylabel="tokens per second")
    axes.set_ylim(bottom=0)
    axes.tick_params(which="both", color=LINE)
    legend(axes)
    rows = [(o.method, o.concurrency, o.tokens_per_s.value, o.tokens_per_s.low, o.tokens_per_s.high)
            for o in found]  # fmt: skip
    return Chart(
        f"concurrency-T{temperature:g}", f"Concurrent requests at temperature {temperature:g}",
        "Output tokens of all requests per second, prompts included; first turns only.",
        figure, ("method", "concurrency", "tokens_per_s", "low", "high"), rows,
    )  # fmt: skip
