"""Is budget "auto" ever slower than plain decoding? Live, paired and interleaved.

Every prompt is decoded twice, plainly and with "auto", by engines that live through the whole
scenario and take turns cycle by cycle: a machine whose speed changes within seconds, as those of
virtual machines do, then changes it for both. The ratio of seconds comes with a 95 % bootstrap
interval over prompts; the bar is a lower bound of 0.97 in every scenario:

    trained       the shipped drafter
    untrained     a network of its shape with random weights
    wrong-domain  ``--wrong-domain FOLDER``; without one, the shipped drafter with its predictions
                  moved to other tokens: as sure of itself, and always wrong
    random-text   the shipped drafter on prompts of random characters
    busy          the shipped drafter while another process eats a core, from half-way on

Also by how much the policy's latency model was off, cycle by cycle before it saw the cycle: the
median (bar 8 %), and for ``busy`` the median from 20 cycles after the change on (bar 15 %).

    python benchmarks/live_auto.py --eval EVAL_FOLDER --save
    python benchmarks/live_auto.py --scenarios untrained busy --prompts 4 --tokens 64
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from common import machine, read_prompts, save
from torch import nn

import draftwood as dw
from draftwood.bench.statistics import Interval, ratio
from draftwood.draft.base import Drafter
from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.draft.checkpoint import load_draft
from draftwood.draft.network import DraftNetwork
from draftwood.engine import Engine
from draftwood.records import Output
from draftwood.target.load import load_target
from draftwood.target.model import Target
from draftwood.tree.latency import LatencyModel

SCENARIOS = ("trained", "untrained", "wrong-domain", "random-text", "busy")
SETS = ("gsm8k", "humaneval", "alpaca")
SHIPPED = Path(dw.__file__).parent / "weights" / "smollm2-135m-instruct"
BAR = 0.97
SETTLING = 20  # cycles after a change
EAT = "while True: pass"


class Forecasts:
    """A latency model, and how far off its prediction of each cycle was.

    Attributes:
        errors: |predicted / actual seconds − 1| of every cycle.
    """

    def __init__(self, inner: LatencyModel) -> None:
        self.inner = inner
        self.errors: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def observe(self, **cycle: Any) -> None:
        context_len, num_seqs = cycle["context_len"], cycle["num_seqs"]
        width = np.array([cycle["width"]])
        predicted = float(self.inner.verify_s(width, context_len, num_seqs)[0])
        predicted += self.inner.other_s() + self.inner.walk_s(cycle["num_tokens"])
        actual = cycle["verify_s"] + cycle["other_s"] + cycle["walk_s"]
        if cycle["draft_s"] is not None:
            predicted += self.inner.draft_s(context_len, num_seqs)
            actual += cycle["draft_s"]
        self.errors.append(abs(predicted / actual - 1.0))
        self.inner.observe(**cycle)


def shipped(target: Target) -> DraftNetwork:
    network: DraftNetwork = load_draft(SHIPPED, dtype=target.dtype, device=target.device)[1]
    return network


def drafter_for(scenario: str, target: Target, args: argparse.Namespace) -> Drafter:
    if scenario == "wrong-domain" and args.wrong_domain is not None:
        return dw.load(target, args.wrong_domain, "off").drafter
    network = shipped(target)
    if scenario == "untrained":
        torch.manual_seed(0)
        for weight in network.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)
    if scenario == "wrong-domain":
        _move_predictions(network, target)
    return BlockDiffusionDrafter(network, target)


def _move_predictions(network: DraftNetwork, target: Target) -> None:
    """Every row of the head moves on by one: what was predicted becomes another token."""
    if network.lm_head is None:
        head = target.output_embeddings()
        network.lm_head = nn.Linear(head.shape[1], head.shape[0], bias=False, dtype=head.dtype)
        network.lm_head.weight.data = head.clone()
    network.lm_head.weight.data = network.lm_head.weight.data.roll(1, dims=0)


def prompts_for(scenario: str, args: argparse.Namespace) -> list[str]:
    if scenario == "random-text":
        rng = random.Random(0)
        symbols = string.ascii_letters + string.digits + string.punctuation + " "
        return ["".join(rng.choices(symbols, k=120)) for _ in range(args.prompts)]
    if args.eval is None:
        return read_prompts(args.prompts)
    found = []
    for index in range(args.prompts):  # of the sets in turn
        lines = (args.eval / f"{SETS[index % len(SETS)]}.jsonl").read_text().splitlines()
        found.append(json.loads(lines[index // len(SETS)])["turns"][0])
    return found


def run(scenario: str, target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds [prompts] of both, and what the policy did."""
    auto = dw.load(target, drafter_for(scenario, target, args), "auto")
    forecasts = Forecasts(auto.latency)
    auto.latency = cast(LatencyModel, forecasts)
    settled = 0  # first cycle whose forecast counts
    plain = Engine(target)
    params = dw.SamplingParams(
        max_new_tokens=args.tokens, temperature=args.temperature,
        seed=0 if args.temperature else None,
    )  # fmt: skip
    prompts = prompts_for(scenario, args)
    plain.generate(prompts[0], dw.SamplingParams(max_new_tokens=8))  # warms the target up
    seconds: dict[str, list[float]] = {"plain": [], "auto": []}
    cycles = []
    with ExitStack() as stack:
        for index, prompt in enumerate(prompts):
            if scenario == "busy" and index == len(prompts) // 2:
                eater = subprocess.Popen([sys.executable, "-c", EAT])
                stack.callback(eater.kill)
                settled = len(forecasts.errors) + SETTLING
            outputs = in_turns({"plain": plain, "auto": auto}, prompt, params)
            for name, output in outputs.items():
                seconds[name].append(output.decode_s)
            assert outputs["plain"].token_ids == outputs["auto"].token_ids, prompt
            cycles += outputs["auto"].cycles
    num_tokens = sum(cycle.num_committed for cycle in cycles)
    return {
        "seconds": seconds,
        "forecast_error": statistics.median(forecasts.errors[settled:]),
        "tau": num_tokens / len(cycles),
        "drafted_share": sum(cycle.num_drafted > 0 for cycle in cycles) / len(cycles),
        "mean_budget": sum(cycle.num_drafted for cycle in cycles) / len(cycles),
    }


