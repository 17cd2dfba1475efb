"""The charts of a report: acceptance and the drafter's probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from draftwood.bench.measure import acceptance_by_depth, acceptance_histogram
from draftwood.bench.methods import REFERENCE
from draftwood.bench.reliability import curve
from draftwood.bench.report.charts import color_of
from draftwood.bench.report.style import MUTED, SERIES, Chart, legend, new_figure, whole_numbers
from draftwood.bench.summary import Results, Turn

SOURCES = ("hit", "soft", "miss", "standby")


def _turns(results: Results, method: str, temperature: float) -> list[Turn]:
    return [
        turn
        for turn in results.turns
        if (turn.method, turn.temperature) == (method, temperature) and not turn.repetitive
    ]


def histogram(results: Results, temperature: float) -> Chart | None:
    """How many tokens a cycle gave: chain against trees."""
    wanted = [m for m in results.methods if m in ("chain", "auto", "hf-dflash") or "tree" in m]
    found = {
        method: acceptance_histogram([t.sequence for t in _turns(results, method, temperature)])
        for method in wanted
    }
    found = {method: counts for method, counts in found.items() if counts}
    if not found:
        return None
    longest = max(max(counts) for counts in found.values())
    lengths = list(range(1, longest + 1))
    figure, axes = new_figure(height=2.7)
    width, rows = 0.82 / len(found), []
    for number, (method, counts) in enumerate(found.items()):
        shares = np.array([counts[length] for length in lengths]) / counts.total()
        places = np.array(lengths) + (number - (len(found) - 1) / 2) * width
        axes.bar(places, shares, width * 0.94, color=color_of(results, method), label=method)
        rows += [(method, n, counts[n], float(s)) for n, s in zip(lengths, shares, strict=True)]
    axes.set_xticks(lengths)
    axes.grid(axis="x", visible=False)
    axes.set(xlabel="tokens per cycle, bonus token included", ylabel="share of cycles")
    legend(axes)
    return Chart(
        f"acceptance-T{temperature:g}", f"Tokens per cycle at temperature {temperature:g}",
        "A tree has fewer short cycles: where the first guess is wrong, a sibling may be right.",
        figure, ("method", "tokens", "cycles", "share"), rows,
    )  # fmt: skip


def by_depth(results: Results, temperature: float) -> Chart | None:
    """Acceptance rate by position of the drafted token."""
    figure, axes = new_figure(height=2.7)
    rows: list[tuple[Any, ...]] = []
    for method in results.methods:
        turns = _turns(results, method, temperature)
        shares = acceptance_by_depth([turn.sequence for turn in turns])
        if method == REFERENCE or not any(shares):
            continue
        depths = range(1, len(shares) + 1)
        axes.plot(
            depths, shares, "o-", markersize=3.5, color=color_of(results, method), label=method
        )
        rows += [(method, depth, share) for depth, share in zip(depths, shares, strict=True)]
    if not rows:
        return None
    axes.set_ylim(0, 1)
    axes.set(xlabel="position in the draft", ylabel="accepted, given all before")
    whole_numbers(axes)
    legend(axes)
    return Chart(
        f"depth-T{temperature:g}", f"Acceptance by position at temperature {temperature:g}",
        "Share of drafted cycles that accept a token at this position, of those that accepted all "
        "before it.",
        figure, ("method", "position", "rate"), rows,
    )  # fmt: skip


def reliability(results: Results, temperature: float) -> Chart | None:
    """Promised against observed probability that the target's text goes through a node."""
    figure, axes = new_figure(height=3.6)
    rows: list[tuple[Any, ...]] = []
    for method in results.methods:
        turns = _turns(results, method, temperature)
        parts = [turn.record["reliability"] for turn in turns if turn.record.get("reliability")]
        points = [point for point in curve(parts) if point[2] >= 20]
        if len(points) < 2:
            continue
        promised, observed, _ = zip(*points, strict=True)
        axes.plot(promised, observed, "o-", markersize=3.5, color=color_of(results, method),
                  label=method)  # fmt: skip
        rows += [(method, *point) for point in points]
    if not rows:
        return None
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.9, linestyle="--")
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="promised by the drafter", ylabel="came true")
    legend(axes)
    return Chart(
        f"reliability-T{temperature:g}",
        f"Reliability of the surrogate at temperature {temperature:g}",
        "Nodes by their prefix probability (what Φ adds up), against how often the target's own "
        "text went through them. On the dashed line a promise is what it says; bins of 20 nodes "
        "or more. Where scores are calibrated online, they are shown as calibrated.",
        figure, ("method", "promised", "observed", "nodes"), rows,
    )  # fmt: skip


def ahead(results: Results, temperature: float) -> Chart | None:
    """Where drafts came from, where drafting overlaps verifying."""
    rows: list[tuple[Any, ...]] = []
    for method in results.methods:
        sources = _sources(_turns(results, method, temperature))
        if sources:
            rows.append((method, *(sources[name] / sources.total() for name in SOURCES)))
    if not rows:
        return None
    figure, axes = new_figure(height=1.1 + 0.34 * len(rows))
    left = np.zeros(len(rows))
    shades = (SERIES[2], SERIES[8], SERIES[3], SERIES[0])
    for number, (name, shade) in enumerate(zip(SOURCES, shades, strict=True), start=1):
        widths = np.array([row[number] for row in rows])
        axes.barh([row[0] for row in rows], widths, left=left, height=0.62, color=shade, label=name)
        left += widths
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    axes.set_xlabel("share of drafted cycles")
    legend(axes)
    return Chart(
        f"ahead-T{temperature:g}", f"Drafting ahead at temperature {temperature:g}",
        "hit: the draft was ready when the verification ended; soft: ready up to the bonus token; "
        "miss: drafted on the spot; standby: the worker was away.",
        figure, ("method", *SOURCES), rows,
    )  # fmt: skip


def _sources(turns: Sequence[Turn]) -> Counter[str]:
    found: Counter[str] = Counter()
    for turn in turns:
        cycles = turn.sequence["cycles"]
        found.update(source for source in (cycles or {}).get("ahead") or () if source)
    return found
