"""Pruning an independent drafter (D3D): rank its layers, remove, recover, repeat; resumable."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draftwood.draft.independent_checkpoint import check_fits, load_independent, save_independent
from draftwood.draft.independent_network import IndependentNetwork
from draftwood.target.model import Target
from draftwood.train.anchors import Example
from draftwood.train.conditionals import markov_tables
from draftwood.train.distill import DistillObjective
from draftwood.train.evaluate import loop_cycles
from draftwood.train.independent import TokenSource
from draftwood.train.kept import damaged, read_kept, write_kept
from draftwood.train.layer_choice import ORDERS, LayerScore, rank_layers
from draftwood.train.prune_cost import pass_seconds
from draftwood.train.prune_settings import require_continued, run_settings
from draftwood.train.prune_table import Stage, Table
from draftwood.train.target_side import ResponseRow, as_example, split_rows
from draftwood.train.train_config import TrainConfig
from draftwood.train.trainer import Trainer

_DRAFT = "draft"
# So many of a round's best layers, per place, compete for its next place.
_SHORTLIST = 3
_LEAST = {
    "min_depth": 1, "budget": 0, "num_ranking": 1, "num_validation": 1, "max_len": 2,
    "context_len": 1, "per_round": 1, "ranking_block": 0,
}  # fmt: skip


@dataclass(frozen=True)
class PruneConfig:
    """How to prune.

    Attributes:
        recovery: the training after each round, whose ``loss`` has the position weights and λ;
            None removes layers without any.
        order: how the next layer is chosen, see ``rank_layers``.
        per_round: layers removed before each recovery. The first is chosen among all, the next ones
            among those that were nearly chosen, measured without what is gone already.
        min_depth: stop at this many layers.
        keep_tau: stop below this share of the unpruned drafter's τ; 0 never does.
        speedup: stop once the estimated speedup reaches this; None never does.
        budget: of the tree whose acceptance counts; 0 is the chain.
        margin: of the distillation target, see ``distill``.
        confidence: standard errors at which a layer is out of the race.
        num_ranking: most held-out responses that layers are compared on.
        ranking_block: rows of the blocks that layers are compared on; 0: as many as the drafter's.
            Half as many take half the time; longer acceptances are cut, and a block of fewer masks
            may draft a little differently.
        num_validation: most held-out responses that τ is measured on.
        held_out_percent, max_len: see ``DataUse``.
        context_len: tokens of context at which latency is measured, at most.
        seed: of the random order.
    """

    recovery: TrainConfig | None
    order: str = "acceptance"
    per_round: int = 1
    min_depth: int = 1
    keep_tau: float = 0.0
    speedup: float | None = None
    budget: int = 0
    margin: float = 0.1
    confidence: float = 3.0
    num_ranking: int = 48
    ranking_block: int = 0
    num_validation: int = 96
    held_out_percent: float = 3.0
    max_len: int = 2048
    context_len: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {self.order!r}")
        if self.recovery is not None:
            self.recovery.schedule()
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= least):
                raise ValueError(f"{name} must be a whole number ≥ {least}, got {value}")
        percent, rows = self.held_out_percent, self.ranking_block
        for name, value, is_fine, wanted in (  # NaN is nowhere fine
            ("keep_tau", self.keep_tau, 0 <= self.keep_tau <= 1, "between 0 and 1"),
            ("margin", self.margin, 0 <= self.margin <= 1, "between 0 and 1"),
            ("confidence", self.confidence, self.confidence > 0, "positive"),
            ("speedup", self.speedup, self.speedup is None or self.speedup > 0, "positive"),
            ("held_out_percent", percent, 0 < percent < 100, "more than 0 and less than 100"),
            ("ranking_block", rows, rows != 1, "0 or at least 2, an anchor and a mask"),
            (
                "ranking_block",
                rows,
                rows == 0 or self.order == "acceptance",
                f"0 where layers do not draft to compete (order {self.order!r})",
            ),
        ):
            if not is_fine:
                raise ValueError(f"{name} must be {wanted}, got {value}")


def prune_drafter(
    drafter: str | os.PathLike[str],
    target: Target,
    rows: Sequence[ResponseRow],
    folder: str | os.PathLike[str],
    config: PruneConfig,
    *,
    on_stage: Callable[[Stage], None] | None = None,
    accelerator: Any = None,
) -> Table:
    """Remove layers, one or a few a round, until a target is met, or go on with ``folder``'s run.

    Args:
        drafter: folder of a trained independent drafter; the teacher of every recovery.
        target: gives borrowed tables, and at every depth the latencies of the speedup estimate.
        rows: its replies; the held-out part chooses layers and measures τ.
        folder: gets ``prune.json`` and ``depth-NN/draft`` for every depth.
        on_stage: called with every depth that is done.
        accelerator: an ``accelerate.Accelerator`` of one process, for mixed precision.

    Raises:
        ValueError: rows, drafter, target or settings do not fit each other or the folder's run.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    kept = [row for row in rows if len(row.token_ids) <= config.max_len]
    train, held = split_rows(kept, config.held_out_percent)
    if not train or not held:
        raise ValueError(
            f"pruning needs replies to recover on and held-out ones to measure on, got "
            f"{len(train)} and {len(held)}; generate more, or hold out more percent of them"
        )
    run = _Run(str(drafter), target, train, list(map(as_example, held)), path, config, accelerator)
    shown = 0
    while True:
        if on_stage is not None:
            for stage in run.table.stages[shown:]:
                on_stage(stage)
        shown = len(run.table.stages)
        if run.is_done():
            return run.table
        run.next_stage()


