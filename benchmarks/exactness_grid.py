"""The full exactness grid on a real model in float32, resumable.

Every drafter × budget × batch size × temperature against the engine's own plain decoding, one
prompt at a time, and (greedy) against transformers' ``generate``, by the rule of
``draftwood.bench.compare``. One JSON line per finished cell; cells that are there are skipped, so
it can be stopped (Ctrl-C) and started again at any time. ``--report`` only prints what is there.

    python benchmarks/exactness_grid.py --drafters oracle,lookup,shipped
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, encode_prompts, machine, named_drafter, save

from draftwood.bench.compare import MAX_SHARE, Tally
from draftwood.bench.runs import Request, Run, compare_runs, engine_run, generate_run
from draftwood.engine import Engine
from draftwood.sampling import SamplingParams
from draftwood.target.load import load_target
from draftwood.target.model import Target
from draftwood.tree.budget import parse_budget

NUM_PROMPTS, NUM_NEW = 24, 64
PROMPTS_OF_BUDGET = {"chain": 24, "8": 24, "32": 24, "128": 8}
BATCHES = (1, 4)
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class Cell:
    """One way to decode."""

    temperature: float
    drafter: str
    budget: str
    batch: int
    num_prompts: int = NUM_PROMPTS

    @property
    def key(self) -> str:
        return f"T{self.temperature:g} {self.drafter} {self.budget} batch {self.batch}"


def cells_of(drafters: Sequence[str]) -> Iterator[Cell]:
    """In the order of running: what says most comes first."""
    for temperature in TEMPERATURES:
        yield Cell(temperature, "none", "off", 4)
    for temperature in (0.0,):
        yield Cell(temperature, "transformers", "off", NUM_PROMPTS)
    for drafter in drafters:
        for budget, num_prompts in PROMPTS_OF_BUDGET.items():
            for batch in reversed(BATCHES):
                for temperature in TEMPERATURES:
                    yield Cell(temperature, drafter, budget, batch, num_prompts)


class Log:
    """Finished work in a JSONL file; a half-written last line is dropped."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self._path = path
        self.records: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(exist_ok=True)
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
        complete = lines[:-1]
        for line in complete:
            record = json.loads(line)
            self.records[record["key"]] = record
        path.write_text("".join(line + "\n" for line in complete), encoding="utf-8")
        known = self.records.get("header")
        if known is not None and known["settings"] != header:
            raise SystemExit(f"{path} is of other settings ({known['settings']}); remove it")
        if known is None:
            self.add("header", settings=header)

    def add(self, key: str, **fields: Any) -> None:
        """Append one record in one write."""
        record = {"key": key, **fields}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self.records[key] = record


def requests_of(target: Target, temperature: float) -> list[Request]:
    return [
        Request(
            prompt,
            SamplingParams(
                temperature=temperature, seed=seed, max_new_tokens=NUM_NEW, ignore_eos=True
            ),
        )
        for seed, prompt in enumerate(encode_prompts(target, NUM_PROMPTS))
    ]


def reference_run(target: Target, temperature: float, log: Log) -> Run:
    """Plain decoding, one prompt at a time: the "off, batch 1" cell."""
    key, requests = f"T{temperature:g} reference", requests_of(target, temperature)
    if key not in log.records:
        begin = time.perf_counter()
        ids = engine_run(lambda: Engine(target, max_batch=1), requests).token_ids
        log.add(key, token_ids=ids, seconds=time.perf_counter() - begin)

    def row_of(index: int, position: int) -> torch.Tensor | None:
        # Sequences in a batch of one do not meet: the others need not be decoded again.
        run = engine_run(lambda: Engine(target), requests[index : index + 1])
        return run.row_of(0, position)

    return Run(log.records[key]["token_ids"], row_of)


