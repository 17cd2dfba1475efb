"""Every budget policy on the same recorded cycles: one table, and the bars of adaptive budgets.

Recordings hold the drafts at every position of texts that the target wrote, so a replay is exact
about tokens and cycles, and repeatable. Seconds come from a machine: the one measured on a quiet
box with ``measure``, and made-up ones (a staircase, a flat and a steep curve).

    python benchmarks/policies.py record --folder /tmp/recordings --eval EVAL_FOLDER
    python benchmarks/policies.py measure --output /tmp/machine.json
    python benchmarks/policies.py table --folder /tmp/recordings --machine /tmp/machine.json --save
    python benchmarks/policies.py reliability --folder /tmp/recordings --save

Bars, on the measured machine: auto ≥ 0.98 × the best fixed budget in every cell (a set of prompts
at a temperature), ≥ every single fixed budget on the mean, and ≥ 0.99 × plain on every prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine as box
from common import named_drafter, read_prompts, save

from draftwood.engine import Engine
from draftwood.replay.compare import ORACLE, compare
from draftwood.replay.machines import (
    Machine,
    flat_machine,
    measured_machine,
    staircase_machine,
    steep_machine,
)
from draftwood.replay.record import record
from draftwood.replay.recording import Recording, load_recording, save_recording
from draftwood.replay.reliability import promises, reliability
from draftwood.replay.replay import BUDGETS, Replay
from draftwood.sampling import SamplingParams
from draftwood.target.load import load_target
from draftwood.target.measure import measured
from draftwood.tree.budget import Fixed

SETS = ("gsm8k", "math500", "aime24", "humaneval", "mbpp", "livecodebench", "swe-bench",
        "mt-bench", "alpaca", "spec-bench")  # fmt: skip
TEMPERATURES = (0.0, 1.0)
POLICIES = ("auto", "convex", "roofline", ORACLE, *map(str, BUDGETS), "chain", "off")
MAX_PROMPT_CHARS = 2000  # swe-bench prompts are whole files
NEAR_BEST, NEVER_SLOWER = 0.98, 0.99


def make_recordings(args: argparse.Namespace) -> None:
    args.folder.mkdir(parents=True, exist_ok=True)
    target = load_target(args.target, dtype="float32", device="cpu", probe=False)
    for name in args.sets:
        for temperature in TEMPERATURES:
            path = args.folder / f"{name}-T{temperature:g}.npz"
            if path.exists():
                continue
            prompts = _prompts(args.eval / f"{name}.jsonl", args.prompts)
            params = SamplingParams(
                temperature=temperature, seed=0 if temperature else None,
                max_new_tokens=args.tokens,
            )  # fmt: skip
            drafter = named_drafter(args.drafter, target)
            found = record(target, drafter, prompts, params, name=name, drafter_name=args.drafter)
            save_recording(path, found)
            print(f"{path}: {len(found.texts)} texts, {found.num_tokens} positions", flush=True)


def _prompts(path: Path, count: int) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()[:count]
    return [json.loads(line)["turns"][0][:MAX_PROMPT_CHARS] for line in lines]


def measure(args: argparse.Namespace) -> None:
    """Seconds of passes by width, of a draft and of the rest, on this box as it is now."""
    target = load_target(args.target, dtype="float32", device="cpu", probe=False)
    drafter = named_drafter(args.drafter, target)
    curve = measured(target, drafter.taps, limit_s=args.limit)
    params = SamplingParams(max_new_tokens=64, ignore_eos=True)
    (output,) = Engine(target, drafter, Fixed(16)).generate(read_prompts(1), params)
    cycles = [(cycle.seconds, cycle.num_accepted + 1) for cycle in output.cycles]
    content = {
        "curve": asdict(curve),
        "draft_s": statistics.median(s.draft_s for s, _ in cycles),
        "other_s": statistics.median(s.commit_s + s.other_s for s, _ in cycles),
        "walk_s": statistics.median(s.walk_s / tokens for s, tokens in cycles),
        "box": box(),
    }
    args.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"one row {curve.seconds[0] * 1e3:.1f} ms, draft {content['draft_s'] * 1e3:.1f} ms")


def on_machine(recording: Recording, measured_at: dict[str, Any] | None) -> Recording:
    """The recording with the seconds of another measurement."""
    if measured_at is None:
        return recording
    details = {**recording.details, **{k: measured_at[k] for k in ("curve", "other_s", "walk_s")}}
    draft_s = np.float32(measured_at["draft_s"])
    texts = [replace(text, draft_s=np.full_like(text.draft_s, draft_s)) for text in recording.texts]
    return Recording(texts, details)


def machines(recording: Recording) -> list[Machine]:
    makers = (measured_machine, staircase_machine, flat_machine, steep_machine)
    return [make(recording) for make in makers]


def table(args: argparse.Namespace) -> None:
    content = json.loads(args.machine.read_text()) if args.machine else None
    cells: dict[str, dict[str, dict[str, Replay]]] = {}
    for recording in _recordings(args.folder):
        moved = on_machine(recording, content)
        name = f"{recording.details['name']} T={recording.details['temperature']:g}"
        for machine in machines(moved):
            cells.setdefault(machine.name, {})[name] = compare(moved, machine)
    failed = [bar for name, by_cell in cells.items() for bar in show(name, by_cell)]
    print("\n".join(failed) if failed else "all bars are met")
    if args.save:
        save("policies", settings=_settings(args), machine=content,
             cells={m: {c: _plain(row) for c, row in by.items()} for m, by in cells.items()},
             failed=failed)  # fmt: skip


def show(machine: str, cells: dict[str, dict[str, Replay]]) -> list[str]:
    """Print one machine's table; the bars it misses."""
    print(f"\n{machine}: {len(cells)} cells, speedups over plain decoding")
    print(
        f"{'policy':>10} {'mean':>7} {'worst cell / best fixed':>24} {'worst prompt':>13} {'τ':>6}"
    )
    means = {}
    for policy in POLICIES:
        speeds = [cell[policy].speedup for cell in cells.values()]
        ratios = [cell[policy].speedup / cell[ORACLE].speedup for cell in cells.values()]
        worst = min(text.speedup for cell in cells.values() for text in cell[policy].texts)
        tau = statistics.mean(cell[policy].acceptance_length for cell in cells.values())
        means[policy] = statistics.mean(speeds)
        print(f"{policy:>10} {means[policy]:7.3f} {min(ratios):24.3f} {worst:13.3f} {tau:6.2f}")
    return misses(machine, cells, means)


