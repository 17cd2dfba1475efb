"""Acceptance length of a drafter per evaluation set, in the decode loop, greedy.

    python benchmarks/drafter_tau.py FOLDER --drafter shipped --prompts 40 --tokens 128

FOLDER holds one ``NAME.jsonl`` per set with ``{"turns": [...]}`` lines. Decodes the first turn of
``--prompts`` evenly spaced rows with the chain and with a tree of 32 nodes and prints τ per set
with and without outputs that degenerate into repetition, and the mean over sets. Not a timing
benchmark: it may run on a busy machine. Every finished set is saved, and the same command continues
with the next.

The chain is verified in full. Its text is then known, and of a tree only the nodes on that text are
verified, which is all that the walk can visit: same tokens, same cycles, a third of the time.
``--full`` verifies whole trees, and the texts of chain and tree are compared.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, named_drafter, save

from draftwood.draft.base import DraftContext, Drafter, DraftLimits
from draftwood.engine import Engine
from draftwood.records import Output
from draftwood.request import encode
from draftwood.sampling import SamplingParams
from draftwood.target.load import load_target
from draftwood.target.model import Target
from draftwood.tree.budget import parse_budget
from draftwood.tree.tree import NO_PARENT, ScoredPrefixes

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


class OnText:
    """A drafter whose proposals are cut down to the nodes on the known text.

    Args:
        inner: proposes, and learns as ever.
        texts: the output of each prompt.
    """

    def __init__(self, inner: Drafter, texts: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        self._inner, self._texts = inner, texts
        self.taps, self.horizon = inner.taps, inner.horizon
        self.observe, self.truncate, self.release = inner.observe, inner.truncate, inner.release

    def propose(self, contexts: Sequence[DraftContext], limits: DraftLimits) -> ScoredPrefixes:
        scored = self._inner.propose(contexts, limits)
        return ScoredPrefixes.stack(
            [self._cut(context, scored.row(i)) for i, context in enumerate(contexts)]
        )

    def _cut(self, context: DraftContext, scored: ScoredPrefixes) -> ScoredPrefixes:
        text = self._texts[tuple(context.token_ids[: context.prompt_len])]
        ahead = text[len(context.token_ids) - context.prompt_len :]
        kept, last = [], NO_PARENT
        for node in range(int(scored.counts[0])):  # parents come first
            depth = int(scored.depths[0, node])
            on_text = depth <= len(ahead) and scored.token_ids[0, node] == ahead[depth - 1]
            if on_text and scored.parents[0, node] == last:
                kept.append(node)
                last = node
        size = len(kept)
        return ScoredPrefixes(
            scored.token_ids[:, kept], np.arange(-1, size - 1)[None], scored.depths[:, kept],
            scored.log_probs[:, kept], np.array([size]),
        )  # fmt: skip


def decoded(
    target: Target, drafter: Drafter, method: str, prompts: list[list[int]], tokens: int
) -> list[Output]:
    engine = Engine(target, drafter, parse_budget(method), max_batch=1)
    return engine.generate(prompts, SamplingParams(max_new_tokens=tokens))


def measure(
    target: Target, name: str, prompts: list[list[int]], tokens: int, *, full: bool
) -> dict[str, float | int]:
    """τ of both methods on one set."""
    chain, tree = METHODS
    outputs = {chain: decoded(target, named_drafter(name, target), chain, prompts, tokens)}
    texts = {tuple(out.prompt_token_ids): out.token_ids for out in outputs[chain]}
    drafter = named_drafter(name, target)
    if not full:
        drafter = OnText(drafter, texts)
    outputs[tree] = decoded(target, drafter, tree, prompts, tokens)
    sound = [i for i, out in enumerate(outputs["chain"]) if not degenerates(out.token_ids)]
    pairs = zip(*outputs.values(), strict=True)
    return {
        "prompts": len(prompts),
        "degenerate": len(prompts) - len(sound),
        "same_text": sum(a.token_ids == b.token_ids for a, b in pairs),
        **{f"tau_{method}": tau(outputs[method]) for method in METHODS},
        **{f"tau_{m}_sound": tau([outputs[m][i] for i in sound]) for m in METHODS},
    }


def finished(path: Path, settings: dict[str, Any]) -> dict[str, dict[str, float | int]]:
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
    parser.add_argument("--full", action="store_true", help="verify whole trees")
    parser.add_argument("--out", type=Path, default=RESULTS / "drafter_tau.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target(args.target, dtype="float32", device="cpu")
    settings = {
        "drafter": args.drafter,
        "target": args.target,
        "prompts_per_set": args.prompts,
        "tokens": args.tokens,
        "full": args.full,
    }
    table = finished(args.out, settings)
    keys = [f"tau_{m}{suffix}" for m in METHODS for suffix in ("", "_sound")]
    for path in sorted(args.folder.glob("*.jsonl")):
        if path.stem in table:
            continue
        prompts = rows_of(path, args.prompts, target)
        table[path.stem] = measure(target, args.drafter, prompts, args.tokens, full=args.full)
        print(path.stem, table[path.stem], flush=True)
        mean = {key: sum(row[key] for row in table.values()) / len(table) for key in keys}
        save(args.out.stem, folder=args.out.parent, settings=settings, sets=table, mean=mean)
    print(args.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
