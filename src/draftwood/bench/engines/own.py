"""This package's engine as a method of the benchmark."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from draftwood.bench.engines.base import Batch, Generation
from draftwood.bench.engines.memory import PeakMemory
from draftwood.bench.reliability import Reliability
from draftwood.bench.runs import Request, rerun_row
from draftwood.draft.base import Drafter
from draftwood.draft.surrogate import Surrogate
from draftwood.engine import Engine
from draftwood.records import Output
from draftwood.target.measure import calibrated
from draftwood.target.model import Target
from draftwood.tree.budget import BudgetPolicy, CycleState
from draftwood.tree.latency import LatencyModel, OnlineLatency
from draftwood.tree.tree import IntArray, ScoredPrefixes

_SHARED = (torch.Tensor, nn.Module, Target)


class OwnRunner:
    """Draftwood's loop.

    Every run gets a drafter that has learned nothing, so that a result depends on the prompt alone
    and not on what ran before it. What is known about the machine's speed stays: the latency model
    and the policy.

    Args:
        target: the model.
        drafter: one that has not been used; copied for every run.
        new_policy: makes the budget policy.
        adapts: whether the budget depends on predictions: the machine is then measured, and the
            drafter's scores are calibrated as it goes, as ``draftwood.load`` does.
        wrap: applied to every copied drafter (asynchronous drafting).
    """

    max_concurrency: int | None = None
    promises_identity = True

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        new_policy: Callable[[], BudgetPolicy],
        *,
        adapts: bool = False,
        wrap: Callable[[Drafter], Drafter] = lambda drafter: drafter,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._new_policy = new_policy
        self._wrap = wrap
        self._policy = new_policy()
        self._adapts = adapts
        self._surrogate = Surrogate() if adapts else None
        curve = calibrated(target, drafter.taps) if adapts else None
        self._latency: LatencyModel = OnlineLatency(curve)

    def run(self, requests: Sequence[Request]) -> Batch:
        listener = Reliability()
        drafter = self._new_drafter()
        engine = Engine(
            self._target, drafter, self._policy, latency=self._latency,
            surrogate=self._surrogate, max_batch=len(requests), on_cycle=listener,
        )  # fmt: skip
        gc.collect()
        peak = PeakMemory(self._target.device)
        arrivals: dict[int, list[tuple[float, int]]] = {}
        outputs: dict[int, Output] = {}
        kv_bytes = 0
        begin = now = time.perf_counter()
        ids = [engine.add(request.prompt_ids, request.params) for request in requests]
        while engine.num_active:
            for event in engine.step():
                now = time.perf_counter()
                if event.token_ids:
                    arrival = (now - begin, len(event.token_ids))
                    arrivals.setdefault(event.seq_id, []).append(arrival)
                if event.output is not None:
                    outputs[event.seq_id] = event.output
            kv_bytes = max(kv_bytes, engine.kv_bytes)
        details: dict[str, Any] = {"reliability": listener.counts()}
        close = getattr(drafter, "close", None)
        if close is not None:
            close()
        return Batch(
            [_generation(outputs[i], arrivals.get(i, [])) for i in ids], now - begin,
            kv_bytes, peak.read(), details,
        )  # fmt: skip

    def row(
        self, requests: Sequence[Request], batch: Sequence[list[int]], index: int, position: int,
        budgets: Sequence[int] | None,
    ) -> torch.Tensor | None:  # fmt: skip
        replays = self._adapts and budgets is not None
        policy = Replay(budgets or ()) if replays else self._new_policy()
        engine = Engine(self._target, fork(self._drafter), policy, max_batch=len(requests))
        return rerun_row(engine, requests, index, position)

    def _new_drafter(self) -> Drafter:
        return self._wrap(fork(self._drafter))

    def close(self) -> None:
        pass


class Replay:
    """The budgets of a run that was timed, cycle by cycle, for one sequence."""

    def __init__(self, budgets: Sequence[int]) -> None:
        self._rest = list(budgets)
        self._now = 0

    def limits(self, state: CycleState, latency: LatencyModel) -> tuple[int, int | None]:
        self._now = self._rest.pop(0) if self._rest else 0
        return self._now, None

    def choose(self, scored: ScoredPrefixes, state: CycleState, latency: LatencyModel) -> IntArray:
        return np.minimum(scored.counts, self._now)

    def observe(
        self, scored: ScoredPrefixes, budgets: IntArray, accepted: Sequence[Sequence[int]]
    ) -> None:
        pass


def fork(drafter: Drafter) -> Drafter:
    """A copy with a state of its own; models and weights are shared."""
    return copy.deepcopy(drafter, {id(item): item for item in _models(drafter)})


def _models(drafter: Drafter) -> list[object]:
    """All tensors and models inside a drafter that has not been used."""
    found: list[object] = []
    seen: set[int] = set()
    todo: list[object] = [drafter]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, _SHARED):
            found.append(item)
        elif isinstance(item, Mapping):
            todo += item.values()
        elif isinstance(item, (list, tuple, set)):
            todo += item
        else:
            slots = [s for kind in type(item).__mro__ for s in getattr(kind, "__slots__", ())]
            todo += getattr(item, "__dict__", {}).values()
            todo += [getattr(item, slot) for slot in slots if hasattr(item, slot)]
    return found


def _generation(output: Output, arrivals: list[tuple[float, int]]) -> Generation:
    end = arrivals[-1][0] if arrivals else 0.0
    return Generation(
        output.token_ids, output.finish_reason, arrivals, output.prefill_s,
        max(end - output.prefill_s, output.decode_s), len(output.token_ids), output.cycles,
        output.error,
    )  # fmt: skip
