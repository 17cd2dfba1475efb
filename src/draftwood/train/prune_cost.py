"""Seconds of drafting and verifying, for the speedup that a drafter can be expected to give."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from draftwood.draft.base import Committed, DraftContext, DraftLimits
from draftwood.draft.independent import IndependentDrafter
from draftwood.draft.independent_network import IndependentNetwork
from draftwood.sampling import Sampler, SamplingParams
from draftwood.target.model import Target
from draftwood.tree.tree import DraftTree

_ACCEPTED = 3  # tokens that a cycle commits, as the drafter sees it
_REPEATS = 5


def target_seconds(target: Target, width: int, context_len: int) -> tuple[float, float]:
    """Median seconds of a target pass over 1 row, and over ``width`` rows."""
    cache = target.new_cache()
    context_len = max(min(context_len, target.max_len - width), 1)
    tokens = _tokens(target.vocab_size, context_len)
    target.forward(DraftTree.chain(tokens), [cache])
    cache.commit(np.arange(context_len))

    def verify(rows: int) -> Callable[[], None]:
        def once() -> None:
            hidden = target.forward(DraftTree.chain(tokens[:1] * rows), [cache]).hidden
            target.logits(hidden)
            cache.truncate(context_len)
            _wait(target.device)

        return once

    return _median(verify(1)), _median(verify(width))


def draft_seconds(
    network: IndependentNetwork,
    target: Target,
    max_nodes: int,
    context_len: int,
    *,
    is_chain: bool,
) -> float:
    """Median seconds of a proposal that also encodes the tokens of the cycle before."""
    drafter = IndependentDrafter(network.eval(), target)
    total = context_len + (_REPEATS + 2) * _ACCEPTED
    tokens = _tokens(target.vocab_size, total)
    sampler = Sampler(SamplingParams(), tokens[:1], vocab_size=target.vocab_size)
    limits = DraftLimits(max_nodes, 1 if is_chain else None)
    known = 0

    def once() -> None:
        nonlocal known
        new = tokens[known : known + _ACCEPTED] if known else tokens[:context_len]
        drafter.observe([Committed(0, known, new, None, [], 0)])
        known += len(new)
        seen = tokens[: known + 1]
        drafter.propose([DraftContext(0, seen, 1, drafter.horizon, sampler)], limits)
        _wait(target.device)

    once()  # the prompt
    return _median(once)


def _tokens(vocab_size: int, count: int) -> list[int]:
    found: list[int] = np.random.default_rng(0).integers(0, vocab_size, size=count).tolist()
    return found


def _median(once: Callable[[], None]) -> float:
    once()  # warms up
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
