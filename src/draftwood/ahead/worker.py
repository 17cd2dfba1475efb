"""The drafting worker: owns the drafter, takes one request after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from draftwood.ahead.emulate import EmulatedBranches
from draftwood.ahead.messages import (
    Ahead,
    Draft,
    Drafted,
    Failed,
    Inbox,
    Observe,
    Ready,
    Release,
    Reply,
    Request,
    Source,
    Truncate,
)
from draftwood.draft.base import DraftContext, Drafter
from draftwood.draft.branches import BranchDraft, BranchDrafter
from draftwood.tree.tree import ScoredPrefixes

DrafterFactory = Callable[[], Drafter]


def serve(
    factory: DrafterFactory,
    receive: Callable[[], Request | None],
    send: Callable[[Reply], None],
) -> None:
    """Answer requests until ``receive`` gives None or something fails, which is reported."""
    try:
        desk = Desk(factory())
        send(desk.ready())
        while (request := receive()) is not None:
            reply = desk.handle(request)
            if reply is not None:
                send(reply)
    except Exception as error:  # whatever it is, the engine goes on without this worker
        send(Failed(f"{type(error).__name__}: {error}"))


class Desk:
    """A drafter, copies of its sequences, and the branches drafted for each."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = with_branches(drafter) if not drafter.taps else drafter
        self._inbox = Inbox()
        self._branches: dict[int, list[BranchDraft]] = {}
        self._ahead_s: float | None = None

    def ready(self) -> Ready:
        drafter = self._drafter
        return Ready(tuple(drafter.taps), drafter.horizon, getattr(drafter, "has_soft", True))

    def handle(self, request: Request) -> Reply | None:
        """Do what is asked; only ``Draft`` has an answer."""
        if isinstance(request, Draft):
            return self._draft(request)
        if isinstance(request, Ahead):
            self._draft_ahead(request)
        elif isinstance(request, Observe):
            self._drafter.observe(request.committed)
        elif isinstance(request, Truncate):
            self._forget(request.seq_id)
            self._drafter.truncate(request.seq_id, request.length)
        else:
            assert isinstance(request, Release), request
            self._forget(request.seq_id)
            self._drafter.release(request.seq_id)
        return None

    def _forget(self, seq_id: int) -> None:
        self._inbox.forget(seq_id)
        self._branches.pop(seq_id, None)

    def _draft_ahead(self, request: Ahead) -> None:
        begin = time.perf_counter()
        contexts = self._inbox.contexts(request.updates)
        for context in contexts:
            self._branches.pop(context.seq_id, None)
        branching: BranchDrafter = self._drafter  # type: ignore[assignment]
        for branch in branching.draft_branches(
            contexts, request.tree, request.anchors, request.num_rows
        ):
            self._branches.setdefault(branch.seq_id, []).append(branch)
        self._ahead_s = time.perf_counter() - begin

    def _draft(self, request: Draft) -> Drafted:
        contexts = self._inbox.contexts(request.updates)
        found = [self._find(context, request.allow_soft) for context in contexts]
        hits = [i for i, (branch, _) in enumerate(found) if branch is not None]
        misses = [i for i, (branch, _) in enumerate(found) if branch is None]
        rows: dict[int, ScoredPrefixes] = {}
        if hits:
            branches = [branch for branch, _ in found if branch is not None]
            branching: BranchDrafter = self._drafter  # type: ignore[assignment]
            scored = branching.adopt([contexts[i] for i in hits], branches, request.limits)
            rows.update((i, scored.row(row)) for row, i in enumerate(hits))
        draft_s = self._propose([contexts[i] for i in misses], misses, request, rows)
        ahead_s, self._ahead_s = self._ahead_s, None
        scored = ScoredPrefixes.stack([rows[i] for i in range(len(contexts))])
        sources = tuple(source for _, source in found)
        return Drafted(request.serial, scored, sources, draft_s, ahead_s)

    def _propose(
        self,
        contexts: list[DraftContext],
        places: list[int],
        request: Draft,
        rows: dict[int, ScoredPrefixes],
    ) -> float | None:
        """Draft now for those that no branch serves; seconds it took."""
        if not contexts:
            return None
        begin = time.perf_counter()
        most = request.miss_depth
        shorter = [replace(one, max_depth=min(one.max_depth, most)) for one in contexts]
        scored = self._drafter.propose(shorter, replace(request.limits, max_depth=most))
        rows.update((place, scored.row(row)) for row, place in enumerate(places))
        return time.perf_counter() - begin

    def _find(self, context: DraftContext, allow_soft: bool) -> tuple[BranchDraft | None, Source]:
        """The branch that came true, the exact one first."""
        soft: BranchDraft | None = None
        for branch in self._branches.pop(context.seq_id, []):
            behind = branch.serves(context)
            if behind == 0:
                return branch, "hit"
            if behind == 1 and allow_soft:
                soft = branch
        return (soft, "soft") if soft is not None else (None, "miss")


def with_branches(drafter: Drafter) -> Drafter:
    """``drafter`` itself if it has a packed pass over branches, else one that emulates it."""
    return drafter if hasattr(drafter, "draft_branches") else EmulatedBranches(drafter)
