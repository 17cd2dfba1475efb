"""How often is the next draft there already? Most probable outcomes against the paper's grid.

Chains are verified, as in D3D. Of every cycle the drafter's 4096 best prefixes are kept, and where
the target really went. That gives the hit rate of any choice of branches afterwards, at equal
N_async = B · (branches + 1), the path itself included; for the grid that is B · [(C−1)F + 2]. A hit
is a branch that foresaw the bonus token or, after the whole path, could not. Probabilities are
calibrated by what the target said in earlier cycles, as in the engine, unless "by raw scores".
Nothing runs asynchronously here, so any drafter will do, also one that reads target features.

    python benchmarks/ahead_hits.py --drafter FOLDER --prompts 8 --max-new-tokens 128
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from common import encode_prompts, machine, named_drafter, save

from draftwood.ahead.choice import Choice, Grid, Likeliest
from draftwood.ahead.outcomes import UNKNOWN, Outcomes, columns_of, frontier
from draftwood.ahead.proposal import narrowed
from draftwood.draft.base import Committed, DraftContext, Drafter, DraftLimits
from draftwood.draft.surrogate import Surrogate
from draftwood.engine import Engine
from draftwood.records import CycleRecord
from draftwood.sampling import SamplingParams
from draftwood.target.load import load_target
from draftwood.tree.budget import Chain
from draftwood.tree.tree import ScoredPrefixes

NUM_PREFIXES = 4096
NUM_RESAMPLES = 2000
BEST = "most probable"
RAW = " by raw scores"


class Wide:
    """A drafter whose chains are cut from a wide proposal, which is kept."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.taps, self.horizon = drafter.taps, drafter.horizon
        self.scored = ScoredPrefixes.empty(0)

    def propose(self, contexts: Sequence[DraftContext], limits: DraftLimits) -> ScoredPrefixes:
        self.scored = self._drafter.propose(contexts, DraftLimits(NUM_PREFIXES))
        return narrowed(self.scored, limits)

    def observe(self, committed: Sequence[Committed]) -> None:
        self._drafter.observe(committed)

    def truncate(self, seq_id: int, length: int) -> None:
        self._drafter.truncate(seq_id, length)

    def release(self, seq_id: int) -> None:
        self._drafter.release(seq_id)


@dataclass(frozen=True)
class Named:
    """The most probable outcomes with a named bonus token, and full acceptance: as in the grid."""

    def choose(self, outcomes: Outcomes, most: int) -> Outcomes:
        at_end = outcomes.depths == outcomes.depths.max(initial=0)
        return Likeliest(soft_weight=1.0).choose(outcomes.take(outcomes.is_known | at_end), most)


def choices(block_size: int, budget: int) -> dict[str, tuple[Choice, int]]:
    """Choices of branches with their number at N_async ≤ budget."""
    branches = budget // block_size - 1
    found: dict[str, tuple[Choice, int]] = {
        BEST: (Named(), branches),
        "most probable, also open ones": (Likeliest(), branches),
        "best grid of each cycle": (Grid(), branches),
        BEST + RAW: (Named(), branches),
        "best grid of each cycle" + RAW: (Grid(), branches),
    }
    for positions in range(2, block_size + 1):
        alternatives = (branches - 1) // (positions - 1)
        if alternatives:
            name = f"grid C={positions} F={alternatives}"
            found[name] = (Grid(positions, alternatives), branches)
    return found


def kind_of_hit(outcomes: Outcomes, chosen: Outcomes, node: int, bonus: int) -> str:
    """What was ready when the walk ended at ``node`` with ``bonus``.

    ``hit``: a branch with that bonus token; ``end``: one after the whole path, which cannot know
    it; ``soft``: one after another node that left it open; ``miss``: nothing.
    """
    here = chosen.nodes == node
    if bonus != UNKNOWN and (here & (chosen.bonus == bonus)).any():
        return "hit"
    if not (here & ~chosen.is_known).any():
        return "miss"
    return "end" if chosen.depths[here].max() == outcomes.depths.max() else "soft"


