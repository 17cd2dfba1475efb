"""Traces made up for the viewer's tests: any number of cycles and nodes, any token texts."""

from __future__ import annotations

import heapq
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HORIZON = 15
BRANCHES = 6
SECONDS = {"draft_s": 0.002, "verify_s": 0.02, "walk_s": 0.004, "commit_s": 0.001, "other_s": 5e-4}
PREDICTED = {"draft_s": 0.0021, "verify_s": 0.023, "other_s": 0.0012}
WORDS = (" the", " of", "\n", " tree", "s", ",", " draft", " model", ".", " and", "ing", " a", " Φ")


def best_first_tree(rng: random.Random, num_nodes: int) -> tuple[list[int], list[float]]:
    """(parents, log probabilities) of the anchor and the most probable prefixes."""
    branches = [
        sorted(
            (math.log(rng.betavariate(0.25, 2) / 2 + 1e-4) for _ in range(BRANCHES)), reverse=True
        )
        for _ in range(HORIZON)
    ]
    for depth, branch in enumerate(branches):
        branch[0] = math.log(rng.uniform(0.35, 0.97 - 0.03 * depth))  # a drafter that often knows
        branch.sort(reverse=True)
    parents, log_probs, depths = [-1], [0.0], [0]
    heap: list[tuple[float, int, int]] = [(-branches[0][0], 0, 0)]
    while heap and len(parents) <= num_nodes:
        negative, parent, rank = heapq.heappop(heap)
        node, depth = len(parents), depths[parent] + 1
        parents.append(parent)
        log_probs.append(-negative)
        depths.append(depth)
        if rank + 1 < BRANCHES:
            score = log_probs[parent] + branches[depth - 1][rank + 1]
            heapq.heappush(heap, (-score, parent, rank + 1))
        if depth < HORIZON:
            heapq.heappush(heap, (-(log_probs[node] + branches[depth][0]), node, 0))
    return parents, [round(value, 4) for value in log_probs]


def random_path(rng: random.Random, parents: Sequence[int]) -> list[int]:
    """A walk from the anchor that mostly takes the likelier child."""
    path = [0]
    while rng.random() < 0.8:
        children = [node for node, parent in enumerate(parents) if parent == path[-1]]
        if not children:
            break
        path.append(children[min(int(rng.expovariate(1.5)), len(children) - 1)])
    return path


def cycle_line(
    rng: random.Random,
    parents: Sequence[int],
    log_probs: Sequence[float],
    *,
    words: Sequence[str] = WORDS,
    seq: int = 0,
    start: int = 9,
    number: int = 1,
) -> dict[str, Any]:
    """One ``"kind": "cycle"`` line of a trace on a given tree."""
    tokens = [rng.randrange(len(words)) for _ in parents]
    path = random_path(rng, parents)
    picks = [tokens[node] for node in path[1:]] + [rng.randrange(len(words))]
    phi = [0.0]
    for value in log_probs[1:]:
        phi.append(round(phi[-1] + math.exp(value), 4))
    return {
        "kind": "cycle", "seq": seq, "pass": number, "start": start,
        "seconds": SECONDS, "predicted": PREDICTED, "drafted": True,
        "tokens": tokens, "parents": list(parents), "log_probs": list(log_probs),
        "texts": [words[token] for token in tokens], "path": path, "picks": picks,
        "pick_texts": [words[token] for token in picks], "num_committed": len(picks),
        "committed_texts": [words[token] for token in picks],
        "phi": phi, "budget": len(parents) - 1, "error": None,
    }  # fmt: skip


def trace_lines(
    num_cycles: int = 12,
    num_nodes: int = 24,
    *,
    words: Sequence[str] = WORDS,
    num_seqs: int = 1,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """A whole trace: header, a prefill line per sequence, cycles."""
    rng = random.Random(seed)
    shapes = [
        best_first_tree(rng, rng.randint(num_nodes // 2, num_nodes) if at % 2 else num_nodes)
        for at in range(min(num_cycles, 16))
    ]
    lines: list[dict[str, Any]] = [
        {"kind": "header", "format": 1, "draftwood": "0", "target": "t", "prompt": words[0]}
    ]
    for seq in range(num_seqs):
        lines.append(
            {"kind": "prefill", "seq": seq, "pass": 0, "start": 0, "num_tokens": 9,
             "text": f"A prompt of sequence {seq} with {words[0]}", "seconds": SECONDS}
        )  # fmt: skip
    starts = [9] * num_seqs
    for number in range(1, num_cycles + 1):
        for seq in range(num_seqs):
            shape = shapes[(number + seq) % len(shapes)]
            line = cycle_line(rng, *shape, words=words, seq=seq, start=starts[seq], number=number)
            starts[seq] += line["num_committed"]
            lines.append(line)
    return lines


def write_trace(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    """Write lines as ``TraceWriter`` does."""
    path.write_text(
        "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8"
    )
    return path
