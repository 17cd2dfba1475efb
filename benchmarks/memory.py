"""Memory of a long generation: it grows by the keys and values it needs, and nothing is re-copied.

Decodes thousands of tokens with draft trees and counts, operation by operation, the bytes that
every cycle copies: all tensor operations that move data without computing with it. A loop that
copied its context every cycle would show the size of the context there. Attention masks, four bytes
per context token and tree row, are counted by themselves, and so are the cycles in which a buffer
doubles ("largest").

    python benchmarks/memory.py                                   # a small random model
    python benchmarks/memory.py --target demo --drafter lookup    # SmolLM2
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from common import encode_prompts, machine, named_drafter, save

from draftwood.bench.copies import CopyCounter
from draftwood.draft.base import Drafter
from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.engine import Engine
from draftwood.sampling import SamplingParams
from draftwood.target.load import load_target
from draftwood.target.model import Target
from draftwood.tree.budget import parse_budget


@dataclass(frozen=True)
class Cycle:
    """One cycle: tokens before it, bytes copied in it, bytes held after it."""

    context_len: int
    copied: int
    masked: int
    target_held: int
    drafter_held: int
    resident: int


@dataclass(frozen=True)
class Row:
    """All cycles around one context length, in bytes; the medians leave doublings out."""

    context_len: int
    target_needs: int
    target_holds: int
    drafter_needs: int
    drafter_holds: int
    copied_per_cycle: int
    copied_when_growing: int
    masks: int
    resident: int


def decode(engine: Engine, prompt: list[int], params: SamplingParams) -> list[Cycle]:
    """Decode to the end, counting."""
    engine.add(prompt, params)
    cycles = []
    while engine.num_active:
        before = len(engine._running[0].token_ids) if engine._running else 0
        with CopyCounter() as counter:
            engine.step()
        if engine._running:
            held = engine._running[0].cache.num_bytes
            drafted = _drafter_bytes(engine.drafter)
            cycles.append(Cycle(before, counter.moved, counter.masked, held, drafted, _resident()))
    return cycles[1:]  # the first one took in the prompt


def summarise(cycles: list[Cycle], marks: list[int], target: int, drafter: int) -> list[Row]:
    """One row per mark; ``target`` and ``drafter``: bytes of keys and values per token."""
    rows = []
    for low, mark in zip([0, *marks], marks, strict=False):
        near = [c for c in cycles if max(low, mark * 3 // 4) <= c.context_len <= mark]
        grows = [c for c in cycles if low < c.context_len <= mark]
        last = near[-1]
        rows.append(
            Row(
                last.context_len,
                last.context_len * target,
                last.target_held,
                last.context_len * drafter,
                last.drafter_held,
                int(np.median([c.copied for c in near])),
                max(c.copied for c in grows),
                int(np.median([c.masked for c in near])),
                last.resident,
            )
        )
    return rows


def show(rows: list[Row]) -> None:
    print("context   target K/V MB     drafter K/V MB   copied per cycle, MB           resident")
    print(" tokens   needs   holds     needs   holds    median  largest    masks           MB")
    for row in rows:
        mb = {name: value / 1e6 for name, value in asdict(row).items()}
        print(
            f"{row.context_len:7} {mb['target_needs']:7.2f} {mb['target_holds']:7.2f}   "
            f"{mb['drafter_needs']:7.2f} {mb['drafter_holds']:7.2f}   "
            f"{mb['copied_per_cycle']:7.3f} {mb['copied_when_growing']:8.3f} {mb['masks']:8.3f} "
            f"{mb['resident']:12.1f}"
        )


def bytes_per_token(target: Target, drafter: Drafter) -> tuple[int, int]:
    """Keys and values of one token in the target and in a block-diffusion drafter."""
    config = target.model.config.get_text_config(decoder=True)
    heads = config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = torch.empty(0, dtype=target.dtype).element_size()
    own = 2 * target.num_layers * heads * dim * size
    if not isinstance(drafter, BlockDiffusionDrafter):
        return own, 0
    c = drafter.config
    return own, 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * size


def open_target(name: str) -> Target:
    if name != "tiny":
        return load_target(name, dtype="float32", device="cpu", probe=False)
    from tiny import tiny_model

    model = tiny_model("llama", dtype=torch.float32, max_position_embeddings=8192)
    return Target(model, probe=False)


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    target = open_target(args.target)
    prompt = encode_prompts(target, 1)[0] if target.tokenizer else [5, 6, 7, 8, 5, 6, 7]
    params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)
    futures = None
    if args.drafter == "oracle":
        plain = Engine(target).generate([prompt], params)[0]
        futures = {tuple(prompt): plain.token_ids}
    drafter = named_drafter(args.drafter, target, futures)
    cycles = decode(Engine(target, drafter, parse_budget(args.budget)), prompt, params)
    marks = [mark for mark in (256, 512, 1024, 2048, 4096, 8192) if mark <= cycles[-1].context_len]
    rows = summarise(cycles, [*marks, cycles[-1].context_len], *bytes_per_token(target, drafter))
    print(f"{args.target}, drafter {args.drafter}, budget {args.budget}: {len(cycles)} cycles")
    show(rows)
    if args.save:
        settings = {k: v for k, v in vars(args).items() if k != "save"}
        name = f"memory_{args.target}_{args.drafter}"
        save(name, settings=settings, machine=machine(), cycles=len(cycles),
             rows=[asdict(row) for row in rows])  # fmt: skip


def _drafter_bytes(drafter: Drafter) -> int:
    if not isinstance(drafter, BlockDiffusionDrafter):
        return 0
    return sum(state.cache._buffer.nbytes for state in drafter._states.values())


def _resident() -> int:
    """Bytes of physical memory of this process; 0 where the system does not tell."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * 4096 if path.exists() else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bytes held and copied while decoding.")
    parser.add_argument("--target", default="tiny", help="tiny, demo, or any model")
    parser.add_argument("--drafter", default="random", help="random, oracle, shipped, lookup, …")
    parser.add_argument("--budget", default="32")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="write results/memory_….json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
