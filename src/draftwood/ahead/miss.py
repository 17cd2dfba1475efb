"""How deep to draft when the target waits for it: the whole block, or half of it."""

from __future__ import annotations

import statistics
from collections import deque

_LEAST = 3  # drafts of each depth before they are compared
_WINDOW = 33
_LOOK_AGAIN = 50  # drafts


class MissDepth:
    """Compares tokens per second of cycles after whole and after half drafts.

    What half a block would have given is known from whole ones: no more than its depth.
    """

    def __init__(self) -> None:
        self._seconds: dict[bool, deque[float]] = {
            whole: deque(maxlen=_WINDOW) for whole in (True, False)
        }
        self._tokens: deque[int] = deque(maxlen=_WINDOW)
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

    def observe_tokens(self, num_tokens: int) -> None:
        """Tokens of the cycle after a whole draft."""
        self._tokens.append(num_tokens)

    def _takes_whole(self, half: int, rest_s: float) -> bool:
        whole_s, half_s = self._seconds[True], self._seconds[False]
        if len(whole_s) < _LEAST or not self._tokens or self._since_whole >= _LOOK_AGAIN:
            return True
        if len(half_s) < _LEAST:
            return False
        short = statistics.fmean(min(tokens, half + 1) for tokens in self._tokens)
        whole = statistics.fmean(self._tokens)
        return whole * (rest_s + statistics.median(half_s)) >= short * (
            rest_s + statistics.median(whole_s)
        )
