"""One method against another on the same prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draftwood.bench.statistics import Interval, mean, mean_of_groups, ratio, ratio_of_groups
from draftwood.bench.summary import ALL_SETS, Results, paired


@dataclass(frozen=True)
class Difference:
    """One method against another on the same prompts.

    Attributes:
        tau: mean difference of tokens per cycle, left − right.
        speed: right's seconds per token over left's; above 1, left is faster.
    """

    set_name: str
    temperature: float
    left: str
    right: str
    tau: Interval | None
    speed: Interval


def differences(results: Results, left: str, right: str) -> list[Difference]:
    """Paired by prompt, per set and temperature and over all sets; without repetitive outputs."""
    found = []
    for temperature in results.temperatures:
        taus: list[list[float]] = []
        speeds: list[tuple[list[float], list[float]]] = []
        for name in results.sets:
            mine, theirs = (
                [t for t in results.turns if not t.repetitive
                 and (t.set_name, t.temperature, t.method) == (name, temperature, method)]
                for method in (left, right)
            )  # fmt: skip
            above, below = paired(theirs, mine, "token_s")
            if not above:
                continue
            tau_left, tau_right = paired(mine, theirs, "tau")
            gains = list(np.subtract(tau_left, tau_right))
            taus, speeds = [*taus, gains], [*speeds, (above, below)]
            tau = mean(gains) if gains else None
            found.append(Difference(name, temperature, left, right, tau, ratio(above, below)))
        if len(speeds) > 1:
            tau = mean_of_groups([part for part in taus if part])
            speed = ratio_of_groups(speeds)
            found.append(Difference(ALL_SETS, temperature, left, right, tau, speed))
    return found
