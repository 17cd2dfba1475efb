"""How often a looked-up guess is right, learned from how it was found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftwood.draft.online_fit import OnlineFit, sigmoid
from draftwood.tree.tree import FloatArray

LONGEST = 16  # match lengths beyond are treated alike

# Fitted to greedy SmolLM2-135M-Instruct answers to chat, code and school maths prompts:
# log-odds of a hit = w · (1, log2 length, log2 count, log2 length lead over the next guess,
# whether better guesses already failed).
PRIOR_WEIGHTS = np.array([0.0, 0.1, 0.7, 0.55, -0.8])
PRIOR_PRECISION = np.array([20.0, 20.0, 20.0, 20.0, 20.0])
SEQUENCE_PRECISION = np.array([1.0])  # log-odds shift of one sequence: std 1 before evidence


class Guess(NamedTuple):
    """One candidate token at a node and the evidence for it.

    Attributes:
        rank: 0 for the best supported candidate.
        match_len: longest matching suffix behind it (in tokens).
        next_match_len: the same for the next candidate, 0 if there is none.
        support: number of occurrences that agree on it.
    """

    rank: int
    match_len: int
    next_match_len: int
    support: int

    def features(self) -> tuple[float, ...]:
        length = _LENGTH[min(self.match_len, LONGEST)]
        lead = length - _RIVAL[min(self.next_match_len, LONGEST)]
        return 1.0, length, math.log2(self.support), lead, float(self.rank > 0)


_LENGTH = [0.0, *(math.log2(n) for n in range(1, LONGEST + 1))]
_RIVAL = [math.log2(n + 0.5) for n in range(LONGEST + 1)]


class HitRates:
    """P(the target picks a guess | it picked none of the better ones), per kind of guess.

    A logistic model shared by all sequences plus one shift per sequence, since texts differ in
    how much they repeat themselves.
    """

    def __init__(self) -> None:
        self._shared = OnlineFit(PRIOR_WEIGHTS, PRIOR_PRECISION)
        self._shifts: dict[int, OnlineFit] = {}

    def probs(self, seq_id: int, guesses: Sequence[Guess]) -> list[float]:
        """Probabilities of the guesses of one node, best supported first; their sum is < 1."""
        bias, length, count, lead, later = self._shared.mean.tolist()
        bias += self._shift(seq_id)
        left = 1.0
        probs = []
        for guess in guesses:
            one, x, y, z, r = guess.features()
            rate = sigmoid(bias * one + length * x + count * y + lead * z + later * r)
            probs.append(left * rate)
            left *= 1.0 - rate
        return probs

    def learn(self, seq_id: int, guesses: Sequence[Guess], hit: int | None) -> None:
        """Take in which of a node's guesses the target picked; None if it picked another token."""
        tried = guesses if hit is None else guesses[: hit + 1]
        shift = self._shifts.setdefault(seq_id, OnlineFit(np.zeros(1), SEQUENCE_PRECISION))
        for guess in tried:
            features: FloatArray = np.array(guess.features())
            rate = sigmoid(float(self._shared.mean @ features) + float(shift.mean[0]))
            error = float(guess.rank == hit) - rate
            spread = rate * (1.0 - rate)
            self._shared.update(error * features, spread * np.outer(features, features))
            shift.update(np.array([error]), np.array([[spread]]))

    def release(self, seq_id: int) -> None:
        """Forget the shift of a sequence."""
        self._shifts.pop(seq_id, None)

    def _shift(self, seq_id: int) -> float:
        fit = self._shifts.get(seq_id)
        return float(fit.mean[0]) if fit is not None else 0.0
