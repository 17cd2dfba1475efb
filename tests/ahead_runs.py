"""Generations with drafting ahead, and what they must give."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

from draftwood.ahead.planner import AheadOptions
from draftwood.draft.base import Drafter, DraftLimits
from draftwood.draft.independent import IndependentDrafter
from draftwood.engine import Engine
from draftwood.records import Output
from draftwood.sampling import SamplingParams
from draftwood.target.model import Target
from draftwood.tree.budget import BudgetPolicy, Fixed
from tiny import tiny_model
from tiny_drafter import tiny_independent_network

VOCAB = 61
NUM_NEW = 20
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 9, 5, 6], [9, 8, 7, 20, 31, 4, 4, 4], [3]]
GREEDY = SamplingParams(max_new_tokens=NUM_NEW)
SAMPLED = SamplingParams(max_new_tokens=NUM_NEW, temperature=1.0, seed=3)
OPTIONS = AheadOptions(num_branches=6, timeout_s=20.0)
LIMITS = DraftLimits(24)


@functools.cache
def target() -> Target:
    return Target(tiny_model("llama", vocab=VOCAB), probe=False)


@functools.cache
def _reference(seed: int | None) -> list[list[int]]:
    params = GREEDY if seed is None else replace(SAMPLED, seed=seed)
    return [Engine(target()).generate([prompt], params)[0].token_ids for prompt in PROMPTS]


def reference(params: SamplingParams = GREEDY) -> list[list[int]]:
    """The target's own output for ``GREEDY``, or for ``SAMPLED`` with another seed."""
    return _reference(params.seed if params.temperature > 0 else None)


def future(params: SamplingParams = GREEDY) -> dict[tuple[int, ...], list[int]]:
    return dict(zip(map(tuple, PROMPTS), reference(params), strict=True))


def run(
    drafter: Drafter, params: SamplingParams = GREEDY, policy: BudgetPolicy | None = None
) -> list[Output]:
    engine = Engine(target(), drafter, policy or Fixed(3), prefill_chunk_len=5)
    return engine.generate(PROMPTS, params)


def sources(outputs: list[Output]) -> Counter[str]:
    return Counter(c.ahead.source for o in outputs for c in o.cycles if c.ahead is not None)


def tokens(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def independent() -> IndependentDrafter:
    return IndependentDrafter(tiny_independent_network(target()), target())


def finish(engine: Engine, seq_id: int) -> Output:
    while True:
        for event in engine.step():
            if event.seq_id == seq_id and event.output is not None:
                return event.output
