"""What a run would cost, and what a drafter achieves without running the decode loop."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftwood.draft.network import DraftNetwork
from draftwood.train.anchors import Example
from draftwood.train.evaluate import BUDGETS, Acceptance, evaluate
from draftwood.train.features import is_held_out
from draftwood.train.networks import Network
from draftwood.train.recipe import describe
from draftwood.train.run import DataUse, Start, prepare
from draftwood.train.start import load_fitting, trained_folder
from draftwood.train.target_side import ResponseRow, as_example, run_target, split_rows
from draftwood.train.train_config import TrainConfig


def dry_run(
    model: nn.Module,
    rows: Sequence[ResponseRow],
    recipe: Start,
    config: TrainConfig,
    *,
    use: DataUse | None = None,
    device: torch.device | str = "cpu",
    accelerator: Any = None,
    num_steps: int = 3,
) -> tuple[Network, dict[str, float]]:
    """A few real steps on a few rows in a temporary folder.

    Returns:
        The network (with shapes and configuration), and figures: those of ``recipe.describe``,
        ``step_s``, ``positions_per_s`` (response tokens asked for), ``feature_bytes`` of all
        rows on disk, ``target_tokens_per_s`` of computing them, and on a GPU ``peak_bytes``. An
        independent drafter has no features.
    """
    use = use or DataUse()
    kept = [row for row in rows if len(row.token_ids) <= use.max_len]
    some = split_rows(kept, use.held_out_percent)[0]
    some = some[: config.accumulate * max(8, 2 * config.blocks // config.blocks_per_response)]
    num_tokens = sum(len(row.token_ids) for row in kept)
    short = replace(config, max_steps=num_steps, max_minutes=None, warmup_steps=1)
    few = replace(use, cache_features=True, held_out_percent=0.0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = prepare(
            model, some, Path(folder), recipe, short,
            use=few, device=device, accelerator=accelerator,
        )  # fmt: skip
        trainer.step()  # warms up
        begin, before = time.perf_counter(), trainer.progress.positions
        for _ in range(num_steps - 1):
            trainer.step()
        seconds = time.perf_counter() - begin
        if trainer.log is not None:
            trainer.log.close()
    network = trainer.network
    columns = network.config.head_size
    if config.head_negatives:
        columns = min(columns, 2 * config.head_negatives)
    figures = {
        **describe(network, config.blocks * config.accumulate, columns),
        "step_s": seconds / (num_steps - 1),
        "positions_per_s": (trainer.progress.positions - before) / seconds,
    }
    if isinstance(network, DraftNetwork):
        figures |= _feature_figures(model, network, some, num_tokens, use)
    if trainer.device.type == "cuda":
        figures["peak_bytes"] = float(torch.cuda.max_memory_allocated(trainer.device))
    return network, figures


def _feature_figures(
    model: nn.Module,
    network: DraftNetwork,
    some: Sequence[ResponseRow],
    num_tokens: int,
    use: DataUse,
) -> dict[str, float]:
    """Size of the feature cache of all tokens, and how fast the target fills it."""
    begin = time.perf_counter()
    for row in some:
        run_target(model, row, network.config.target_layer_ids, use.top_k)
    target_s = time.perf_counter() - begin
    taps = len(network.config.target_layer_ids)
    width = 2 * taps * network.config.target_hidden_size + 4 + 6 * use.top_k
    return {
        "feature_bytes": float(width * num_tokens) if use.cache_features else 0.0,
        "target_tokens_per_s": sum(len(row.token_ids) for row in some) / target_s,
    }


def evaluate_drafter(
    drafter: str | os.PathLike[str],
    target: Any,
    rows: Iterable[ResponseRow],
    *,
    budgets: Sequence[int] = BUDGETS,
    held_out_percent: float | None = None,
) -> dict[str, Acceptance]:
    """Offline acceptance of a saved drafter on the target's (greedy) replies, by domain.

    Args:
        drafter: folder or hub id, or ``"shipped"``.
        target: a ``draftwood.target.model.Target``; a DFlash drafter needs it run over every row.
        rows: replies; only their tokens matter.
        budgets: tree budgets; 0 is the chain.
        held_out_percent: use only the rows that a run with this percentage held out.

    Raises:
        ValueError: the drafter does not fit the target, or there is no row.
    """
    wanted = (
        row
        for row in rows
        if held_out_percent is None or is_held_out(row.prompt_key, held_out_percent)
    )
    examples: Iterable[Example]
    network = load_fitting(trained_folder(drafter, target), target)
    if isinstance(network, DraftNetwork):
        taps = network.config.target_layer_ids
        examples = (run_target(target.model, row, taps, 0) for row in wanted)
    else:
        examples = map(as_example, wanted)
    found = evaluate(network, examples, budgets)
    if not found:
        raise ValueError("there is no reply to evaluate on; check the data folder and the split")
    return found
