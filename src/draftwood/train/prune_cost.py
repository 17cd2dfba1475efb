"""Seconds of drafting and verifying, for the speedup that a drafter can be expected to give."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draftwood.draft.base import Committed, DraftContext, DraftLimits
from draftwood.draft.independent import IndependentDrafter
from draftwood.draft.independent_network import IndependentNetwork
from draftwood.sampling import Sampler, SamplingParams
from draftwood.target.model import Target
from draftwood.tree.tree import DraftTree

_ACCEPTED = 3  # tokens that a cycle commits, as the drafter sees it
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 31
_LIMIT_S = 3.0


@dataclass(frozen=True)
class PassSeconds:
    """Median seconds of three passes, measured in turn: they compare, whatever else runs.

    Attributes:
        plain_s: of the target over one token.
        verify_s: of the target over a tree.
        draft_s: of a proposal, which also encodes the tokens of the cycle before.
    """

    plain_s: float
    verify_s: float
    draft_s: float

    def speedup(self, tau: float) -> float:
        """Over plain decoding, at ``tau`` tokens per cycle: τ · t(1) / (t_draft + t(tree))."""
        return tau * self.plain_s / (self.draft_s + self.verify_s)


def pass_seconds(
    network: IndependentNetwork,
    target: Target,
    max_nodes: int,
    context_len: int,
    *,
    is_chain: bool,
) -> PassSeconds:
    """Measure the passes of a decoding cycle, for some seconds.

    Args:
        network: the drafter, in the dtype it is decoded with.
        target: the model it drafts for.
        max_nodes: of a draft; its tree has the anchor too.
        context_len: tokens before the anchor; fewer where the target's context ends.
        is_chain: draft one token per depth.

    Raises:
        ValueError: the tree does not fit the target's context.
    """
    width = max_nodes + 1
    longest = max(width, _ACCEPTED + network.config.block_size)
    context_len = max(min(context_len, target.max_len - longest), 1)
    tokens = _tokens(target.vocab_size, context_len + _ACCEPTED + 1)
    limits = DraftLimits(max_nodes, 1 if is_chain else None)
    plain, verify = _target_passes(target, tokens[:context_len], (1, width))
    draft = _draft_pass(network, target, tokens, limits)
    return PassSeconds(*seconds_in_turn([plain, verify, draft]))


def seconds_in_turn(passes: Sequence[Callable[[], None]]) -> list[float]:
    """Median seconds of each pass, over rounds in which every one runs once."""
    for once in passes:
        once()  # warms up
    laps: list[list[float]] = []
    end = time.perf_counter() + _LIMIT_S
    while len(laps) < _MOST_ROUNDS:
        laps.append([_lap(once) for once in passes])
        if len(laps) >= _LEAST_ROUNDS and time.perf_counter() >= end:
            break
    return [float(seconds) for seconds in np.median(laps, axis=0)]


def _target_passes(
    target: Target, context: Sequence[int], widths: Sequence[int]
) -> list[Callable[[], None]]:
    """Passes with the head over so many rows each, behind ``context``."""
    cache = target.new_cache()
    target.forward(DraftTree.chain(context), [cache])
    cache.commit(np.arange(len(context)))

    def over(rows: int) -> Callable[[], None]:
        tree = DraftTree.chain([context[0]] * rows)

        def once() -> None:
            target.logits(target.forward(tree, [cache]).hidden)
            cache.truncate(len(context))
            _wait(target.device)

        return once

    return [over(rows) for rows in widths]


def _draft_pass(
    network: IndependentNetwork, target: Target, tokens: Sequence[int], limits: DraftLimits
) -> Callable[[], None]:
    """The cycle whose anchor is the last token: always the same one."""
    drafter = IndependentDrafter(network.eval(), target)
    start = len(tokens) - 1 - _ACCEPTED
    sampler = Sampler(SamplingParams(), tokens[:1], vocab_size=target.vocab_size)
    context = DraftContext(0, tokens, 1, drafter.horizon, sampler)

    def once() -> None:
        drafter.observe([Committed(0, start, tokens[start:-1], None, [], 0)])
        drafter.propose([context], limits)
        drafter.truncate(0, start)
        _wait(target.device)

    drafter.observe([Committed(0, 0, tokens[:start], None, [], 0)])
    once()  # encodes the prompt as well
    return once


def _tokens(vocab_size: int, count: int) -> list[int]:
    found: list[int] = np.random.default_rng(0).integers(0, vocab_size, size=count).tolist()
    return found


def _lap(once: Callable[[], None]) -> float:
    begin = time.perf_counter()
    once()
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
