"""From a folder of results to a report: a page, pictures and tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from draftwood.bench.methods import REFERENCE
from draftwood.bench.pairs import differences
from draftwood.bench.published import published
from draftwood.bench.report import acceptance, tables
from draftwood.bench.report import charts as drawn
from draftwood.bench.report.page import charts, facts, folded, page, paragraph, table
from draftwood.bench.report.style import Chart, look, png, svg
from draftwood.bench.summary import Cell, Results, cells, load_results


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write ``report.html``, and every chart and table as PNG, SVG and CSV beside it.

    Args:
        folder: with the results of ``draftwood bench``.
        out: where to write; ``folder/report`` if None.

    Returns:
        The page.

    Raises:
        ValueError: no results there, or damaged ones.
        ImportError: matplotlib is missing.
    """
    results = load_results(folder)
    out = Path(out) if out is not None else Path(folder) / "report"
    with look():
        found = cells(results)
        pictures = list(_charts(results, found))
        text = render(results, found, pictures)
    out.mkdir(parents=True, exist_ok=True)
    for chart in pictures:
        (out / f"{chart.name}.svg").write_text(svg(chart), encoding="utf-8")
        (out / f"{chart.name}.png").write_bytes(png(chart))
        _write_csv(out / f"{chart.name}.csv", chart.header, chart.rows)
    _write_csv(out / "results.csv", *_results_rows(found))
    _write_csv(out / "against-chain.csv", *_pair_rows(results))
    path = out / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


def _charts(results: Results, found: Sequence[Cell]) -> Iterable[Chart]:
    for temperature in results.temperatures:
        candidates = (
            drawn.speedups(results, found, temperature),
            drawn.budget_curve(results, found, temperature),
            acceptance.histogram(results, temperature),
            acceptance.by_depth(results, temperature),
            drawn.stages(results, temperature),
            drawn.budgets_over_time(results, temperature),
            acceptance.reliability(results, temperature),
            acceptance.ahead(results, temperature),
            drawn.concurrency(results, temperature),
        )
        yield from (chart for chart in candidates if chart is not None)


def render(results: Results, found: Sequence[Cell], pictures: Sequence[Chart]) -> str:
    """The page of some results, their cells and charts."""
    settings = results.runs[0]["settings"] if results.runs else {}
    title = f"Benchmark of {Path(settings.get('target', 'a target')).name}"
    hardware = results.runs[-1].get("hardware", {}) if results.runs else {}
    machine = ", ".join(hardware.get("gpus", [])) or hardware.get("processor", "unknown processor")
    lead = (
        f"Drafter {settings.get('drafter')}, {settings.get('dtype')} on {machine}; "
        f"{len(results.records)} results, {len(results.sets)} "
        f"set{'s' if len(results.sets) > 1 else ''}."
    )
    sections = [
        ("Results", _results_section(results, found, _named(pictures, "speedup"))),
        ("Budget and time", charts(_named(pictures, "budget", "stages", "concurrency"))),
        ("Acceptance", charts(_named(pictures, "acceptance", "depth", "reliability", "ahead"))),
        ("Against the chain", _pairs_section(results)),
        ("Latency and memory", _latency_section(results, found)),
        ("Identical outputs", _identity_section(results)),
        ("Repetitive outputs", _repetitive_section(results)),
        ("Published figures", _published_section(results, found)),
        ("How it was measured", _method_section(results)),
    ]
    return page(title, lead, [(name, body) for name, body in sections if body])


def _named(pictures: Sequence[Chart], *names: str) -> list[Chart]:
    return [chart for chart in pictures if chart.name.startswith(names)]


def _results_section(results: Results, found: Sequence[Cell], pictures: Sequence[Chart]) -> str:
    text = paragraph(
        "Speedup: mean seconds per token of plain decoding over the method's, on the same prompts, "
        "the prompt's own pass not counted. τ: tokens per cycle, bonus token included. Below each, "
        "the 95 % bootstrap interval over prompts. The fastest of a row is emphasised.", "note",
    )  # fmt: skip
    for temperature in results.temperatures:
        one = tables.results_table(found, temperature)
        text += table(one) if one is not None else ""
    return text + charts(pictures)


