"""From records to tables and files."""

from __future__ import annotations

import csv
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from draftwood.bench.pairs import differences
from draftwood.bench.published import published
from draftwood.bench.report import acceptance
from draftwood.bench.report.build import write_report
from draftwood.bench.report.tables import (
    divergences,
    identity_table,
    published_table,
    results_table,
)
from draftwood.bench.store import FILE
from draftwood.bench.summary import ALL_SETS, cells, load_results
from draftwood.bench.throughput import throughputs
from draftwood.bench.workloads import PAPER_SETS
from draftwood.cli.app import app
from synthetic_results import METHODS, check, record, result_lines, run_line, write_results

from typer.testing import CliRunner  # isort: skip


def test_speedup_is_paired_and_repetition_is_shown_apart(tmp_path: Path) -> None:
    results = load_results(write_results(tmp_path, result_lines()))
    by_key = {(c.set_name, c.temperature, c.method): c for c in cells(results)}
    assert len(by_key) == 3 * 2 * len(METHODS)
    for (name, _, method), cell in by_key.items():
        per_cycle, seconds = METHODS[method]
        assert cell.num_prompts == (6 if name == ALL_SETS else 3)
        if method == "ar":
            assert cell.speedup is None
            continue
        assert cell.speedup is not None
        assert cell.tau is not None
        # a prompt's own speed varies fourfold, the methods' 2 % each
        assert cell.speedup.value == pytest.approx(per_cycle * 0.05 / seconds, rel=0.05)
        assert cell.speedup.high - cell.speedup.low < 0.1 * cell.speedup.value
        assert cell.tau.value == per_cycle
        assert cell.findings["same"] == cell.num_prompts
    apart = {(c.set_name, c.method): c for c in cells(results, repetitive=True)}
    assert apart["gsm8k", "chain"].num_prompts == 1


def test_all_sets_weigh_alike(tmp_path: Path) -> None:
    lines = [run_line()]
    for name, num, noise in (("a", 5, 1.0), ("b", 1, 0.5)):
        for task in range(num):
            lines += [record(name, task, 0.0, "ar"), record(name, task, 0.0, "chain", noise=noise)]
    results = load_results(write_results(tmp_path, lines))
    speeds = {c.set_name: c.speedup.value for c in cells(results) if c.speedup is not None}
    assert speeds[ALL_SETS] == pytest.approx((speeds["a"] + speeds["b"]) / 2)
    assert speeds["b"] == pytest.approx(2 * speeds["a"])


def test_what_plain_decoding_lacks_is_left_out(tmp_path: Path) -> None:
    """An interrupted run: a method may be ahead of the reference."""
    lines = [run_line(), *(record("a", t, 0.0, "chain") for t in range(3))]
    lines += [record("a", t, 0.0, "ar") for t in range(2)]
    results = load_results(write_results(tmp_path, lines))
    assert {c.method: c.num_prompts for c in cells(results)} == {"ar": 2, "chain": 2}
    (row,) = differences(results, "chain", "ar")
    assert row.tau is not None
    assert row.tau.value == 1.0


def test_only_turns_that_both_have_are_compared(tmp_path: Path) -> None:
    """An interrupted run: of the second turn, ten times as slow, there is only the reference."""
    second = record("a", 0, 0.0, "ar", noise=10.0)
    second |= {"turn": 1, "key": second["key"].replace("turn0", "turn1")}
    lines = [run_line(), record("a", 0, 0.0, "ar"), second, record("a", 0, 0.0, "chain")]
    results = load_results(write_results(tmp_path, lines))
    (speed,) = (cell.speedup for cell in cells(results) if cell.speedup is not None)
    assert speed.value == pytest.approx(2 * 0.05 / 0.06)
    (row,) = differences(results, "chain", "ar")
    assert row.speed.value == pytest.approx(2 * 0.05 / 0.06)


def test_throughput_is_of_the_same_requests(tmp_path: Path) -> None:
    lines = [run_line(), *(record("a", 0, 0.0, m, concurrency=4) for m in ("ar", "chain"))]
    slow = [record("a", 1, 0.0, "ar", noise=9.0, concurrency=4)]  # interrupted before the chain
    results = load_results(write_results(tmp_path, [*lines, *slow]))
    ar, chain = throughputs(results)
    assert chain.tokens_per_s.value / ar.tokens_per_s.value == pytest.approx(1.3 / 0.82)


def test_repetitions_are_no_further_requests(tmp_path: Path) -> None:
    again = record("a", 0, 0.0, "ar", noise=2.0, concurrency=4)
    again |= {"repeat": 1, "key": again["key"].replace("/r0/", "/r1/")}
    lines = [run_line(), record("a", 0, 0.0, "ar", concurrency=4), again]
    (one,) = throughputs(load_results(write_results(tmp_path, lines)))
    assert one.tokens_per_s.num == 1


