"""The benchmark on a tiny model: what is kept, checked, resumed and refused."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from draftwood.bench.engines import own, worker
from draftwood.bench.engines.base import Batch
from draftwood.bench.harness import Decoding, Harness, encode
from draftwood.bench.identity import check
from draftwood.bench.measure import acceptance_by_depth, acceptance_length
from draftwood.bench.methods import Bench, Outside, open_runner, parse_method
from draftwood.bench.plan import Plan
from draftwood.bench.runs import Request
from draftwood.bench.store import FILE, Store, read_lines
from draftwood.bench.workloads import Task
from draftwood.cli.app import app
from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.errors import DraftwoodError
from draftwood.sampling import SamplingParams
from draftwood.target.model import Target
from tiny import tiny_model
from tiny_drafter import tiny_draft_network
from tiny_folder import save_tiny_folder, tiny_tokenizer

TASKS = [Task(4, ("abcabcabcabc", "again, abcabc")), Task(7, ("xyz xyz xyz",), "be nice")]
DECODING = Decoding(max_new_tokens=12)


@pytest.fixture(scope="module")
def target() -> Target:
    tokenizer = tiny_tokenizer()
    return Target(tiny_model("llama", vocab=len(tokenizer)), tokenizer, probe=False)


def harness(target: Target, store: Store, methods: str, **plan: Any) -> Harness:
    settings = {"chosen": {"mine": TASKS}, "temperatures": (0.0, 1.0), **plan}
    names = [parse_method(name) for name in methods.split(",")]
    return Harness(Bench(target, "tiny", "lookup"), names, Plan(**settings), DECODING, store)


def test_every_output_is_that_of_plain_decoding_and_measured(
    target: Target, tmp_path: Path
) -> None:
    with Store(tmp_path) as store:
        harness(target, store, "chain,tree:4,lookup,hf-ar").run()
        # 3 turns × 2 temperatures × 5 methods, plain decoding added
        assert len(store.records) == 30
        # hf-ar promises its own text only where nothing is drawn
        assert len(store.checks) == 2 * 3 * 3 + 3
        assert all(f["found"] == "same" for c in store.checks.values() for f in c["findings"])
        for record in store.records.values():
            (sequence,) = record["sequences"]
            assert 0 < len(sequence["token_ids"]) <= DECODING.max_new_tokens
            assert sequence["decode_s"] > 0
            assert record["wall_s"] >= sequence["decode_s"]
            assert sum(sequence["bursts"]) == len(sequence["token_ids"])
            if record["method"] != "hf-ar":
                cycles = sequence["cycles"]
                assert cycles["committed"] == sequence["bursts"]
                assert record["kv_bytes"] > 0
                assert sum(record["reliability"]["num"]) == sum(cycles["drafted"])
                assert sum(record["reliability"]["accepted"]) == sum(cycles["accepted"])
            if record["method"] == "ar":
                assert acceptance_length(sequence) == 1.0


def test_a_second_turn_follows_the_reply_of_plain_decoding(target: Target, tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        harness(target, store, "tree:4", temperatures=(0.0,)).run()
        first = store.records["mine/4/turn0/T0/c1/r0/ar"]["sequences"][0]["token_ids"]
        second = store.records["mine/4/turn1/T0/c1/r0/tree:4"]
        reply = target.tokenizer.decode(first, skip_special_tokens=True)  # type: ignore[union-attr]
        ids = encode(target, TASKS[0], [reply], thinking=False)
        assert second["num_prompt_tokens"] == [len(ids)]


def test_what_is_there_is_not_done_again(target: Target, tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        harness(target, store, "tree:4", temperatures=(0.0,)).run()
        before = (tmp_path / FILE).read_bytes()
        harness(target, store, "tree:4", temperatures=(0.0,)).run()
        assert (tmp_path / FILE).read_bytes() == before
    lines = before.splitlines(keepends=True)
    (tmp_path / FILE).write_bytes(b"".join(lines[:-3]))  # records and checks may be missing
    with Store(tmp_path) as store:
        harness(target, store, "tree:4,chain", temperatures=(0.0,)).run()
        assert len(store.records) == 9
        assert len(store.checks) == 6


def test_concurrent_requests_share_a_record(target: Target, tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        harness(target, store, "tree:4,hf-ar", concurrencies=(4,), temperatures=(1.0,)).run()
        record = store.records["mine/4+7+4+7/turn0/T1/c4/r0/tree:4"]
        ids = [one["token_ids"] for one in record["sequences"]]
        assert len(ids) == 4
        assert ids[0] != ids[2]  # the same prompt twice is drawn twice
        findings = store.checks[record["key"]]["findings"]
        assert [one["found"] for one in findings] == ["same"] * 4


@pytest.mark.parametrize(
    ("dtype", "min_half_bytes"),
    # compiled products in the second, and in bfloat16 where the CPU has that in the third
    [(torch.float64, 2**20), (torch.float32, 2**20), (torch.float32, 0)],
)
def test_a_drafter_learns_nothing_from_earlier_prompts(
    dtype: torch.dtype, min_half_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwood.draft.products._MIN_HALF_BYTES", min_half_bytes)
    target = Target(tiny_model("llama", dtype=dtype), probe=False)
    network = tiny_draft_network(target)
    drafter = BlockDiffusionDrafter(network, target)
    copy = own.fork(drafter)
    assert copy is not drafter
    assert [id(m) for m in own._models(copy)] == [id(m) for m in own._models(drafter)]
    bench = Bench(target, "tiny")
    bench.__dict__["given"] = drafter
    runner = open_runner(parse_method("tree:6"), bench, 1.0)
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=16)
    requests = [Request([5, 9, 11, 3, 9], params)]
    drafted = [
        [cycle.num_accepted for cycle in runner.run(requests).generations[0].cycles]
        for _ in range(2)
    ]
    assert drafted[0] == drafted[1]


class Shifted:
    """A runner whose logits behind a token are known."""

    promises_identity = True
    max_concurrency = None

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        self._rows = rows

    def run(self, requests: Sequence[Request]) -> Batch:
        raise NotImplementedError

    def row(self, requests: Any, batch: Any, index: int, position: int, budgets: Any) -> Any:
        return self._rows[position]

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [
        ([0.0, 1.0, 1.0 - 1e-6], [0.0, 1.0 - 1e-6, 1.0], "tie"),
        ([0.0, 1.0, 1.0 - 1e-4], [0.0, 1.0, 1.0 - 1e-4], "unproven"),
        ([0.0, 1.0, 0.9], [0.0, 0.9, 1.0], "different"),
        ([0.0, 1.0, 0.5], [0.0, 1.0, 0.5], "different"),
    ],
)
def test_differences_are_looked_into(left: list[float], right: list[float], found: str) -> None:
    rows = [torch.zeros(3)], [torch.zeros(3)]
    rows[0].append(torch.tensor(left))
    rows[1].append(torch.tensor(right))
    requests = [Request([1], SamplingParams(max_new_tokens=2))]
    runners = (Shifted(rows[0]), Shifted(rows[1]))
    (finding,) = check(requests, [[0, 1]], [[0, 2]], [None], runners, [])
    assert finding["found"] == found
    assert (finding["position"], finding["tokens"]) == (1, [1, 2])
    json.dumps(finding, allow_nan=False)


def test_acceptance_by_depth_is_conditional() -> None:
    cycles = {"accepted": [0, 1, 2, 2, 0], "drafted": [4, 4, 4, 4, 0], "committed": [1] * 5}
    rates = acceptance_by_depth([{"cycles": cycles}])
    assert rates == [3 / 4, 2 / 3, 0.0]


ENGINE = """
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message["op"] == "load":
        ok = message["model"] == "good"
        answer = {"ok": ok, "versions": {"fake": "1"}, "error": "cannot load"}
    else:
        outputs = [{"token_ids": r["prompt_ids"], "finish_reason": "length", "prefill_s": 0.1,
                    "decode_s": 0.2, "num_decoded": 2, "arrivals": [[0.1, 1], [0.3, 2]]}
                   for r in message["requests"]]
        answer = {"ok": True, "wall_s": 0.4, "outputs": outputs}
    print(json.dumps(answer), flush=True)
