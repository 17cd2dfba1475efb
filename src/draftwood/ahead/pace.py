"""Seconds and worths that drafting ahead is planned by, learned from every cycle."""

from __future__ import annotations

import statistics
from collections import deque

import numpy as np

from draftwood.draft.base import AheadSource
from draftwood.tree.trust import Trust

_WINDOW = 15  # cycles a median looks back
_FORGET = 0.97  # per cycle
_FIRST_BRANCHES = 4
_FILL = 0.9  # of the verification window may be planned for
_TRIES = 6  # soft hits and fresh drafts that are tried before they are compared


class Pace:
    """What the parts of an asynchronous cycle take, and what comes of them.

    Args:
        max_branches: most branches per pass.
    """

    def __init__(self, max_branches: int = 32) -> None:
        self.max_branches = max_branches
        self.hit_trust = Trust()
        self._sums = np.zeros(5)  # weight, x, xx, y, xy of (branches, seconds)
        self._most_seen = _FIRST_BRANCHES // 2
        self._draft: deque[float] = deque(maxlen=_WINDOW)
        self._window: deque[float] = deque(maxlen=_WINDOW)
        self._tokens: dict[AheadSource, deque[int]] = {}

    # ---- what was seen ----------------------------------------------------------------------

    def observe_ahead(self, num_branches: int, seconds: float) -> None:
        """One pass over branches."""
        x, y = float(num_branches), seconds
        self._sums = _FORGET * self._sums + np.array([1.0, x, x * x, y, x * y])
        self._most_seen = max(self._most_seen, num_branches)

    def observe_rest(self) -> None:
        """A cycle without branches: what is known of their seconds grows old."""
        self._sums = _FORGET * self._sums

    def observe_draft(self, seconds: float) -> None:
        """One draft that the target had to wait for."""
        self._draft.append(seconds)

    def observe_window(self, seconds: float) -> None:
        """Time from the start of the branches to the end of the cycle: what they may take."""
        self._window.append(seconds)

    def observe_tokens(self, source: AheadSource, num_tokens: int) -> None:
        """Tokens of a cycle whose draft came from ``source``."""
        self._tokens.setdefault(source, deque(maxlen=4 * _WINDOW)).append(num_tokens)

    # ---- what follows from it ---------------------------------------------------------------

    def ahead_s(self, num_branches: int) -> float:
        """Seconds of a pass over that many branches; 0 before any was seen."""
        weight, x, xx, y, xy = self._sums.tolist()
        if weight == 0.0:
            return 0.0
        spread = xx - x * x / weight
        slope = max((xy - x * y / weight) / spread, 0.0) if spread > 1e-6 else 0.0
        if slope == 0.0:  # one size only: half of it is taken to be fixed
            slope = 0.5 * y / max(x, 1.0)
        return max(y / weight + slope * (num_branches - x / weight), 0.0)

    @property
    def draft_s(self) -> float:
        """Seconds of a draft that the target waits for; 0 before any."""
        return statistics.median(self._draft) if self._draft else 0.0

    @property
    def window_s(self) -> float | None:
        """Seconds the target leaves for the branches; None before any cycle."""
        return statistics.median(self._window) if self._window else None

    def num_branches(self, window_s: float | None = None) -> int:
        """Most branches whose pass fits the window, 0 if none; grows at most twofold at a time.

        Args:
            window_s: seconds; the usual ones if not given.
        """
        window = self.window_s if window_s is None else window_s
        most = min(2 * self._most_seen, self.max_branches)
        if window is None or self._sums[0] == 0.0:
            return min(_FIRST_BRANCHES, most)
        return max((m for m in range(1, most + 1) if self.ahead_s(m) <= _FILL * window), default=0)

    def takes_soft(self, rest_s: float) -> bool:
        """Whether a branch that did not know the bonus beats drafting now, in tokens per second.

        Args:
            rest_s: seconds of a cycle without its draft.
        """
        soft, fresh = self._tokens.get("soft", ()), self._tokens.get("miss", ())
        if len(soft) < _TRIES or len(fresh) < _TRIES:
            return len(soft) <= len(fresh)
        gain = statistics.fmean(soft) * (rest_s + self.draft_s)
        return gain >= statistics.fmean(fresh) * rest_s