def collect(
    args: argparse.Namespace, choices_of: Callable[[int], dict[str, tuple[Choice, int]]]
) -> tuple[list[list[dict[str, str]]], list[int], int]:
    """Per prompt and cycle the kind of hit of each choice; tokens of each cycle; block size.

    Args:
        choices_of: block size → choices of branches with their number.
    """
    target = load_target(args.target)
    wide = Wide(named_drafter(args.drafter, target))
    block_size = wide.horizon + 1
    named = choices_of(block_size)
    kinds: list[list[dict[str, str]]] = []
    tokens: list[int] = []
    surrogate = Surrogate()

    def watch(record: CycleRecord) -> None:
        if not record.drafted:
            return
        path, picks = record.verdicts[0].path, record.verdicts[0].picks
        scores = surrogate.calibrated(wide.scored, [args.temperature > 0]), wide.scored
        calibrated, raw = (frontier(s, [columns_of(s, 0, record.tree, 0)]) for s in scores)
        surrogate.learn([[pick.token_id for pick in picks]])
        end = int(path[-1]), picks[-1].token_id
        tokens.append(len(picks))
        kinds[-1].append(
            {
                name: kind_of_hit(outcomes, choice.choose(outcomes, most), *end)
                for name, (choice, most) in named.items()
                for outcomes in [raw if name.endswith(RAW) else calibrated]
            }
        )

    engine = Engine(target, wide, Chain(), on_cycle=watch)
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=0
    )
    for prompt in encode_prompts(target, args.prompts):
        kinds.append([])
        engine.generate([prompt], params)
    return kinds, tokens, block_size


def rates(kinds: list[list[dict[str, str]]], name: str) -> dict[str, Any]:
    """Hit rates of one choice, and what it lacks to the most probable, over prompts."""
    counts = {
        kind: np.array([sum(c[name] == kind for c in cycles) for cycles in kinds])
        for kind in ("hit", "end", "soft")
    }
    sizes = np.array([len(cycles) for cycles in kinds])
    hits = counts["hit"] + counts["end"]
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(kinds), size=(NUM_RESAMPLES, len(kinds)))
    best = np.array([sum(c[BEST] in ("hit", "end") for c in cycles) for cycles in kinds])

    def interval(counts: np.ndarray) -> list[float]:
        rates = counts[drawn].sum(1) / sizes[drawn].sum(1)
        low, high = np.quantile(rates, [0.025, 0.975]).tolist()
        return [low, high]

    return {
        "hit_rate": float(hits.sum() / sizes.sum()),
        "interval_95": interval(hits),
        "behind": float((best - hits).sum() / sizes.sum()),
        "behind_95": interval(best - hits),
        **{kind: float(count.sum() / sizes.sum()) for kind, count in counts.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--n-async", type=int, default=384)
    parser.add_argument("--name", default="ahead_hits")
    args = parser.parse_args()
    kinds, tokens, block_size = collect(args, lambda size: choices(size, args.n_async))
    kinds = [cycles for cycles in kinds if cycles]
    found = {name: rates(kinds, name) for name in choices(block_size, args.n_async)}
    print(f"{len(tokens)} cycles, {np.mean(tokens):.2f} tokens each; N_async = {args.n_async}")
    for name, row in found.items():
        low, high = row["interval_95"]
        less, more = row["behind_95"]
        print(
            f"{name:30} {row['hit_rate']:.3f} [{low:.3f}, {high:.3f}] = "
            f"foreseen {row['hit']:.3f} + whole path {row['end']:.3f}; open {row['soft']:.3f}; "
            f"behind {row['behind']:.3f} [{less:.3f}, {more:.3f}]"
        )
    save(
        args.name, machine=machine(), settings=vars(args), block_size=block_size,
        num_cycles=len(tokens), acceptance_length=float(np.mean(tokens)), choices=found,
    )  # fmt: skip


if __name__ == "__main__":
    main()
