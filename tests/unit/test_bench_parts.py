"""The parts of the benchmark that need no model."""

from __future__ import annotations

import getpass
import json
import os
import platform
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.bench import statistics
from draftwood.bench.methods import parse_method
from draftwood.bench.places import last_name, without_places
from draftwood.bench.plan import Plan, choose, in_turn, order_numbers
from draftwood.bench.provenance import changes, provenance
from draftwood.bench.repetition import MIN_TOKENS, is_repetitive, longest_loop
from draftwood.bench.store import FILE, Store, check_writable, read_lines
from draftwood.bench.workloads import (
    PAPER_SETS,
    SETS,
    Task,
    Workload,
    hub_workload,
    local_workloads,
)
from draftwood.cli.bench_progress import PAUSE_S, lines

# ---- repetition ---------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 1000), max_size=60, unique=True),
    st.lists(st.integers(2000, 3000), min_size=1, max_size=20, unique=True),
    st.integers(3, 8),
    st.integers(0, 30),
)
def test_a_loop_is_found_where_it_is(
    before: list[int], span: list[int], times: int, num_after: int
) -> None:
    after = list(range(5000, 5000 + num_after))
    ids = [*before, *span * times, *after]
    length = len(span) * times
    if length < MIN_TOKENS:
        assert longest_loop(ids) == (0, 0)
        assert not is_repetitive(ids)
        return
    assert longest_loop(ids) == (len(before) + length, length)
    assert is_repetitive(ids) == (not after or 3 * length >= len(ids))


def test_lists_and_short_outputs_are_no_loops() -> None:
    assert not is_repetitive([])
    assert not is_repetitive([7] * (MIN_TOKENS - 1))
    rows = [token for number in range(12) for token in (1, 2, 100 + number, 3)]
    assert not is_repetitive(rows)  # an enumeration: each row differs


def test_a_loop_at_the_end_counts_before_a_longer_one() -> None:
    ids = [*[1, 2] * 30, *range(100, 400), *[9] * MIN_TOKENS]
    assert longest_loop(ids) == (len(ids), MIN_TOKENS)
    assert is_repetitive(ids)


# ---- statistics ---------------------------------------------------------------------------


@pytest.mark.parametrize("num", [5, 8, 40])
def test_interval_covers_and_is_the_same_every_time(num: int) -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        one = statistics.mean(rng.normal(3.0, 1.0, num).tolist())
        inside += one.low <= 3.0 <= one.high
    assert 178 <= inside <= 200  # plain percentiles of 5 values: 161
    assert statistics.mean([1.0, 2.0, 4.0]) == statistics.mean([1.0, 2.0, 4.0])


def test_pairs_cancel_what_they_share() -> None:
    """The prompt decides the speed; the ratio of paired prompts hardly varies."""
    rng = np.random.default_rng(1)
    plain = rng.lognormal(0.0, 1.0, 30)
    fast = plain / 2 * rng.uniform(0.97, 1.03, 30)
    paired = statistics.ratio(plain.tolist(), fast.tolist())
    assert paired.value == pytest.approx(plain.sum() / fast.sum())
    assert paired.low > 1.95
    assert paired.high < 2.05
    shuffled = statistics.ratio(plain.tolist(), rng.permutation(fast).tolist())
    assert shuffled.high - shuffled.low > 3 * (paired.high - paired.low)


def test_groups_count_alike_whatever_their_size() -> None:
    assert statistics.mean_of_groups([[1.0] * 9, [3.0]]).value == 2.0
    both = statistics.ratio_of_groups([([2.0], [1.0]), ([8.0, 8.0], [2.0, 2.0])])
    assert both.value == 3.0
    assert statistics.mean_of_groups([]).num == 0


# ---- workloads ----------------------------------------------------------------------------


def test_local_prompts_in_every_form(tmp_path: Path) -> None:
    rows = [
        {"turns": ["a", "b"]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"},
                      {"role": "assistant", "content": "x"}, {"role": "user", "content": "v"}]},
    ]  # fmt: skip
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    (one,) = local_workloads(tmp_path)
    assert one == local_workloads(file)[0]
    assert one.name == "mine"
    assert one.tasks == (Task(0, ("a", "b")), Task(1, ("u", "v"), "s"))


