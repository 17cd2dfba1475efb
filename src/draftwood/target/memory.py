"""How much memory this process can still take."""

from __future__ import annotations

import os
from pathlib import Path

# Where Linux says what a container may use and what it uses: cgroup v2, v1.
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def available_bytes() -> int:
    """Memory that can be had without swapping; 0 where nothing tells."""
    free = _machine_bytes()
    for limit, used in _CGROUP_FILES:
        try:
            rest = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):
            continue
        free = min(free, max(rest, 0))
    return free


def _machine_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        pass
    try:
        # Not what is free, but a fair share of what the machine has.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    except (AttributeError, OSError, ValueError):
        return 0