def in_turns(
    engines: dict[str, Engine], prompt: str, params: dw.SamplingParams
) -> dict[str, Output]:
    """The prompt decoded by every engine, one cycle of each at a time, in changing order."""
    for engine in engines.values():
        engine.add(prompt, params)
    outputs: dict[str, Output] = {}
    order = list(engines)
    while len(outputs) < len(engines):
        for name in order:
            for event in engines[name].step():
                if event.output is not None:
                    outputs[name] = event.output
        order.reverse()
    return outputs


def speedup(done: dict[str, Any]) -> Interval:
    return ratio(done["seconds"]["plain"], done["seconds"]["auto"])


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    target = load_target(args.target, dtype="float32", device="cpu", probe=False)
    results = {}
    for scenario in args.scenarios:
        done = run(scenario, target, args)
        found = speedup(done)
        verdict = "meets" if found.low >= BAR else "MISSES"
        print(
            f"{scenario:>13}: auto / plain {found.value:.3f} [{found.low:.3f}, {found.high:.3f}] "
            f"{verdict} {BAR}; τ {done['tau']:.2f}, drafted {done['drafted_share']:.0%}, "
            f"forecasts off by {done['forecast_error']:.1%}",
            flush=True,
        )
        results[scenario] = {**done, "ratio": found.value, "interval": [found.low, found.high]}
    if args.save:
        settings = {key: str(value) for key, value in vars(args).items() if key != "save"}
        save("live_auto", settings=settings, machine=machine(), scenarios=results)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Live speed of budget 'auto' beside plain.")
    parser.add_argument("--target", default="demo")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    parser.add_argument("--eval", type=Path, help="folder with gsm8k, humaneval, alpaca .jsonl")
    parser.add_argument("--wrong-domain", help="drafter trained on something else")
    parser.add_argument("--prompts", type=int, default=18, help="in all")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", action="store_true", help="write results/live_auto.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
