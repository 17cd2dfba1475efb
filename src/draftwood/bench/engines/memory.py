"""Peak memory of one run."""

from __future__ import annotations

from pathlib import Path

import torch


class PeakMemory:
    """Most memory between its creation and ``read``: of a GPU, else of this process (Linux)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._resets = True
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        except OSError:
            self._resets = False

    def read(self) -> int | None:
        """Bytes; None where the system does not tell."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if not self._resets:
            return None
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if "VmHWM" in line)
        except (OSError, StopIteration, ValueError):
            return None
