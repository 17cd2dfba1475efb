"""Few shapes of products instead of a new one at each step.

On a CPU a matrix product is compiled for its shape (oneDNN keeps the last thousand), which takes
longer than the product itself; a tenth of a training step was that.
"""

from __future__ import annotations

_LEAST = 32


def filled_up(length: int) -> int:
    """``length`` rounded up to one of 16 sizes per octave, or a multiple of 32 where that is more.

    What it adds is computed in vain: at most a sixteenth of more than 512.
    """
    step = max(_LEAST, 1 << max(length.bit_length() - 5, 0))
    return -(-length // step) * step
