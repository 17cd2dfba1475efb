"""What one target pass costs beside the machine's bound; plain decoding beside transformers.

    python benchmarks/verify_cost.py --target demo --threads 2

The bound of a pass of n rows is max(weight bytes / copy bandwidth, FLOPs / GEMM rate), both
measured between the passes of the same run: a copy counts the bytes read and written and moves
about as many as a pass reads, so that it needs as long a lucky moment; the GEMM is a large square
product. A pass is the forward and the head's logits of all n rows, behind
``--context`` tokens. The bars are 1.4 × the bound at 1, 8, 16 and 32 rows, and 1.3 × the tokens
per second of ``generate``.

Everything is interleaved; compared are the least times with the best rates, so that what other
processes take away counts on neither side. Give it a quiet machine all the same: two threads on a
shared one measure the scheduler.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch
from common import encode_prompts, machine, save
from target_forward import random_tree

from draftwood.engine import Engine
from draftwood.sampling import SamplingParams
from draftwood.target.cache import KVCache
from draftwood.target.load import load_target
from draftwood.target.model import Target
from draftwood.tree.tree import DraftTree

BAR_ROWS = (1, 8, 16, 32)
BAR_VERIFY = 1.4
BAR_DECODING = 1.3
COPY_BYTES = 128 * 2**20
NUM_COPIES = 2
GEMM_SIZE = 1536


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=32, help="decoded per side; 0: no decoding")
    parser.add_argument("--name", default="verify_cost", help="of the file in results/")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    fast = load_target(args.target, device="cpu", dtype="float32", probe=False)
    own = Target(fast.model, fast.tokenizer, probe=False, kernels=None)

    costs = verify_costs(fast, own, args.rows, args.context, args.rounds)
    result = {"machine": machine(), "context": args.context, "kernels": kernels_used(fast), **costs}
    print_costs(result)
    if args.tokens:
        result["decoding"] = decoding_rates(fast, own, args.tokens, rounds=3)
        print_decoding(result["decoding"])
    print(f"written to {save(args.name, **result)}")


# ---- one pass -----------------------------------------------------------------------------------


def verify_costs(
    fast: Target, own: Target, rows: Sequence[int], context: int, rounds: int
) -> dict[str, object]:
    """Seconds per pass, bandwidth, GEMM rate and the bounds they give."""
    rng = np.random.default_rng(0)
    prompt = DraftTree.chain(rng.integers(10, 4000, context).tolist())
    cache = fast.new_cache()
    fast.forward(prompt, [cache])
    cache.commit(np.arange(context))
    trees = {n: random_tree(rng, n) for n in rows}
    copy, gemm = machine_probes()
    seconds: dict[str, dict[int, list[float]]] = {
        name: {n: [] for n in rows} for name in ("fast", "own")
    }
    copies: list[float] = []
    gemms: list[float] = []
    for _ in range(rounds):
        copies += [timed(copy) for _ in range(3)]
        gemms += [timed(gemm) for _ in range(2)]
        for n in rows:
            for name, target in (("fast", fast), ("own", own)):
                one_pass(target, trees[n], cache)  # as in decoding: behind a pass of its own kind
                seconds[name][n].append(timed(lambda t=target, n=n: one_pass(t, trees[n], cache)))
    bandwidth = NUM_COPIES * 2 * COPY_BYTES / min(copies)
    rate = 2 * GEMM_SIZE**3 / min(gemms)
    num_weights = product_weights(fast)
    bounds = {n: max(4 * num_weights / bandwidth, 2 * num_weights * n / rate) for n in rows}
    return {
        "weights": num_weights,
        "copy_bytes_per_s": bandwidth,
        "gemm_flops_per_s": rate,
        "rows": {
            n: {
                "bound_s": bounds[n],
                "fast_s": min(seconds["fast"][n]),
                "fast_median_s": median(seconds["fast"][n]),
                "own_s": min(seconds["own"][n]),
                "ratio": min(seconds["fast"][n]) / bounds[n],
            }
            for n in rows
        },
    }


def one_pass(target: Target, tree: DraftTree, cache: KVCache) -> None:
    with torch.inference_mode():
        target.logits(target.forward(tree, [cache]).hidden)
        cache.commit(np.arange(0))


def machine_probes() -> tuple[Callable[[], object], Callable[[], object]]:
    """NUM_COPIES copies of COPY_BYTES and a product of two GEMM_SIZE² matrices."""
    source = torch.ones(COPY_BYTES // 4)
    sink = torch.empty_like(source)
    matrix = torch.ones(GEMM_SIZE, GEMM_SIZE)
    out = torch.empty_like(matrix)

    def copy() -> None:
        for _ in range(NUM_COPIES):
            sink.copy_(source)

    return copy, lambda: torch.mm(matrix, matrix, out=out)


def product_weights(target: Target) -> int:
    """Weights that every pass multiplies with: the decoder's matrices and the head."""
    decoder = target.model.get_decoder()
    table = target.input_embeddings().data_ptr()
    matrices = [p for p in decoder.parameters() if p.dim() == 2 and p.data_ptr() != table]
    return sum(matrix.numel() for matrix in matrices) + target.output_embeddings().numel()


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def kernels_used(target: Target) -> dict[str, object]:
    kernels = target.kernels
    return {
        "native": target.kernels.is_native,
        "lean_layers": kernels.num_lean_layers,
        "copied_bytes": kernels.copied_bytes,
        "choices": {fast.weights.shape: [k.__name__ for k in fast.kernels]
                    for fast in kernels.linears},
    }  # fmt: skip


