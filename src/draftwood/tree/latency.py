"""Predicted seconds of a cycle's parts, learned from observed ones."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from draftwood.tree.tree import FloatArray


class LatencyModel(Protocol):
    """Seconds of the parts of a cycle.

    ``width`` is the number of rows of the packed target forward: Σ (budget + 1) over sequences.
    """

    def verify_s(self, widths: np.ndarray, context_len: float, num_seqs: int) -> FloatArray:
        """[len(widths)] seconds of one target pass incl. head and walk."""
        ...

    def draft_s(self, context_len: float, num_seqs: int) -> float:
        """Seconds of one drafter pass incl. enumeration."""
        ...

    def other_s(self) -> float:
        """Seconds of a cycle outside the two models."""
        ...

    def observe(
        self,
        *,
        width: int,
        context_len: float,
        num_seqs: int,
        verify_s: float,
        draft_s: float | None,
        other_s: float,
    ) -> None:
        """Take in one cycle; ``draft_s`` is None when nothing was drafted."""
        ...
