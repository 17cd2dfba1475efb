"""How the target pass slows down with the length of the context."""

from __future__ import annotations

_FORGET = 0.99  # per cycle
_STEEPEST = 1e-3  # relative seconds per context token; steeper is a disturbance
_TRUST_START = 20 * 200.0**2  # of a slope of before, in cycles × tokens²


class ContextSlope:
    """Relative seconds per context token, by regression with forgetting.

    Contexts grow slowly, together with everything else that drifts, hence the strong pull to the
    slope found before and the new start whenever the machine's speed jumps.

    Args:
        context_len: the context at which factor is 1.
    """

    def __init__(self, context_len: float) -> None:
        self._origin = context_len
        self._slope = self._start = 0.0
        self._sums = [0.0] * 5

    def factor(self, context_len: float) -> float:
        """Seconds at this context by seconds at the original one."""
        return max(1.0 + self._slope * (context_len - self._origin), 0.1)

    def restart(self) -> None:
        """The machine's speed changed: older cycles no longer compare."""
        self._sums = [0.0] * 5
        self._start = self._slope

    def observe(self, context_len: float, ratio: float) -> None:
        """One cycle took ``ratio`` times the seconds of its width at the original context."""
        x = context_len - self._origin
        new = (1.0, x, ratio, x * x, x * ratio)
        self._sums = [_FORGET * old + value for old, value in zip(self._sums, new, strict=True)]
        count, sum_x, sum_y, sum_xx, sum_xy = self._sums
        mean_x, mean_y = sum_x / count, sum_y / count
        spread = sum_xx - count * mean_x * mean_x
        joint = sum_xy - count * mean_x * mean_y
        # Relative to the level at the origin: y = level · (1 + slope · x).
        pull = _TRUST_START * self._start * mean_y / max(1.0 + self._start * mean_x, 0.1)
        rise = (joint + pull) / (spread + _TRUST_START)
        level = max(mean_y - rise * mean_x, 0.1 * mean_y)
        self._slope = min(max(rise / level, 0.0), _STEEPEST)
