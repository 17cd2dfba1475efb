"""SIMULATION of asynchronous drafting on two devices; nothing here is a measurement of one.

Which tokens come is drawn from a stated process: at depth j of a block the drafter's first choice
has log-odds  level + block · z − decay · (j − 1) + noise · e_j,  z and e_j standard normal, z one
per block; the rest of the probability falls to the other tokens as rank^−tail. The target draws
from exactly these probabilities (a calibrated drafter). Tree, outcomes and choice of branches are
the library's own code.

Seconds of a pass of n rows: overhead + max(weights / bandwidth, 2 · parameters · n / peak). The
target and the drafter have a device each. While the target verifies, the drafter works on the
branches; a branch that foresaw the bonus token is the next draft, after one that left it open the
block is one token shorter and one position deeper in its decay, otherwise the target waits for a
draft.

With ``--drafter`` cycles are not drawn but recorded: that drafter's chains for the demo model, and
what the target made of them. A hit's draft is the one that was recorded next; after the whole
chain, where the bonus was not known, it would have been another, so that counts as a miss here.

    python benchmarks/ahead_sim.py                  # both targets, C × F, N_async
    python benchmarks/ahead_sim.py --verify 32      # trees of 32 nodes instead of chains
    python benchmarks/ahead_sim.py --drafter FOLDER --name ahead_sim_recorded
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from ahead_hits import Named, collect, kind_of_hit
from common import save

from draftwood.ahead.choice import Choice, Grid
from draftwood.ahead.outcomes import UNKNOWN, Outcomes, frontier
from draftwood.tree.enumerate import top_prefixes
from draftwood.tree.tree import NO_PARENT

NUM_PREFIXES = 1024
NUM_TOKENS = 48  # candidates per depth


@dataclass(frozen=True)
class Process:
    """The law of the drafts and of the target's tokens; see above."""

    block_size: int = 16
    level: float = 2.6
    block: float = 1.2
    decay: float = 0.11
    noise: float = 1.2
    tail: float = 1.6

    def marginals(self, rng: np.random.Generator, skipped: int) -> np.ndarray:
        """[horizon, NUM_TOKENS] probabilities, best first; the first ``skipped`` depths lost."""
        depth = np.arange(self.block_size - 1)
        odds = self.level + self.block * rng.standard_normal() - self.decay * depth
        odds = (odds + self.noise * rng.standard_normal(len(depth)))[skipped:]
        first = 1.0 / (1.0 + np.exp(-odds))
        others = np.arange(1, NUM_TOKENS) ** -self.tail
        rest = (1.0 - first)[:, None] * others / others.sum()
        return -np.sort(-np.concatenate([first[:, None], rest], axis=1), axis=1)


@dataclass(frozen=True)
class Device:
    """A model on its device.

    Attributes:
        parameters: of the model (bfloat16).
        overhead_s: of a pass: launches, sampling, the loop.
        bandwidth, peak: bytes and operations per second that are reached.
    """

    parameters: float
    overhead_s: float
    bandwidth: float
    peak: float

    def seconds(self, rows: int) -> float:
        """One pass."""
        memory = 2.0 * self.parameters / self.bandwidth
        return self.overhead_s + max(memory, 2.0 * self.parameters * rows / self.peak)


# One accelerator of 3 TB/s and 500 Tflop/s reached; the 32B model on four with 75 % of their sum.
TARGETS = {
    "8B": Device(8.2e9, 2.0e-3, 3.0e12, 5e14),
    "32B": Device(32.8e9, 4.0e-3, 9.0e12, 1.5e15),
}
DRAFTER = Device(0.6e9, 2.5e-3, 3.0e12, 3e14)
LINK_S = 1e-4  # from one device to the other


@dataclass(frozen=True)
class Cycle:
    """One simulated verification.

    Attributes:
        outcomes: all of them.
        node, bonus: where the walk ended.
        num_tokens: committed, bonus included.
        width: rows that were verified.
    """

    outcomes: Outcomes
    node: int
    bonus: int
    num_tokens: int
    width: int


def verify(process: Process, rng: np.random.Generator, nodes: int, skipped: int) -> Cycle:
    """Draft, verify a chain (``nodes`` 0) or a tree, and let the target draw."""
    probs = process.marginals(rng, skipped)
    luck = rng.random(process.block_size - 1)[skipped:]
    drawn = (probs.cumsum(axis=1) / probs.sum(axis=1, keepdims=True) < luck[:, None]).sum(axis=1)
    drawn = drawn.tolist()
    if nodes == 0:
        depth = next((d for d, token in enumerate(drawn) if token != 0), len(drawn))
        bonus = drawn[depth] if depth < len(drawn) else UNKNOWN  # beyond the block no one knows it
        return Cycle(chain_outcomes(probs), depth, bonus, depth + 1, len(drawn) + 1)
    scored = top_prefixes(np.log(np.maximum(probs, 1e-30))[None], NUM_PREFIXES)
    size = min(nodes, int(scored.counts[0]))
    parents, tokens = scored.parents[0, :size].tolist(), scored.token_ids[0, :size].tolist()
    place = {key: column for column, key in enumerate(zip(parents, tokens, strict=True))}
    at, depth = NO_PARENT, 0
    while depth < len(drawn) and (at, drawn[depth]) in place:
        at, depth = place[at, drawn[depth]], depth + 1
    bonus = drawn[depth] if depth < len(drawn) else UNKNOWN
    return Cycle(frontier(scored, [np.arange(size)]), at + 1, bonus, depth + 1, size + 1)


