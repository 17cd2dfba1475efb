"""Asynchronous drafting: while the target verifies, draft for what may come of it (D3D).

``AheadDrafter`` stands in for a drafter that needs nothing but tokens. The drafter itself lives in
a worker; every call becomes a message. If the walk ends as a branch foresaw, the next draft is
there already. None of this can change the output, and a worker that fails costs time only: while
it is away, prompt lookup drafts in its place.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

from draftwood.ahead.channel import Connect
from draftwood.ahead.link import Link
from draftwood.ahead.messages import Ahead, Draft, Observe, Outbox, Release, Truncate
from draftwood.ahead.planner import AheadOptions, Branches, Planner
from draftwood.ahead.proposal import narrowed, problem
from draftwood.ahead.refusal import check_ready
from draftwood.draft.base import AheadStats, Committed, DraftContext, DraftLimits
from draftwood.draft.lookup import LookupDrafter
from draftwood.tree.tree import DraftTree, ScoredPrefixes

_REMEMBERED = 1024  # released sequences that a failed worker may not have heard of


class AheadDrafter:
    """Drafts for the likely outcomes of a verification while it runs.

    Args:
        link: keeps the worker alive, or what starts one (``InThread``, ``InProcess``).
        options: what to draft ahead.
        vocab_size: of the target, to check replies against.

    Attributes:
        planner: what it has learned about time and chances.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self,
        link: Link | Connect,
        options: AheadOptions | None = None,
        *,
        vocab_size: int | None = None,
    ) -> None:
        self.options = options if options is not None else AheadOptions()
        self.planner = Planner(self.options)
        self._link = link if isinstance(link, Link) else Link(link)
        self._vocab_size = vocab_size
        self._standby = LookupDrafter()
        self._outbox = Outbox()
        self._reported: dict[int, int] = {}  # tokens that this worker knows, by sequence
        self._released: deque[int] = deque(maxlen=_REMEMBERED)
        self._generation = 0
        self._serial = 0
        self._full: tuple[list[int], ScoredPrefixes] | None = None
        self._branches: tuple[list[int], Branches] | None = None
        self._begun_at: float | None = None  # the branches of this cycle
        self._stats: dict[int, AheadStats] = {}
        weakref.finalize(self, self._link.close)

    @property
    def horizon(self) -> int:
        ready = self._link.ready
        return ready.horizon if ready is not None else self._standby.horizon

    @property
    def counters(self) -> Counter[str]:
        """Workers started and what became of them; see ``Link``."""
        return self._link.counters

    @property
    def last_error(self) -> str | None:
        """Why the last worker was given up."""
        return self._link.last_error

    def wait_ready(self, at_most_s: float | None = None) -> bool:
        """Wait until the worker can draft.

        Args:
            at_most_s: seconds after which a worker that is still starting is left to itself:
                prompt lookup drafts until it is ready. None: as long as the link allows.

        Returns:
            Whether it can.

        Raises:
            ValueError: its drafter needs target features, or never drafts.
            DraftwoodError: it did not start.
        """
        ready = self._link.wait_ready(at_most_s)
        if ready is not None:
            check_ready(ready)
        return ready is not None

    def close(self) -> None:
        """End the worker."""
        self._link.close()

    # ---- the drafter's calls ----------------------------------------------------------------

    def propose(self, contexts: Sequence[DraftContext], limits: DraftLimits) -> ScoredPrefixes:
        """The worker's draft, from a branch where one came true; prompt lookup without a worker."""
        full = self._ask(contexts, limits)
        if full is None:
            self._branches = self._full = None
            self._stats.update((c.seq_id, AheadStats("standby")) for c in contexts)
            return narrowed(self._standby.propose(contexts, limits), limits)
        self._full = [context.seq_id for context in contexts], full
        return narrowed(full, limits)

    def prefetch(self, contexts: Sequence[DraftContext], tree: DraftTree) -> None:
        """Start drafting for the likely outcomes of ``tree``."""
        full, self._full = self._full, None
        self._branches = None
        seq_ids = [context.seq_id for context in contexts]
        if full is None or full[0] != seq_ids or not self._is_up():
            return
        assert self._link.ready is not None
        has_soft = self._link.ready.has_soft
        branches = self.planner.branches(contexts, full[1], tree, has_soft=has_soft)
        if branches is None:
            return
        self._catch_up(contexts)
        updates = self._outbox.updates(contexts)
        rows = self.planner.head_rows(len(branches.anchors))
        self._link.tell(Ahead(updates, branches.tree, branches.anchors, rows))
        self._branches = seq_ids, branches
        self._begun_at = time.perf_counter()
        for s, seq_id in enumerate(seq_ids):
            self._stats[seq_id] = replace(
                self._stats[seq_id],
                num_branches=int(branches.num_branches[s]),
                hit_prob=float(branches.hit_probs[s]),
            )

    def observe(self, committed: Sequence[Committed]) -> None:
        """Pass on committed tokens; what a worker missed it hears when it drafts again."""
        self.planner.learn_picks(committed)
        begun_at, self._begun_at = self._begun_at, None
        if begun_at is not None:
            self.planner.pace.observe_window(time.perf_counter() - begun_at)
        for record in committed:
            stats = self._stats.get(record.seq_id)
            if stats is not None and record.picks:
                self.planner.learn_tokens(stats.source, len(record.picks))
                if stats.source == "standby":
                    self._standby.observe([record])
        if not self._is_up():
            return
        news = [r for r in committed if self._reported.get(r.seq_id, 0) == r.start]
        for record in news:
            self._reported[record.seq_id] = record.start + len(record.token_ids)
        if news:
            self._link.tell(Observe(tuple(replace(record, features=None) for record in news)))

    def truncate(self, seq_id: int, length: int) -> None:
        """Forget tokens at positions ≥ ``length``."""
        self._standby.truncate(seq_id, length)
        self._outbox.forget(seq_id)
        if seq_id in self._reported:
            self._reported[seq_id] = min(self._reported[seq_id], length)
            self._link.tell(Truncate(seq_id, length))

    def release(self, seq_id: int) -> None:
        """Drop all state of a sequence."""
        self._standby.release(seq_id)
        self._outbox.forget(seq_id)
        self._stats.pop(seq_id, None)
        if self._reported.pop(seq_id, None) is not None:
            self._released.append(seq_id)
            self._link.tell(Release(seq_id))

    def take_stats(self, seq_id: int) -> AheadStats | None:
        """What the present cycle of a sequence had to do with drafting ahead; once."""
        return self._stats.pop(seq_id, None)

    # ---- the worker -------------------------------------------------------------------------

    def _is_up(self) -> bool:
        """Whether the worker can be asked. A new one knows nothing."""
        if not self._link.is_up():
            return False
        if self._generation != self._link.generation:
            self._generation = self._link.generation
            assert self._link.ready is not None
            try:
                check_ready(self._link.ready)
            except ValueError as error:  # it started too late to be refused by ``wait_ready``
                self._link.fail("refused", str(error))
                self._link.close()  # the next would be no better
                return False
            for seq_id in {*self._released, *self._reported}:
                self._link.tell(Release(seq_id))  # its drafter may be the one of the last worker
            self._released.clear()
            self._reported.clear()
            self._outbox.forget()
        return True

    def _ask(self, contexts: Sequence[DraftContext], limits: DraftLimits) -> ScoredPrefixes | None:
        """The worker's prefixes, more than were asked for; None if there is no worker."""
        branches = self._take_branches(contexts)
        if not contexts or not self._is_up():
            return None
        self._catch_up(contexts)
        self._serial += 1
        request = Draft(
            self._serial,
            self._outbox.updates(contexts),
            self.planner.widened(limits),
            miss_depth=self.planner.miss_depth(self.horizon),
            allow_soft=self.planner.takes_soft(),
        )
        reply = self._link.ask(request, self.options.timeout_s)
        if reply is None:
            return None
        wrong = problem(reply, contexts, self._vocab_size)
        if wrong is not None:
            self._link.fail("garbage", wrong)
            return None
        self.planner.learn(reply, branches)
        for context, source in zip(contexts, reply.sources, strict=True):
            self._stats[context.seq_id] = AheadStats(source)
        return reply.scored

    def _take_branches(self, contexts: Sequence[DraftContext]) -> Branches | None:
        """What was drafted ahead for just these sequences."""
        last, self._branches = self._branches, None
        if last is None:
            return None
        seq_ids, branches = last
        return branches if seq_ids == [context.seq_id for context in contexts] else None

    def _catch_up(self, contexts: Sequence[DraftContext]) -> None:
        """Report the committed tokens that the worker has not seen."""
        records = []
        for context in contexts:
            start, anchor = self._reported.get(context.seq_id, 0), len(context.token_ids) - 1
            if start < anchor:
                tokens = list(context.token_ids[start:anchor])
                records.append(Committed(context.seq_id, start, tokens, None, [], 0))
            self._reported[context.seq_id] = anchor
        if records:
            self._link.tell(Observe(tuple(records)))
