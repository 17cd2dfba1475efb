"""Peak memory of one run."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch


class PeakMemory:
    """Most memory between its creation and ``read``: of a GPU, else of this process (Linux)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        # Where that has no effect (some sandboxes), an old mark would stand for a new one.
        peak, now = _status("VmHWM"), _status("VmRSS")
        self._resets = peak is not None and now is not None and peak <= 1.02 * now

    def read(self) -> int | None:
        """Bytes; None where the system does not tell."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _status("VmHWM") if self._resets else None


def _status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
    except (OSError, StopIteration, ValueError):
        return None
