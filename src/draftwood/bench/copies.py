"""Count the bytes that tensor operations copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MOVES = {
    "copy_", "_to_copy", "clone", "contiguous", "cat", "stack", "index", "index_select", "gather",
    "repeat", "repeat_interleave", "constant_pad_nd", "take",
}  # fmt: skip
MASKS = {"masked_fill", "masked_fill_"}


class CopyCounter(TorchDispatchMode):
    """Within this context, adds up what operations that compute nothing write.

    Attributes:
        moved: bytes copied, gathered, joined, repeated or padded, in the result's own size.
        masked: bytes of attention masks filled in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0
        self.masked = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            name = func.overloadpacket.__name__
            self.moved += out.nbytes if name in MOVES else 0
            self.masked += out.nbytes if name in MASKS else 0
        return out
