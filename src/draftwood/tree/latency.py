"""Predicted seconds of a cycle's parts, learned from observed ones."""

from __future__ import annotations

import math
import statistics
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
        """[len(widths)] seconds of one target pass, and of a head that runs on all its rows."""
        ...

    def draft_s(self, context_len: float, num_seqs: int) -> float:
        """Seconds of one drafter pass incl. enumeration."""
        ...

    def other_s(self) -> float:
        """Seconds of a cycle outside the two models."""
        ...

    def walk_s(self, num_tokens: int) -> float:
        """Seconds of drawing that many tokens where the head runs once for each of them.

        The same per token under every budget, so no policy needs to look at it.
        """
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
        walk_s: float = 0.0,
        num_tokens: int = 1,
    ) -> None:
        """Take in one cycle.

        Args:
            width: rows of the target pass.
            context_len: mean context of its sequences.
            num_seqs: their number.
            verify_s: seconds of the pass.
            draft_s: seconds of drafting, None when nothing was drafted.
            other_s: seconds of the rest.
            walk_s: seconds of drawing tokens, if not part of ``verify_s``.
            num_tokens: tokens drawn.
        """
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
_LEVEL_WINDOW = 9  # cycles
_LEAST_S = 1e-9


class _Pass(NamedTuple):
    width: int
    context_len: float
    verify_s: float


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
        self._walk = _Levels(0.0)
        self._recent: deque[_Pass] = deque(maxlen=_WINDOW)
        self._speed = 0.0  # log of observed by expected seconds
        self._regime = 0.0  # the speed when the parts were last trusted fully
        self._last_bucket = 1
        self._num_guessed = 0 if calibration is not None else _FIRST_CYCLES

    def verify_s(self, widths: np.ndarray, context_len: float, num_seqs: int) -> FloatArray:
        scale = math.exp(self._speed) * self._slope.factor(context_len)
        return self._curve.seconds(widths) * scale

    def draft_s(self, context_len: float, num_seqs: int) -> float:
        return self._draft.seconds(_bucket(num_seqs)) * math.exp(self._speed)

    def other_s(self) -> float:
        return self._other.seconds(self._last_bucket) * math.exp(self._speed)

    def walk_s(self, num_tokens: int) -> float:
        return num_tokens * self._walk.seconds(self._last_bucket) * math.exp(self._speed)

    def observe(
        self,
        *,
        width: int,
        context_len: float,
        num_seqs: int,
        verify_s: float,
        draft_s: float | None,
        other_s: float,
        walk_s: float = 0.0,
        num_tokens: int = 1,
    ) -> None:
        times = (verify_s, other_s, walk_s, 0.0 if draft_s is None else draft_s)
        assert all(math.isfinite(value) and value >= 0 for value in times), times
        self._follow(_Pass(width, context_len, max(verify_s, _LEAST_S)))
        relative = math.exp(self._speed) * self._slope.factor(context_len)
        limit = _LARGEST_FIRST_STEP if self._num_guessed > 0 else _LARGEST_STEP
        ratio = math.log(max(verify_s, _LEAST_S) / (self._curve.seconds_at(width) * relative))
        ratio = min(max(ratio, -limit), limit)
        self._slope.observe(context_len, relative * math.exp(ratio))
        self._curve.observe(width, ratio)
        bucket = self._last_bucket = _bucket(num_seqs)
        self._other.observe(bucket, other_s, self._speed)
        self._walk.observe(bucket, walk_s / max(num_tokens, 1), self._speed)
        if draft_s is not None:
            self._draft.observe(bucket, draft_s, self._speed)

    def _follow(self, newest: _Pass) -> None:
        """The present speed: median log ratio of observed to expected target passes."""
        self._recent.append(newest)
        self._num_guessed -= 1
        if self._num_guessed > 0 and len(self._recent) > 1:
            return  # the curve is a guess: what differs from the first cycle is its fault
        self._speed = statistics.median(
            math.log(one.verify_s / self._curve.seconds_at(one.width))
            - math.log(self._slope.factor(one.context_len))
            for one in self._recent
        )
        if abs(self._speed - self._regime) > _NEW_REGIME:
            self._regime = self._speed
            self._curve.loosen()
            self._slope.restart()


class _Levels:
    """Typical seconds at speed 0 by batch size (powers of two): medians of the last ones."""

    def __init__(self, seconds: float) -> None:
        self._start = seconds
        self._recent: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}

    def seconds(self, bucket: int) -> float:
        nearest = min(self._medians, key=lambda known: abs(known - bucket), default=None)
        return self._start if nearest is None else self._medians[nearest]

    def observe(self, bucket: int, seconds: float, speed: float) -> None:
        recent = self._recent.setdefault(bucket, deque(maxlen=_LEVEL_WINDOW))
        recent.append(seconds * math.exp(-speed))
        self._medians[bucket] = statistics.median(recent)


def _bucket(num_seqs: int) -> int:
    return max(num_seqs, 1).bit_length()
