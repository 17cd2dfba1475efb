"""Memory that stays with the process between training steps."""

from __future__ import annotations

import ctypes
import sys

# From malloc.h of the GNU C library.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_MOST = 2**31 - 1
_PAD_BYTES = 64 * 2**20


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed instead of giving it back to the system.

    A step on a CPU allocates and frees large tensors all the time. By default each is mapped anew
    and the system fills it with zeros page by page, which takes up to half of a step in
    bfloat16. The process then stays as large as its largest moment.

    Returns:
        Whether that was possible: with the GNU C library only.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    settings = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _MOST, _M_TOP_PAD: _PAD_BYTES}
    return sum(mallopt(name, value) for name, value in settings.items()) == len(settings)
