"""The exactness check on SmolLM2, one temperature per process.

What covers what. The rounding errors depend on the shapes that the target computes, not on who
drafted, so the oracle (deep, scattered paths) goes over the whole grid of budget × batch size with
all prompts. Lookup (small, irregular trees) and the block-diffusion drafter (its own taps, cache
and batched pass) join with fewer prompts, at the budgets where they differ most. That every drafter
gives the same text under every policy is the business of ``test_exactness``, in float64.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from draftwood.bench.compare import Tally
from draftwood.bench.runs import Request, Run, compare_runs, engine_run, generate_run
from draftwood.draft.base import Drafter
from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.draft.load import load_drafter
from draftwood.draft.lookup import LookupDrafter
from draftwood.engine import Engine
from draftwood.records import CycleRecord
from draftwood.request import encode
from draftwood.sampling import SamplingParams
from draftwood.target.load import load_target
from draftwood.target.model import Target
from draftwood.tree.budget import parse_budget
from oracle import NoisyOracleDrafter
from tiny_drafter import tiny_draft_network

PROMPT_FILE = Path(__file__).parents[1] / "benchmarks" / "prompts.jsonl"
NUM_PROMPTS = 8
NUM_NEW = 48
BUDGETS = ("off", "chain", "8", "32")
BATCHES = (1, 4)


@dataclass(frozen=True)
class Cell:
    """One way to decode, and how much of the prompts and of the output to compare."""

    drafter: str
    budget: str
    batch: int
    num_prompts: int = NUM_PROMPTS
    num_new: int = NUM_NEW

    def __str__(self) -> str:
        return f"{self.drafter}, budget {self.budget}, batch {self.batch}"


CELLS = (
    Cell("none", "off", 4),  # "off" in a batch of one is the reference
    *(Cell("oracle", budget, batch) for budget in BUDGETS[1:] for batch in BATCHES),
    Cell("lookup", "chain", 4, 4, 32),
    Cell("lookup", "32", 1, 2, 32),
    Cell("lookup", "32", 4, 4, 32),
    Cell("block_diffusion", "chain", 1, 1, 24),
    Cell("block_diffusion", "8", 4, 4, 24),
    Cell("block_diffusion", "32", 4, 4, 16),
)


@dataclass
class Report:
    """What one process found."""

    tally: Tally = field(default_factory=Tally)
    lines: list[str] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    scattered: list[bool] = field(default_factory=list)

    def watch(self, record: CycleRecord) -> None:
        for index in record.decoding:
            path = record.verdicts[index].path
            self.depths.append(len(path) - 1)
            self.scattered.append(bool(np.any(np.diff(path) != 1)))


def real_requests(target: Target, temperature: float) -> list[Request]:
    """Every third of the prompts that the full grid uses."""
    lines = PROMPT_FILE.read_text().splitlines()[:: 24 // NUM_PROMPTS]
    texts = [json.loads(line)["turns"][0] for line in lines]
    return [
        Request(
            encode(target, text, raw=False),
            SamplingParams(
                temperature=temperature, seed=seed, max_new_tokens=NUM_NEW, ignore_eos=True
            ),
        )
        for seed, text in enumerate(texts)
    ]


def check(temperature: float) -> Report:
    """Run all cells at one temperature on one thread."""
    torch.set_num_threads(1)
    target = load_target("demo", dtype="float32", device="cpu", probe=False)
    requests = real_requests(target, temperature)
    reference = engine_run(lambda: Engine(target), requests)
    report = Report()
    if temperature == 0:
        theirs = generate_run(target, requests)
        compare_runs(report.tally, "transformers", reference, theirs, requests)
    for cell in CELLS:
        _check_cell(cell, target, requests, reference, report)
    return report


def _check_cell(
    cell: Cell, target: Target, requests: Sequence[Request], reference: Run, report: Report
) -> None:
    shown = [
        replace(r, params=replace(r.params, max_new_tokens=cell.num_new))
        for r in requests[: cell.num_prompts]
    ]
    expected = [ids[: cell.num_new] for ids in reference.token_ids[: cell.num_prompts]]
    watch = report.watch if (cell.drafter, cell.budget) == ("oracle", "32") else None

    def new_engine() -> Engine:
        drafter = drafter_of(cell.drafter, target, shown, expected)
        policy = parse_budget(cell.budget)
        return Engine(target, drafter, policy, max_batch=cell.batch, on_cycle=watch)

    run = engine_run(new_engine, shown)
    compare_runs(report.tally, str(cell), Run(expected, reference.row_of), run, shown)
    report.lines.append(f"{cell}: τ {run.acceptance_length:.2f}")


def drafter_of(
    name: str, target: Target, requests: Sequence[Request], expected: Sequence[Sequence[int]]
) -> Drafter | None:
    """A new drafter; the block-diffusion one is the shipped one, or random where none is."""
    if name == "oracle":
        prompts = [tuple(request.prompt_ids) for request in requests]
        return NoisyOracleDrafter(dict(zip(prompts, expected, strict=True)))
    if name == "lookup":
        return LookupDrafter()
    if name == "block_diffusion":
        shipped = load_drafter("auto", target)
        if isinstance(shipped, BlockDiffusionDrafter):
            return shipped
        return BlockDiffusionDrafter(tiny_draft_network(target), target)
    return None
