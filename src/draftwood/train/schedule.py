"""Learning rate over a run whose length is given in steps, in minutes, or both."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Linear warmup, then a cosine down to ``final_share`` of the peak.

    Attributes:
        learning_rate: peak.
        warmup_steps: steps of the linear rise.
        max_steps: length in steps, or None.
        max_minutes: length in minutes of training time (over all resumed parts), or None. The
            schedule follows whichever limit is nearer, so it ends at its end in either case.
        final_share: last learning rate as a share of the peak.
    """

    learning_rate: float
    warmup_steps: int
    max_steps: int | None
    max_minutes: float | None
    final_share: float = 0.02

    def __post_init__(self) -> None:
        if self.max_steps is None and self.max_minutes is None:
            raise ValueError("a run needs an end: give max_steps or max_minutes")
        for name in ("max_steps", "max_minutes", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, got {value}")

    def progress(self, step: int, elapsed_s: float) -> float:
        """Share of the run that is done, 0 … 1."""
        shares = [0.0]
        if self.max_steps is not None:
            shares.append(step / self.max_steps)
        if self.max_minutes is not None:
            shares.append(elapsed_s / (60 * self.max_minutes))
        return min(max(shares), 1.0)

    def rate(self, step: int, elapsed_s: float) -> float:
        """Learning rate of the step with 0-based index ``step``."""
        warm = min((step + 1) / max(self.warmup_steps, 1), 1.0)
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress(step, elapsed_s)))
        return self.learning_rate * warm * (self.final_share + (1 - self.final_share) * cosine)
