"""What the benchmark asks of a way to decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from draftwood.bench.runs import Request
from draftwood.records import CycleStats


@dataclass(frozen=True)
class Generation:
    """One decoded sequence, as a client saw it.

    Attributes:
        token_ids: the output, a final stop token included.
        finish_reason: "stop", "length" or "error".
        arrivals: (seconds since the request, tokens that came together); [] if not streamed.
        prefill_s: seconds for the prompt, however the engine counts them.
        decode_s: seconds that gave the last ``num_decoded`` tokens.
        num_decoded: tokens to divide by ``decode_s``.
        cycles: the engine's records of its decoding cycles, if it keeps any.
        error: why, when ``finish_reason`` is "error".
    """

    token_ids: list[int]
    finish_reason: str
    arrivals: list[tuple[float, int]]
    prefill_s: float
    decode_s: float
    num_decoded: int
    cycles: Sequence[CycleStats] = ()
    error: str | None = None


@dataclass(frozen=True)
class Batch:
    """Sequences decoded together.

    Attributes:
        generations: in the order of the requests.
        wall_s: from the first request to the last token.
        kv_bytes: most memory of KV caches at any time, where the engine tells.
        peak_bytes: most memory of the process (CPU) or device (GPU) meanwhile.
        details: further figures of the engine, as JSON.
    """

    generations: list[Generation]
    wall_s: float
    kv_bytes: int | None = None
    peak_bytes: int | None = None
    details: dict[str, Any] = field(default_factory=dict)


class Runner(Protocol):
    """A method made ready on one target at one temperature."""

    max_concurrency: int | None

    @property
    def promises_identity(self) -> bool:
        """Whether its output must be that of plain decoding with the same seeds."""
        ...

    def run(self, requests: Sequence[Request]) -> Batch:
        """Decode requests together and measure."""
        ...

    def row(
        self, requests: Sequence[Request], batch: Sequence[list[int]], index: int, position: int,
        budgets: Sequence[int] | None,
    ) -> torch.Tensor | None:  # fmt: skip
        """Decode again for the raw logits [V] behind one output token; None if it cannot be done.

        Args:
            requests: as they were decoded together.
            batch: their outputs.
            index: the request in question.
            position: its output token in question.
            budgets: nodes that the measured run verified, cycle by cycle, of a lone request.
        """
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...