def misses(machine: str, cells: dict[str, dict[str, Replay]], means: dict[str, float]) -> list[str]:
    found = []
    for name, cell in cells.items():
        ratio = cell["auto"].speedup / cell[ORACLE].speedup
        if ratio < NEAR_BEST:
            found.append(f"{machine}, {name}: auto is {ratio:.3f} of the best fixed budget")
        for index, text in enumerate(cell["auto"].texts):
            if text.speedup < NEVER_SLOWER:
                found.append(f"{machine}, {name}, prompt {index}: {text.speedup:.3f} of plain")
    best = max(map(str, BUDGETS), key=lambda budget: means[budget])
    if means["auto"] < means[best]:
        found.append(f"{machine}: mean {means['auto']:.3f}, fixed {best} has {means[best]:.3f}")
    return found


def show_reliability(args: argparse.Namespace) -> None:
    """Stated against observed, before and after calibration, by temperature."""
    content = {}
    for temperature in TEMPERATURES:
        chosen = [r for r in _recordings(args.folder) if r.details["temperature"] == temperature]
        if not chosen:
            continue
        curves, kept = reliability(chosen), promises(chosen)
        for curve in curves:
            when = "after" if curve.is_calibrated else "before"
            print(f"T={temperature:g} {curve.kind:>8} {when:>6}: calibration error "
                  f"{curve.error:.4f}, log loss {curve.log_loss:.4f}")  # fmt: skip
        for one in kept:
            when = "after" if one.is_calibrated else "before"
            print(f"T={temperature:g} budget {one.budget:3d} {when:>6}: Φ {one.phi:.3f}, "
                  f"accepted {one.accepted:.3f}")  # fmt: skip
        content[f"T={temperature:g}"] = {
            "curves": [asdict(curve) for curve in curves],
            "promises": [asdict(one) for one in kept],
        }
    if args.save:
        save("reliability", settings=_settings(args), **content)


def _recordings(folder: Path) -> list[Recording]:
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise SystemExit(f"no recordings in {folder}; run 'record' first")
    return [load_recording(path) for path in paths]


def _plain(row: dict[str, Replay]) -> dict[str, Any]:
    return {
        policy: {
            "speedup": one.speedup,
            "tau": one.acceptance_length,
            "nodes": one.num_drafted / one.num_cycles,
            "worst_prompt": min(text.speedup for text in one.texts),
        }
        for policy, one in row.items()
    }


def _settings(args: argparse.Namespace) -> dict[str, str]:
    return {key: str(value) for key, value in vars(args).items() if key not in ("run", "save")}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("record")
    one.add_argument("--folder", type=Path, required=True)
    one.add_argument("--eval", type=Path, required=True, help="folder with SET.jsonl")
    one.add_argument("--sets", nargs="+", default=SETS)
    one.add_argument("--prompts", type=int, default=6, help="of each set")
    one.add_argument("--tokens", type=int, default=128)
    one.set_defaults(run=make_recordings)
    two = commands.add_parser("measure")
    two.add_argument("--output", type=Path, required=True)
    two.add_argument("--limit", type=float, default=20.0)
    two.set_defaults(run=measure)
    for each in (one, two):
        each.add_argument("--target", default="demo")
        each.add_argument("--drafter", default="shipped")
    three = commands.add_parser("table")
    three.add_argument("--machine", type=Path, help="of 'measure'; else as recorded")
    three.set_defaults(run=table)
    four = commands.add_parser("reliability")
    four.set_defaults(run=show_reliability)
    for each in (three, four):
        each.add_argument("--folder", type=Path, required=True)
        each.add_argument("--save", action="store_true", help="write results/….json")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    args.run(args)


if __name__ == "__main__":
    main()