@pytest.mark.parametrize("line", ['{"text": "x"}', "[1]", "{", '{"turns": []}', '{"turns": [1]}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"turns": ["a"]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 2 of .*mine\.jsonl"):
        local_workloads(file)


def test_no_prompts_and_unknown_sets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSONL"):
        local_workloads(tmp_path)
    with pytest.raises(ValueError, match="gsm8k"):
        hub_workload("gsm9k")


def test_the_papers_templates() -> None:
    assert set(PAPER_SETS) <= set(SETS)
    row = {"question": "1+1?"}
    (gsm8k,) = SETS["gsm8k"].turns(row)
    assert gsm8k == (
        "1+1?\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    (code,) = SETS["humaneval"].turns({"prompt": "def f():"})
    assert code.endswith("```python\ndef f():\n```")
    assert SETS["alpaca"].turns({"instruction": "i", "input": ""}) == ["i"]
    assert SETS["alpaca"].turns({"instruction": "i", "input": "x"}) == ["i\n\nInput:\nx"]
    (bare,) = SETS["livecodebench"].turns({"question_content": "q", "starter_code": ""})
    assert "Write your code in the following format:\n```python\n# YOUR CODE HERE\n```" in bare
    (given_code,) = SETS["livecodebench"].turns({"question_content": "q", "starter_code": "S"})
    assert "Use the following code structure:\n```python\nS\n```" in given_code
    assert SETS["mt-bench"].turns({"prompt": ["a", "b"]}) == ["a", "b"]


# ---- plan ---------------------------------------------------------------------------------


def _workload(name: str, count: int, num_turns: int = 1) -> Workload:
    return Workload(name, tuple(Task(i, (f"{name} {i}",) * num_turns) for i in range(count)))


def test_more_prompts_are_the_same_and_more() -> None:
    few, many = (
        choose([_workload("a", 50)], count, 3, lambda task: task.index % 2 == 0)["a"]
        for count in (5, 9)
    )
    assert many[:5] == few
    assert len(set(many)) == 9
    assert all(task.index % 2 == 0 for task in many)
    assert few != choose([_workload("a", 50)], 5, 4, lambda task: True)["a"]
    with pytest.raises(ValueError, match="room"):
        choose([_workload("a", 5)], 5, 0, lambda task: False)
    with pytest.raises(ValueError, match="two sets"):
        choose([_workload("a", 5), _workload("a", 5)], 5, 0, lambda task: True)


def test_units_have_distinct_keys_and_come_in_turns() -> None:
    chosen = {"a": list(_workload("a", 3, 2).tasks), "b": list(_workload("b", 2).tasks)}
    plan = Plan(chosen, (0.0, 1.0), (1, 2, 4), 2)
    units = list(plan.units())
    method = parse_method("auto")
    assert len({unit.key(method) for unit in units}) == len(units)
    assert [u.set_name for u in units[:6]] == ["a", "a", "a", "a", "b", "b"]
    assert all(u.turn == 0 for u in units if u.concurrency > 1)
    fours = [u for u in units if (u.set_name, u.concurrency, u.temperature) == ("b", 4, 0.0)]
    assert [t.index for t in fours[0].tasks] == [0, 1, 0, 1]
    seeds = [fours[0].seed(place, 0) for place in range(4)]
    assert len(set(seeds)) == 4  # the same prompt twice is two draws
    assert seeds == [fours[1].seed(place, 0) for place in range(4)]  # repetitions draw the same


def test_no_method_is_always_first_or_after_the_same() -> None:
    methods = [parse_method(name) for name in ("ar", "chain", "auto")]
    orders = [tuple(m.name for m in in_turn(methods, number)) for number in range(6)]
    assert len(set(orders)) == 6
    for place in range(3):
        assert {order[place] for order in orders} == {"ar", "chain", "auto"}


@pytest.mark.parametrize("num_methods", [2, 3, 4])
def test_every_place_equally_often_in_every_set_at_every_temperature(num_methods: int) -> None:
    methods = [parse_method(name) for name in ("ar", "chain", "auto", "lookup")[:num_methods]]
    sets = {name: list(_workload(name, 2 * num_methods).tasks) for name in ("a", "b")}
    units = list(Plan(sets, (0.0, 1.0)).units())
    places: Counter[tuple[str, float, str, int]] = Counter()
    for number, unit in zip(order_numbers(units), units, strict=True):
        for place, method in enumerate(in_turn(methods, number)):
            places[unit.set_name, unit.temperature, method.name, place] += 1
    assert len(places) == 2 * 2 * num_methods**2
    assert set(places.values()) == {2}
    firsts = {in_turn(methods, number)[0].name for number in order_numbers(units)[:4]}
    assert len(firsts) > 1  # sets do not all begin with the same method


def test_methods_by_name() -> None:
    assert parse_method("tree:32").budget == "32"
    assert parse_method("lookup:chain").drafter == "lookup"
    assert parse_method("lookup").budget == "auto"
    for wrong in ("", "tree", "tree:", "tree:x", "auto:3", "fast"):
        with pytest.raises(ValueError, match=r"method|budget"):
            parse_method(wrong)


# ---- store --------------------------------------------------------------------------------


def test_a_torn_line_is_removed_and_all_others_stay(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.begin({}, {"target": "t"})
        for number in range(3):
            store.add({"key": f"k{number}", "value": number})
        store.add_check({"key": "k0", "findings": []})
    whole = (tmp_path / FILE).read_bytes()
    for cut in random.Random(0).sample(range(len(whole)), 25):
        (tmp_path / FILE).write_bytes(whole[:cut])
        with Store(tmp_path) as store:
            complete = whole[:cut].count(b"\n")
            assert len(store.lines) == complete
            is_whole = cut == 0 or whole[:cut].endswith(b"\n")
            assert store.cut_line == (None if is_whole else complete + 1)
            store.begin({}, {"target": "t"})
            store.add({"key": "new"})
        with Store(tmp_path) as store:
            assert len(store.lines) == complete + 2
            assert store.cut_line is None


def test_other_settings_and_damage_are_refused(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.begin({}, {"target": "t", "seed": 0})
    with Store(tmp_path) as store, pytest.raises(ValueError, match="seed 0, now it is 1"):
        store.begin({}, {"target": "t", "seed": 1})
    (tmp_path / FILE).write_text("{}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1"):
        Store(tmp_path)
    (tmp_path / FILE).write_text("nothing\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1"):
        Store(tmp_path)


def test_a_damaged_line_in_the_middle_is_named_and_kept(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.begin({}, {"target": "t"})
        for number in range(3):
            store.add({"key": f"k{number}"})
    rows = (tmp_path / FILE).read_bytes().splitlines(keepends=True)
    damaged = b"".join([*rows[:2], rows[2][:-9] + b"\n", rows[3], rows[3][:5]])
    (tmp_path / FILE).write_bytes(damaged)
    for read in (lambda: Store(tmp_path), lambda: read_lines(tmp_path / FILE)):
        with pytest.raises(ValueError, match="line 3"):
            read()
    assert (tmp_path / FILE).read_bytes() == damaged


def test_only_one_command_writes(tmp_path: Path) -> None:
    code = "import sys; from draftwood.bench.store import Store; Store(sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    with Store(tmp_path):
        second = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert second.returncode != 0
        assert "ValueError: another" in second.stderr
    assert subprocess.run(command, env=environment, capture_output=True).returncode == 0


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    file = tmp_path / "file"
    file.touch()
    for wrong in (file, file / "below"):
        with pytest.raises(ValueError, match="choose another folder"):
            check_writable(wrong)

    def refuse(dir: Path) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # tests may run as root
    with pytest.raises(ValueError, match="Permission denied"):
        check_writable(tmp_path / "a")


# ---- headers ------------------------------------------------------------------------------


def test_names_of_folders_stay_on_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "somebody" / "work"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    above = work.parent
    for given_, kept in {
        f"{work}/out": "out",
        f"--data={work}/my/set.jsonl": "--data=my/set.jsonl",
        f"-o{work}/out": "-oout",
        f"{above}/models/tiny": "tiny",
        "../models/tiny": "tiny",
        "~/models/tiny+lookup": "tiny+lookup",
        f"xllamacpp={above}/llama/bin/python:{above}/model.gguf": "xllamacpp=python:model.gguf",
        "results/paper": "results/paper",
        "owner/model": "owner/model",
        "ar,tree:32": "ar,tree:32",
    }.items():
        assert without_places(given_) == kept
    assert last_name(f"{above}/models/tiny+lookup") == "tiny+lookup"
    assert [last_name(name) for name in ("owner/model", "demo")] == ["owner/model", "demo"]
    program = [f"{above}/bin/draftwood", "bench", "-o", f"{above}/x", "--target", f"{work}/m"]
    monkeypatch.setattr(sys, "argv", program)
    header = provenance()
    assert header["command"] == "draftwood bench -o x --target m"
    text = json.dumps(header)
    assert "somebody" not in text
    assert f'"{platform.node()}"' not in text
    assert f'"{getpass.getuser()}"' not in text
    monkeypatch.setattr(sys, "argv", [f"{above}/draftwood/__main__.py", "bench"])
    assert provenance()["command"] == "draftwood bench"


def test_a_model_is_the_same_wherever_its_folder_is(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.begin({}, {"target": "/home/me/models/tiny"})
    with Store(tmp_path) as store:
        assert store.begin({}, {"target": "tiny"}) == 1
    with Store(tmp_path) as store, pytest.raises(ValueError, match="now it is 'small'"):
        store.begin({}, {"target": "small"})


def test_other_threads_and_versions_are_told() -> None:
    now = provenance()
    assert changes(now, now) == []
    hardware = {**now["hardware"], "threads": 99, "load_before": 7.0}
    versions = {**now["versions"], "torch": "0"}
    found = changes({**now, "hardware": hardware, "versions": versions}, now)
    assert sorted(line.split()[0] for line in found) == ["threads", "torch"]


# ---- progress -----------------------------------------------------------------------------


def test_progress_in_lines_now_and_then() -> None:
    said: list[str] = []
    clock = [0.0]
    tell = lines(said.append, lambda: clock[0])
    for done in range(40, 141):  # 40 were there before
        tell(done, 140, "gsm8k T=0 ar")
        clock[0] += 2.0
    assert [line.split(" ")[0] for line in said] == [f"{n}/140" for n in range(40, 140, 7)]
    assert said[1] == "47/140 · gsm8k T=0 ar · about 3 min left"
    said.clear()
    tell = lines(said.append, lambda: clock[0])
    for done in range(4):
        tell(done, 1000, "gsm8k T=0 ar")
        clock[0] += PAUSE_S / 2
    assert [line.split(" ")[0] for line in said] == ["0/1000", "2/1000"]
    said.clear()
    lines(said.append)(6, 6, "")
    assert said == []  # nothing was left to do