def run_cell(cell: Cell, target: Target, reference: Run) -> dict[str, Any]:
    """Decode one cell and compare; what goes into its record."""
    requests = requests_of(target, cell.temperature)[: cell.num_prompts]
    expected = reference.token_ids[: cell.num_prompts]
    prompts = [tuple(request.prompt_ids) for request in requests]
    futures = dict(zip(prompts, expected, strict=True))

    def new_engine() -> Engine:
        drafter = named_drafter(cell.drafter, target, futures)
        return Engine(target, drafter, parse_budget(cell.budget), max_batch=cell.batch)

    begin = time.perf_counter()
    theirs = cell.drafter == "transformers"
    run = generate_run(target, requests) if theirs else engine_run(new_engine, requests)
    seconds = time.perf_counter() - begin
    tally = Tally()
    compare_runs(tally, cell.key, Run(expected, reference.row_of), run, requests)
    return {
        "num_tokens": tally.num_tokens,
        "acceptance_length": 1.0 if theirs else run.acceptance_length,
        "divergences": [
            {"where": where, **dataclasses.asdict(one), "is_rounding": one.is_rounding}
            for where, one in tally.divergences
        ],
        "seconds": seconds,
    }


def report(log: Log, cells: Sequence[Cell]) -> None:
    """Print the table and write ``results/exactness_grid.json``."""
    done = [(cell, log.records[cell.key]) for cell in cells if cell.key in log.records]
    print(f"{'cell':40} {'prompts':>7} {'tokens':>7} {'τ':>6} {'diverged':>8} {'unexplained':>11}")
    for cell, record in done:
        found = record["divergences"]
        print(
            f"{cell.key:40} {cell.num_prompts:7} {record['num_tokens']:7} "
            f"{record['acceptance_length']:6.2f} {len(found):8} "
            f"{sum(not one['is_rounding'] for one in found):11}"
        )
    everything = [one for _, record in done for one in record["divergences"]]
    num_tokens = sum(record["num_tokens"] for _, record in done)
    unexplained = [one for one in everything if not one["is_rounding"]]
    passed = not unexplained and len(everything) <= MAX_SHARE * num_tokens
    for one in everything:
        print(f"{one['where']}, token {one['position']}: {one['tokens']}, Δ {one['delta']:.1e}, "
              f"gap {one['gap']:.1e}, rounding: {one['is_rounding']}")  # fmt: skip
    print(
        f"{len(done)} of {len(cells)} cells, {num_tokens} tokens, {len(everything)} divergences, "
        f"{len(unexplained)} unexplained: {'passed' if passed else 'FAILED'} so far"
    )
    header = log.records["header"]
    save("exactness_grid", settings=header["settings"], cells_done=len(done),
         cells=len(cells), num_tokens=num_tokens, num_divergences=len(everything),
         num_unexplained=len(unexplained), passed=passed,
         records=[{k: v for k, v in record.items() if k != "seconds"} for _, record in done],
    )  # fmt: skip


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    cells = list(cells_of(args.drafters.split(",")))
    header = {"target": args.target, "prompts": NUM_PROMPTS, "tokens": NUM_NEW, **machine()}
    log = Log(RESULTS / "exactness_grid.jsonl", header)
    try:
        if not args.report:
            _run_all(cells, log, args.target)
    except KeyboardInterrupt:
        print("stopped; start again to go on")
    report(log, cells)


def _run_all(cells: Sequence[Cell], log: Log, target_name: str) -> None:
    target = load_target(target_name, dtype="float32", device="cpu", probe=False)
    references = {t: reference_run(target, t, log) for t in TEMPERATURES}
    missing = {cell.drafter for cell in cells if not _exists(cell.drafter, target)}
    for cell in cells:
        if cell.key in log.records or cell.drafter in missing:
            continue
        record = run_cell(cell, target, references[cell.temperature])
        log.add(cell.key, **record)
        print(f"{cell.key}: {record['seconds']:.0f} s, {len(record['divergences'])} diverged",
              flush=True)  # fmt: skip


def _exists(drafter: str, target: Target) -> bool:
    if drafter == "transformers":
        return True
    try:
        named_drafter(drafter, target, {})
    except ValueError as error:
        print(f"leaving out {drafter}: {error}")
        return False
    return True


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Exactness of all ways to decode, resumable.")
    parser.add_argument("--target", default="demo")
    parser.add_argument("--drafters", default="oracle,lookup,shipped")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--report", action="store_true", help="run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