def _begin_round(where: Path, layers: Sequence[int]) -> None:
    """The folder of a round that removes some of ``layers``, continued if it is the same round.

    A depth may be reached from several others, if a run was told to stop at another one first.
    """
    marker = where / "round.json"
    begun = {"from": list(layers)}
    if where.is_dir() and not (marker.is_file() and read_kept(marker) == begun):
        shutil.rmtree(where)
    where.mkdir(exist_ok=True)
    write_kept(marker, begun)


class _Run:
    """One call of ``prune_drafter``."""

    def __init__(
        self,
        drafter: str,
        target: Target,
        train: Sequence[ResponseRow],
        held: Sequence[Example],
        folder: Path,
        config: PruneConfig,
        accelerator: Any,
    ) -> None:
        self._target, self._folder, self.config = target, folder, config
        self._train, self._held, self._accelerator = train, held, accelerator
        self.teacher = self._load(drafter)
        if config.min_depth > len(self.teacher.layers):
            raise ValueError(
                f"cannot prune to {config.min_depth} layers, {drafter} has only "
                f"{len(self.teacher.layers)}"
            )
        table = Table.load(folder, drafter)
        settings = run_settings(
            asdict(config), drafter, target, [*map(as_example, train), *held], accelerator
        )
        if table is None:
            table = Table(settings)
        else:
            require_continued(table.settings, settings, folder)
        self.table = table
        if not table.stages:
            self._add(self.teacher, (), None, drafter)

    def is_done(self) -> bool:
        first, last, config = self.table.stages[0], self.table.stages[-1], self.config
        return (
            last.depth <= config.min_depth
            or last.tau < config.keep_tau * first.tau
            or (config.speedup is not None and last.speedup >= config.speedup)
        )

    def next_stage(self) -> Stage:
        """Rank, remove, recover, measure."""
        last = self.table.stages[-1]
        pruned = self._load(last.folder)
        count = min(self.config.per_round, last.depth - self.config.min_depth)
        where = self._folder / f"depth-{last.depth - count:02d}"
        _begin_round(where, last.layers)
        removed: list[int] = []
        among: list[int] | None = None
        for place in range(count):
            ranking = self._ranking(where / f"ranking-{place}.json", pruned, among)
            gone = ranking[0].layer
            removed.append(pruned.config.layers[gone])
            pruned = pruned.without(gone)
            near = [one.layer for one in ranking[1 : _SHORTLIST * count]]
            among = [layer - (layer > gone) for layer in near]
        tau_without = self._tau(pruned)
        if self.config.recovery is None:
            save_independent(where / _DRAFT, pruned.config, pruned.state_dict())
        else:
            self._recover(pruned, where, self.config.recovery)
        return self._add(
            self._load(str(where / _DRAFT)), tuple(removed), tau_without, str(where / _DRAFT)
        )  # fmt: skip

    def _ranking(
        self, file: Path, network: IndependentNetwork, among: list[int] | None
    ) -> list[LayerScore]:
        """Layers, the one to remove first; kept, so that a continued run does not choose again."""
        if not file.is_file():
            config = self.config
            own = network.config.block_size
            with self._mixed():
                ranking = rank_layers(
                    network, config.order, self._held[: config.num_ranking], budget=config.budget,
                    confidence=config.confidence, seed=config.seed,
                    block_size=min(config.ranking_block or own, own), among=among,
                )  # fmt: skip
            write_kept(file, [asdict(one) for one in ranking])
        try:
            kept = [LayerScore(**one) for one in read_kept(file)]
            strange = [one.layer for one in kept if not 0 <= one.layer < len(network.layers)]
            if strange or not kept:
                raise IndexError(f"there are no layers {strange}")
            return kept
        except (IndexError, KeyError, TypeError) as error:
            raise damaged(file, repr(error)) from error

    def _recover(self, pruned: IndependentNetwork, where: Path, recovery: TrainConfig) -> None:
        pruned.requires_grad_(True).train()
        # other replies, and other parts of them, than the recovery before
        recovery = replace(recovery, seed=recovery.seed + len(pruned.layers))
        objective = DistillObjective(pruned, self.teacher, recovery.loss, self.config.margin)
        # nothing is evaluated by the trainer: what it saves is measured after
        source, mixed = TokenSource(self._train), self._accelerator
        Trainer(objective, source, list, where, recovery, accelerator=mixed).run()
        if mixed is not None:
            mixed.free_memory()  # it keeps what it prepared

    def _add(
        self,
        network: IndependentNetwork,
        removed: tuple[int, ...],
        tau_without: float | None,
        at: str,
    ) -> Stage:
        config, table = self.config, self.table
        tau = self._tau(network)
        # as decoding would run it
        served = load_independent(at, dtype=self._target.dtype, device=self._target.device)
        seconds = pass_seconds(
            served, self._target, config.budget or network.config.horizon,
            config.context_len, is_chain=config.budget == 0,
        )  # fmt: skip
        layers = network.config.layers
        stage = Stage(
            len(layers), layers, removed, tau_without, tau, seconds.draft_s, seconds.plain_s,
            seconds.verify_s, seconds.speedup(tau), at,
        )  # fmt: skip
        table.stages.append(stage)
        table.save(self._folder)
        return stage

    def _tau(self, network: IndependentNetwork) -> float:
        config = self.config
        held = [one for one in self._held[: config.num_validation] if one.num_anchors]
        if not held:
            raise ValueError("the held-out replies have no token to predict; generate longer ones")
        tables = markov_tables(network.eval())
        with self._mixed():
            cycles = sum(loop_cycles(network, one, config.budget, tables=tables) for one in held)
        return sum(one.num_anchors for one in held) / cycles

    def _mixed(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._accelerator is None else self._accelerator.autocast()

    def _load(self, folder: str) -> IndependentNetwork:
        network = load_independent(folder, device=self._target.device)
        check_fits(network.config, self._target)
        if network.config.borrows:
            tables = (self._target.input_embeddings(), self._target.output_embeddings())
            network.borrow(*(table.float() for table in tables))
        return network
