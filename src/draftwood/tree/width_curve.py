"""Seconds of a target pass by its width: a measured start, corrected bin by bin."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from draftwood.tree.calibration import Calibration
from draftwood.tree.tree import FloatArray, IntArray

_FINE = 32  # every width up to here has its own bin: kernels change at 9, 17, 33
_GROWTH = 1.125
_WIDEST = 65536
_FORGET = 0.995  # per cycle: what has not been seen for long may be tried again
_MOST_WEIGHT = 20.0  # cycles a bin remembers
_SEEN = 0.05  # weight below which a bin has said nothing
_LOOSENED = 0.2
_SHRINK = 0.3  # cycles' worth of trust in the neighbouring bins


class WidthCurve:
    """A piecewise linear curve; log corrections at its knots, learned one observed width at a time.

    A knot without observations of its own is corrected like its observed neighbours. No shape is
    assumed, so that staircases survive.
    """

    def __init__(self, start: Calibration) -> None:
        self._knots = _knots()
        self._knot_list: list[int] = self._knots.tolist()
        self._positions = np.log(self._knots)
        self._start_s = _extended(start, self._knots)
        self._offset = np.zeros(len(self._knots))  # what each bin says itself
        self._weight = np.zeros(len(self._knots))
        self._correction = np.zeros(len(self._knots))  # what is believed
        self._seconds = self._start_s.copy()

    def seconds(self, widths: np.ndarray) -> FloatArray:
        """[len(widths)] seconds at those widths."""
        return np.interp(widths, self._knots, self._seconds)

    def seconds_at(self, width: int) -> float:
        """Seconds at one width, at the price of one look-up."""
        left, right, share = self._between(width)
        return float(self._seconds[left] * (1.0 - share) + self._seconds[right] * share)

    def observe(self, width: int, ratio: float) -> None:
        """Move the curve at ``width`` towards exp(ratio) times its present value."""
        self._weight *= _FORGET
        left, right, share = self._between(width)
        for knot, part in ((left, 1.0 - share), (right, share)):
            if part > 0.0:
                kept, believed = float(self._weight[knot]), float(self._correction[knot])
                # A bin that has said little yet starts from what its neighbours said.
                old = float(self._offset[knot]) if kept > _SEEN else believed
                self._offset[knot] = old + (believed + ratio - old) * part / (kept + part)
                self._weight[knot] = min(kept + part, _MOST_WEIGHT)
        self._correction = self._smoothed()
        self._seconds = self._start_s * np.exp(self._correction)

    def loosen(self) -> None:
        """Trust less in what was learned: the machine has changed."""
        self._weight *= _LOOSENED

    def _between(self, width: int) -> tuple[int, int, float]:
        """Knots around ``width`` and the share of the right one."""
        right = min(bisect_left(self._knot_list, width), len(self._knot_list) - 1)
        end = self._knot_list[right]
        if end <= width or right == 0:
            return right, right, 0.0
        start = self._knot_list[right - 1]
        return right - 1, right, (width - start) / (end - start)

    def _smoothed(self) -> FloatArray:
        """Log corrections of all knots."""
        seen = np.flatnonzero(self._weight > _SEEN)
        own, weight, at = self._offset[seen], self._weight[seen], self._positions[seen]
        if len(seen) > 2:  # the ends have nothing to lean on
            middle = (weight[1:-1] * own[1:-1] + _SHRINK * _between(own, at)) / (
                weight[1:-1] + _SHRINK
            )
            own = np.concatenate([own[:1], middle, own[-1:]])
        return np.interp(self._positions, at, own)


def _between(values: FloatArray, at: FloatArray) -> FloatArray:
    """Each inner entry as its two neighbours would have it."""
    share = (at[1:-1] - at[:-2]) / (at[2:] - at[:-2])
    return values[:-2] * (1.0 - share) + values[2:] * share


def _knots() -> IntArray:
    knots = list(range(1, _FINE + 1))
    while knots[-1] < _WIDEST:
        knots.append(round(knots[-1] * _GROWTH))
    return np.array(knots, dtype=np.int64)


def _extended(start: Calibration, knots: IntArray) -> FloatArray:
    """The measured curve at the knots; beyond it, with the mean slope of its upper half."""
    widths, seconds = np.array(start.widths, dtype=np.float64), np.array(start.seconds)
    curve = np.interp(knots, widths, seconds)
    if len(widths) == 1:
        return curve
    half = min(int(np.searchsorted(widths, widths[-1] / 2)), len(widths) - 2)
    slope = max((seconds[-1] - seconds[half]) / (widths[-1] - widths[half]), 0.0)
    return curve + np.maximum(knots - widths[-1], 0.0) * slope
