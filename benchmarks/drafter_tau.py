"""Acceptance length of a drafter per evaluation set, in the decode loop, greedy.

    python benchmarks/drafter_tau.py FOLDER --drafter shipped --prompts 40 --tokens 128

FOLDER holds one ``NAME.jsonl`` per set with ``{"turns": [...]}`` lines. Decodes the first turn of
``--prompts`` evenly spaced rows with the chain and with a tree of 32 nodes and prints τ per set
with and without outputs that degenerate into repetition, and the mean over sets. Texts of chain and
tree are compared. Not a timing benchmark: it may run on a busy machine. Every finished set is
saved, and the same command continues with the next.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from common import RESULTS, named_drafter, save

from draftwood.engine import Engine
from draftwood.records import Output
from draftwood.request import encode
from draftwood.sampling import SamplingParams
from draftwood.target.load import load_target
from draftwood.target.model import Target
from draftwood.tree.budget import parse_budget

METHODS = ("chain", "32")
REPEATS = 3  # an output degenerates when its last n tokens repeat the n before, thrice
SPANS = range(1, 33)


def degenerates(token_ids: Sequence[int]) -> bool:
    """Whether the output ends in a span of up to 32 tokens said at least three times in a row."""
    for span in SPANS:
        tail = list(token_ids[-span * REPEATS :])
        covers = len(tail) == span * REPEATS and len(tail) >= 12
        if covers and tail == tail[:span] * REPEATS:
            return True
    return False


def rows_of(path: Path, count: int, target: Target) -> list[list[int]]:
    """Token ids of ``count`` evenly spaced prompts that leave room in the context."""
    lines = path.read_text(encoding="utf-8").splitlines()
    step = max(1, len(lines) // count)
    turns = [json.loads(line)["turns"][0] for line in lines[::step]]
    prompts = [encode(target, turn, raw=False) for turn in turns]
    return [ids for ids in prompts if len(ids) < 2048][:count]


def tau(outputs: Sequence[Output]) -> float:
    """Tokens per cycle over all outputs; NaN for none."""
    cycles = sum(output.num_cycles for output in outputs)
    return sum(len(output.token_ids) for output in outputs) / cycles if cycles else float("nan")


def measure(
    target: Target, drafter: str, prompts: list[list[int]], tokens: int
) -> dict[str, float | int]:
    """τ of both methods on one set."""
    params = SamplingParams(max_new_tokens=tokens)
    outputs = {
        method: Engine(
            target, named_drafter(drafter, target), parse_budget(method), max_batch=1
        ).generate(prompts, params)
        for method in METHODS
    }
    sound = [i for i, out in enumerate(outputs["chain"]) if not degenerates(out.token_ids)]
    pairs = zip(*outputs.values(), strict=True)
    return {
        "prompts": len(prompts),
        "degenerate": len(prompts) - len(sound),
        "same_text": sum(a.token_ids == b.token_ids for a, b in pairs),
        **{f"tau_{method}": tau(outputs[method]) for method in METHODS},
        **{f"tau_{m}_sound": tau([outputs[m][i] for i in sound]) for m in METHODS},
    }


def finished(path: Path, settings: dict[str, str | int]) -> dict[str, dict[str, float | int]]:
    """The sets that an earlier run with these settings finished."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["settings"] != settings:
        raise SystemExit(
            f"{path} is of other settings ({found['settings']}); remove it or use --out"
        )
    return found["sets"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--drafter", default="shipped")
    parser.add_argument("--target", default="demo")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=RESULTS / "drafter_tau.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target(args.target, dtype="float32", device="cpu")
    settings = {
        "drafter": args.drafter,
        "target": args.target,
        "prompts_per_set": args.prompts,
        "tokens": args.tokens,
    }
    table = finished(args.out, settings)
    keys = [f"tau_{m}{suffix}" for m in METHODS for suffix in ("", "_sound")]
    for path in sorted(args.folder.glob("*.jsonl")):
        if path.stem in table:
            continue
        prompts = rows_of(path, args.prompts, target)
        table[path.stem] = measure(target, args.drafter, prompts, args.tokens)
        print(path.stem, table[path.stem], flush=True)
        mean = {key: sum(row[key] for row in table.values()) / len(table) for key in keys}
        save(args.out.stem, folder=args.out.parent, settings=settings, sets=table, mean=mean)
    print(args.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
