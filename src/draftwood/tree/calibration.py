"""A short measurement of the target pass at load, and its cache on disk."""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Both sides of the powers of two: kernels change tile sizes there, and the curve jumps.
CALIBRATION_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 192, 256)


@dataclass(frozen=True)
class Calibration:
    """Seconds of one target pass by width, for one sequence.

    Attributes:
        widths: rows of the pass, increasing from ≥ 1.
        seconds: of a pass with that many rows.
        context_len: tokens in the KV cache while measuring.
        draft_s: seconds of one drafter pass, if measured.
        noise: how much rounds differed: (longest − shortest) / shortest, median over the widths
            measured more than once; 0 if none was.

    Raises:
        ValueError: no widths, unequal lengths, widths not increasing, seconds not positive.
    """

    widths: tuple[int, ...]
    seconds: tuple[float, ...]
    context_len: int = 0
    draft_s: float | None = None
    noise: float = 0.0

    def __post_init__(self) -> None:
        if not self.widths or len(self.widths) != len(self.seconds):
            raise ValueError(
                f"a calibration needs as many seconds as widths and at least one, got "
                f"{len(self.seconds)} for {len(self.widths)}"
            )
        if self.widths[0] < 1 or any(
            a >= b for a, b in zip(self.widths, self.widths[1:], strict=False)
        ):
            raise ValueError(f"widths must increase from ≥ 1, got {self.widths}")
        times = [*self.seconds, *([] if self.draft_s is None else [self.draft_s])]
        if not all(math.isfinite(value) and value > 0 for value in times):
            raise ValueError(f"measured seconds must be finite and > 0, got {times}")
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise ValueError(f"noise must be finite and ≥ 0, got {self.noise}")


def calibrate(
    measure: Callable[[int], float],
    widths: Sequence[int] = CALIBRATION_WIDTHS,
    *,
    context_len: int = 0,
    repeats: int = 3,
    limit_s: float = 5.0,
) -> Calibration:
    """Median seconds per width.

    All widths are measured once per round, so that a disturbance spoils one round and not one
    width. Widths that half of ``limit_s`` leaves no time for in the first round are left out, so
    that there is a second round to compare with.

    Args:
        measure: runs one target pass of that many rows and returns its seconds.
        widths: rows to measure, increasing.
        context_len: recorded in the result.
        repeats: rounds, after one unrecorded pass of the narrowest width that warms up.
        limit_s: seconds for all of it, roughly.
    """
    samples: dict[int, list[float]] = {}
    start = time.perf_counter()
    measure(widths[0])
    for number in range(repeats):
        deadline = start + (limit_s if number else limit_s / 2)
        for width in sorted(samples) if number else widths:
            if samples and time.perf_counter() > deadline:
                break
            samples.setdefault(width, []).append(measure(width))
    measured = sorted(samples)
    spreads = [max(laps) / min(laps) - 1.0 for laps in samples.values() if len(laps) > 1]
    return Calibration(
        tuple(measured),
        tuple(statistics.median(samples[width]) for width in measured),
        context_len,
        noise=statistics.median(spreads) if spreads else 0.0,
    )


def save_calibration(path: Path, key: Mapping[str, str], calibration: Calibration) -> None:
    """Write atomically; ``key`` says what it holds for (device, dtype, model, versions …)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"key": dict(key), **asdict(calibration)}, file)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def load_calibration(path: Path, key: Mapping[str, str]) -> Calibration | None:
    """The cached calibration, None if missing, unreadable, invalid or of another key."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["key"] != dict(key):
            return None
        return Calibration(
            tuple(int(width) for width in record["widths"]),
            tuple(float(value) for value in record["seconds"]),
            int(record["context_len"]),
            None if record["draft_s"] is None else float(record["draft_s"]),
            float(record["noise"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
