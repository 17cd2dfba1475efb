"""Prefix enumeration against a plain heap per sequence, top-K extraction included.

    python benchmarks/enumerate.py            # writes results/enumerate.json, ~3 minutes
    python benchmarks/enumerate.py --quick    # small cases only

"heap" is the textbook way: torch.topk of min(n, V) candidates per depth, then one best-first heap
per sequence. "ours" is ``top_prefixes``. "selection" and "beam" are parts of the choice made
there: our top-K extraction of 64 candidates alone, and the level beam (the accelerator's way)
on those candidates. Milliseconds, the least of repeats (heap and ours in turns), one thread;
ratio is heap/ours.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Callable

import numpy as np
import torch
from common import machine, save

from draftwood.tree.enumerate import top_prefixes
from draftwood.tree.level_beam import level_beam
from draftwood.tree.topk import top_k

HORIZON = 15
# sequences, nodes, vocabulary, flat
SMALL = [(1, 32, 8192, False), (1, 64, 8192, False), (1, 256, 8192, False),
         (1, 32, 49152, False), (1, 64, 49152, False), (1, 256, 49152, False),
         (1, 512, 49152, False), (1, 64, 49152, True), (1, 512, 49152, True)]  # fmt: skip
LARGE = [(64, 32, 32768, False), (64, 128, 32768, False), (64, 512, 32768, False),
         (64, 512, 32768, True), (64, 512, 151936, False)]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for num_seqs, max_nodes, vocab_size, is_flat in SMALL if args.quick else SMALL + LARGE:
        repeats = args.repeats * 10 if num_seqs == 1 else max(args.repeats // 2, 3)
        row = compare(num_seqs, max_nodes, vocab_size, is_flat, repeats)
        rows.append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if not args.quick:
        save("enumerate", machine=machine(), horizon=HORIZON, rows=rows)


def compare(
    num_seqs: int, max_nodes: int, vocab_size: int, is_flat: bool, repeats: int
) -> dict[str, float]:
    log_probs = drafter_like(num_seqs, vocab_size, is_flat)
    flat = log_probs.view(-1, vocab_size)
    values, ids = top_k(flat, min(64, max_nodes))
    shape = (num_seqs, HORIZON, -1)
    costs, tokens = -values.view(shape).double(), ids.view(shape)
    found = top_prefixes(log_probs, max_nodes)
    theirs = [plain_heap(one, max_nodes) for one in log_probs]
    sums = np.array([[score for score, *_ in nodes] for nodes in theirs])
    assert np.allclose(np.exp(sums).sum(1), found.phi()[:, -1]), "not the same prefixes"
    times = interleaved(
        {
            "heap": lambda: [plain_heap(one, max_nodes) for one in log_probs],
            "ours": lambda: top_prefixes(log_probs, max_nodes),
        },
        repeats,
    )
    times |= interleaved({"selection": lambda: top_k(flat, min(64, max_nodes))}, repeats)
    times |= interleaved({"beam": lambda: level_beam(costs, tokens, max_nodes)}, repeats)
    row = {"seqs": num_seqs, "nodes": max_nodes, "vocab": vocab_size, "flat": is_flat}
    row |= {f"{name}_ms": round(seconds * 1e3, 3) for name, seconds in times.items()}
    return row | {"ratio": round(times["heap"] / times["ours"], 2)}


def drafter_like(num_seqs: int, vocab_size: int, is_flat: bool) -> torch.Tensor:
    """[S, L, V] log-probabilities: a best token and a power-law tail, as language models have.

    The best token has about 0.9 at depth 1 and 0.5 at depth 15, in every fourth sequence a third
    of that; flat ones have 0.02.
    """
    rng = np.random.default_rng(0)
    tail = np.arange(1, vocab_size) ** -1.2
    tail /= tail.sum()
    out = torch.empty(num_seqs, HORIZON, vocab_size)
    for s in range(num_seqs):
        for depth in range(HORIZON):
            ease = 0.02 if is_flat else rng.beta(8, 2) * 0.96**depth / (3 if s % 4 == 3 else 1)
            probs = np.concatenate([[ease], (1 - ease) * tail])
            noise = rng.lognormal(sigma=0.5, size=vocab_size)
            probs = (probs * noise)[rng.permutation(vocab_size)]
            out[s, depth] = torch.from_numpy(np.log(probs / probs.sum()))
    return out


def plain_heap(log_probs: torch.Tensor, max_nodes: int) -> list[tuple[float, int, int, int]]:
    """Best-first with a heap of rank tuples: (score, token, parent, depth) of each node."""
    width = min(max_nodes, log_probs.shape[1])
    values, ids = log_probs.topk(width, dim=-1)
    scores, tokens = values.double().tolist(), ids.tolist()
    heap = [(-scores[0][0], (0,), -1)]
    nodes: list[tuple[float, int, int, int]] = []
    while heap and len(nodes) < max_nodes:
        cost, ranks, parent = heapq.heappop(heap)
        depth, rank = len(ranks), ranks[-1]
        row = scores[depth - 1]
        if rank + 1 < width:
            sibling = cost + row[rank] - row[rank + 1]
            heapq.heappush(heap, (sibling, (*ranks[:-1], rank + 1), parent))
        if depth < len(scores):
            heapq.heappush(heap, (cost - scores[depth][0], (*ranks, 0), len(nodes)))
        nodes.append((-cost, tokens[depth - 1][rank], parent, depth))
    return nodes


def interleaved(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Least seconds of each, measured in turns."""
    least = dict.fromkeys(functions, float("inf"))
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            least[name] = min(least[name], time.perf_counter() - start)
    return least


if __name__ == "__main__":
    main()
