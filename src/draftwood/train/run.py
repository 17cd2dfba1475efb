"""A whole training run: from response rows to a drafter folder, resumable."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from draftwood.draft.independent_network import IndependentNetwork
from draftwood.draft.network import DraftNetwork
from draftwood.train.anchors import Example
from draftwood.train.batches import ExampleSource
from draftwood.train.evaluate import Acceptance
from draftwood.train.features import StoreSource
from draftwood.train.grow import with_vocabulary
from draftwood.train.independent import IndependentRecipe, TokenSource, build_independent
from draftwood.train.joint import JointObjective
from draftwood.train.recipe import Recipe, default_taps, draft_config
from draftwood.train.run_file import HELD_OUT, read_run, write_run
from draftwood.train.start import TrainedStart, check_masks, lend_tables, load_start
from draftwood.train.state import HeardLog, RunLog, latest_checkpoint
from draftwood.train.target_side import LiveSource, ResponseRow, build_store, split_rows
from draftwood.train.train_config import TrainConfig
from draftwood.train.trainer import DRAFT, Trainer
from draftwood.train.untrained import first_network, first_vocabulary

FEATURES = "features"

Start: TypeAlias = Recipe | IndependentRecipe | TrainedStart


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
    recipe: Start,
    config: TrainConfig,
    *,
    use: DataUse | None = None,
    device: torch.device | str = "cpu",
    accelerator: Any = None,
    on_record: Callable[[str, int, dict[str, Any]], None] | None = None,
) -> dict[str, Acceptance]:
    """Train a drafter, or continue the run that ``folder`` holds.

    Args:
        model: the target, a transformers causal LM; moved to ``device``. For a new independent
            drafter the language model it is made of.
        rows: the target's replies, see ``load_rows``; may grow between two calls.
        folder: checkpoints, logs, features, and the drafter itself as ``draft``.
        recipe: a new drafter, whose type decides the kind, or a trained one to go on with; a
            continued run must have the same.
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
    if on_record is not None and isinstance(trainer.log, RunLog):
        trainer.log = HeardLog(trainer.log, on_record)
    return trainer.run(evaluate_first=isinstance(recipe, TrainedStart))


def prepare(
    model: nn.Module,
    rows: Sequence[ResponseRow],
    folder: Path,
    recipe: Start,
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
    where = accelerator.device if accelerator is not None else torch.device(device)
    model.to(where)
    run = _Run(model, rows, train, held, folder, config, use, where, accelerator)
    if isinstance(recipe, IndependentRecipe):
        return _prepare_independent(run, build_independent(model, recipe), asdict(recipe))
    if isinstance(recipe, Recipe):
        draft_config(model.config, recipe, attention_bias=False)  # refused before any computation
        taps = recipe.taps or default_taps(int(model.config.num_hidden_layers))  # type: ignore[union-attr, arg-type]
        return _prepare_block(
            run, taps, asdict(recipe),
            choose=lambda source: first_vocabulary(model, recipe.draft_vocab_size, source, train),
            build=lambda vocabulary: first_network(model, recipe, taps, vocabulary, train),
        )  # fmt: skip
    return _prepare_trained(run, recipe)


@dataclass(frozen=True)
class _Run:
    """What a run of every kind consists of; the model is in its place, no row is too long."""

    model: nn.Module
    rows: Sequence[ResponseRow]
    train: Sequence[ResponseRow]
    held: Sequence[ResponseRow]
    folder: Path
    config: TrainConfig
    use: DataUse
    where: torch.device
    accelerator: Any

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.accelerator is None or bool(self.accelerator.is_main_process)

    def wait(self) -> None:
        """For the other processes."""
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()


def _prepare_trained(run: _Run, start: TrainedStart) -> Trainer:
    """The network is there; the folder must have started from the same one."""
    if start.folder.resolve() == (run.folder / DRAFT).resolve():
        raise ValueError(f"the run would overwrite {start.folder}; train in another folder")
    check_masks(start.mask_token_id, run.rows)
    network = load_start(start, run.model, run.where)
    if isinstance(network, IndependentNetwork):
        return _prepare_independent(run, network, start.choices())
    head = run.model.get_output_embeddings().weight  # type: ignore[operator]

    def build(vocabulary: list[int] | None) -> DraftNetwork:
        if vocabulary is None:
            return network
        changed = with_vocabulary(network, vocabulary, head)
        lend_tables(changed, run.model)
        return changed

    return _prepare_block(
        run, network.config.target_layer_ids, start.choices(),
        choose=lambda source: first_vocabulary(
            run.model, start.draft_vocab_size, source, run.train
        ),
        build=build,
    )  # fmt: skip


def _prepare_block(
    run: _Run,
    taps: Sequence[int],
    choices: Mapping[str, Any],
    *,
    choose: Callable[[ExampleSource], list[int] | None],
    build: Callable[[list[int] | None], DraftNetwork],
) -> Trainer:
    """Features first, then the draft vocabulary, once for all parts of a run, then the network."""
    run.folder.mkdir(parents=True, exist_ok=True)
    choices = {**choices, HELD_OUT: run.use.held_out_percent}
    source, validation = _sources(run, taps)
    if run.is_first and latest_checkpoint(run.folder) is None:
        write_run(run.folder, choices, choose(source))
    run.wait()
    network = build(read_run(run.folder, choices)).to(run.where)
    held_out = _some(validation, run.use.num_validation)
    return Trainer(network, source, held_out, run.folder, run.config, run.accelerator)


def _sources(run: _Run, taps: Sequence[int]) -> tuple[ExampleSource, ExampleSource]:
    """Replies with the target's features: (to train on, held out)."""
    use = run.use
    if not use.cache_features:
        return (
            LiveSource(run.train, run.model, taps, use.top_k),
            LiveSource(run.held, run.model, taps, use.top_k),
        )
    store, percent = run.folder / FEATURES, use.held_out_percent
    if run.is_first:
        rows = run.rows
        build_store(store, rows, run.model, taps, top_k=use.top_k, max_len=use.max_len)
    run.wait()
    return (
        StoreSource(store, taps, held_out=False, percent=percent),
        StoreSource(store, taps, held_out=True, percent=percent),
    )


def _prepare_independent(
    run: _Run, network: IndependentNetwork, choices: Mapping[str, Any]
) -> Trainer:
    """No features, no draft vocabulary: the network, its objective, and the tokens."""
    loss = run.config.loss
    if loss.distill > 0 or loss.tree > 0:
        raise ValueError(
            "an independent drafter is trained on the replies' tokens; set distill and tree to 0"
        )
    run.folder.mkdir(parents=True, exist_ok=True)
    choices = {**choices, HELD_OUT: run.use.held_out_percent}
    if run.is_first and latest_checkpoint(run.folder) is None:
        write_run(run.folder, choices, None)
    run.wait()
    read_run(run.folder, choices)
    held_out = _some(TokenSource(run.held), run.use.num_validation)
    objective, source = JointObjective(network, loss), TokenSource(run.train)
    return Trainer(objective, source, held_out, run.folder, run.config, run.accelerator)


def _some(validation: ExampleSource, count: int) -> Callable[[], list[Example]]:
    """The first held-out responses, read anew at every evaluation."""

    def held_out() -> list[Example]:
        validation.refresh()
        return [validation.example(i) for i in range(min(len(validation), count))]

    return held_out