# ---- plain decoding ---------------------------------------------------------------------------


def decoding_rates(fast: Target, own: Target, num_tokens: int, rounds: int) -> dict[str, float]:
    """Tokens per second of greedy decoding, prompts included, the best of a few rounds each."""
    prompt = encode_prompts(fast, 1)[0]
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    ids = torch.tensor([prompt])

    def transformers_generate() -> None:
        fast.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
            max_new_tokens=num_tokens, min_new_tokens=num_tokens,
        )  # fmt: skip

    calls: dict[str, Callable[[], object]] = {
        "fast": lambda: Engine(fast).generate([prompt], params),
        "own": lambda: Engine(own).generate([prompt], params),
        "transformers": transformers_generate,
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(timed(call))
    return {name: num_tokens / min(times) for name, times in seconds.items()}


# ---- printing ---------------------------------------------------------------------------------


def print_costs(result: dict) -> None:
    print(
        f"copy {result['copy_bytes_per_s'] / 1e9:.1f} GB/s (read + written), "
        f"GEMM {result['gemm_flops_per_s'] / 1e9:.0f} GFLOP/s, "
        f"{4 * result['weights'] / 1e6:.0f} MB of weights, {result['machine']['threads']} threads"
    )
    print(f"{'rows':>5} {'bound':>8} {'fast':>8} {'median':>8} {'own':>8}  ms, {'fast/bound':>10}")
    for n, row in result["rows"].items():
        times = (row[key] * 1e3 for key in ("bound_s", "fast_s", "fast_median_s", "own_s"))
        verdict = (
            "" if n not in BAR_ROWS else f"bar {BAR_VERIFY}: {met(row['ratio'] <= BAR_VERIFY)}"
        )
        print(
            f"{n:5d} " + " ".join(f"{t:8.1f}" for t in times) + f"  {row['ratio']:14.2f}  {verdict}"
        )


def print_decoding(rates: dict[str, float]) -> None:
    gain = rates["fast"] / rates["transformers"]
    print(
        "plain decoding: "
        + ", ".join(f"{name} {rate:.1f} tokens/s" for name, rate in rates.items())
        + f"; fast/transformers {gain:.2f}  bar {BAR_DECODING}: {met(gain >= BAR_DECODING)}"
    )


def met(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


if __name__ == "__main__":
    main()
