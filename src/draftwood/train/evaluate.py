"""Offline acceptance: what a drafter would achieve in the loop, from stored greedy responses.

The target's greedy response is the only path the loop can take, so the cycle that starts at an
anchor accepts as many of its next tokens as the draft tree contains. All anchors of a response
are drafted in one packed call and the loop is replayed over the result for every budget at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from draftwood.draft.block_ranking import MANY
from draftwood.draft.markov import MarkovTables
from draftwood.train.accepted import (
    CHAIN,
    accepted_lengths,
    chain_lengths,
    conditional_lengths,
    count_cycles,
)
from draftwood.train.anchors import BlockBatch, Example, anchor_range, make_batch
from draftwood.train.conditionals import markov_tables
from draftwood.train.loss import UNKNOWN, draft_ids, inverse_map
from draftwood.train.networks import Network, block_hidden, device_of
from draftwood.tree.tree import IntArray

# Log-probabilities held at a time: 64 MiB, whatever block and vocabulary.
_MAX_SCORES = 16 * 2**20

Drafted: TypeAlias = tuple[torch.Tensor, BlockBatch]
"""Normed states [A, B − 1, H] of a block at every anchor of a response, and those blocks."""

BUDGETS = (CHAIN, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Acceptance:
    """Offline result over some responses.

    Attributes:
        num_responses, num_tokens: what it was measured on.
        accuracy: [horizon] share of rows whose most probable token is the right one.
        num_cycles: cycles by budget (``CHAIN`` for the chain).
    """

    num_responses: int
    num_tokens: int
    accuracy: tuple[float, ...]
    num_cycles: Mapping[int, int]

    def tau(self, budget: int) -> float:
        """Acceptance length: tokens per cycle, bonus token included."""
        return self.num_tokens / max(self.num_cycles[budget], 1)


def evaluate(
    network: Network, examples: Iterable[Example], budgets: Sequence[int] = BUDGETS
) -> dict[str, Acceptance]:
    """Acceptance by domain, and over all responses under the key ``"all"``.

    Args:
        network: drafter with embeddings and head of its own or borrowed.
        examples: greedy responses of the target with its features.
    """
    parts: dict[str, list[Replay]] = {}
    tables = markov_tables(network)
    for example in examples:
        if example.num_anchors == 0:
            continue
        one = replay(network, example, budgets, tables)
        for name in ("all", example.domain or "other"):
            parts.setdefault(name, []).append(one)
    return {name: _summary(replays, budgets) for name, replays in parts.items()}


@dataclass(frozen=True)
class Replay:
    """The loop replayed on one response.

    Attributes:
        num_tokens: response tokens.
        right, counted: [horizon] rows predicted right, and rows with a response token.
        cycles: by budget.
    """

    num_tokens: int
    right: torch.Tensor
    counted: torch.Tensor
    cycles: Mapping[int, int]


@torch.no_grad()
def replay(
    network: Network,
    example: Example,
    budgets: Sequence[int],
    tables: MarkovTables | None = None,
    drafted: Drafted | None = None,
) -> Replay:
    """Draft at every anchor of a response in one packed pass, then follow the loop.

    Args:
        tables, drafted: ``markov_tables`` and ``anchor_hidden``, if the caller has them.
    """
    tables = tables or markov_tables(network)
    to_draft = inverse_map(network.target_ids(), network.config.vocab_size)
    hidden, batch = drafted or anchor_hidden(network, example)
    labels = draft_ids(batch.labels[0].to(hidden.device), to_draft)
    labels = labels.masked_fill(~batch.valid[0].to(labels.device), UNKNOWN)
    accepted: dict[int, list[IntArray]] = {budget: [] for budget in budgets}
    right = torch.zeros(hidden.shape[1], dtype=torch.int64, device=hidden.device)
    width = network.config.head_size
    if tables is not None:  # pairs of candidates, several copies in float64
        width = max(width, 8 * MANY**2)
    step = max(_MAX_SCORES // (hidden.shape[1] * width), 1)
    for rows, wanted in zip(hidden.split(step), labels.split(step), strict=True):
        log_probs = _exact_logits(network, rows).log_softmax(dim=-1)
        right += (log_probs.argmax(-1) == wanted).sum(0)
        found = (
            accepted_lengths(log_probs, wanted, budgets)
            if tables is None
            else conditional_lengths(log_probs, rows, wanted, tables, budgets)
        )
        for budget, lengths in found.items():
            accepted[budget].append(lengths)
    cycles = {budget: count_cycles(np.concatenate(parts)) for budget, parts in accepted.items()}
    return Replay(len(labels), right.cpu(), batch.valid[0].sum(0).cpu(), cycles)


@torch.no_grad()
def loop_cycles(
    network: Network,
    example: Example,
    budget: int,
    drafted: Drafted | None = None,
    tables: MarkovTables | None = None,
) -> int:
    """Cycles that the loop takes over a response: those of ``replay``, without its accuracy.

    Args:
        drafted, tables: ``anchor_hidden`` and ``markov_tables``, if the caller has them.
    """
    tables = tables or markov_tables(network)
    hidden, batch = drafted or anchor_hidden(network, example)
    if budget != CHAIN:
        return replay(network, example, (budget,), tables, (hidden, batch)).cycles[budget]
    to_draft = inverse_map(network.target_ids(), network.config.vocab_size)
    labels = draft_ids(batch.labels[0].to(hidden.device), to_draft)
    labels = labels.masked_fill(~batch.valid[0].to(labels.device), UNKNOWN)
    step = max(_MAX_SCORES // network.config.head_size, 1)
    parts = [
        chain_lengths(lambda x: _exact_logits(network, x), rows, wanted, tables)
        for rows, wanted in zip(hidden.split(step), labels.split(step), strict=True)
    ]
    return count_cycles(np.concatenate(parts))


def _exact_logits(network: Network, hidden: torch.Tensor) -> torch.Tensor:
    """In the head's own precision also in mixed precision, where many would be tied."""
    with torch.autocast(hidden.device.type, enabled=False):
        return network.logits(hidden.to(network.head_weight().dtype)).float()


def _summary(replays: Sequence[Replay], budgets: Sequence[int]) -> Acceptance:
    right = torch.stack([one.right for one in replays]).sum(0)
    counted = torch.stack([one.counted for one in replays]).sum(0)
    return Acceptance(
        len(replays),
        sum(one.num_tokens for one in replays),
        tuple((right / counted.clamp_min(1)).tolist()),
        {budget: sum(one.cycles[budget] for one in replays) for budget in budgets},
    )


@torch.no_grad()
def anchor_hidden(network: Network, example: Example) -> Drafted:
    """Normed states of a block at every anchor of a response, and those blocks."""
    batch = anchor_batch(network, example)
    return block_hidden(network, batch)[0], batch


def anchor_batch(network: Network, example: Example, block_size: int | None = None) -> BlockBatch:
    """A block at every anchor of a response; of the drafter's own size if none is given."""
    first, count = anchor_range(example.response_start, len(example.token_ids))
    return make_batch(
        [example],
        [np.arange(first, first + count)],
        block_size=block_size or network.config.block_size,
        mask_token_id=network.config.mask_token_id,
    ).to(device_of(network))
