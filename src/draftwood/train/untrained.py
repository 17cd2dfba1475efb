"""The network that a recipe stands for, from a target and its replies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn

from draftwood.draft.network import DraftNetwork
from draftwood.train.batches import ExampleSource
from draftwood.train.features import StoreSource
from draftwood.train.recipe import Recipe, build_drafter
from draftwood.train.target_side import ResponseRow, run_target
from draftwood.train.warm_start import draft_vocabulary
from draftwood.tree.tree import FloatArray

_NORM_ROWS = 8


def token_weights(
    rows: Iterable[ResponseRow], vocab_size: int, prompt_share: float = 0.3
) -> FloatArray:
    """[vocab_size] count of each token in replies, plus a share of its count in prompts."""
    weights = np.zeros(vocab_size)
    for row in rows:
        ids = np.asarray(row.token_ids)
        weights += np.bincount(ids[row.response_start :], minlength=vocab_size)
        weights += prompt_share * np.bincount(ids[: row.response_start], minlength=vocab_size)
    return weights


def first_vocabulary(
    model: nn.Module, size: int | None, source: ExampleSource, rows: Sequence[ResponseRow]
) -> list[int] | None:
    """Target ids of a reduced draft vocabulary, chosen from the replies; None without a size."""
    if size is None:
        return None
    vocab_size = _vocab_size(model)
    if isinstance(source, StoreSource):
        weights = source.store.token_weights(vocab_size)
    else:
        weights = token_weights(rows, vocab_size)
    ids: list[int] = draft_vocabulary(weights, size).tolist()
    return ids


def _vocab_size(model: nn.Module) -> int:
    return int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]


def first_network(
    model: nn.Module,
    recipe: Recipe,
    taps: Sequence[int],
    vocabulary: Sequence[int] | None,
    rows: Sequence[ResponseRow],
) -> DraftNetwork:
    """The untrained drafter; q/k norms take their scale from a few rows."""
    weights = None
    if vocabulary is not None:
        weights = np.zeros(_vocab_size(model))
        weights[list(vocabulary)] = 1.0
    features = tokens = None
    if recipe.warm:
        few = [run_target(model, row, taps, 0) for row in rows[:_NORM_ROWS]]
        features = torch.cat([example.features for example in few]).float()
        tokens = np.concatenate([example.token_ids for example in few]).tolist()
    return build_drafter(model, recipe, weights, features, tokens)
