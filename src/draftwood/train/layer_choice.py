"""Which layer of a drafter to remove next: by acceptance without it, or by simpler rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draftwood.draft.independent_network import IndependentNetwork, split_rows
from draftwood.train.anchors import Example
from draftwood.train.conditionals import markov_tables
from draftwood.train.evaluate import Drafted, anchor_batch, anchor_hidden, loop_cycles
from draftwood.tree.tree import FloatArray

ORDERS = ("acceptance", "cosine", "last", "random")

_MIN_RESPONSES = 8  # below that a spread is not known


@dataclass(frozen=True)
class LayerScore:
    """What removing one layer would do.

    Attributes:
        layer: index in the drafter.
        score: larger is less harmful. For ``acceptance`` the τ without it.
        num_responses: responses it was measured on; less than all where it was surely worse.
    """

    layer: int
    score: float
    num_responses: int = 0


def rank_layers(
    network: IndependentNetwork,
    order: str,
    examples: Sequence[Example],
    *,
    budget: int,
    confidence: float = 3.0,
    seed: int = 0,
    block_size: int | None = None,
    among: Sequence[int] | None = None,
) -> list[LayerScore]:
    """Layers, the least harmful to remove first.

    Args:
        order: ``acceptance`` (D3D), ``cosine`` (the layer that turns its input least), ``last``
            or ``random``.
        examples: held-out responses.
        budget: of the tree whose acceptance counts; 0 is the chain.
        confidence: see ``race``.
        seed: of the random order.
        block_size: rows of the drafted blocks where acceptance counts, the drafter's own if None.
        among: the layers that compete; all if None.

    Raises:
        ValueError: an unknown order, or no response to measure on.
    """
    count = len(network.layers)
    layers = sorted(range(count) if among is None else among)
    if order == "last":
        return [LayerScore(i, float(i)) for i in reversed(layers)]
    if order == "random":
        keys = np.random.default_rng([seed, count]).random(count)
        scores = [LayerScore(i, float(keys[i])) for i in layers]
        return sorted(scores, key=lambda one: -one.score)
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, got {order!r}")
    if not examples:
        raise ValueError("there is no held-out response to choose layers by")
    if order == "cosine":
        ranking = _by_cosine(network, examples)
        return [one for one in ranking if one.layer in layers]
    seen: list[_Response] = []  # the one at hand
    with torch.autocast(network.device.type, enabled=False):  # scores are never in mixed precision
        tables = markov_tables(network)

    def cycles_of(layer: int, example: Example) -> int:
        if not seen or seen[-1].example is not example:
            seen[:] = [_Response(network, example, block_size)]
        return loop_cycles(network, example, budget, seen[-1].without(layer), tables)

    return race(cycles_of, layers, examples, confidence)


class _Response:
    """A response drafted without one layer, for any layer; what comes before it is shared."""

    def __init__(
        self, network: IndependentNetwork, example: Example, block_size: int | None = None
    ) -> None:
        self.example = example
        self._network = network
        self._batch = anchor_batch(network, example, block_size)
        b = self._batch
        x, positions, self._attend = network.pack(b.context_ids, b.anchor_positions, b.block_ids)
        self._turn = network.angles(positions)
        self._first = self._input = x
        self._before = 0  # layer that ``_input`` goes into

    @torch.no_grad()
    def without(self, layer: int) -> Drafted:
        """As ``anchor_hidden`` of ``network.without(layer)``; cheapest in ascending order."""
        if layer < self._before:
            self._input, self._before = self._first, 0
        while self._before < layer:
            self._input = self._run(self._input, self._before)
            self._before += 1
        x = self._input
        for later in range(layer + 1, len(self._network.layers)):
            x = self._run(x, later)
        b = self._batch
        return split_rows(self._network.norm(x), b.context_ids, b.block_ids)[1][0], b

    def _run(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        one = self._network.stack()[layer]
        return one(x, self._turn, lambda q, k, v: self._attend(layer, q, k, v))


def race(
    cycles_of: Callable[[int, Example], int],
    layers: Sequence[int],
    examples: Iterable[Example],
    confidence: float = 3.0,
) -> list[LayerScore]:
    """Compare layers response by response; those that are surely worse stop early.

    All see the same responses, so the *difference* in cycles to the leader is compared: a layer
    is out when it exceeds zero by ``confidence`` standard errors.

    Args:
        cycles_of: (layer, response) → cycles that the loop takes without that layer.
    """
    cycles: dict[int, list[int]] = {layer: [] for layer in layers}
    tokens: list[int] = []
    alive = list(layers)
    for example in examples:
        if example.num_anchors == 0:
            continue
        tokens.append(example.num_anchors)
        for layer in alive:
            cycles[layer].append(cycles_of(layer, example))
        if len(tokens) >= _MIN_RESPONSES:
            leader = min(alive, key=lambda layer: sum(cycles[layer]))
            lead = np.array(cycles[leader], dtype=np.float64)
            alive = [i for i in alive if not _surely_above(cycles[i] - lead, confidence)]
    scores = [
        LayerScore(i, sum(tokens[: len(seen)]) / max(sum(seen), 1), len(seen))
        for i, seen in cycles.items()
    ]
    return sorted(scores, key=lambda one: (-one.num_responses, -one.score, one.layer))


def _surely_above(difference: FloatArray, confidence: float) -> bool:
    error = difference.std(ddof=1) / np.sqrt(len(difference))
    return bool(difference.mean() > confidence * error)


@torch.no_grad()
def _by_cosine(network: IndependentNetwork, examples: Sequence[Example]) -> list[LayerScore]:
    """Mean cosine between the input and the output of every layer, over all rows."""
    sums, rows = np.zeros(len(network.layers)), 0

    def watch(layer: int) -> Callable[..., None]:
        def hook(_module: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            sums[layer] += float(torch.cosine_similarity(inputs[0], output, dim=-1).sum())

        return hook

    handles = [one.register_forward_hook(watch(i)) for i, one in enumerate(network.layers)]
    try:
        for example in examples:
            if example.num_anchors:
                _, batch = anchor_hidden(network, example)
                rows += batch.num_rows + batch.context_ids.numel()
    finally:
        for handle in handles:
            handle.remove()
    scores = [LayerScore(i, total / max(rows, 1), len(examples)) for i, total in enumerate(sums)]
    return sorted(scores, key=lambda one: -one.score)
