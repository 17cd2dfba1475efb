"""Wall clock of drafting ahead against drafting when needed, paired by prompt.

The synchronous engine has all cores and threads; it is run with every ``--budgets`` and its best
one counts. The asynchronous one gives the last core to a drafting process and keeps the others; so
does a third one, whose process drafts when it is asked and never ahead: as if the cores were two
devices. Orders alternate, texts must be the same. Run it on an otherwise idle machine.

    python benchmarks/ahead_wall.py --drafter FOLDER --prompts 12 --tokens 128
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from typing import Any

import torch
from common import encode_prompts, machine, save

import draftwood as dw
from draftwood.ahead.drafter import AheadDrafter
from draftwood.ahead.planner import AheadOptions
from draftwood.bench.statistics import ratio
from draftwood.engine import Engine
from draftwood.records import Output
from draftwood.target.load import load_target

ASYNC = "ahead"
ON_DEMAND = "on demand"


class Place:
    """Which cores and how many threads the engine has."""

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self._threads = torch.get_num_threads()
        if len(self._cores) < 2:
            raise SystemExit("drafting ahead on a CPU needs two cores")

    @property
    def spare(self) -> int:
        return self._cores[-1]

    def take(self, *, all_cores: bool) -> None:
        """All cores, or all but the drafting process's."""
        cores = self._cores if all_cores else self._cores[:-1]
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(min(self._threads, len(cores)))


def engines(args: argparse.Namespace, place: Place) -> dict[str, Engine]:
    """The asynchronous engine and a synchronous one per budget, on one target."""
    target = load_target(args.target)
    options = {ASYNC: AheadOptions(), ON_DEMAND: AheadOptions(num_branches=0)}
    beside = {
        name: dw.load(
            target, args.drafter, args.ahead_budget, calibrate=False,
            ahead=f"process:{place.spare}", ahead_options=how,
        )
        for name, how in options.items()
    }  # fmt: skip
    return {
        **beside,
        **{b: dw.load(target, args.drafter, b, calibrate=False) for b in args.budgets},
    }


def run(found: dict[str, Engine], args: argparse.Namespace, place: Place) -> dict[str, Any]:
    """Decode every prompt with every engine."""
    params = dw.SamplingParams(
        max_new_tokens=args.tokens, temperature=args.temperature,
        seed=0 if args.temperature else None,
    )  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in found}
    outputs: dict[str, list[Output]] = {name: [] for name in found}
    prompts = encode_prompts(found[ASYNC].target, args.prompts + 1)
    for index, prompt in enumerate(prompts):
        names = list(found)
        for name in names if index % 2 else names[::-1]:
            place.take(all_cores=name not in (ASYNC, ON_DEMAND))
            (output,) = found[name].generate([prompt], params)
            if index > 0:  # the first one warms everything up
                outputs[name].append(output)
                seconds[name].append(output.decode_s)
        texts = {tuple(rows[-1].token_ids) for rows in outputs.values() if rows}
        assert len(texts) <= 1, f"texts differ after prompt {index}"
    return {"seconds": seconds, "outputs": outputs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--drafter", required=True, help="one that needs only tokens")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--budgets", nargs="+", default=["auto", "chain", "8", "off"])
    parser.add_argument("--ahead-budget", default="auto")
    parser.add_argument("--name", default="ahead_wall")
    args = parser.parse_args()
    place, box = Place(), machine()  # the threads of the synchronous engine
    found = engines(args, place)
    done = run(found, args, place)
    seconds = done["seconds"]
    best = min(args.budgets, key=lambda budget: sum(seconds[budget]))
    speed = ratio(seconds[best], seconds[ASYNC])
    print(f"best synchronous budget: {best}")
    print(f"synchronous / ahead {speed.value:.3f} [{speed.low:.3f}, {speed.high:.3f}] of seconds")
    overlap = ratio(seconds[ON_DEMAND], seconds[ASYNC])
    print(f"on demand / ahead {overlap.value:.3f} [{overlap.low:.3f}, {overlap.high:.3f}]")
    waited = [sum(c.seconds.draft_s for c in o.cycles) for o in done["outputs"][ASYNC]]
    rest = [all_s - draft_s for all_s, draft_s in zip(seconds[ASYNC], waited, strict=True)]
    bound = ratio(seconds[best], rest)
    print(f"with no wait for any draft {bound.value:.3f} [{bound.low:.3f}, {bound.high:.3f}]")
    cycles = [cycle for output in done["outputs"][ASYNC] for cycle in output.cycles]
    sources = Counter(cycle.ahead.source for cycle in cycles if cycle.ahead is not None)
    drafter = found[ASYNC].drafter
    assert isinstance(drafter, AheadDrafter)
    pace = drafter.planner.pace
    pass_ms = {m: round(1e3 * pace.ahead_s(m), 1) for m in (1, 2, 4, 8, 16)}
    window_ms, draft_ms = (round(1e3 * (x or 0.0), 1) for x in (pace.window_s, pace.draft_s))
    print(f"a verification leaves {window_ms} ms, a draft {draft_ms}, branches {pass_ms}")
    print(f"drafts: {dict(sources)}; workers: {dict(drafter.counters)}")
    save(
        args.name, machine=box, settings=vars(args), seconds=seconds, best=best,
        ratio=speed.value, interval_95=[speed.low, speed.high],
        on_demand=overlap.value, on_demand_95=[overlap.low, overlap.high],
        window_ms=window_ms, draft_ms=draft_ms, pass_ms=pass_ms,
        without_waits=bound.value, without_waits_95=[bound.low, bound.high],
        sources=dict(sources), workers=dict(drafter.counters),
        branches=Counter(cycle.ahead.num_branches for cycle in cycles if cycle.ahead is not None),
        acceptance_length={
            name: sum(len(o.token_ids) for o in rows) / sum(o.num_cycles for o in rows)
            for name, rows in done["outputs"].items()
        },
    )  # fmt: skip
    for name in (ASYNC, ON_DEMAND):
        found[name].drafter.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