def _pairs_section(results: Results) -> str:
    found = [tables.pair_table(results, temperature) for temperature in results.temperatures]
    shown = [table(one) for one in found if one is not None]
    note = (
        "Differences on the same prompts: τ minus the chain's, and seconds per token of the chain "
        "over the method's. An interval of τ above 0, or of the speed above 1, is a real gain; τ "
        "is emphasised where it is."
    )
    return paragraph(note, "note") + "".join(shown) if shown else ""


def _latency_section(results: Results, found: Sequence[Cell]) -> str:
    note = (
        "Means and medians over prompts. Waits are between arrivals of a stream; the tokens of a "
        "cycle arrive together. Memory of the process includes the model."
    )
    parts = [table(tables.latency_table(found, results, t)) for t in results.temperatures]
    return paragraph(note, "note") + "".join(parts)


def _identity_section(results: Results) -> str:
    one = tables.identity_table(results)
    if not one.rows:
        return ""
    note = (
        "Every output against plain decoding with the same seeds. A tie is a difference that is "
        "proven to be rounding: both computations were made again, and the two tokens are closer "
        "than their scores differ. Unproven: as close, but not repeated. Any other difference "
        "would be an error. Engines with other kernels, weights or draws are not compared."
    )
    lines = tables.divergences(results)
    return (
        paragraph(note, "note") + table(one) + (folded("All differences", lines) if lines else "")
    )


def _repetitive_section(results: Results) -> str:
    plain = [t for t in results.turns if t.method == REFERENCE]
    looping = [t for t in plain if t.repetitive]
    text = paragraph(
        f"{len(looping)} of {len(plain)} outputs of plain decoding fall into repetition. Loops are "
        "easy to draft and inflate τ and speedup, so they are left out above and shown here.",
        "note",
    )
    apart = cells(results, repetitive=True)
    for temperature in results.temperatures:
        one = tables.results_table(apart, temperature)
        text += table(one) if one is not None else ""
    return text


def _published_section(results: Results, found: Sequence[Cell]) -> str:
    source = published()
    parts = [tables.published_table(found, source, t) for t in results.temperatures]
    shown = [table(one) for one in parts if one is not None]
    if not shown:
        return ""
    warning = paragraph(
        "Published figures are from other hardware and other models. They show what these methods "
        "can do, not what they do here.", "warning",
    )  # fmt: skip
    about = paragraph(f"Source: {source.source}. {source.note}", "note")
    return warning + "".join(shown) + about


def _method_section(results: Results) -> str:
    text = "".join(
        facts({name: value for name, value in run.items() if name not in ("kind", "format")})
        for run in results.runs
    )
    return text


def _results_rows(found: Sequence[Cell]) -> tuple[Sequence[str], list[Sequence[Any]]]:
    header = ("set", "temperature", "method", "prompts", "tokens_per_s", "speedup", "speedup_low",
              "speedup_high", "tau", "tau_low", "tau_high", "ttft_s")  # fmt: skip
    rows: list[Sequence[Any]] = []
    for c in found:
        spans = [
            part
            for one in (c.speedup, c.tau)
            for part in ((one.value, one.low, one.high) if one else ("", "", ""))
        ]
        first = (c.set_name, c.temperature, c.method, c.num_prompts, c.tokens_per_s)
        rows.append((*first, *spans, c.ttft_s))
    return header, rows


def _pair_rows(results: Results) -> tuple[Sequence[str], list[Sequence[Any]]]:
    header = ("set", "temperature", "method", "tau_gain", "tau_low", "tau_high", "speed",
              "speed_low", "speed_high")  # fmt: skip
    rows: list[Sequence[Any]] = []
    for method in results.methods if "chain" in results.methods else []:
        if method in ("chain", REFERENCE):
            continue
        for one in differences(results, method, "chain"):
            tau = (one.tau.value, one.tau.low, one.tau.high) if one.tau else ("", "", "")
            speed = (one.speed.value, one.speed.low, one.speed.high)
            rows.append((one.set_name, one.temperature, method, *tau, *speed))
    return header, rows


def _write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    path.write_text(text.getvalue(), encoding="utf-8")
