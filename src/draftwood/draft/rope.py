"""Rotary position embedding of a drafter: inverse frequencies from the draft configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from draftwood.draft.mixed import products_dtype

SUPPORTED = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """How positions rotate queries and keys.

    Attributes:
        theta: base of the geometric frequency ladder.
        kind: one of ``SUPPORTED``; kinds whose factors depend on the longest position seen
            (dynamic, longrope) are refused, a drafter's cached keys could not follow them.
        parameters: the kind's own numbers, as in the checkpoint (``factor``, …).
    """

    theta: float
    kind: str = "default"
    parameters: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in SUPPORTED:
            raise ValueError(
                f"rope type {self.kind!r} of the draft configuration is not supported; "
                f"use one of {', '.join(SUPPORTED)}"
            )
        if self.kind != "default" and "factor" not in self.parameters:
            raise ValueError(f"rope type {self.kind!r} needs 'factor' in the draft configuration")
        for name, value in (("theta", self.theta), ("factor", self.parameters.get("factor", 1.0))):
            if not 0 < value < math.inf:
                raise ValueError(f"rope {name} must be a positive number, got {value}")

    def frequencies(self, head_dim: int, max_position: int) -> tuple[torch.Tensor, float]:
        """([head_dim / 2] radians per position in fp64, factor on cos and sin)."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        inverse = self.theta**-exponents
        if self.kind == "linear":
            return inverse / self.parameters["factor"], 1.0
        if self.kind == "llama3":
            return self._llama3(inverse, max_position), 1.0
        if self.kind == "yarn":
            return self._yarn(inverse, head_dim, max_position)
        return inverse, 1.0

    def _llama3(self, inverse: torch.Tensor, max_position: int) -> torch.Tensor:
        """Long wavelengths are stretched by ``factor``, short ones kept, a ramp between."""
        low = self.parameters.get("low_freq_factor", 1.0)
        high = self.parameters.get("high_freq_factor", 4.0)
        original = self.parameters.get("original_max_position_embeddings", max_position)
        turns = original * inverse / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return kept * inverse + (1.0 - kept) * inverse / self.parameters["factor"]

    def _yarn(
        self, inverse: torch.Tensor, head_dim: int, max_position: int
    ) -> tuple[torch.Tensor, float]:
        """YaRN (arXiv 2309.00071): interpolate slow dimensions, keep fast ones, rescale logits."""
        factor = self.parameters["factor"]
        original = self.parameters.get("original_max_position_embeddings", max_position)

        def dimension(rotations: float) -> float:
            ratio = original / (rotations * 2 * math.pi)
            return head_dim * math.log(ratio) / (2 * math.log(self.theta))

        first = max(math.floor(dimension(self.parameters.get("beta_fast", 32.0))), 0)
        last = min(math.ceil(dimension(self.parameters.get("beta_slow", 1.0))), head_dim - 1)
        index = torch.arange(head_dim // 2, dtype=torch.float64)
        slow = ((index - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
        scale = self.parameters.get("attention_factor")
        if scale is None:
            scale = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return slow * inverse / factor + (1.0 - slow) * inverse, float(scale)

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> RopeConfig:
        """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` + ``rope_scaling`` (4).

        Raises:
            ValueError: neither names a theta, or the type is unknown.
        """
        nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = nested.get("rope_theta", config.get("rope_theta"))
        if theta is None:
            raise ValueError(
                "the draft configuration has neither rope_theta nor rope_parameters.rope_theta; "
                "add the value the drafter was trained with (it is not taken from the target)"
            )
        kind = nested.get("rope_type", nested.get("type", "default"))
        skip = {"rope_type", "type", "rope_theta"}
        numbers = {
            key: float(value)
            for key, value in nested.items()
            if key not in skip and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        return RopeConfig(float(theta), str(kind), numbers)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of the last dimension of ``x``; ``cos``/``sin`` end in that half.

    Where gradients are taken the result has the dtype of the product that follows.
    """
    if torch.is_grad_enabled():
        turned: torch.Tensor = _Rotation.apply(x, cos, sin, products_dtype(x))
        return turned
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class _Rotation(torch.autograd.Function):
    """Its gradient is the rotation back; angles have none."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _turn(x, cos, sin, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(upstream[0], cos, -sin, ctx.dtype), None, None, None


def _turn(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The rotation in the angles' dtype, in few passes."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    turned = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    left, right = turned.chunk(2, dim=-1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=right).addcmul_(first, sin)
    return turned.to(dtype)
