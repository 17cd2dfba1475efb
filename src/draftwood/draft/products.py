"""Products of a few rows with a drafter's weights."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import addressof

import torch
import torch.nn.functional as F

from draftwood.target.linear import Weights
from draftwood.target.native import Linear, Native, load_native
from draftwood.target.native_layer import NativeLinear

Product = Callable[[torch.Tensor], torch.Tensor]

# Row counts for which a CPU reads W once in W @ xᵀ; others in between are 2–3 times slower per
# row, so few rows are padded to the next of these.
_GOOD_ROWS = (1, 2, 4, 8, 16, 32)
_MAX_COPY_BYTES = 256 * 2**20
_MIN_HALF_BYTES = 2**20  # smaller ones stay in a cache anyway


def few_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [N, in] · weight [out, in]ᵀ + bias, fast on CPU for the few rows of a decoding step."""
    num_rows = len(x)
    if x.device.type != "cpu" or num_rows > _GOOD_ROWS[-1]:
        return F.linear(x, weight, bias)
    padded = next(size for size in _GOOD_ROWS if size >= num_rows)
    if padded > num_rows:
        x = F.pad(x, (0, 0, 0, padded - num_rows))
    out = (weight @ x.t())[:, :num_rows].t().contiguous()
    return out if bias is None else out.add_(bias)


class HalfLinear:
    """x · Wᵀ + bias in bfloat16 with float32 sums: half the memory to read, several times the rate.

    A draft may round, the target never does. The weights of saved drafters are bfloat16 numbers
    already; those that are borrowed from the target are rounded.
    """

    def __init__(self, native: Native, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._native = native
        bias = None if bias is None else bias.detach().contiguous()
        self._kept = (native.packed_half(weight), bias)
        pointers = [None if one is None else one.data_ptr() for one in self._kept]
        self._spec = Linear(*pointers, *weight.shape[::-1])

    def __deepcopy__(self, _memo: object) -> HalfLinear:
        return self  # nothing changes it

    @staticmethod
    def suits(weight: torch.Tensor) -> bool:
        """Whether a float32 weight is large enough to gain."""
        return weight.nbytes >= _MIN_HALF_BYTES and weight.shape[1] % 2 == 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty(len(x), self._spec.O)
        self._native.linear_half(
            addressof(self._spec), x.data_ptr(), out.data_ptr(), len(x), torch.get_num_threads()
        )
        return out


def product(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
    """x [N, in] → x · weight [out, in]ᵀ + bias, by compiled kernels on a CPU where there are any.

    Those hold a copy of the weight; what is larger than ``_MAX_COPY_BYTES`` is used as it is. Large
    float32 products are computed in bfloat16 where the CPU has instructions for that.
    """
    is_cpu_float = weight.device.type == "cpu" and weight.dtype == torch.float32
    native = load_native() if is_cpu_float and weight.nbytes <= _MAX_COPY_BYTES else None
    if native is None:
        return lambda x: few_rows(x, weight, bias)
    if native.has_half and HalfLinear.suits(weight):
        return HalfLinear(native, weight.detach(), bias)
    return NativeLinear(native, Weights((weight.detach(),), None if bias is None else (bias,)))
