"""Kernels for a model: built, compared with its own forward, chosen by measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from draftwood.target.attention import PackedPass
from draftwood.target.cache import KVCache
from draftwood.target.choices import KernelChoices
from draftwood.target.kernels import KernelConfig, Kernels
from draftwood.target.lean import is_plain_linear, weights_of
from draftwood.target.linear import default_kernels
from draftwood.target.memory import available_bytes
from draftwood.target.native import load_native
from draftwood.target.native_layer import is_native_shaped
from draftwood.tree.tree import NO_PARENT, DraftTree

# Models with less weights than this stay as they are: they run from the processor's caches.
MIN_BYTES = 16 * 2**20
# Largest accepted ‖fast − own‖ / ‖own‖ of the decoder's output. Rounding stays far below; a layer
# that was misread lies far above.
TOLERANCE = 1e-4

_TIMED_PASSES = 4

Run = Callable[[PackedPass], torch.Tensor]


def build_kernels(
    decoder: nn.Module,
    layers: Sequence[nn.Module],
    head: nn.Module,
    run: Run,
    config: KernelConfig,
) -> Kernels:
    """Kernels for a model: built, compared with its own forward, chosen by measurement.

    Takes a second or two at the first load of a small model. What does not reproduce the model's
    own output is not used.

    Args:
        decoder: everything but the head.
        layers: its layers.
        head: the language model head.
        run: the decoder's [N, hidden_size] output of a packed pass, whatever forwards its modules
            have at the moment.
        config: what may be used.
    """
    num_bytes = sum(weights_of(part).num_bytes for part in _linears((*layers, head)))
    is_forced = config.candidates is not None or config.native
    if num_bytes < (1 if is_forced else MIN_BYTES):
        return Kernels()
    first = _RecordingPass(len(layers))
    own = run(first)
    native = _native_kernels(layers, head, run, config, first.windows, own, num_bytes)
    if native is not None:
        if native.add_decoder(decoder, layers) and not _direct_agrees(run, native, len(layers)):
            native.drop_decoder()
        return native
    for lean in (True, False) if config.lean_layers else (False,):
        kernels = Kernels()
        kernels.add_layers(layers, first.windows, lean)
        kernels.add_head(head)
        if not _agrees(own, run, kernels, len(layers)):
            continue
        _choose(kernels, config)
        if _agrees(own, run, kernels, len(layers)):
            return kernels
    return Kernels()


def _native_kernels(
    layers: Sequence[nn.Module],
    head: nn.Module,
    run: Run,
    config: KernelConfig,
    windows: Sequence[int | None],
    own: torch.Tensor,
    num_bytes: int,
) -> Kernels | None:
    """The compiled kernels, if they can run this model, do it right, and are the fastest."""
    wanted = config.native or (config.native is None and config.candidates is None)
    native = load_native() if wanted else None
    if native is None or not all(is_native_shaped(layer, native) for layer in layers):
        return None
    if not config.native and num_bytes > config.memory_share * available_bytes():
        return None
    kernels = Kernels()
    kernels.add_native(native, layers, windows, head)
    if not _agrees(own, run, kernels, len(layers)):
        return None
    if config.native:
        return kernels

    def is_faster() -> bool:
        rival = Kernels()
        rival.add_layers(layers, windows, config.lean_layers)
        rival.add_head(head)
        rival.use(default_kernels()[-1])
        times = [_pass_s(run, each, len(layers)) for each in (kernels, rival)]
        return times[0] < times[1]

    shapes = sorted({weights_of(part).shape for part in _linears(layers)})
    key = f"native, {len(layers)} layers, {', '.join(shapes)}"
    return kernels if KernelChoices(default_kernels()).is_faster(key, is_faster) else None


def _linears(roots: Sequence[nn.Module]) -> Iterator[nn.Module]:
    return (part for root in roots for part in root.modules() if is_plain_linear(part))


@torch.no_grad()
def _pass_s(run: Run, kernels: Kernels, num_layers: int) -> float:
    """Seconds of a small tree's pass; the least of a few, since only delays disturb."""
    seconds = []
    with kernels.active():
        for _ in range(_TIMED_PASSES):
            packed = _RecordingPass(num_layers)
            start = time.perf_counter()
            run(packed)
            seconds.append(time.perf_counter() - start)
    return min(seconds)


def _choose(kernels: Kernels, config: KernelConfig) -> None:
    candidates = default_kernels() if config.candidates is None else config.candidates
    if len(candidates) == 1:
        kernels.use(candidates[0])
    else:
        kernels.choose(candidates, int(config.memory_share * available_bytes()))


@torch.no_grad()
def _agrees(own: torch.Tensor, run: Run, kernels: Kernels, num_layers: int) -> bool:
    with kernels.active():
        fast = run(_RecordingPass(num_layers))
    return bool((fast - own).norm() <= TOLERANCE * own.norm())


@torch.no_grad()
def _direct_agrees(run: Run, kernels: Kernels, num_layers: int) -> bool:
    """Whether the pass without the decoder's own forward gives what the pass with it gives."""
    cache = KVCache(num_layers)
    with kernels.active():
        run(_RecordingPass(num_layers, cache))  # the first window of a cache has no buffers yet
        cache.commit(np.arange(1))
        own = run(_RecordingPass(num_layers, cache))
        cache.commit(np.arange(0))
    packed = _RecordingPass(num_layers, cache)
    direct = kernels.direct(packed)
    if direct is None:
        return False
    try:
        hidden, _ = direct.forward(packed)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False  # modules that want to be called in another way
    return hidden.shape == own.shape and bool((hidden - own).norm() <= TOLERANCE * own.norm())


class _RecordingPass(PackedPass):
    """A small packed tree that notes which sliding window each layer gives to its attention."""

    def __init__(self, num_layers: int, cache: KVCache | None = None) -> None:
        parents = np.array([NO_PARENT, 0, 0, 1, 1, 4, 5, 2])
        depths = np.array([0, 1, 1, 2, 2, 3, 4, 2])
        size = len(parents)
        seq = np.zeros(size, dtype=np.int64)
        tree = DraftTree(np.arange(size) + 1, parents, depths, seq, np.array([0, size]))
        super().__init__(tree, [cache or KVCache(num_layers)])
        self.windows: list[int | None] = []

    def views(
        self, window: int | None, repeats: int, device: torch.device, dtype: torch.dtype
    ) -> Any:
        self.windows.append(window)
        return super().views(window, repeats, device, dtype)
