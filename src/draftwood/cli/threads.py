"""How many CPU threads to compute with, found by trying."""

from __future__ import annotations

import os
import time


def choose_threads() -> int:
    """Set torch's threads to the fastest count for a decode-sized product and return it.

    Counts of logical processors mislead (hyper-threads, container quotas, busy neighbours: two
    OpenMP threads on a shared pair of cores can be ten times slower than one), so a few are timed.
    ``OMP_NUM_THREADS`` is respected if it is set.
    """
    import torch

    if os.environ.get("OMP_NUM_THREADS"):
        return torch.get_num_threads()
    most = torch.get_num_threads()
    counts = sorted({1, most} | {n for n in (2, 4, 8, 16) if n < most})
    weight, rows = torch.randn(4096, 1024), torch.randn(8, 1024)
    timed = {n: _seconds(n, weight, rows) for n in counts}
    best = min(timed, key=lambda n: timed[n])
    torch.set_num_threads(best)
    return best


def _seconds(num_threads: int, weight: object, rows: object) -> float:
    """Median seconds of a product after a warm-up; the median sees stalls that a minimum hides."""
    import torch
    from torch.nn.functional import linear

    assert isinstance(weight, torch.Tensor)
    assert isinstance(rows, torch.Tensor)
    torch.set_num_threads(num_threads)
    laps = []
    for _ in range(24):
        begin = time.perf_counter()
        linear(rows, weight)
        laps.append(time.perf_counter() - begin)
    return sorted(laps[4:])[len(laps[4:]) // 2]
