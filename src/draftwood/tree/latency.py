"""Predicted seconds of a cycle's parts, learned from observed ones."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple, Protocol

import numpy as np

from draftwood.tree.calibration import Calibration
from draftwood.tree.context_slope import ContextSlope
from draftwood.tree.tree import FloatArray
from draftwood.tree.width_curve import WidthCurve


class LatencyModel(Protocol):
    """Seconds of the parts of a cycle.

    ``width`` is the number of rows of the packed target forward: Σ (budget + 1) over sequences.
    """

    def verify_s(self, widths: np.ndarray, context_len: float, num_seqs: int) -> FloatArray:
        """[len(widths)] seconds of one target pass incl. head and walk."""
        ...

    def draft_s(self, context_len: float, num_seqs: int) -> float:
        """Seconds of one drafter pass incl. enumeration."""
        ...

    def other_s(self) -> float:
        """Seconds of a cycle outside the two models."""
        ...

    def observe(
        self,
        *,
        width: int,
        context_len: float,
        num_seqs: int,
        verify_s: float,
        draft_s: float | None,
        other_s: float,
    ) -> None:
        """Take in one cycle; ``draft_s`` is None when nothing was drafted."""
        ...


# Before any data: a target pass of this long, rows nearly free. Only ratios matter to a policy,
# and the first cycle sets the level. Optimistic, so that wide passes are tried.
_GUESS = Calibration((1, 65), (0.03, 0.045))
_GUESS_DRAFT = 0.15  # of a one-row target pass
_GUESS_OTHER = 0.03
_WINDOW = 7  # cycles whose median is the present speed: a jump counts after four of them
_NEW_REGIME = 0.2  # change of log speed that casts doubt on everything learned
_LARGEST_STEP = 0.4  # |log ratio| one cycle is believed; a stall of seconds counts no more
_FIRST_CYCLES = 12  # without a calibration, these are believed
_LARGEST_FIRST_STEP = 1.6


class _Cycle(NamedTuple):
    width: int
    context_len: float
    bucket: int
    drafted: bool
    total_s: float


class OnlineLatency:
    """Seconds = present speed × (width curve × (1 + slope · context) | draft level | other level).

    The parts hold what is characteristic of the machine and models, and change slowly. The speed
    is the median over the last cycles of observed by expected seconds: it follows another process,
    thermal limits or a different batch within four cycles, for all widths at once, and is blind to
    single stalls. Nothing is assumed about the shape of the width curve.

    Args:
        calibration: measured width curve to start from; a rough guess without.
    """

    def __init__(self, calibration: Calibration | None = None) -> None:
        start = calibration if calibration is not None else _GUESS
        one_row_s = start.seconds[0]
        self._curve = WidthCurve(start)
        self._slope = ContextSlope(start.context_len)
        self._draft = _Levels(start.draft_s or _GUESS_DRAFT * one_row_s)
        self._other = _Levels(_GUESS_OTHER * one_row_s)
        self._recent: deque[_Cycle] = deque(maxlen=_WINDOW)
        self._speed = 0.0  # log of observed by expected seconds
        self._regime = 0.0  # the speed when the parts were last trusted fully
        self._last_bucket = 1
        self._num_to_believe = 0 if calibration is not None else _FIRST_CYCLES

    def verify_s(self, widths: np.ndarray, context_len: float, num_seqs: int) -> FloatArray:
        scale = math.exp(self._speed) * self._slope.factor(context_len)
        return self._curve.seconds(widths) * scale

    def draft_s(self, context_len: float, num_seqs: int) -> float:
        return self._draft.seconds(_bucket(num_seqs)) * math.exp(self._speed)

    def other_s(self) -> float:
        return self._other.seconds(self._last_bucket) * math.exp(self._speed)

    def observe(
        self,
        *,
        width: int,
        context_len: float,
        num_seqs: int,
        verify_s: float,
        draft_s: float | None,
        other_s: float,
    ) -> None:
        times = (verify_s, other_s, 0.0 if draft_s is None else draft_s)
        assert all(math.isfinite(value) and value >= 0 for value in times), times
        bucket = self._last_bucket = _bucket(num_seqs)
        cycle = _Cycle(width, context_len, bucket, draft_s is not None, sum(times))
        self._recent.append(cycle)
        self._speed = self._present_speed()
        if abs(self._speed - self._regime) > _NEW_REGIME:
            self._regime = self._speed
            self._curve.loosen()
            self._slope.restart()
        relative = math.exp(self._speed) * self._slope.factor(context_len)
        limit = _LARGEST_FIRST_STEP if self._num_to_believe > 0 else _LARGEST_STEP
        self._num_to_believe -= 1
        ratio = _believed(limit, verify_s, self._curve.seconds_at(width) * relative)
        self._slope.observe(context_len, relative * math.exp(ratio))
        self._curve.observe(width, ratio)
        self._other.observe(bucket, _believed(limit, other_s, self.other_s()))
        if draft_s is not None:
            expected = self.draft_s(context_len, num_seqs)
            self._draft.observe(bucket, _believed(limit, draft_s, expected))

    def _present_speed(self) -> float:
        """Median log ratio of observed to expected whole cycles."""
        ratios = sorted(
            math.log(
                max(cycle.total_s, 1e-9)
                / (
                    self._curve.seconds_at(cycle.width) * self._slope.factor(cycle.context_len)
                    + self._other.seconds(cycle.bucket)
                    + (self._draft.seconds(cycle.bucket) if cycle.drafted else 0.0)
                )
            )
            for cycle in self._recent
        )
        half = len(ratios) // 2
        return ratios[half] if len(ratios) % 2 else (ratios[half - 1] + ratios[half]) / 2


class _Levels:
    """Typical seconds by batch size (powers of two), as log levels moved by believed ratios."""

    def __init__(self, seconds: float) -> None:
        self._levels: dict[int, tuple[float, float]] = {}  # bucket → (log seconds, weight)
        self._start = math.log(seconds)

    def seconds(self, bucket: int) -> float:
        return math.exp(self._level(bucket)[0])

    def observe(self, bucket: int, ratio: float) -> None:
        level, weight = self._level(bucket)
        weight = min(weight + 1.0, 10.0)
        self._levels[bucket] = level + ratio / weight, weight

    def _level(self, bucket: int) -> tuple[float, float]:
        if bucket in self._levels:
            return self._levels[bucket]
        nearest = min(self._levels, key=lambda known: abs(known - bucket), default=None)
        return (self._start if nearest is None else self._levels[nearest][0]), 0.0


def _bucket(num_seqs: int) -> int:
    return max(num_seqs, 1).bit_length()


def _believed(limit: float, seconds: float, expected: float) -> float:
    """log(seconds / expected), at most ``limit`` up or down."""
    return min(max(math.log(max(seconds, 1e-9) / expected), -limit), limit)
