"""A few parameters of a logistic model, learned one observation at a time."""

from __future__ import annotations

import math

import numpy as np

from draftwood.tree.tree import FloatArray

MEMORY = 1000.0  # observations after which old ones count for 1/e
MAX_STEP = 0.25  # one surprising observation must not turn a parameter over


class OnlineFit:
    """Approximate Bayesian fit of a log-concave likelihood with a Gaussian prior.

    After every observation the Gaussian belief is refined by one Newton step (the extended Kalman
    filter of logistic regression): precision += curvature, mean += precision⁻¹ · gradient. Old
    evidence fades towards the prior, so that the fit follows a changing workload.

    Args:
        mean: [P] prior means; what is used until evidence arrives.
        precision: [P] prior precisions: how much evidence it takes to move away.

    Attributes:
        mean: [P] current parameters.
        precision: [P, P] current precision of the belief in them.
    """

    def __init__(self, mean: FloatArray, precision: FloatArray) -> None:
        assert mean.shape == precision.shape
        self.mean = mean.astype(np.float64)
        self._prior = np.diag(precision.astype(np.float64))
        self.precision = self._prior.copy()

    def update(self, gradient: FloatArray, curvature: FloatArray) -> None:
        """Take in one observation.

        Args:
            gradient: [P] of the log-likelihood at ``mean``.
            curvature: [P, P] negative Hessian there (positive semi-definite).
        """
        self.precision += curvature - (self.precision - self._prior) / MEMORY
        step = np.linalg.solve(self.precision, gradient)
        self.mean = self.mean + step * min(1.0, MAX_STEP / max(float(np.abs(step).max()), 1e-12))


def sigmoid(x: float) -> float:
    """The logistic function, kept off 0 and 1 so that logs stay finite."""
    return 1.0 / (1.0 + math.exp(-max(-12.0, min(12.0, x))))