def chain_outcomes(probs: np.ndarray) -> Outcomes:
    """Of verifying the first choices; token 0 is the first choice everywhere."""
    horizon, size = probs.shape
    reached = np.concatenate([[1.0], np.cumprod(probs[:, 0])])
    depths = np.append(np.repeat(np.arange(horizon), size - 1), horizon)
    return Outcomes(
        np.zeros(len(depths), dtype=np.int64),
        depths,
        np.append(np.tile(np.arange(1, size), horizon), UNKNOWN),
        np.append((reached[:-1, None] * probs[:, 1:]).ravel(), reached[-1]),
        depths,
    )


@dataclass(frozen=True)
class Event:
    """What one cycle of a simulated generation does to the clock."""

    num_tokens: int
    width: int
    rows_ahead: int
    kind: str


def play(process: Process, choice: Choice | None, branches: int, args: Namespace) -> list[Event]:
    """A generation without its clock; ``choice`` None drafts synchronously."""
    events: list[Event] = []
    skipped = 0
    for number in range(args.cycles):
        rng = np.random.default_rng([args.seed, number])  # the same luck for all that is compared
        cycle = verify(process, rng, args.verify, skipped)
        kind, rows = "miss", 0
        if choice is not None:
            chosen = choice.choose(cycle.outcomes, branches)
            rows = process.block_size * len(chosen) + cycle.width
            kind = kind_of_hit(cycle.outcomes, chosen, cycle.node, cycle.bonus)
        skipped = int(kind in ("end", "soft"))
        events.append(Event(cycle.num_tokens, cycle.width, rows, kind))
    return events


def recorded(args: Namespace) -> tuple[int, list[tuple[str, list[Event]]]]:
    """Block size, and a generation for everything that is compared, from one run of a drafter."""
    kinds, tokens, size = collect(
        args,
        lambda size: {
            name: (choice, branches) for name, choice, branches in sweeps(size, args) if choice
        },
    )
    cycles = [cycle for prompt in kinds for cycle in prompt]
    found = []
    for name, choice, branches in sweeps(size, args):
        rows = 0 if choice is None else size * (branches + 1)
        hits = [choice is not None and cycle[name] == "hit" for cycle in cycles]
        events = [
            Event(count, size, rows, "hit" if hit else "miss")
            for count, hit in zip(tokens, hits, strict=True)
        ]
        found.append((name, events))
    return size, found


def clock(block_size: int, target: Device, events: list[Event]) -> float:
    """Seconds until the last draft: the target and the drafter each do one thing at a time."""
    draft_s = DRAFTER.seconds(block_size) + LINK_S
    target_free = drafter_free = 0.0
    draft_ready = draft_s
    for event in events:
        begin = max(target_free, draft_ready)
        target_free = begin + target.seconds(event.width)
        if event.rows_ahead:
            drafter_free = max(begin + LINK_S, drafter_free) + DRAFTER.seconds(event.rows_ahead)
        draft_ready = max(target_free, drafter_free) + LINK_S
        if event.kind == "miss":
            draft_ready += draft_s
    return draft_ready


def summary(block_size: int, target: Device, events: list[Event]) -> dict[str, float]:
    """Speedup over plain decoding on the target's device, and how it came about."""
    num_tokens = sum(event.num_tokens for event in events)
    kinds = [event.kind for event in events]
    return {
        "speedup": num_tokens * target.seconds(1) / clock(block_size, target, events),
        "hit_rate": (kinds.count("hit") + kinds.count("end")) / len(kinds),
        "open": kinds.count("soft") / len(kinds),
        "acceptance_length": num_tokens / len(kinds),
    }


def sweeps(block_size: int, args: Namespace) -> Iterator[tuple[str, Choice | None, int]]:
    """Name, choice and number of branches of everything that is compared."""
    yield "synchronous", None, 0
    for n_async in args.n_async:
        branches = n_async // block_size - 1
        yield f"most probable N_async={n_async}", Named(), branches
        yield f"best grid of each cycle N_async={n_async}", Grid(), branches
    for positions in args.positions:
        for alternatives in args.alternatives:
            branches = (positions - 1) * alternatives + 1
            n_async = block_size * (branches + 1)
            name = f"grid C={positions} F={alternatives} N_async={n_async}"
            yield name, Grid(positions, alternatives), branches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verify", type=int, default=0, help="nodes of the tree; 0: a chain")
    many: dict[str, Any] = {"type": int, "nargs": "+"}
    parser.add_argument("--n-async", **many, default=[128, 256, 384, 512, 768, 1024, 1536, 2048])
    parser.add_argument("--positions", **many, default=[4, 8, 12, 16])
    parser.add_argument("--alternatives", **many, default=[1, 2, 4, 8])
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--drafter", help="take the cycles of this one, decoding the demo model")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--name", default="ahead_sim")
    args = parser.parse_args()
    process = Process()
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in args.targets}
    if args.drafter:
        args.target, args.temperature = "demo", 0.0
        size, plays = recorded(args)
    else:
        size = process.block_size
        plays = [
            (name, play(process, choice, branches, args))
            for name, choice, branches in sweeps(size, args)
        ]
    for label, events in plays:
        print(f"SIMULATED {label}", flush=True)
        for name, rows in found.items():
            row = rows[label] = summary(size, TARGETS[name], events)
            print(f"  {name:4} " + "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
    for name, rows in found.items():
        best = max(rows, key=lambda label: rows[label]["speedup"])
        print(f"best for {name}, simulated: {best}, {rows[best]['speedup']:.2f}x")
    save(
        args.name, is_simulation=True, settings=vars(args),
        process=None if args.drafter else vars(process),
        drafter=vars(DRAFTER), targets={name: vars(TARGETS[name]) for name in args.targets},
        results=found,
    )  # fmt: skip


if __name__ == "__main__":
    main()
