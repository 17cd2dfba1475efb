"""BASTION's budget (2605.29727): a roofline latency model and its stopping rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftwood.tree.latency import LatencyModel
from draftwood.tree.policy import MAX_NODES, CycleState
from draftwood.tree.ranked import rank_nodes
from draftwood.tree.tree import FloatArray, IntArray, ScoredPrefixes


@dataclass(frozen=True)
class ModelShape:
    """What a decoder's operations and memory traffic follow from.

    Attributes:
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        query_size: query heads times head size.
        kv_size: key-value heads times head size.
        num_heads: query heads.
        ffn_size: intermediate size of the gated MLP (of the active experts together).
        vocab_size: rows of the head.
        bytes_per_value: of weights, cache and activations.
    """

    num_layers: int
    hidden_size: int
    query_size: int
    kv_size: int
    num_heads: int
    ffn_size: int
    vocab_size: int
    bytes_per_value: int

    def flops(self, rows: FloatArray, context_len: float) -> FloatArray:
        """Floating-point operations of one pass (their appendix, per token 2 · weights)."""
        weights = self.num_layers * self._layer_weights() + self.hidden_size * self.vocab_size
        attention = 4 * self.num_layers * self.query_size * (context_len + rows)
        return rows * (2.0 * weights + attention)

    def traffic_bytes(self, rows: FloatArray, context_len: float) -> FloatArray:
        """Bytes moved by one pass: weights, cache and activations."""
        weights = self.num_layers * self._layer_weights() + 2 * self.hidden_size * self.vocab_size
        cache = 2.0 * self.num_layers * self.kv_size * (context_len + rows)
        per_row = (
            4 * self.hidden_size
            + 4 * self.query_size
            + 2 * self.kv_size
            + 4 * self.ffn_size
            + 2 * self.num_heads * (context_len + rows)
        )
        head = self.hidden_size + self.vocab_size
        activations = rows * (self.num_layers * per_row + head)
        return self.bytes_per_value * (weights + cache + activations)

    def _layer_weights(self) -> int:
        attention = 2 * self.hidden_size * (self.query_size + self.kv_size)
        return attention + 3 * self.hidden_size * self.ffn_size


@dataclass(frozen=True)
class RooflineFit:
    """Seconds = max(α_m · bytes + β_m, α_c · operations + β_c), all four ≥ 0."""

    shape: ModelShape
    memory: tuple[float, float]
    compute: tuple[float, float]

    def seconds(self, rows: FloatArray, context_len: float) -> FloatArray:
        return np.maximum(
            self.memory[0] * self.shape.traffic_bytes(rows, context_len) + self.memory[1],
            self.compute[0] * self.shape.flops(rows, context_len) + self.compute[1],
        )


def fit_roofline(
    shape: ModelShape,
    widths: Sequence[int],
    context_lens: Sequence[float],
    seconds: Sequence[float],
) -> RooflineFit:
    """Least squares over measured passes.

    Passes are ordered by operations; for every split the lower part is fitted to the memory and
    the upper to the compute branch, and the split with the least error of the maximum is kept.

    Args:
        shape: of the model measured.
        widths, context_lens, seconds: one entry per measured pass, at least two.

    Raises:
        ValueError: fewer than two passes.
    """
    if len(widths) < 2:
        raise ValueError(f"a roofline needs at least two measured passes, got {len(widths)}")
    rows, measured = np.array(widths, dtype=np.float64), np.array(seconds)
    points = [(row, context) for row, context in zip(rows, context_lens, strict=True)]
    flops = np.array([float(shape.flops(row, context)) for row, context in points])
    traffic = np.array([float(shape.traffic_bytes(row, context)) for row, context in points])
    order = np.argsort(flops)
    flops, traffic, measured = flops[order], traffic[order], measured[order]
    best: tuple[float, tuple[float, float], tuple[float, float]] | None = None
    for split in range(len(rows) + 1):
        memory = _line(traffic[:split], measured[:split])
        compute = _line(flops[split:], measured[split:])
        found = np.maximum(memory[0] * traffic + memory[1], compute[0] * flops + compute[1])
        error = float(np.sum((found / measured - 1.0) ** 2))
        if best is None or error < best[0]:
            best = error, memory, compute
    assert best is not None
    return RooflineFit(shape, best[1], best[2])


def _line(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    """(slope, intercept) ≥ 0 of least squares; zeros without points."""
    if len(x) == 0:
        return 0.0, 0.0
    spread = float(np.sum((x - x.mean()) ** 2))
    slope = float(np.sum((x - x.mean()) * (y - y.mean()))) / spread if spread > 0 else 0.0
    if slope <= 0.0:
        return 0.0, float(y.mean())
    intercept = float(y.mean() - slope * x.mean())
    return (slope, intercept) if intercept >= 0 else (float(x @ y / (x @ x)), 0.0)


@dataclass(frozen=True)
class Roofline:
    """Grows while p(u) · (draft + other + C(n)) > (1 + Φ(n)) · (C(n+1) − C(n)).

    As published: at least ``step`` nodes (root included) before the rule may stop, and the tree
    cut back to a multiple of ``step`` (their shape buckets for compiled kernels).

    Deviations: α and β are fitted for any model shape instead of three named ones, and peak rates
    are part of them; Φ counts the root apart; in a batch all sequences' nodes compete for one
    budget and the step holds for the batch. Draft and other seconds are the online model's.
    """

    fit: RooflineFit
    step: int = 32
    max_nodes: int = MAX_NODES
    why = "roofline"

    def limits(self, state: CycleState, latency: LatencyModel) -> tuple[int, int | None]:
        return self.max_nodes, None

    def choose(self, scored: ScoredPrefixes, state: CycleState, latency: LatencyModel) -> IntArray:
        num_seqs = len(scored)
        ranked = rank_nodes(scored)
        context_len = sum(state.context_lens) / max(num_seqs, 1)
        rows = num_seqs + np.arange(len(ranked.phi), dtype=np.float64)
        cost = self.fit.seconds(rows, context_len)
        rest = latency.draft_s(context_len, num_seqs) + latency.other_s()
        gain = np.diff(ranked.phi) * (rest + cost[:-1])
        stops = gain <= (num_seqs + ranked.phi[:-1]) * np.diff(cost)
        stops[: max(self.step - num_seqs, 0)] = False
        found = np.flatnonzero(stops)
        total = num_seqs + (int(found[0]) if len(found) else len(stops))
        if total >= self.step:
            total -= total % self.step
        return ranked.budgets(max(total - num_seqs, 0))

    def observe(
        self, scored: ScoredPrefixes, budgets: IntArray, accepted: Sequence[Sequence[int]]
    ) -> None:
        pass