"""


def test_outside_engines_answer_in_lines(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE, encoding="utf-8")
    monkeypatch.setitem(worker.SCRIPTS, "xllamacpp", str(script))
    places = {name: {"xllamacpp": Outside(sys.executable, name)} for name in ("good", "bad")}
    method = parse_method("xllamacpp")
    runner = open_runner(method, Bench(target, "tiny", outside=places["good"]), 0.0)
    (one,) = runner.run([Request([4, 5, 6], SamplingParams())]).generations
    runner.close()
    assert one.token_ids == [4, 5, 6]
    assert one.arrivals == [(0.1, 1), (0.3, 2)]
    with pytest.raises(DraftwoodError, match="cannot load"):
        open_runner(method, Bench(target, "tiny", outside=places["bad"]), 0.0)
    with pytest.raises(ValueError, match="--engine xllamacpp="):
        open_runner(method, Bench(target, "tiny"), 0.0)
    missing = {"xllamacpp": Outside(str(tmp_path / "python"), "good")}
    with pytest.raises(ValueError, match="there is no"):
        open_runner(method, Bench(target, "tiny", outside=missing), 0.0)


def test_usage_errors_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = save_tiny_folder(tmp_path / "tiny")
    data = tmp_path / "mine.jsonl"
    data.write_text('{"turns": ["abc"]}\n', encoding="utf-8")
    base = ["bench", "--out", str(tmp_path / "out"), "--target", str(folder)]
    for wrong in (
        [], ["--data", str(data), "-m", "fast"], ["--data", str(data), "-T", "warm"],
        ["--data", str(data), "--concurrency", "0"], ["--suite", "all"],
        ["--data", str(data), "--engine", "vllm=x"],
    ):  # fmt: skip
        result = CliRunner().invoke(app, [*base, *wrong])
        assert result.exit_code == 2, result.output
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_refused_before_the_model_is_looked_for(
    tmp_path: Path,
) -> None:
    data = tmp_path / "mine.jsonl"
    data.write_text('{"turns": ["abc"]}\n', encoding="utf-8")
    base = ["bench", "--data", str(data), "--target", str(tmp_path / "none"), "--out"]
    for wrong in (data, data / "below"):
        result = CliRunner().invoke(app, [*base, str(wrong)])
        assert result.exit_code == 2, result.output
        assert "choose another folder" in " ".join(result.stderr.replace("│", " ").split())


def test_an_interrupt_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_folder(tmp_path / "tiny")
    data = tmp_path / "mine.jsonl"
    data.write_text('{"turns": ["abcabc"]}\n{"turns": ["xyz"]}\n', encoding="utf-8")
    command = ["bench", "--out", str(tmp_path / "out"), "--target", str(folder), "-d", "lookup",
               "--data", str(data), "-n", "6", "-m", "ar,chain"]  # fmt: skip
    run, calls = own.OwnRunner.run, []

    def interrupted(self: own.OwnRunner, requests: Sequence[Request]) -> Batch:
        calls.append(requests)
        if len(calls) == 5:  # two warm-ups, two results
            raise KeyboardInterrupt
        return run(self, requests)

    monkeypatch.setattr(own.OwnRunner, "run", interrupted)
    stopped = CliRunner().invoke(app, command)
    assert stopped.exit_code == 130, stopped.output
    assert "2 results" in stopped.stderr
    assert "1/4 · mine T=0 " in stopped.stderr  # no terminal, so in lines
    path = tmp_path / "out" / FILE
    cut = read_lines(path)
    assert cut[-1]["kind"] == "check"
    del cut[-1]
    path.write_bytes(path.read_bytes().rstrip(b"\n")[:-3])
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "4 results" in done.stderr
    assert "2 of them new" in done.stderr
    assert f"line {len(cut) + 1} of {path} " in done.stderr
    found = read_lines(path)
    assert found[: len(cut)] == cut
    assert [line["kind"] for line in found].count("check") == 2
    assert found[0]["settings"]["target"] == "tiny"


def test_a_drafter_with_lookup_has_the_weights_of_the_drafter(target: Target) -> None:
    folders = {name: Bench(target, "tiny", name).drafter_folder
               for name in ("x", "x+lookup", "lookup", "none")}  # fmt: skip
    assert folders == {"x": "x", "x+lookup": "x", "lookup": None, "none": None}


@pytest.mark.parametrize("method", ["lookup", "async-process"])
def test_nothing_is_learned_from_or_for_other_commands(
    method: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path))
    bench = Bench(target, "tiny", "lookup")
    runner = open_runner(parse_method(method), bench, 0.0)
    try:
        (one,) = runner.run(
            [Request([5, 9, 5, 9, 5], SamplingParams(max_new_tokens=8))]
        ).generations
        assert one.cycles
    finally:
        runner.close()
    del runner
    gc.collect()
    assert not (tmp_path / "surrogates").exists()
