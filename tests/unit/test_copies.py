"""Nothing of the context is copied again, cycle by cycle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftwood.bench.copies import CopyCounter
from draftwood.draft.base import Drafter
from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.engine import Engine
from draftwood.sampling import SamplingParams
from draftwood.target.cache import KVCache
from draftwood.target.model import Target
from draftwood.tree.budget import Fixed
from oracle import NoisyOracleDrafter
from tiny import tiny_model
from tiny_drafter import tiny_draft_network

PROMPT = [5, 6, 7, 8, 5, 6, 7]
PARAMS = SamplingParams(max_new_tokens=280)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", dtype=torch.float32), probe=False)


def test_counter_counts_copies_and_nothing_else() -> None:
    x = torch.zeros(10, 4)
    with CopyCounter() as counter:
        x.clone()
        x[2:5] = x[:3].exp()
        torch.cat([x, x])
        x + 1
        x.view(-1)
    assert counter.moved == (40 + 12 + 80) * 4
    assert counter.masked == 0


def copied(engine: Engine) -> dict[int, int]:
    """Context length → bytes that the cycle there moved."""
    engine.add(PROMPT, PARAMS)
    engine.step()
    found = {}
    while engine.num_active:
        context_len = len(engine._running[0].token_ids)
        with CopyCounter() as counter:
            engine.step()
        found[context_len] = counter.moved
    return found


def growth(found: dict[int, int]) -> float:
    """Median bytes per cycle at 200 … 280 tokens over those at 20 … 100."""

    def near(low: int, high: int) -> float:
        return float(np.median([bytes_ for at, bytes_ in found.items() if low <= at < high]))

    return near(200, 280) / near(20, 100)


def drafter_of(name: str, target: Target) -> Drafter:
    if name == "block_diffusion":
        return BlockDiffusionDrafter(tiny_draft_network(target), target)
    (plain,) = Engine(target).generate([PROMPT], PARAMS)
    return NoisyOracleDrafter({tuple(PROMPT): plain.token_ids})


@pytest.mark.parametrize("name", ["oracle", "block_diffusion"])
def test_copies_per_cycle_do_not_grow_with_the_context(target: Target, name: str) -> None:
    assert growth(copied(Engine(target, drafter_of(name, target), Fixed(16)))) < 1.1


def test_a_cache_that_copies_itself_is_noticed(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = KVCache.append

    def with_copy(self: KVCache, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = real(self, *args)  # type: ignore[arg-type]
        return keys.clone(), values.clone()

    monkeypatch.setattr(KVCache, "append", with_copy)
    assert growth(copied(Engine(target, drafter_of("oracle", target), Fixed(16)))) > 1.5
