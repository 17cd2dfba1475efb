"""How far a drafter's probabilities come true."""

from __future__ import annotations

_SLOW, _FAST = 0.99, 0.9  # per cycle, forgetting
_START = 2.0  # nodes' worth of trust in the drafter's own probabilities
_MOST = 1.5
_SURPRISE = 6.0  # squared standard deviations that mean something has changed
_SPREAD = 2.0  # variance of accepted nodes by their mean: they come in runs


class Trust:
    """Running ratio of accepted to expected nodes; starts over when the last cycles contradict."""

    def __init__(self) -> None:
        self._slow = self._fast = (0.0, 0.0)  # accepted, expected

    @property
    def ratio(self) -> float:
        accepted, expected = self._slow
        return min((accepted + _START) / (expected + _START), _MOST)

    def observe(self, accepted: float, expected: float) -> None:
        """One cycle's accepted nodes, and those the drafter's probabilities promised."""
        self._slow = _SLOW * self._slow[0] + accepted, _SLOW * self._slow[1] + expected
        self._fast = _FAST * self._fast[0] + accepted, _FAST * self._fast[1] + expected
        predicted = self.ratio * self._fast[1]
        if (self._fast[0] - predicted) ** 2 > _SURPRISE * _SPREAD * (predicted + 1.0):
            self._slow = self._fast
