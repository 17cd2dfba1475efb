"""The tables of a report, as data: a cell is a main line and a smaller one below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftwood.bench.methods import REFERENCE
from draftwood.bench.pairs import Difference, differences
from draftwood.bench.published import Source
from draftwood.bench.statistics import Interval
from draftwood.bench.summary import ALL_SETS, Cell, Results


@dataclass(frozen=True)
class Entry:
    """One cell of a table.

    Attributes:
        text: what it says.
        below: in small print, a line each.
        value: to sort by.
        strong: emphasised.
    """

    text: str
    below: Sequence[str] = ()
    value: float | str | None = None
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """A table with a row heading in the first column."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Entry]]


def _interval(one: Interval | None, unit: str = "") -> tuple[str, str]:
    if one is None:
        return "–", ""
    return f"{one.value:.2f}{unit}", f"{one.low:.2f} to {one.high:.2f}"


def results_table(cells: Sequence[Cell], temperature: float) -> Table | None:
    """Speedup and τ with intervals, a row per set and a column per method."""
    shown = [cell for cell in cells if cell.temperature == temperature]
    methods = [m for m in dict.fromkeys(cell.method for cell in shown) if m != REFERENCE]
    sets = sorted(dict.fromkeys(cell.set_name for cell in shown), key=lambda n: n == ALL_SETS)
    if not methods:
        return None
    rows = []
    for name in sets:
        part = {cell.method: cell for cell in shown if cell.set_name == name}
        num = max(cell.num_prompts for cell in part.values())
        plain = part.get(REFERENCE)
        rate = f"{plain.tokens_per_s:.1f} tok/s" if plain else "–"
        speeds = [c.speedup.value for c in part.values() if c.speedup is not None]
        row = [Entry(name, [f"{num} prompt{'s' if num > 1 else ''}"]), Entry(rate)]
        row += [_result(part.get(method), max(speeds, default=0.0)) for method in methods]
        rows.append(row)
    return Table(f"Temperature {temperature:g}", ["set", "plain decoding", *methods], rows)


def _result(cell: Cell | None, best: float) -> Entry:
    if cell is None or cell.speedup is None:
        return Entry("–")
    value, span = _interval(cell.speedup, "×")
    below = [span]
    if cell.tau is not None:
        tau, tau_span = _interval(cell.tau)
        below.append(f"τ {tau} ({tau_span})")
    return Entry(value, below, cell.speedup.value, strong=cell.speedup.value == best)


def latency_table(cells: Sequence[Cell], results: Results, temperature: float) -> Table:
    """Speed and latency of each method over all sets."""
    top = ALL_SETS if len(results.sets) > 1 else results.sets[0]
    rows = []
    for method in results.methods:
        every = [c for c in cells if (c.temperature, c.method) == (temperature, method)]
        found = [cell for cell in every if cell.set_name == top] or every
        if not found:
            continue
        cell, waits = found[0], found[0].itl_ms
        ttft = "–" if cell.ttft_s is None else f"{cell.ttft_s * 1e3:.0f}"
        itl = [f"{waits[q]:.1f}" if waits else "–" for q in ("p50", "p95", "p99")]
        kv, peak = (_largest(results, method, name) for name in ("kv_bytes", "peak_bytes"))
        shares = _shares(results, method, temperature)
        texts = [f"{cell.tokens_per_s:.1f}", ttft, *itl, shares, kv, peak]
        rows.append([Entry(method), *map(Entry, texts)])
    header = ["method", "tok/s", "first token, ms", "wait p50, ms", "p95", "p99",
              "draft : verify : other", "KV cache, MB", "peak memory, MB"]  # fmt: skip
    return Table(f"Temperature {temperature:g}", header, rows)


def _largest(results: Results, method: str, field: str) -> str:
    found = [r[field] for r in results.records.values()
             if r["method"] == method and r["concurrency"] == 1 and r[field]]  # fmt: skip
    return f"{max(found) / 1e6:.1f}" if found else "–"


