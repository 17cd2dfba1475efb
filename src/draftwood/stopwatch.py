"""Where the seconds of a cycle go."""

from __future__ import annotations

import time

from draftwood.records import StageSeconds


class Stopwatch:
    """Lap times of one cycle, in seconds."""

    def __init__(self) -> None:
        self._begin = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self._laps[stage] = now - self._last
        self._last = now

    def seconds(self) -> StageSeconds:
        """Laps so far; what no lap covers is ``other_s``."""
        total = time.perf_counter() - self._begin
        return StageSeconds(**self._laps, other_s=max(0.0, total - sum(self._laps.values())))
