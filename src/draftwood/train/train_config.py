"""How a drafter is trained."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftwood.train.loss import LossConfig
from draftwood.train.schedule import Schedule


@dataclass(frozen=True)
class TrainConfig:
    """A run.

    Attributes:
        learning_rate, warmup_steps, max_steps, max_minutes: see ``Schedule``.
        weight_decay, betas, clip: AdamW and gradient norm limit.
        blocks: blocks of one micro-batch (of one process).
        blocks_per_response: most anchors drawn from one response at a time.
        accumulate: micro-batches per step.
        short_block, short_share: train with this smaller block during the first share of the
            run; near positions are learned first and cheaper. 0 turns it off.
        head_negatives: train through a sample of the head, everything the batch asks for plus
            this many others; 0 uses all of it. A DFlash drafter needs a head of its own for it.
        train_head: whether the drafter's own head and embeddings are trained or stay as they
            started.
        ema_decay: keep an exponential moving average of the weights for evaluation and saving.
        eval_minutes, save_minutes: how often (training time); both also happen at the end.
        log_steps: steps per log record.
        seed: of data order, anchors and head samples.
        loss: the objective.
    """

    learning_rate: float = 1e-3
    warmup_steps: int = 30
    max_steps: int | None = None
    max_minutes: float | None = None
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0
    blocks: int = 256
    blocks_per_response: int = 64
    accumulate: int = 1
    short_block: int = 0
    short_share: float = 0.0
    head_negatives: int = 0
    train_head: bool = True
    ema_decay: float = 0.0
    eval_minutes: float = 10.0
    save_minutes: float = 5.0
    log_steps: int = 10
    seed: int = 0
    loss: LossConfig = field(default_factory=LossConfig)

    def schedule(self) -> Schedule:
        return Schedule(self.learning_rate, self.warmup_steps, self.max_steps, self.max_minutes)
