"""How deep to draft when the target waits for it: the whole block, or half of it."""

from __future__ import annotations

import statistics
from collections import deque

_LEAST = 3  # drafts of each depth before they are compared
_ENOUGH = 12  # cycles after half drafts that say more than a bound does
_WINDOW = 33
_LOOK_AGAIN = 50  # drafts


class MissDepth:
    """Compares tokens per second of cycles after whole and after half drafts.

    What half a block would have given is bounded by whole ones, cut at its depth, and seen in the
    cycles after half ones, once there are enough.
    """

    def __init__(self) -> None:
        self._seconds: dict[bool, deque[float]] = {
            whole: deque(maxlen=_WINDOW) for whole in (True, False)
        }
        self._tokens: dict[bool, deque[int]] = {
            whole: deque(maxlen=_WINDOW) for whole in (True, False)
        }
        self._since_whole = 0

    def depth(self, horizon: int, rest_s: float) -> int:
        """Deepest node to draft now.

        Args:
            horizon: of the drafter.
            rest_s: seconds of a cycle without its draft.
        """
        half = max(horizon // 2, 1)
        return horizon if self._takes_whole(half, rest_s) else half

    def observe(self, whole: bool, seconds: float) -> None:
        """One draft that the target waited for."""
        self._seconds[whole].append(seconds)
        self._since_whole = 0 if whole else self._since_whole + 1

    def observe_tokens(self, whole: bool, num_tokens: int) -> None:
        """Tokens of the cycle after such a draft."""
        self._tokens[whole].append(num_tokens)

    def _takes_whole(self, half: int, rest_s: float) -> bool:
        whole_s, half_s = self._seconds[True], self._seconds[False]
        after_whole, after_half = self._tokens[True], self._tokens[False]
        if len(whole_s) < _LEAST or not after_whole or self._since_whole >= _LOOK_AGAIN:
            return True
        if len(half_s) < _LEAST:
            return False
        short = statistics.fmean(min(tokens, half + 1) for tokens in after_whole)
        if len(after_half) >= _ENOUGH:
            short = min(short, statistics.fmean(after_half))
        whole = statistics.fmean(after_whole)
        return whole * (rest_s + statistics.median(half_s)) >= short * (
            rest_s + statistics.median(whole_s)
        )
