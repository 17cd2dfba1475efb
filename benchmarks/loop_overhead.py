"""What the decode loop costs besides the two models.

Decodes a few prompts with draft trees and says where each cycle's time goes. "Overhead" is all
that is neither a forward of the target or of the drafter nor a language-model head. The bar is 5 %
of the cycle on SmolLM2 at budget 32.

    python benchmarks/loop_overhead.py --drafter shipped --budget 32

On a busy machine give ``--clock cpu`` (the thread's own CPU time) and one thread.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time

import torch
from common import encode_prompts, machine, named_drafter, save
from stages import Stages

from draftwood.draft import block_ranking
from draftwood.draft.autoregressive import AutoregressiveDrafter
from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.draft.ranking import Ranker
from draftwood.engine import Engine
from draftwood.sampling import SamplingParams
from draftwood.target.attention import PackedPass
from draftwood.target.cache import KVCache
from draftwood.target.load import load_target
from draftwood.tree.budget import parse_budget
from draftwood.tree.tree import DraftTree

MODELS = {"target forward", "target head", "draft forward", "draft head"}
BAR = 0.05


def install(stages: Stages, engine: Engine) -> None:
    """Wrap everything that one cycle consists of."""
    target, drafter = engine.target, engine.drafter
    stages.wrap(engine, "cycle", "other")
    stages.wrap(target, "forward", "target forward")
    stages.wrap(target, "logits", "target head")
    stages.wrap(PackedPass, "__init__", "masks")
    stages.wrap(PackedPass, "views", "masks")
    stages.wrap(KVCache, "commit", "commit KV")
    stages.wrap(DraftTree, "grow", "plant tree")
    stages.wrap(engine, "_learn", "records, latency")
    stages.wrap(type(engine.policy), "limits", "policy")
    stages.wrap(type(engine.policy), "choose", "policy")
    stages.wrap(drafter, "propose", "propose, rest")
    stages.wrap(drafter, "observe", "observe, rest")
    stages.wrap(Ranker, "rank", "rank (noise, top-K)")
    stages.wrap(Ranker, "learn", "learn ranking")
    if isinstance(drafter, BlockDiffusionDrafter):
        stages.wrap(drafter._pass, "hidden", "draft forward")
        stages.wrap(drafter._pass, "context", "draft forward")
        stages.wrap(drafter._ranking, "logits", "draft head")
        stages.wrap(block_ranking, "top_prefixes_from_candidates", "enumerate")
    if isinstance(drafter, AutoregressiveDrafter):
        stages.wrap(drafter._model, "forward", "draft forward")
        stages.wrap(drafter._model, "logits", "draft head")
    _wrap_module_functions(stages)


def _wrap_module_functions(stages: Stages) -> None:
    from draftwood import engine as engine_module
    from draftwood.text import TextStream

    stages.wrap(engine_module, "walk", "walk")
    stages.wrap(engine_module, "accept", "accept, text")
    stages.wrap(TextStream, "take", "accept, text")


def decode(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, stages: Stages | None = None
) -> tuple[int, int]:
    """(tokens, engine cycles) of decoding ``max_batch`` prompts at a time, without the prefill."""
    num_tokens = num_cycles = 0
    for start in range(0, len(prompts), engine.max_batch):
        for prompt in prompts[start : start + engine.max_batch]:
            engine.add(prompt, params)
        engine.step()  # the prompts are short: one chunk
        if stages is not None:
            install(stages, engine)
        while engine.num_active:
            num_tokens += sum(len(event.token_ids) for event in engine.step())
            num_cycles += 1
        if stages is not None:
            stages.unwrap()
    return num_tokens, num_cycles


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    target = load_target(args.target, dtype="float32", device="cpu", probe=False)
    prompts = encode_prompts(target, args.prompts)
    params = SamplingParams(
        max_new_tokens=args.tokens, temperature=args.temperature, seed=1, ignore_eos=True
    )
    futures = None
    if args.drafter == "oracle":
        plain = Engine(target).generate(prompts, params)
        futures = {tuple(o.prompt_token_ids): o.token_ids for o in plain}
    drafter = named_drafter(args.drafter, target, futures)
    engine = Engine(target, drafter, parse_budget(args.budget), max_batch=args.batch)
    decode(engine, prompts[:1], params)  # warm up: buffers, fits, caches of rows
    stages = Stages(time.thread_time if args.clock == "cpu" else time.perf_counter)
    profile = cProfile.Profile() if args.profile else None
    if profile:
        profile.enable()
    num_tokens, num_cycles = decode(engine, prompts, params, stages)
    if profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    total = sum(stages.seconds.values())
    overhead = sum(s for stage, s in stages.seconds.items() if stage not in MODELS) / total
    for stage, seconds in stages.seconds.most_common():
        kind = "model" if stage in MODELS else ""
        print(f"{stage:22} {1e3 * seconds / num_cycles:8.2f} ms {seconds / total:7.2%}  {kind}")
    print(f"{'cycle':22} {1e3 * total / num_cycles:8.2f} ms, {num_tokens / num_cycles:.2f} tokens")
    print(f"overhead outside the models: {overhead:.2%} (bar {BAR:.0%})")
    if args.save:
        ms = {stage: 1e3 * s / num_cycles for stage, s in stages.seconds.most_common()}
        settings = {k: v for k, v in vars(args).items() if k not in ("save", "profile")}
        save("loop_overhead", settings=settings, machine=machine(), ms_per_cycle=ms,
             overhead=overhead, bar=BAR)  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time per stage of a decode cycle.")
    parser.add_argument("--target", default="demo")
    parser.add_argument("--drafter", default="shipped", help="shipped, random, oracle, lookup, …")
    parser.add_argument("--budget", default="32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--profile", action="store_true", help="print cProfile's top functions")
    parser.add_argument("--save", action="store_true", help="write results/loop_overhead.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
