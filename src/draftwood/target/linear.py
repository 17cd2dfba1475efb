"""Exact CPU kernels for linear layers, and the choice between them by measurement.

``F.linear`` with a few rows runs far below the memory bandwidth, mostly for reasons of layout. The
same product over a copy of the weights in another layout does better; which one depends on the
shape, the number of rows and the machine, so it is measured. Every kernel computes the same
float32 sums, in another order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch.nn.functional import linear

# Row counts at which kernels are compared. Each stands for all counts up to its bound, the last
# for all others.
ROWS = (1, 4, 9, 17, 33)
ROW_BOUNDS = (1, 5, 12, 24)
# Weights that one timed pass reads, if there are as many: more than stays in a cache.
COLD_BYTES = 32 * 2**20
REPEATS = 3
# Where the two best repeats differ by more, something else was running and the times mean nothing.
MAX_SPREAD = 1.25
# A copy of the weights must save this share of the time, averaged over ROWS.
MIN_GAIN = 0.05

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Weights:
    """Linear layers over one input, whose outputs are wanted side by side.

    Attributes:
        weights: each [out, in].
        biases: each [out]; None: no layer has one.
    """

    weights: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor, ...] | None = None

    @property
    def in_features(self) -> int:
        return self.weights[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    @property
    def shape(self) -> str:
        """What the best kernel depends on, e.g. ``576 -> 576+192+192``."""
        outputs = "+".join(str(len(weight)) for weight in self.weights)
        return f"{self.in_features} -> {outputs}{'' if self.biases is None else ', bias'}"

    def stacked(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All as one layer: [Σ out, in] and [Σ out]."""
        if len(self.weights) == 1:
            return self.weights[0], None if self.biases is None else self.biases[0]
        bias = None if self.biases is None else torch.cat(self.biases)
        return torch.cat(self.weights), bias


def plain(weights: Weights) -> Product:
    """The model's own product, on its own weights."""
    pairs = list(zip(weights.weights, weights.biases or [None] * len(weights.weights), strict=True))
    if len(pairs) == 1:
        weight, bias = pairs[0]
        return lambda rows: linear(rows, weight, bias)
    return lambda rows: torch.cat([linear(rows, *pair) for pair in pairs], dim=-1)


def transposed(weights: Weights) -> Product:
    """rows @ Wᵀ with Wᵀ contiguous: one input feature's weights are read in one piece."""
    stacked, bias = weights.stacked()
    matrix = stacked.t().contiguous()
    if bias is None:
        return lambda rows: torch.mm(rows, matrix)
    return lambda rows: torch.addmm(bias, rows, matrix)


def onednn(weights: Weights) -> Product:
    """oneDNN's inner product on weights reordered into its own blocks."""
    stacked, bias = weights.stacked()
    # The row count is a hint: one row would keep the plain layout, all others block it alike.
    packed = torch.ops.mkldnn._reorder_linear_weight(stacked, max(ROWS))
    product = torch.ops.mkldnn._linear_pointwise.default
    return lambda rows: product(rows.contiguous(), packed, bias, "none", [], "")


def has_onednn() -> bool:
    """Whether this build of torch has the two (private) operators that ``onednn`` needs."""
    try:
        _ = torch.ops.mkldnn._linear_pointwise.default
        _ = torch.ops.mkldnn._reorder_linear_weight.default
    except (AttributeError, RuntimeError):
        return False
    return torch.backends.mkldnn.is_available()


Kernel = Callable[[Weights], Product]


def default_kernels() -> tuple[Kernel, ...]:
    """The kernels to choose from; the first needs no copy of the weights."""
    return (plain, transposed, onednn) if has_onednn() else (plain, transposed)


class FastLinear:
    """[N, in] → [N, Σ out], by the kernel chosen for N; at first by ``plain``."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.use((plain,) * len(ROWS))

    def use(self, kernels: Sequence[Kernel]) -> None:
        """Make the copies that ``kernels`` (one per entry of ROWS) need, and use them."""
        assert len(kernels) == len(ROWS)
        products = {kernel: kernel(self.weights) for kernel in set(kernels)}
        self.kernels = tuple(kernels)
        counts = range(ROW_BOUNDS[-1] + 1)
        classes = (sum(count > bound for bound in ROW_BOUNDS) for count in counts)
        self._by_count = [products[kernels[index]] for index in classes]
        self._beyond = products[kernels[-1]]

    @property
    def copied_bytes(self) -> int:
        """Memory beyond the model's own weights."""
        return self.weights.num_bytes * len(set(self.kernels) - {plain})

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        count = rows.shape[0]
        product = self._by_count[count] if count < len(self._by_count) else self._beyond
        return product(rows)


def choose_kernels(
    same_shape: Sequence[Weights], candidates: Sequence[Kernel], max_copies: int
) -> tuple[tuple[Kernel, ...], bool]:
    """The kernel for each entry of ROWS, and whether that is worth keeping for the next load.

    Measured; where the measurement was disturbed, the last candidate throughout.

    Args:
        same_shape: the weights that will use the choice; some of them are measured.
        candidates: the first is the one without a copy, the last the one that is best as a rule.
        max_copies: how many copies of the weights may be held.
    """
    if max_copies < 1 or len(candidates) == 1:
        return (candidates[0],) * len(ROWS), True
    sample: list[Weights] = []
    for weights in same_shape:
        if sum(w.num_bytes for w in sample) < COLD_BYTES:
            sample.append(weights)
    seconds, is_steady = _measure(sample, candidates)
    if not is_steady:
        return (candidates[-1],) * len(ROWS), False
    return _pick(seconds, candidates, max_copies), True


@torch.no_grad()
def _measure(
    sample: Sequence[Weights], candidates: Sequence[Kernel]
) -> tuple[list[list[float]], bool]:
    """[kernel][entry of ROWS] seconds of one pass over the sample, and whether they repeat."""
    products = [[kernel(weights) for weights in sample] for kernel in candidates]
    seconds = [[float("inf")] * len(ROWS) for _ in candidates]
    spread = 1.0
    for column, num_rows in enumerate(ROWS):
        rows = torch.ones(num_rows, sample[0].in_features)
        times: list[list[float]] = [[] for _ in candidates]
        for _ in range(REPEATS):
            for index, kernel in enumerate(candidates):
                if kernel is transposed and num_rows > 1:
                    continue  # its one strength; with more rows it is the slowest
                start = time.perf_counter()
                for product in products[index]:
                    product(rows)
                times[index].append(time.perf_counter() - start)
        for index, repeats in enumerate(times):
            if repeats:
                least, second = sorted(repeats)[:2]
                seconds[index][column] = least
                spread = max(spread, second / least)
    return seconds, spread <= MAX_SPREAD


def _pick(
    seconds: list[list[float]], candidates: Sequence[Kernel], max_copies: int
) -> tuple[Kernel, ...]:
    """The fastest kernel per row count, from the set whose copies are worth their memory."""
    columns = range(len(ROWS))
    fastest = [min(row[column] for row in seconds) for column in columns]

    def cost(kept: tuple[int, ...]) -> float:
        slowdowns = (min(seconds[index][c] for index in kept) / fastest[c] for c in columns)
        return sum(slowdowns) / len(ROWS) + MIN_GAIN * (len(kept) - 1)

    sets = (
        (0, *copies)
        for count in range(min(max_copies, len(candidates) - 1) + 1)
        for copies in combinations(range(1, len(candidates)), count)
    )
    kept = min(sets, key=cost)
    return tuple(candidates[min(kept, key=lambda index: seconds[index][c])] for c in columns)
