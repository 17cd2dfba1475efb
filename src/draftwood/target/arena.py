"""Memory for packed weights, in huge pages where the system grants them.

A pass reads all weights front to back; with pages of 4 KB it waits for the translation of their
addresses: the same read is a quarter to a third slower (``benchmarks/verify_cost.py``).
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch

CHUNK_BYTES = 64 * 2**20
ALIGNMENT = 64  # bytes: a cache line


class Arena:
    """Hands out float32 buffers from large mappings, one behind the other.

    A mapping lives as long as one of its buffers does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = torch.empty(0)

    def take(self, size: int) -> torch.Tensor:
        """[size] float32, zero, starting on a cache line."""
        step = ALIGNMENT // 4
        whole = -(-size // step) * step
        if 8 * whole > CHUNK_BYTES:
            return _mapping(4 * whole)[:size]
        with self._lock:
            if whole > len(self._chunk):
                self._chunk = _mapping(CHUNK_BYTES)
            taken, self._chunk = self._chunk[:size], self._chunk[whole:]
        return taken


def _mapping(num_bytes: int) -> torch.Tensor:
    """Private pages as float32; huge ones if the system has them to give."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel, or a Python, without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.float32)