def test_a_cut_last_line_is_told(tmp_path: Path) -> None:
    folder = write_results(tmp_path / "results", result_lines())
    path = folder / FILE
    num = len(path.read_bytes().splitlines())
    path.write_bytes(path.read_bytes()[:-20])
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    assert f"line {num} of {path} " in result.stderr
    rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*rows[:4], b"{\n", *rows[4:]]))
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 1
    assert f"line 5 of {path} " in " ".join(result.stderr.split())


def test_tree_against_chain(tmp_path: Path) -> None:
    results = load_results(write_results(tmp_path, result_lines()))
    found = differences(results, "tree:32", "chain")
    assert [one.set_name for one in found] == ["gsm8k", "alpaca", ALL_SETS] * 2
    for one in found:
        assert one.tau is not None
        assert (one.tau.value, one.tau.low) == (2.0, 2.0)
        assert one.speed.value == pytest.approx(4 * 0.06 / (2 * 0.1), rel=0.05)
        assert 1 < one.speed.low < one.speed.value < one.speed.high


def test_differences_in_text_are_listed(tmp_path: Path) -> None:
    lines = [run_line(), record("a", 0, 0.0, "ar"), record("a", 1, 0.0, "ar")]
    for task, found in enumerate(("tie", "different")):
        one = record("a", task, 0.0, "auto")
        lines += [one, check(one["key"], found)]
    results = load_results(write_results(tmp_path, lines))
    (row,) = identity_table(results).rows
    assert [entry.text for entry in row] == ["auto", "0", "1", "0", "1"]
    assert len(divergences(results)) == 2
    assert "different at output token 3" in divergences(results)[1]


def test_throughput_counts_all_requests(tmp_path: Path) -> None:
    lines = [run_line(), record("a", 0, 0.0, "ar"), record("a", 0, 0.0, "ar", concurrency=4)]
    results = load_results(write_results(tmp_path, lines))
    one, four = throughputs(results)
    assert (one.concurrency, four.concurrency) == (1, 4)
    assert four.tokens_per_s.value == pytest.approx(4 * one.tokens_per_s.value)
    assert [c.method for c in cells(results)] == ["ar"]


def test_published_figures_are_set_beside_ours(tmp_path: Path) -> None:
    source = published()
    assert len(source.rows) == 10 * 2 * 3 * 2
    assert {row.set_name for row in source.rows} == set(PAPER_SETS)
    results = load_results(write_results(tmp_path, result_lines()))
    table = published_table(cells(results), source, 0.0)
    assert table is not None
    assert [row[0].text for row in table.rows] == ["gsm8k", "alpaca"]
    at = list(table.header).index("DDTree, Qwen3-8B")
    assert table.rows[0][at].text == "6.75×"
    assert published_table(cells(results), source, 0.5) is None


def test_the_fastest_of_a_row_is_emphasised(tmp_path: Path) -> None:
    results = load_results(write_results(tmp_path, result_lines()))
    table = results_table(cells(results), 1.0)
    assert table is not None
    for row in table.rows:
        strong = [name for name, entry in zip(table.header, row, strict=True) if entry.strong]
        assert strong == ["auto"]


def test_files_of_a_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = result_lines()
    for line in lines:
        if line.get("method") == "auto":
            cycles = line["sequences"][0]["cycles"]
            num = len(cycles["drafted"])
            cycles["ahead"] = [None, *(["hit", "miss"] * num)[: num - 1]]
    folder = write_results(tmp_path / "results", lines)
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    out = folder / "report"
    assert result.stdout.strip() == str(out / "report.html")
    names = {path.stem for path in out.glob("*.svg")}
    assert {f"{name}-T{t}" for t in (0, 1) for name in
            ("speedup", "budget", "acceptance", "depth", "stages", "budget-time", "reliability",
             "ahead")} <= names  # fmt: skip
    for name in names:
        ElementTree.parse(out / f"{name}.svg")
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        rows = list(csv.reader((out / f"{name}.csv").read_text().splitlines()))
        assert len(rows) > 1
        assert {len(row) for row in rows} == {len(rows[0])}
    first = (out / "report.html").read_text(encoding="utf-8")
    assert first == write_report(folder, tmp_path / "again").read_text(encoding="utf-8")


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    lines = [run_line(), record("mine", 0, 0.0, "ar"), record("mine", 0, 0.0, "auto")]
    results = load_results(write_results(tmp_path, lines))
    assert acceptance.ahead(results, 0.0) is None
    page = write_report(tmp_path, tmp_path / "out").read_text(encoding="utf-8")
    assert "Published figures" not in page
    assert "Against the chain" not in page


def test_no_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="draftwood bench"):
        load_results(tmp_path)
    with pytest.raises(ValueError, match="no result yet"):
        load_results(write_results(tmp_path, [run_line()]))
