"""The micro-batches of a run, in an order that a continued run repeats."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from draftwood.train.anchors import BlockBatch, Example, choose_anchors
from draftwood.train.objective import HeadSample, Objective
from draftwood.train.order import PlannedBatch, plan_epoch
from draftwood.train.state import Progress
from draftwood.train.train_config import TrainConfig


class ExampleSource(Protocol):
    """Training responses by index; may grow between epochs (``refresh``)."""

    def refresh(self) -> None: ...
    def __len__(self) -> int: ...
    def num_anchors(self, index: int) -> int: ...
    def name(self, index: int) -> str: ...
    def example(self, index: int) -> Example: ...


class Batches:
    """Draws what one process of a run trains on.

    Args:
        source: training responses.
        task: draws blocks and the sample of the head.
        config: of the run.
        rank, world: this process, and how many there are.
        device: of the batches.
    """

    def __init__(
        self,
        source: ExampleSource,
        task: Objective,
        config: TrainConfig,
        *,
        rank: int,
        world: int,
        device: torch.device,
    ) -> None:
        self.source = source
        self._task, self._config, self._device = task, config, device
        self._rank, self._world = rank, world
        self._plan: list[PlannedBatch] = []

    def draw(
        self, progress: Progress, block_size: int
    ) -> tuple[BlockBatch, HeadSample | None, str]:
        """This process's next micro-batch, and the names of its responses.

        Advances the cursor in ``progress``, by the same in all processes.

        Raises:
            ValueError: there is nothing to train on.
        """
        if not self._plan:
            self._replan(progress, fresh=progress.cursor == 0)
        if progress.cursor >= len(self._plan):
            progress.epoch += 1
            progress.cursor = 0
            self._replan(progress, fresh=True)
        index = progress.cursor + self._rank
        planned = self._plan[index % len(self._plan)]
        progress.cursor += self._world
        rng = np.random.default_rng([self._config.seed, progress.epoch, index, 1])
        examples = [self.source.example(i) for i in planned.responses]
        anchors = [
            choose_anchors(rng, e.response_start, len(e.token_ids), planned.num_anchors)
            for e in examples
        ]
        batch, head = self._task.draw(
            examples, anchors, block_size=block_size, num_negatives=self._config.head_negatives,
            rng=rng, device=self._device,
        )  # fmt: skip
        return batch, head, ", ".join(self.source.name(i) for i in planned.responses)

    def _replan(self, progress: Progress, fresh: bool) -> None:
        """Plan the current epoch; a fresh one takes in responses that appeared meanwhile."""
        if fresh:
            self.source.refresh()
            progress.num_records = len(self.source)
        self._plan = plan_epoch(
            [self.source.num_anchors(i) for i in range(progress.num_records)],
            blocks=self._config.blocks,
            blocks_per_response=self._config.blocks_per_response,
            seed=self._config.seed,
            epoch=progress.epoch,
        )
        if not self._plan:
            raise ValueError("no training response has two tokens; generate responses first")
