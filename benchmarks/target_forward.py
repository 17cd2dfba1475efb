"""What a packed tree forward costs beside the model's own forward of as many rows.

    python benchmarks/target_forward.py --target demo --rows 1 9 33 --context 200

"ours" and "own" see the same context from their caches; "pass" is the part that is only ours:
positions, masks and views of one forward. Milliseconds, the least of all repeats, one thread.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Callable

import numpy as np
import torch

from draftwood.target.attention import PackedPass
from draftwood.target.load import load_target
from draftwood.target.model import Target
from draftwood.tree.tree import NO_PARENT, DraftTree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 9, 33])
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target(args.target, device="cpu")
    rng = np.random.default_rng(0)
    prompt = rng.integers(10, 4000, args.context).tolist()
    taps = tuple(sorted({1, target.num_layers // 2, target.num_layers - 3}))
    print(f"{'rows':>5} {'ours':>8} {'+taps':>8} {'own':>8} {'pass':>8}   ms")
    for rows in args.rows:
        tree = random_tree(rng, rows)
        cache = target.new_cache()
        target.forward(DraftTree.chain(prompt), [cache])
        cache.commit(np.arange(len(prompt)))

        def build(tree: DraftTree = tree, cache=cache) -> None:
            packed = PackedPass(tree, [cache])
            packed.views(None, 1, target.device, target.dtype)

        times = [
            least(lambda tree=tree, cache=cache: target.forward(tree, [cache]), args.repeats),
            least(lambda tree=tree, cache=cache: target.forward(tree, [cache], taps), args.repeats),
            least(own_forward(target, prompt, tree.token_ids.tolist()), args.repeats),
            least(build, args.repeats),
        ]
        print(f"{rows:5d} " + " ".join(f"{seconds * 1e3:8.2f}" for seconds in times))


def random_tree(rng: np.random.Generator, size: int) -> DraftTree:
    parents = np.array([NO_PARENT] + [int(rng.integers(0, node)) for node in range(1, size)])
    depths = np.zeros(size, dtype=np.int64)
    for node in range(1, size):
        depths[node] = depths[parents[node]] + 1
    seq = np.zeros(size, dtype=np.int64)
    return DraftTree(rng.integers(10, 4000, size), parents, depths, seq, np.array([0, size]))


def own_forward(target: Target, prompt: list[int], rows: list[int]) -> Callable[[], object]:
    """The model's own decoder over ``rows`` behind a cached prompt, undone each time."""
    decoder = target.model.get_decoder()
    name = "cache" if "cache" in inspect.signature(decoder.forward).parameters else None
    name = name or "past_key_values"
    cache = target.model(torch.tensor([prompt]), use_cache=True)[name]
    ids = torch.tensor([rows])

    @torch.no_grad()
    def run() -> None:
        decoder(ids, use_cache=True, **{name: cache})
        cache.crop(-len(rows))

    return run


def least(call: Callable[[], object], repeats: int) -> float:
    """Least processor seconds of one call."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


if __name__ == "__main__":
    main()
