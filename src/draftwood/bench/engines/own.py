"""This package's engine as a method of the benchmark."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from draftwood.ahead.drafter import AheadDrafter
from draftwood.bench.engines.base import Batch, Generation
from draftwood.bench.engines.memory import PeakMemory
from draftwood.bench.reliability import Reliability
from draftwood.bench.runs import Request, rerun_row
from draftwood.draft.base import Drafter
from draftwood.engine import Engine
from draftwood.records import Output
from draftwood.target.model import Target
from draftwood.tree.budget import BudgetPolicy, CycleState
from draftwood.tree.latency import LatencyModel
from draftwood.tree.tree import IntArray, ScoredPrefixes

_SHARED = (torch.Tensor, nn.Module, Target)


class OwnRunner:
    """Draftwood's loop.

    Every run gets a drafter that has learned nothing, so that a result depends on the prompt alone
    and not on what ran before it. What is known about the machine's speed stays: the latency model
    and the policy, and with them the calibration of scores. A drafter that works ahead has a worker
    and is the same for all runs.

    Args:
        template: an engine as ``draftwood.load`` makes it; it is not used itself.
        constant: its policy, where that does not depend on the clock.
    """

    max_concurrency: int | None = None
    promises_identity = True

    def __init__(self, template: Engine, constant: BudgetPolicy | None) -> None:
        self._template = template
        self._constant = constant
        self._target = template.target

    def run(self, requests: Sequence[Request]) -> Batch:
        listener = Reliability()
        engine = self._engine(len(requests), listener)
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
        details = {"reliability": listener.counts()}
        return Batch(
            [_generation(outputs[i], arrivals.get(i, [])) for i in ids], now - begin,
            kv_bytes, peak.read(), details,
        )  # fmt: skip

    def row(
        self, requests: Sequence[Request], batch: Sequence[list[int]], index: int, position: int,
        budgets: Sequence[int] | None,
    ) -> torch.Tensor | None:  # fmt: skip
        policy = self._constant or Replay(budgets or ())
        engine = Engine(self._target, self._drafter(), policy, max_batch=len(requests))
        return rerun_row(engine, requests, index, position)

    def _engine(self, max_batch: int, listener: Reliability) -> Engine:
        known = self._template
        return Engine(
            self._target, self._drafter(), known.policy, latency=known.latency,
            surrogate=known.surrogate, max_batch=max_batch, on_cycle=listener,
        )  # fmt: skip

    def _drafter(self) -> Drafter:
        known = self._template.drafter
        return known if isinstance(known, AheadDrafter) else fork(known)

    def close(self) -> None:
        if isinstance(self._template.drafter, AheadDrafter):
            self._template.drafter.close()


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
