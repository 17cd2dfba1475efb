"""Means, ratios of means and their bootstrap intervals, over prompts that were measured in pairs.

The unit that is resampled is the prompt, with everything measured on it: the same prompt decides
most of a method's speed, so differences between methods are far better known than either speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 2000
LEVEL = 0.95

Rows = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % bootstrap interval.

    Attributes:
        value: the estimate on all prompts; NaN without any.
        low, high: the interval; equal to ``value`` for a single prompt, where it says nothing.
        num: prompts.
    """

    value: float
    low: float
    high: float
    num: int

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def mean(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Mean over prompts."""
    return bootstrap([np.asarray(values, dtype=np.float64)[:, None]], _mean, seed=seed)


def ratio(above: Sequence[float], below: Sequence[float], *, seed: int = 0) -> Interval:
    """Mean of ``above`` divided by the mean of ``below``, the two paired by prompt."""
    pairs = np.stack([np.asarray(above, float), np.asarray(below, float)], axis=1)
    return bootstrap([pairs], _ratio, seed=seed)


def mean_of_groups(groups: Sequence[Sequence[float]], *, seed: int = 0) -> Interval:
    """Mean over groups (sets) of the mean over each one's prompts; resampled within groups."""
    return bootstrap([np.asarray(g, dtype=np.float64)[:, None] for g in groups], _mean, seed=seed)


def ratio_of_groups(
    groups: Sequence[tuple[Sequence[float], Sequence[float]]], *, seed: int = 0
) -> Interval:
    """Mean over groups of each one's ratio of means; resampled within groups."""
    rows = [np.stack([np.asarray(a, float), np.asarray(b, float)], axis=1) for a, b in groups]
    return bootstrap(rows, _ratio, seed=seed)


def bootstrap(
    groups: Sequence[Rows], statistic: Callable[[Rows], NDArray[np.float64]], *, seed: int
) -> Interval:
    """Mean over groups of a statistic of each one's prompts, resampled within groups.

    The interval is between percentiles of the resampled estimates, further out than 2.5 and 97.5
    for few prompts, where those cover too little (Hesterberg 2015, "expanded percentile").

    Args:
        groups: [n, k] per group, one row per prompt.
        statistic: [..., n, k] → [...].
        seed: of the resampling; the same records give the same interval.
    """
    groups = [rows for rows in groups if len(rows)]
    if not groups:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    rng = np.random.default_rng(seed)
    value = float(np.mean([statistic(rows) for rows in groups]))
    draws = np.mean([statistic(_resampled(rows, rng)) for rows in groups], axis=0)
    low, high = np.quantile(draws, _tails([len(rows) for rows in groups]))
    return Interval(value, float(low), float(high), sum(map(len, groups)))


def _tails(sizes: Sequence[int]) -> tuple[float, float]:
    """Probabilities of the two percentiles for groups of these sizes.

    Resampling n values spreads like n rather than n − 1 of them and knows no Student's t: both are
    made up for as they would have to be for a mean of normal values.
    """
    freedom = sum(sizes) - len(sizes)
    if freedom < 1:
        return (1 - LEVEL) / 2, (1 + LEVEL) / 2
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    # Student's t by the first terms of its expansion in 1 / freedom (Fisher and Cornish 1960).
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    tail = NormalDist().cdf(-t * sqrt(sum(sizes) / freedom))
    return tail, 1 - tail


def _mean(rows: Rows) -> NDArray[np.float64]:
    return rows[..., 0].mean(-1)


def _ratio(rows: Rows) -> NDArray[np.float64]:
    sums = rows.sum(-2)
    return sums[..., 0] / np.maximum(sums[..., 1], 1e-300)


def _resampled(rows: Rows, rng: np.random.Generator) -> Rows:
    """[NUM_RESAMPLES, n, k]."""
    return rows[rng.integers(len(rows), size=(NUM_RESAMPLES, len(rows)))]
