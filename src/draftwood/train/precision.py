"""Whether a device multiplies matrices faster in bfloat16."""

from __future__ import annotations

import statistics
import time

import torch

_SHAPE = (768, 576, 1536)  # rows, inputs, outputs of the timed product: those of a small layer
_WORTH = 1.5  # times faster, to make up for the casts in between


def has_fast_bfloat16(device: torch.device | str) -> bool:
    """Whether training there gains by bfloat16 products with float32 weights and sums.

    GPUs are asked. CPUs are timed, for some tenths of a second: one with AVX512-BF16 or AMX is
    several times faster than in float32, one without is slower, and neither flags nor versions
    tell what the library makes of it.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    if device.type != "cpu":
        return False
    return _seconds(torch.float32) > _WORTH * _seconds(torch.bfloat16)


def _seconds(dtype: torch.dtype) -> float:
    """Median seconds of a product after a warm-up."""
    rows, inputs, outputs = _SHAPE
    left, weight = torch.ones(rows, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)
    laps = []
    for _ in range(8):
        begin = time.perf_counter()
        torch.nn.functional.linear(left, weight)
        laps.append(time.perf_counter() - begin)
    return statistics.median(laps[3:])
