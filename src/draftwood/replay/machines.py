"""Machines to replay on: the measured one, staircases, and rooflines of GPUs (simulations)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from draftwood.replay.recording import Recording
from draftwood.tree.calibration import CALIBRATION_WIDTHS, Calibration
from draftwood.tree.roofline import ModelShape, RooflineFit
from draftwood.tree.tree import FloatArray


@dataclass(frozen=True)
class Peaks:
    """What a roofline follows from.

    Attributes:
        flops_per_s: peak dense 16-bit operations a second.
        bytes_per_s: peak memory bandwidth.
    """

    flops_per_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        values = (self.flops_per_s, self.bytes_per_s)
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise ValueError(f"peak operations and bytes a second must be > 0, got {values}")


# Data sheets: dense bfloat16 with float32 accumulation, memory bandwidth of the SXM and PCIe card.
GPUS: Mapping[str, Peaks] = {
    "A100": Peaks(312e12, 2.039e12),
    "H100": Peaks(989e12, 3.35e12),
    "H200": Peaks(989e12, 4.8e12),
    "RTX 4090": Peaks(165.2e12, 1.008e12),
}


@dataclass(frozen=True)
class Machine:
    """A machine whose seconds are known: the clock of a replay. Also a ``LatencyModel``.

    Attributes:
        name: for tables.
        is_simulation: whether no such machine was measured.
        curve: seconds of a target pass by width, at its ``context_len``.
        drafting_s: of one drafter pass.
        rest_s: of a cycle outside the models.
        token_s: of drawing one token, where that is not part of a pass.
        context_slope: seconds by which a pass is longer per token of context.
    """

    name: str
    is_simulation: bool
    curve: Calibration
    drafting_s: float
    rest_s: float
    token_s: float = 0.0
    context_slope: float = 0.0

    def verify_s(self, widths: np.ndarray, context_len: float, num_seqs: int) -> FloatArray:
        known, seconds = np.array(self.curve.widths), np.array(self.curve.seconds)
        found = np.interp(widths, known, seconds)
        if len(known) > 1:
            slope = (seconds[-1] - seconds[0]) / (known[-1] - known[0])
            found = found + np.maximum(np.asarray(widths) - known[-1], 0) * max(slope, 0.0)
        extra = self.context_slope * (context_len - self.curve.context_len)
        return np.maximum(found + extra, 0.1 * found)

    def draft_s(self, context_len: float, num_seqs: int) -> float:
        return self.drafting_s

    def other_s(self) -> float:
        return self.rest_s

    def walk_s(self, num_tokens: int) -> float:
        return self.token_s * num_tokens

    def observe(self, **_cycle: object) -> None:
        """A machine does not learn."""


def measured_machine(recording: Recording) -> Machine:
    """The machine a recording was made on, by what was measured then."""
    details = recording.details
    draft_s = np.concatenate([text.draft_s for text in recording.texts])
    return Machine(
        "measured",
        False,
        _calibration(details["curve"]),
        float(np.median(draft_s)),
        float(details["other_s"]),
        float(details["walk_s"]) if details["device"] == "cpu" else 0.0,
    )


def staircase_machine(recording: Recording, *, width: int = 9, height: float = 1.0) -> Machine:
    """The measured machine with a step: passes of ``width`` rows on take ``1 + height`` as long."""
    base = measured_machine(recording)
    one = base.curve.seconds[0]
    widths = tuple(sorted({1, width - 1, width, *CALIBRATION_WIDTHS}))
    seconds = tuple(one * (1 + (height if w >= width else 0.0) + 0.004 * w) for w in widths)
    curve = Calibration(widths, seconds, base.curve.context_len)
    return replace(base, name=f"staircase at {width}", is_simulation=True, curve=curve)


def flat_machine(recording: Recording) -> Machine:
    """The measured machine if a row more cost next to nothing, as on an idle accelerator."""
    base = measured_machine(recording)
    one = base.curve.seconds[0]
    seconds = tuple(one * (1 + 0.0005 * w) for w in CALIBRATION_WIDTHS)
    curve = Calibration(CALIBRATION_WIDTHS, seconds, base.curve.context_len)
    return replace(base, name="flat", is_simulation=True, curve=curve)


def steep_machine(recording: Recording) -> Machine:
    """The measured machine if every row cost a tenth of a pass, as in a full batch."""
    base = measured_machine(recording)
    one = base.curve.seconds[0]
    seconds = tuple(one * (1 + 0.1 * (w - 1)) for w in CALIBRATION_WIDTHS)
    curve = Calibration(CALIBRATION_WIDTHS, seconds, base.curve.context_len)
    return replace(base, name="steep", is_simulation=True, curve=curve)


def roofline_machine(
    recording: Recording, name: str, peaks: Peaks, *, overhead_s: float = 0.0
) -> Machine:
    """A GPU by its peaks: every pass at the roofline, 16-bit weights, no launch costs.

    Args:
        recording: whose target and drafter would run there.
        name: for tables.
        peaks: of the GPU.
        overhead_s: added to every pass.

    Raises:
        ValueError: a drafter whose passes are not known (only block diffusion's and lookup's are).
    """
    details = recording.details
    context_len = float(np.mean([text.prompt_len + len(text) / 2 for text in recording.texts]))
    target = _fit(details["target_shape"], peaks, overhead_s)
    rows = np.array(CALIBRATION_WIDTHS, dtype=np.float64)
    seconds = target.seconds(rows, context_len)
    longer = float(target.seconds(rows[:1], context_len + 1000)[0] - seconds[0]) / 1000
    curve = Calibration(CALIBRATION_WIDTHS, tuple(seconds.tolist()), round(context_len))
    return Machine(
        f"{name} (roofline)", True, curve, _draft_s(recording, peaks, overhead_s, context_len),
        rest_s=overhead_s, context_slope=longer,
    )  # fmt: skip


def _draft_s(recording: Recording, peaks: Peaks, overhead_s: float, context_len: float) -> float:
    details = recording.details
    if details["draft_shape"] is not None:
        fit = _fit(details["draft_shape"], peaks, overhead_s)
        return float(fit.seconds(np.array([float(details["block_size"])]), context_len)[0])
    if details["drafter_type"] == "LookupDrafter":
        return measured_machine(recording).drafting_s  # runs on the host wherever the target runs
    raise ValueError(
        f"the passes of drafter {details['drafter']!r} on another machine are not known; record a "
        "block-diffusion drafter or 'lookup', or simulate without GPUs"
    )


def _fit(shape: dict[str, Any], peaks: Peaks, overhead_s: float) -> RooflineFit:
    wanted = replace(ModelShape(**shape), bytes_per_value=2)
    memory, compute = 1 / peaks.bytes_per_s, 1 / peaks.flops_per_s
    return RooflineFit(wanted, (memory, overhead_s), (compute, overhead_s))


def _calibration(raw: dict[str, Any]) -> Calibration:
    return Calibration(
        tuple(raw["widths"]), tuple(raw["seconds"]), raw["context_len"], raw["draft_s"]
    )
