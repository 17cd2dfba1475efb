"""Training batches: random anchors per response, all blocks of a response in one packed call.

A block starts at an anchor position a and asks for the tokens at a+1 … a+B−1. It may see only
the features of tokens before a (``DraftNetwork.forward`` enforces that from positions alone) and
the anchor's embedding. The prompt and anything past the end of a response carry no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from draftwood.draft.network import NO_POSITION
from draftwood.train.shapes import filled_up
from draftwood.tree.tree import IntArray


@dataclass(frozen=True)
class Example:
    """One response with what the target said about it.

    Attributes:
        token_ids: [N] prompt and response.
        response_start: index of the first response token.
        features: [N, T · H] target features at the taps.
        top_ids, top_log_probs: [N, K] the target's most probable *next* tokens after each
            position and their log-probabilities, or None.
        domain: where the prompt comes from, for reports.
    """

    token_ids: IntArray
    response_start: int
    features: torch.Tensor
    top_ids: torch.Tensor | None = None
    top_log_probs: torch.Tensor | None = None
    domain: str = ""

    @property
    def num_anchors(self) -> int:
        """Positions a block can start at: the last prompt token up to the last but one token."""
        return anchor_range(self.response_start, len(self.token_ids))[1]


@dataclass(frozen=True)
class BlockBatch:
    """G responses with n blocks each; everything a training step needs.

    Attributes:
        context_ids: [G, C] tokens of prompt and response from position 0; 0 where padded.
        lengths: [G] how many of them there are.
        response_starts: [G] index of the first response token.
        features: [G, C, T · H], zero where padded; T = 0 for drafters that read tokens.
        key_positions: [G, C], ``NO_POSITION`` where padded.
        anchor_positions: [G, n].
        block_ids: [G, n, B] token ids [anchor, mask, …].
        labels: [G, n, B − 1] target token ids to predict; 0 where not ``valid``.
        valid: [G, n, B − 1] whether there is a response token to predict.
        top_ids, top_log_probs: [G, n, B − 1, K] the target's distribution at each label, or None.
    """

    context_ids: torch.Tensor
    lengths: torch.Tensor
    response_starts: torch.Tensor
    features: torch.Tensor
    key_positions: torch.Tensor
    anchor_positions: torch.Tensor
    block_ids: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor
    top_ids: torch.Tensor | None
    top_log_probs: torch.Tensor | None

    @property
    def num_rows(self) -> int:
        """Block rows that go through the network."""
        return self.block_ids.numel()

    def to(self, device: torch.device | str) -> BlockBatch:
        """The same batch on another device."""
        moved: dict[str, Any] = {
            field.name: value if value is None else value.to(device)
            for field in fields(self)
            for value in [getattr(self, field.name)]
        }
        return BlockBatch(**moved)


def anchor_range(response_start: int, length: int) -> tuple[int, int]:
    """(first anchor, number of anchors) of a response.

    The last prompt token is an anchor too: it is what the first cycle after prefill drafts from.
    """
    first = max(response_start - 1, 0)
    return first, max(length - 1 - first, 0)


def choose_anchors(
    rng: np.random.Generator, response_start: int, length: int, count: int
) -> IntArray:
    """``count`` distinct anchors of a response, uniformly at random, in order."""
    first, available = anchor_range(response_start, length)
    assert count <= available, (count, available)
    return np.sort(first + rng.permutation(available)[:count]).astype(np.int64)


def make_batch(
    examples: Sequence[Example],
    anchors: Sequence[IntArray],
    *,
    block_size: int,
    mask_token_id: int,
    whole: bool = False,
    fill_up: bool = False,
) -> BlockBatch:
    """Pack one group per example; ``anchors[g]`` (equally many each) are its block starts.

    Context is cut before the last anchor of each response, because later tokens are seen by no
    block, unless the ``whole`` response is asked for. ``fill_up`` pads it to one of few lengths.
    """
    groups = len(examples)
    anchor = torch.from_numpy(np.stack(list(anchors)))
    used = anchor.max(dim=1).values.tolist()
    if whole:
        used = [len(example.token_ids) for example in examples]
    length = filled_up(max(*used, 1)) if fill_up else max(*used, 1)
    width = examples[0].features.shape[1]
    features = torch.zeros(groups, length, width, dtype=examples[0].features.dtype)
    keys = torch.full((groups, length), NO_POSITION, dtype=torch.int64)
    context = torch.zeros(groups, length, dtype=torch.int64)
    for g, (example, count) in enumerate(zip(examples, used, strict=True)):
        features[g, :count] = example.features[:count]
        keys[g, :count] = torch.arange(count)
        context[g, :count] = torch.from_numpy(example.token_ids[:count])
    labels, valid, where = _labels(examples, anchor, block_size)
    blocks = torch.full((*anchor.shape, block_size), mask_token_id, dtype=torch.int64)
    for g, example in enumerate(examples):
        blocks[g, :, 0] = torch.from_numpy(example.token_ids)[anchor[g]]
    top_ids, top_log_probs = _teacher(examples, where)
    starts = torch.tensor([example.response_start for example in examples])
    return BlockBatch(
        context, torch.tensor(used), starts, features, keys, anchor, blocks, labels, valid,
        top_ids, top_log_probs,
    )  # fmt: skip


def _labels(
    examples: Sequence[Example], anchor: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Labels, validity and clamped label positions, each [G, n, B − 1]."""
    position = anchor[..., None] + torch.arange(1, block_size)
    lengths = torch.tensor([len(example.token_ids) for example in examples])[:, None, None]
    starts = torch.tensor([example.response_start for example in examples])[:, None, None]
    valid = (position < lengths) & (position >= starts)
    where = torch.minimum(position, lengths - 1)
    rows = [torch.from_numpy(e.token_ids)[where[g]] for g, e in enumerate(examples)]
    labels = torch.stack(rows).masked_fill(~valid, 0)
    return labels, valid, where


def _teacher(
    examples: Sequence[Example], where: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The target's distribution that produced each label: stored at the position before it."""
    ids, log_probs = [], []
    for g, example in enumerate(examples):
        if example.top_ids is None or example.top_log_probs is None:
            return None, None
        before = (where[g] - 1).clamp_min(0)
        ids.append(example.top_ids[before])
        log_probs.append(example.top_log_probs[before])
    return torch.stack(ids).long(), torch.stack(log_probs).float()
