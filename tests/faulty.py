"""Workers that fail on purpose, in threads and processes."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

from draftwood.ahead.channel import Channel, Connect
from draftwood.ahead.emulate import EmulatedBranches
from draftwood.ahead.messages import Drafted, Reply, Request
from draftwood.draft.base import Committed, DraftContext, Drafter, DraftLimits
from draftwood.draft.branches import BranchDraft
from draftwood.draft.independent import IndependentDrafter
from draftwood.tree.tree import DraftTree, IntArray, ScoredPrefixes
from oracle import NoisyOracleDrafter

HANG_S = 2.0


@dataclass(frozen=True)
class Fault:
    """What goes wrong, where, and at which call of that kind."""

    stage: str
    effect: str
    call: int = 2


@dataclass(frozen=True)
class Faulty:
    """Makes oracle drafters with a fault; survives pickling."""

    future: dict[tuple[int, ...], list[int]]
    fault: Fault | None = None
    make: Callable[[], IndependentDrafter] | None = None

    def __call__(self) -> Drafter:
        drafter = NoisyOracleDrafter(self.future) if self.make is None else self.make()
        if self.fault is None:
            return drafter
        if self.fault.stage == "start":
            fail(self.fault.effect)
        if isinstance(drafter, NoisyOracleDrafter):
            return FaultyDrafter(EmulatedBranches(drafter), self.fault)
        return FaultyDrafter(drafter, self.fault)


def fail(effect: str) -> None:
    if effect == "raise":
        raise RuntimeError("on purpose")
    if effect == "exit":
        os._exit(3)
    if effect == "hang":
        time.sleep(HANG_S)


class FaultyDrafter:
    """A drafter that fails at the n-th call of one kind."""

    taps: tuple[int, ...] = ()

    def __init__(self, drafter: EmulatedBranches | IndependentDrafter, fault: Fault) -> None:
        self.horizon = drafter.horizon
        self.has_soft = getattr(drafter, "has_soft", True)
        self._drafter = drafter
        self._fault = fault
        self._calls = 0

    def propose(self, contexts: Sequence[DraftContext], limits: DraftLimits) -> ScoredPrefixes:
        return self._spoiled("propose", self._drafter.propose(contexts, limits))

    def draft_branches(
        self,
        contexts: Sequence[DraftContext],
        tree: DraftTree,
        anchors: IntArray,
        num_rows: int | None = None,
    ) -> list[BranchDraft]:
        self._meets("branch")
        return self._drafter.draft_branches(contexts, tree, anchors, num_rows)

    def adopt(
        self, contexts: Sequence[DraftContext], drafts: Sequence[BranchDraft], limits: DraftLimits
    ) -> ScoredPrefixes:
        return self._spoiled("adopt", self._drafter.adopt(contexts, drafts, limits))

    def observe(self, committed: Sequence[Committed]) -> None:
        self._meets("observe")
        self._drafter.observe(committed)

    def truncate(self, seq_id: int, length: int) -> None:
        self._meets("truncate")
        self._drafter.truncate(seq_id, length)

    def release(self, seq_id: int) -> None:
        self._meets("release")
        self._drafter.release(seq_id)

    def _spoiled(self, stage: str, scored: ScoredPrefixes) -> ScoredPrefixes:
        if not self._meets(stage):
            return scored
        return replace(scored, token_ids=scored.token_ids + 10**6)

    def _meets(self, stage: str) -> bool:
        """Fail if it is time to; whether the result is to be spoiled."""
        if stage != self._fault.stage:
            return False
        self._calls += 1
        if self._calls != self._fault.call:
            return False
        fail(self._fault.effect)
        return self._fault.effect == "garbage"


@dataclass
class LossyChannel:
    """Loses, repeats or spoils the replies of a worker at given numbers.

    ``lost``: it never comes. ``twice``: the reply before comes again first. ``spoiled``: something
    else comes instead. ``gone``: the worker ends there.
    """

    channel: Channel
    plan: dict[int, str]
    count: int = 0
    waiting: list[Reply] = field(default_factory=list)
    last: Reply | None = None

    def send(self, request: Request) -> None:
        self.channel.send(request)

    def receive(self, timeout_s: float) -> Reply | None:
        if self.waiting:
            return self.waiting.pop()
        reply = self.channel.receive(timeout_s)
        if not isinstance(reply, Drafted):
            return reply
        self.count += 1
        before, self.last = self.last, reply
        what = self.plan.get(self.count)
        if what == "lost":
            return None
        if what == "spoiled":
            return replace(reply, scored="nonsense")  # type: ignore[arg-type]
        if what == "gone":
            self.channel.close()
            return None
        if what == "twice" and before is not None:
            self.waiting.append(reply)
            return before
        return reply

    def close(self) -> None:
        self.channel.close()


@dataclass
class Lossy:
    """Connects through a ``LossyChannel``; every worker has the same faults."""

    connect: Connect
    plan: dict[int, str]

    def __call__(self) -> Channel:
        return LossyChannel(self.connect(), self.plan)


class StopsMidway:
    """Begins to answer and stops there, with half a message on its way."""

    def __call__(self) -> Drafter:
        pipes = [one for one in gc.get_objects() if isinstance(one, Connection)]
        os.write(pipes[0].fileno(), (1000).to_bytes(4, "big") + b"half")
        time.sleep(60.0)
        raise AssertionError
