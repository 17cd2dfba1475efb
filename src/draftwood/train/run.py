"""A whole training run: from response rows to a drafter folder, resumable."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from draftwood.draft.network import DraftNetwork
from draftwood.train.anchors import Example
from draftwood.train.evaluate import Acceptance
from draftwood.train.features import StoreSource
from draftwood.train.independent import IndependentRecipe, TokenSource, build_independent
from draftwood.train.joint import JointObjective
from draftwood.train.recipe import Recipe, build_drafter, default_taps, draft_config
from draftwood.train.run_file import read_run, write_run
from draftwood.train.state import latest_checkpoint
from draftwood.train.target_side import (
    LiveSource,
    ResponseRow,
    build_store,
    run_target,
    split_rows,
)
from draftwood.train.trainer import ExampleSource, TrainConfig, Trainer
from draftwood.train.warm_start import draft_vocabulary
from draftwood.tree.tree import FloatArray

FEATURES = "features"
_NORM_ROWS = 8


@dataclass(frozen=True)
class DataUse:
    """How a run uses its rows.

    Attributes:
        held_out_percent: share of the prompts that is kept for validation.
        num_validation: most responses of one evaluation.
        max_len: longer rows are left out.
        top_k: most probable target tokens kept per position, for distillation.
        cache_features: keep the target's features on disk; False runs the target in every step.
    """

    held_out_percent: float = 3.0
    num_validation: int = 48
    max_len: int = 2048
    top_k: int = 16
    cache_features: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.held_out_percent < 100:
            raise ValueError(f"held_out_percent must be in [0, 100), got {self.held_out_percent}")


def unused_token(tokenizer: Any, vocab_size: int, rows: Iterable[ResponseRow]) -> int:
    """A token that can stand for a masked position: special, unnamed and in none of the rows.

    Else an id of the target's tables that its tokenizer never gives out.

    Raises:
        ValueError: there is none.
    """
    named = {getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "unk")}
    seen = {token for row in rows for token in row.token_ids}
    special = {int(i) for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    beyond = set(range(len(tokenizer), vocab_size))
    for candidates in (special, beyond):
        free = candidates - named - seen
        if free:
            return max(free)
    raise ValueError(
        "every special token of the target is in use; name a token that its text never contains "
        "as the mask token"
    )


def train_drafter(
    model: nn.Module,
    rows: Sequence[ResponseRow],
    folder: str | os.PathLike[str],
    recipe: Recipe | IndependentRecipe,
    config: TrainConfig,
    *,
    use: DataUse | None = None,
    device: torch.device | str = "cpu",
    accelerator: Any = None,
    on_record: Callable[[str, int, dict[str, Any]], None] | None = None,
) -> dict[str, Acceptance]:
    """Train a drafter, or continue the run that ``folder`` holds.

    Args:
        model: the target, a transformers causal LM; moved to ``device``. For an independent
            drafter the language model it is made of.
        rows: the target's replies, see ``load_rows``; may grow between two calls.
        folder: checkpoints, logs, features, and the drafter itself as ``draft``.
        recipe: the drafter, whose type decides the kind; a continued run must have the same.
        config: the run.
        use: how rows are used.
        device: where training happens (an accelerator's own where there is one).
        accelerator: an ``accelerate.Accelerator`` for mixed precision and several processes.
        on_record: called with (kind, step, values) of every log record.

    Returns:
        Offline acceptance on the held-out rows by domain; empty without any, and in all
        processes but the first.

    Raises:
        ValueError: no rows to train on, or a recipe that does not fit target or folder.
        DraftwoodError: the loss became infinite or not a number.
    """
    trainer = prepare(
        model, rows, Path(folder), recipe, config,
        use=use or DataUse(), device=device, accelerator=accelerator,
    )  # fmt: skip
    if on_record is not None and trainer.log is not None:
        trainer.log = _Heard(trainer.log, on_record)  # type: ignore[assignment]
    return trainer.run()


def prepare(
    model: nn.Module,
    rows: Sequence[ResponseRow],
    folder: Path,
    recipe: Recipe | IndependentRecipe,
    config: TrainConfig,
    *,
    use: DataUse,
    device: torch.device | str = "cpu",
    accelerator: Any = None,
) -> Trainer:
    """The trainer of ``train_drafter``, ready to run; features are computed here."""
    rows = [row for row in rows if len(row.token_ids) <= use.max_len]
    train, held = split_rows(rows, use.held_out_percent)
    if not train:
        raise ValueError(
            f"no row of at most {use.max_len} tokens to train on; generate more, or raise max_len "
            "or lower held_out_percent"
        )
    if isinstance(recipe, IndependentRecipe):
        where = accelerator.device if accelerator is not None else torch.device(device)
        return _prepare_independent(
            model.to(where), train, held, folder, recipe, config, use, accelerator
        )
    draft_config(model.config, recipe, attention_bias=False)  # refused before anything is computed
    is_first = accelerator is None or accelerator.is_main_process
    where = accelerator.device if accelerator is not None else torch.device(device)
    model.to(where)
    taps = recipe.taps or default_taps(int(model.config.num_hidden_layers))  # type: ignore[union-attr, arg-type]
    folder.mkdir(parents=True, exist_ok=True)
    if is_first and use.cache_features:
        build_store(folder / FEATURES, rows, model, taps, top_k=use.top_k, max_len=use.max_len)
    _wait(accelerator)
    source: ExampleSource
    validation: ExampleSource
    if use.cache_features:
        store, percent = folder / FEATURES, use.held_out_percent
        source = StoreSource(store, taps, held_out=False, percent=percent)
        validation = StoreSource(store, taps, held_out=True, percent=percent)
    else:
        source = LiveSource(train, model, taps, use.top_k)
        validation = LiveSource(held, model, taps, use.top_k)
    if is_first and latest_checkpoint(folder) is None:
        write_run(folder, recipe, _vocabulary(model, recipe, source, train))
    _wait(accelerator)
    network = _network(model, recipe, taps, read_run(folder, recipe), train).to(where)

    held_out = _some(validation, use.num_validation)
    return Trainer(network, source, held_out, folder, config, accelerator)


def _prepare_independent(
    body: nn.Module,
    train: Sequence[ResponseRow],
    held: Sequence[ResponseRow],
    folder: Path,
    recipe: IndependentRecipe,
    config: TrainConfig,
    use: DataUse,
    accelerator: Any,
) -> Trainer:
    """No features, no draft vocabulary: the network, its objective, and the tokens."""
    if config.loss.distill > 0 or config.loss.tree > 0:
        raise ValueError(
            "an independent drafter is trained on the replies' tokens; set distill and tree to 0"
        )
    network = build_independent(body, recipe)
    folder.mkdir(parents=True, exist_ok=True)
    is_first = accelerator is None or accelerator.is_main_process
    if is_first and latest_checkpoint(folder) is None:
        write_run(folder, recipe, None)
    _wait(accelerator)
    read_run(folder, recipe)
    objective = JointObjective(network, config.loss)
    held_out = _some(TokenSource(held), use.num_validation)
    return Trainer(objective, TokenSource(train), held_out, folder, config, accelerator)


def _some(validation: ExampleSource, count: int) -> Callable[[], list[Example]]:
    """The first held-out responses, read anew at every evaluation."""

    def held_out() -> list[Example]:
        validation.refresh()
        return [validation.example(i) for i in range(min(len(validation), count))]

    return held_out


class _Heard:
    """A run log that also tells someone."""

    def __init__(self, log: Any, on_record: Callable[[str, int, dict[str, Any]], None]) -> None:
        self._log, self._on_record = log, on_record

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        self._log.write(kind, step, values)
        self._on_record(kind, step, values)

    def close(self) -> None:
        self._log.close()


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


def _vocabulary(
    model: nn.Module, recipe: Recipe, source: ExampleSource, rows: Sequence[ResponseRow]
) -> list[int] | None:
    if recipe.draft_vocab_size is None:
        return None
    vocab_size = _vocab_size(model)
    if isinstance(source, StoreSource):
        weights = source.store.token_weights(vocab_size)
    else:
        weights = token_weights(rows, vocab_size)
    ids: list[int] = draft_vocabulary(weights, recipe.draft_vocab_size).tolist()
    return ids


def _vocab_size(model: nn.Module) -> int:
    return int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]


def _wait(accelerator: Any) -> None:
    if accelerator is not None:
        accelerator.wait_for_everyone()


def _network(
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