def _shares(results: Results, method: str, temperature: float) -> str:
    """Seconds of drafting, of the target with its head, and of the rest, in per cent."""
    turns = [t for t in results.turns if (t.method, t.temperature) == (method, temperature)]
    known = [turn.record["stages"] for turn in turns if turn.record["stages"]]
    total = sum(sum(stages.values()) for stages in known)
    if not total:
        return "–"
    draft = sum(stages["draft_s"] for stages in known) / total
    verify = sum(stages["verify_s"] + stages["walk_s"] for stages in known) / total
    return f"{draft:.0%} : {verify:.0%} : {1 - draft - verify:.0%}"


def identity_table(results: Results) -> Table:
    """Outputs by what comparing them with plain decoding found."""
    kinds = ("same", "tie", "unproven", "different")
    rows = []
    for method in results.methods:
        keys = [key for key, record in results.records.items() if record["method"] == method]
        found = [f["found"] for key in keys if key in results.checks
                 for f in results.checks[key]["findings"]]  # fmt: skip
        if found:
            rows.append([Entry(method), *(Entry(str(found.count(kind))) for kind in kinds)])
    return Table("Outputs", ["method", *kinds], rows)


def divergences(results: Results) -> list[str]:
    """Every output that is not that of plain decoding, in words."""
    return [
        f"{key}: {one['found']} at output token {one['position']}, {one['tokens'][0]} or "
        f"{one['tokens'][1]}, Δ {_number(one['delta'])}, gap {_number(one['gap'])}, "
        f"allowed {_number(one['allowance'])}"
        for key, check in results.checks.items()
        for one in check["findings"]
        if one["found"] != "same"
    ]


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1e}"


def pair_table(results: Results, temperature: float) -> Table | None:
    """τ and speed of every tree method against the chain, paired by prompt."""
    adaptive = ("auto", "convex", "roofline")
    trees = [m for m in results.methods if m.startswith("tree:") or m in adaptive]
    if "chain" not in results.methods or not trees:
        return None
    found = {
        (one.set_name, method): one
        for method in trees
        for one in differences(results, method, "chain")
        if one.temperature == temperature
    }
    sets = sorted(dict.fromkeys(name for name, _ in found), key=lambda name: name == ALL_SETS)
    rows = [[Entry(name), *(_gain(found.get((name, m))) for m in trees)] for name in sets]
    header = ["set", *(f"{method} − chain" for method in trees)]
    return Table(f"Temperature {temperature:g}", header, rows) if rows else None


def _gain(one: Difference | None) -> Entry:
    if one is None or one.tau is None:
        return Entry("–")
    speed, speed_span = _interval(one.speed, "×")
    below = [f"{one.tau.low:+.2f} to {one.tau.high:+.2f}", f"speed {speed} ({speed_span})"]
    return Entry(f"τ {one.tau.value:+.2f}", below, one.tau.value, strong=one.tau.low > 0)


def published_table(cells: Sequence[Cell], source: Source, temperature: float) -> Table | None:
    """Published speedup and τ beside the results here, for sets that were measured."""
    here = [c for c in cells if c.temperature == temperature and c.speedup is not None]
    methods = list(dict.fromkeys(cell.method for cell in here))
    rows_of = [row for row in source.rows if row.temperature == temperature]
    columns = list(dict.fromkeys((row.model, row.method) for row in rows_of))
    sets = [name for name in dict.fromkeys(row.set_name for row in rows_of)
            if any(cell.set_name == name for cell in here)]  # fmt: skip
    if not sets:
        return None
    rows = []
    for name in sets:
        mine = {cell.method: cell for cell in here if cell.set_name == name}
        row = [Entry(name)]
        for method in methods:
            cell = mine.get(method)
            tau = [f"τ {cell.tau.value:.2f}"] if cell and cell.tau else []
            row.append(Entry(f"{cell.speedup.value:.2f}×", tau) if cell and cell.speedup
                       else Entry("–"))  # fmt: skip
        theirs = {(r.model, r.method): r for r in rows_of if r.set_name == name}
        row += [Entry(f"{theirs[c].speedup:.2f}×", [f"τ {theirs[c].tau:.2f}"]) for c in columns]
        rows.append(row)
    header = [
        *(f"{m}, here" for m in methods),
        *(f"{method}, {model}" for model, method in columns),
    ]
    return Table(f"Temperature {temperature:g}", ["set", *header], rows)
