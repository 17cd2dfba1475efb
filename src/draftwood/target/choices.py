"""Kernel choices kept on disk: loading again is faster, and rounds as it did before."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from draftwood.target.linear import ROWS, Kernel
from draftwood.target.store import cache_dir, write_text

FILE = "kernels.json"


class KernelChoices:
    """What was measured before on this machine, torch version and number of threads."""

    def __init__(self, candidates: Sequence[Kernel]) -> None:
        self._by_name = {kernel.__name__: kernel for kernel in candidates}
        self._path = cache_dir() / FILE
        self._setting = " | ".join([
            torch.__version__, processor_name(), torch.backends.cpu.get_cpu_capability(),
            f"{torch.get_num_threads()} threads", *sorted(self._by_name), f"rows {ROWS}",
        ])  # fmt: skip

    def get(
        self, key: str, measure: Callable[[], tuple[tuple[Kernel, ...], bool]]
    ) -> tuple[Kernel, ...]:
        """The kernels stored under ``key``; else what ``measure`` says, stored if it says so."""
        names = self._read().get(self._setting, {}).get(key)
        if isinstance(names, list) and len(names) == len(ROWS) and set(names) <= set(self._by_name):
            return tuple(self._by_name[name] for name in names)
        kernels, is_worth_keeping = measure()
        if not is_worth_keeping:
            return kernels
        content = self._read()
        content.setdefault(self._setting, {})[key] = [kernel.__name__ for kernel in kernels]
        # A cache that cannot be written only costs the next load a second.
        with contextlib.suppress(OSError):
            write_text(self._path, json.dumps(content, indent=1))
        return kernels

    def is_faster(self, key: str, measure: Callable[[], bool]) -> bool:
        """The verdict stored under ``key``; else that of ``measure``, stored."""
        known = self._read().get(self._setting, {}).get(key)
        if known in (["yes"], ["no"]):
            return known == ["yes"]
        verdict = measure()
        content = self._read()
        content.setdefault(self._setting, {})[key] = ["yes" if verdict else "no"]
        with contextlib.suppress(OSError):
            write_text(self._path, json.dumps(content, indent=1))
        return verdict

    def _read(self) -> dict[str, dict[str, list[str]]]:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}


def processor_name() -> str:
    """What the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration, IndexError):
        return platform.processor() or platform.machine()
