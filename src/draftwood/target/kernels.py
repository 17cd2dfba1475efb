"""Fast exact execution of a CPU float32 target: which kernels, for which modules, and when.

``Kernels.active`` puts faster forwards in place of the modules' own for the length of one packed
pass. Parameters and module code stay as they are; copies of the weights in other layouts are held
only if they fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from draftwood.target.attention import PackedPass
from draftwood.target.choices import KernelChoices
from draftwood.target.direct import DirectDecoder, is_plain_decoder
from draftwood.target.lean import (
    LeanLayer,
    is_llama_shaped,
    is_plain_linear,
    rope_factors,
    weights_of,
)
from draftwood.target.linear import FastLinear, Kernel, Weights, choose_kernels
from draftwood.target.native import Native
from draftwood.target.native_layer import NativeLayer, NativeLinear, Scratch
from draftwood.target.native_stack import NativeStack
from draftwood.target.watch import Watch


@dataclass(frozen=True)
class KernelConfig:
    """How a target on the CPU in float32 is sped up.

    Attributes:
        candidates: kernels to choose from, the one without a copy of the weights first. One alone
            is used everywhere, unmeasured. None: all of this build of torch, for models that are
            large enough to gain.
        memory_share: how much of the memory available at load the copies may take together. A
            shape whose copies no longer fit runs on the model's own weights.
        lean_layers: run layers of the Llama shape in fewer operations.
        native: run a model whose layers all have the Llama shape on the compiled kernels. None:
            if there is a compiler, ``candidates`` is None too, and they are the fastest.
    """

    candidates: tuple[Kernel, ...] | None = None
    memory_share: float = 0.5
    lean_layers: bool = True
    native: bool | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.memory_share <= 1:
            raise ValueError(f"memory_share must be between 0 and 1, got {self.memory_share}")
        if self.candidates == ():
            raise ValueError("candidates is empty; None means all kernels there are")


DEFAULT_KERNELS = KernelConfig()


_HEAD_ROWS = 4  # MR of native.cpp: they share each weight that is read


class StandIn(Protocol):
    """What runs a layer in its place: [N, hidden_size] → [N, hidden_size]."""

    def forward(
        self,
        hidden: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        packed: PackedPass,
        /,
    ) -> torch.Tensor: ...


class Kernels:
    """The forwards that stand in for a model's own, and the head's product.

    As created: none, everything runs as the model does it.

    Attributes:
        linears: all products that were taken over.
        num_lean_layers: layers that run as a whole.
        is_native: whether layers and head run on the compiled kernels.
        head_rows: rows that the head computes in the time of one.
    """

    def __init__(self) -> None:
        self.linears: list[FastLinear] = []
        self.num_lean_layers = 0
        self.is_native = False
        self.head_rows = 1
        self._native_bytes = 0
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._layers_watch = Watch([])
        self._stack: NativeStack | None = None
        self._direct: DirectDecoder | None = None
        self._head: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._head_watch = Watch([])

    @property
    def copied_bytes(self) -> int:
        """Memory that the copies of the weights take."""
        return self._native_bytes + sum(fast.copied_bytes for fast in self.linears)

    def is_current(self) -> bool:
        """Whether nothing that was taken over has changed since."""
        return self._layers_watch.is_unchanged() and self._head_watch.is_unchanged()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the decoder with the fast forwards; the caller makes sure that it runs alone."""
        if not self._forwards or not self._layers_watch.is_unchanged():
            yield
            return
        for module, forward in self._forwards:
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module, _ in self._forwards:
                module.__dict__.pop("forward", None)

    def head(self, module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] → [R, V] through the language model head ``module``."""
        if self._head is None or not self._head_watch.is_unchanged():
            logits: torch.Tensor = module(hidden)
            return logits
        return self._head(hidden)

    def add_layers(
        self, layers: Sequence[nn.Module], windows: Sequence[int | None], lean: bool
    ) -> None:
        """Stand in for ``layers``: as a whole where they are of the Llama shape, else in parts."""
        factors = _RopeFactors()
        for layer, window in zip(layers, windows, strict=True):
            if lean and is_llama_shaped(layer):
                stand_in = LeanLayer(layer, window, self._fast)
                self._forwards.append((layer, _lean_forward(layer, stand_in, factors)))
                self.num_lean_layers += 1
                continue
            for module in filter(is_plain_linear, layer.modules()):
                fast = self._fast(weights_of(module))
                self._forwards.append((module, _linear_forward(fast)))
        self._layers_watch = Watch(layers)

    def add_head(self, module: nn.Module) -> None:
        """Stand in for the language model head."""
        if is_plain_linear(module):
            self._head = self._fast(weights_of(module))
            self._head_watch = Watch([module])

    def add_native(
        self,
        native: Native,
        layers: Sequence[nn.Module],
        windows: Sequence[int | None],
        head: nn.Module,
    ) -> None:
        """Stand in for ``layers``, all of the right shape, and ``head`` with compiled code."""
        scratch = Scratch()
        natives = [
            NativeLayer(native, layer, window, scratch)
            for layer, window in zip(layers, windows, strict=True)
        ]
        stand_ins: Sequence[StandIn] = natives
        if len({one.widths for one in natives}) == 1:
            self._stack = NativeStack(native, natives, scratch)
            stand_ins = self._stack.layers()
        factors = _RopeFactors()
        for layer, one in zip(layers, stand_ins, strict=True):
            self._forwards.append((layer, _lean_forward(layer, one, factors)))
        self._layers_watch = Watch(layers)
        self.num_lean_layers, self.is_native = len(layers), True
        self._native_bytes = sum(one.copied_bytes for one in natives)
        if is_plain_linear(head):
            product = NativeLinear(native, weights_of(head))
            self._head, self._head_watch = product, Watch([head])
            self.head_rows = _HEAD_ROWS
            self._native_bytes += product.copied_bytes

    def add_decoder(self, decoder: nn.Module, layers: Sequence[nn.Module]) -> bool:
        """Also leave out what the decoder does around compiled layers, if it is plain."""
        if self._stack is not None and is_plain_decoder(decoder):
            self._direct = DirectDecoder(decoder, layers, self._stack)
        return self._direct is not None

    def drop_decoder(self) -> None:
        """Undo ``add_decoder``."""
        self._direct = None

    def direct(self, packed: PackedPass) -> DirectDecoder | None:
        """What runs this pass in the decoder's place, if anything may."""
        one = self._direct
        if one is None or not (self._layers_watch.is_unchanged() and one.can_run(packed)):
            return None
        return one

    def choose(self, candidates: Sequence[Kernel], spare_bytes: int) -> None:
        """Give every product its kernels by measurement, while memory for copies lasts."""
        choices = KernelChoices(candidates)
        by_shape: dict[str, list[FastLinear]] = {}
        for fast in self.linears:
            by_shape.setdefault(fast.weights.shape, []).append(fast)
        for shape, group in by_shape.items():
            weights = [fast.weights for fast in group]
            max_copies = min(spare_bytes // sum(w.num_bytes for w in weights), len(candidates) - 1)
            kernels = choices.get(
                f"{len(group)} × {shape}, {max_copies} copies",
                partial(choose_kernels, weights, candidates, max_copies),
            )
            for fast in group:
                fast.use(kernels)
                spare_bytes -= fast.copied_bytes

    def use(self, kernel: Kernel) -> None:
        """One kernel for everything."""
        for fast in self.linears:
            fast.use((kernel,) * len(fast.kernels))

    def _fast(self, weights: Weights) -> FastLinear:
        self.linears.append(FastLinear(weights))
        return self.linears[-1]


class _RopeFactors:
    """``rope_factors`` of the cosines that all layers of a pass share."""

    def __init__(self) -> None:
        self._cos: torch.Tensor | None = None
        self._factors: tuple[torch.Tensor, torch.Tensor] | None = None

    def of(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._cos is not cos or self._factors is None:
            self._cos, self._factors = cos, rope_factors(cos, sin)
        return self._factors


def _lean_forward(
    layer: nn.Module, stand_in: StandIn, factors: _RopeFactors
) -> Callable[..., torch.Tensor]:
    own = layer.forward

    def forward(
        hidden_states: torch.Tensor,
        *args: Any,
        position_embeddings: Any = None,
        draftwood_pass: PackedPass | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if draftwood_pass is None:  # the user's own call, while we run in another thread
            result: torch.Tensor = own(
                hidden_states, *args, position_embeddings=position_embeddings, **kwargs
            )
            return result
        rope = factors.of(*position_embeddings)
        return stand_in.forward(hidden_states[0], rope, draftwood_pass)[None]

    return forward


def _linear_forward(fast: FastLinear) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, input.shape[-1])
        return fast(rows).view(*input.shape[:-1], -1)

    return forward
