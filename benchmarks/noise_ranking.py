"""Does knowing the target's noise make better draft trees? (temperature 1, equal budgets)

The same prompts are decoded twice with the same seeds, once ranking drafts by their marginal
probabilities and once by how likely the target is to draw them, its keyed noise included. The
texts are the same by construction, so the numbers of cycles compare prompt by prompt. The ratio of
the acceptance lengths comes with a bootstrap interval over prompts.

    python benchmarks/noise_ranking.py --drafter shipped
    python benchmarks/noise_ranking.py --drafter soft:2      # the target's logits + N(0, 2²)
    python benchmarks/noise_ranking.py --drafter layers:24   # the target's first 24 layers
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import numpy as np
import torch
from common import encode_prompts, machine, named_drafter, save

from draftwood.draft.autoregressive import AutoregressiveDrafter
from draftwood.draft.base import Drafter
from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.draft.ranking import Ranker
from draftwood.engine import Engine
from draftwood.records import Output
from draftwood.sampling import SamplingParams
from draftwood.target.load import load_target
from draftwood.target.model import Target
from draftwood.tree.budget import Fixed

NUM_RESAMPLES = 10_000


class SoftOracle(Target):
    """The target with Gaussian errors in its logits: a draft model of adjustable quality."""

    def __init__(self, target: Target, error: float) -> None:
        super().__init__(target.model, target.tokenizer, probe=False)
        self._error = error
        self._random = torch.Generator().manual_seed(0)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        exact = super().logits(hidden)
        return exact + self._error * torch.randn(exact.shape, generator=self._random)


def first_layers(target: Target, count: int) -> Target:
    """The target cut to its first ``count`` layers, sharing their weights."""
    shared = [*target.model.parameters(), *target.model.buffers()]
    model: Any = copy.deepcopy(target.model, {id(tensor): tensor for tensor in shared})
    decoder = model.get_decoder()
    decoder.layers = decoder.layers[:count]
    decoder.config.num_hidden_layers = model.config.num_hidden_layers = count
    return Target(model, target.tokenizer, probe=False)


def new_drafter(name: str, target: Target, *, use_noise: bool) -> Drafter:
    """The drafter, ranking with or without the noise."""
    kind, _, value = name.partition(":")
    if kind == "soft":
        return AutoregressiveDrafter(SoftOracle(target, float(value)), target, use_noise=use_noise)
    if kind == "layers":
        model = first_layers(target, int(value))
        return AutoregressiveDrafter(model, target, use_noise=use_noise)
    drafter = named_drafter(name, target)
    if not isinstance(drafter, (AutoregressiveDrafter, BlockDiffusionDrafter)):
        raise SystemExit(f"{name} has no distribution to rank by; use a model")
    owner = drafter._ranking if isinstance(drafter, BlockDiffusionDrafter) else drafter
    owner._ranker = Ranker(owner._ranker._columns, use_noise=use_noise)
    return drafter


def decode(target: Target, args: argparse.Namespace, *, use_noise: bool) -> list[Output]:
    drafter = new_drafter(args.drafter, target, use_noise=use_noise)
    engine = Engine(target, drafter, Fixed(args.budget), max_batch=args.batch)
    prompts = encode_prompts(target, args.prompts)
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_new_tokens=args.tokens)
        for seed in range(len(prompts))
    ]
    return engine.generate(prompts, params)


def ratio_interval(tokens: np.ndarray, cycles: np.ndarray) -> tuple[float, float, float]:
    """(ratio, low, high) of τ; tokens, cycles: [2, prompts], row 1 with noise; 95 % interval."""
    num_prompts = tokens.shape[1]
    size = (NUM_RESAMPLES, 1, num_prompts)  # the same prompts for both rows: paired
    picks = np.random.default_rng(0).integers(num_prompts, size=size)
    rows = np.arange(2)[None, :, None]
    tau = tokens[rows, picks].sum(-1) / cycles[rows, picks].sum(-1)
    low, high = np.percentile(tau[:, 1] / tau[:, 0], [2.5, 97.5])
    marginal, noisy = tokens.sum(1) / cycles.sum(1)
    return float(noisy / marginal), float(low), float(high)


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    target = load_target(args.target, dtype="float32", device="cpu", probe=False)
    outputs = [decode(target, args, use_noise=use_noise) for use_noise in (False, True)]
    tokens = np.array([[len(output.token_ids) for output in run] for run in outputs])
    cycles = np.array([[output.num_cycles for output in run] for run in outputs])
    same = sum(a.token_ids == b.token_ids for a, b in zip(*outputs, strict=True))
    marginal, noisy = tokens.sum(1) / cycles.sum(1)
    ratio, low, high = ratio_interval(tokens, cycles)
    print(
        f"{args.drafter}, budget {args.budget}: {tokens.shape[1]} prompts, {same} texts identical"
    )
    print(f"τ by marginals {marginal:.3f}, with noise {noisy:.3f}")
    print(f"ratio {ratio:.3f}, 95 % interval {low:.3f} … {high:.3f}")
    if args.save:
        settings = {k: v for k, v in vars(args).items() if k != "save"}
        name = f"noise_ranking_{args.drafter.replace(':', '_').replace('/', '_').strip('_')}"
        save(name, settings=settings, machine=machine(), tau_marginal=marginal, tau_noise=noisy,
             ratio=ratio, interval=[low, high], identical_texts=same,
             cycles=cycles.tolist(), tokens=tokens.tolist())  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Noise-ranked against marginal drafts.")
    parser.add_argument("--target", default="demo")
    parser.add_argument("--drafter", default="shipped", help="soft:σ, layers:n, shipped, a folder")
    parser.add_argument("--budget", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", action="store_true", help="write results/noise_ranking_….json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
