"""What to draft ahead, and what is learned from what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from draftwood.ahead.choice import Choice, Likeliest, check_count
from draftwood.ahead.messages import Drafted
from draftwood.ahead.miss import MissDepth
from draftwood.ahead.outcomes import branch_tree, columns_of, frontier
from draftwood.ahead.pace import Pace
from draftwood.draft.base import AheadSource, Committed, DraftContext, DraftLimits
from draftwood.draft.surrogate import Surrogate
from draftwood.tree.tree import DraftTree, IntArray, ScoredPrefixes

_CHAIN_NODES = 256  # prefixes among which a chain and its alternatives are looked for
_SPARE_PER_BRANCH = 4  # further prefixes, to find the outcomes of a tree in
_LONGEST_S = 86_400.0
_FIRST_REST, _LONGEST_REST = 4, 64  # cycles without branches before one is tried again


@dataclass(frozen=True)
class AheadOptions:
    """How to draft ahead.

    Attributes:
        choice: which outcomes get a branch.
        num_branches: branches per pass, over all sequences; None: as many as fit into the time
            that the target takes, none if one does not.
        max_branches: bound for None.
        head_rows: rows that go through the drafter's head with a pass, shared out evenly, one per
            branch at least; the others follow for the branch that came true, where they matter.
            None: all; by ``load_ahead`` on a CPU, where the head costs as much as the rest, as
            many as cost little more than one.
        timeout_s: a worker that does not answer for so long is given up.
        start_wait_s: ``load_ahead`` waits so long for the first worker; then decoding begins
            without it.
    """

    choice: Choice = field(default_factory=Likeliest)
    num_branches: int | None = None
    max_branches: int = 32
    head_rows: int | None = None
    timeout_s: float = 60.0
    start_wait_s: float = 60.0

    def __post_init__(self) -> None:
        if not callable(getattr(self.choice, "choose", None)) or isinstance(self.choice, type):
            raise ValueError(f"choice must be Likeliest(…) or Grid(…), got {self.choice!r}")
        counts = {"num_branches": 0, "max_branches": 1, "head_rows": 1}
        for name, least in counts.items():
            check_count(name, getattr(self, name), least, optional=name != "max_branches")
        for name in ("timeout_s", "start_wait_s"):
            if not 0 < getattr(self, name) <= _LONGEST_S:
                raise ValueError(
                    f"{name} must be > 0 and at most {_LONGEST_S:g} seconds, got "
                    f"{getattr(self, name)}"
                )


@dataclass(frozen=True)
class Branches:
    """What to draft while a tree is verified.

    Attributes:
        tree, anchors: as ``draft_branches`` takes them.
        num_branches: [S] of each sequence.
        hit_probs: [S] predicted probability that the bonus token will have been foreseen.
    """

    tree: DraftTree
    anchors: IntArray
    num_branches: IntArray
    hit_probs: np.ndarray


class Planner:
    """Chooses branches, and learns how long they take and how often they come true.

    Attributes:
        pace: the seconds.
        surrogate: how often the drafter's scores come true; outcomes are weighed by it.
        planned: branches that a budget policy has settled on for the coming pass.
        is_asked_widely: whether a budget policy asks for outcomes beyond its tree by itself.
    """

    def __init__(self, options: AheadOptions) -> None:
        self.options = options
        self.pace = Pace(options.max_branches)
        self.surrogate = Surrogate()
        self.planned: int | None = None
        self.is_asked_widely = False
        self._asked: list[int] = []
        self._rested, self._rest = 0, _FIRST_REST
        self._misses = MissDepth()
        self._last_depth_is_whole = True

    def widened(self, limits: DraftLimits) -> DraftLimits:
        """What to ask the drafter for, so that the outcomes of the tree are among it too."""
        if limits.max_width is not None:
            return DraftLimits(max(limits.max_nodes, _CHAIN_NODES))
        spare = 0 if self.is_asked_widely else self.num_spare
        return DraftLimits(limits.max_nodes + spare)

    @property
    def num_spare(self) -> int:
        """Prefixes beyond a tree among which the outcomes are that branches could stand for."""
        return _SPARE_PER_BRANCH * self.most_branches

    @property
    def most_branches(self) -> int:
        """More branches than these will not be drafted in the coming pass."""
        fixed = self.options.num_branches
        return fixed if fixed is not None else self.pace.num_branches(np.inf)

    def head_rows(self, num_branches: int) -> int | None:
        """Rows of each of these branches that go through the head at once; None: all."""
        rows = self.options.head_rows
        return None if rows is None else max(rows // num_branches, 1)

    def miss_depth(self, horizon: int) -> int:
        """How deep a draft may go that the target has to wait for."""
        depth = self._misses.depth(horizon, self.pace.window_s or 0.0)
        self._last_depth_is_whole = depth == horizon
        return depth

    def takes_soft(self) -> bool:
        """Whether a branch without the bonus token is better than drafting now."""
        return self.pace.takes_soft(self.pace.window_s or 0.0)

    def branches(
        self,
        contexts: Sequence[DraftContext],
        scored: ScoredPrefixes,
        tree: DraftTree,
        *,
        has_soft: bool,
    ) -> Branches | None:
        """What to draft while ``tree`` is verified; None for nothing.

        Args:
            contexts: the sequences of ``tree``.
            scored: what the drafter said of them, more than is verified.
            tree: what is verified.
            has_soft: whether the drafter can leave the bonus token open.
        """
        if self.options.num_branches == 0:
            return None
        most, self.planned = self._most(), None
        self._asked = [context.seq_id for context in contexts]
        sampled = [context.sampler.noise is not None for context in contexts]
        scored = self.surrogate.calibrated(scored, sampled)
        if not most:
            return None
        columns = [columns_of(scored, s, tree, s) for s in range(len(contexts))]
        outcomes = frontier(scored, columns)
        # A path of depth d emits d + 1 tokens: without room for more there is nothing to draft.
        rooms = np.array([context.max_depth for context in contexts])[outcomes.seq]
        useful = rooms - outcomes.depths - 1 > 0
        useful &= has_soft | outcomes.is_known
        chosen = self.options.choice.choose(outcomes.take(useful), most)
        if len(chosen) == 0:
            return None
        wide, anchors = branch_tree(tree, chosen)
        size = len(contexts)
        known = np.where(chosen.is_known, chosen.probs, 0.0)
        return Branches(
            wide,
            anchors,
            np.bincount(chosen.seq, minlength=size),
            np.minimum(np.bincount(chosen.seq, weights=known, minlength=size), 1.0),
        )

    def learn(self, reply: Drafted, branches: Branches | None) -> None:
        """What became of ``branches`` (None: there were none)."""
        pace = self.pace
        if reply.ahead_s is not None and branches is not None:
            pace.observe_ahead(len(branches.anchors), reply.ahead_s)
        if reply.draft_s is not None:
            pace.observe_draft(reply.draft_s)
            self._misses.observe(self._last_depth_is_whole, reply.draft_s)
        if branches is not None:
            pace.hit_trust.observe(reply.sources.count("hit"), float(branches.hit_probs.sum()))

    def learn_picks(self, committed: Sequence[Committed]) -> None:
        """The target's own tokens after the prefixes that ``branches`` was last given."""
        asked, self._asked = self._asked, []
        if asked:
            picks = {record.seq_id: record.picks for record in committed}
            self.surrogate.learn([picks.get(seq_id, ()) for seq_id in asked])

    def learn_tokens(self, source: AheadSource, num_tokens: int) -> None:
        """Tokens of a cycle whose draft came from ``source``."""
        if source == "miss":
            self._misses.observe_tokens(self._last_depth_is_whole, num_tokens)
        self.pace.observe_tokens(source, num_tokens)

    def _most(self) -> int:
        """Branches of the coming pass."""
        if self.planned is not None:
            return self.planned or self._try_again()
        fits = self.options.num_branches or self.pace.num_branches()
        if fits:
            self._rested, self._rest = 0, _FIRST_REST
        return fits or self._try_again()

    def _try_again(self) -> int:
        """1 after ever longer rests, or what is known of the seconds would never change; else 0."""
        self._rested += 1
        if self._rested < self._rest:
            self.pace.observe_rest()
            return 0
        self._rested, self._rest = 0, min(2 * self._rest, _LONGEST_REST)
        return 1
