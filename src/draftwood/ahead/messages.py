"""What the engine's side and the drafting worker tell each other: plain data only.

The worker runs beside the target and must not read what the engine changes meanwhile, so it keeps
copies of the sequences and is told what was added to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from draftwood.draft.base import Committed, DraftContext, DraftLimits
from draftwood.sampling import Sampler, SamplingParams
from draftwood.tree.tree import DraftTree, IntArray, ScoredPrefixes

Source = Literal["hit", "soft", "miss"]
ANY_VOCABULARY = 1 << 40  # the engine has checked the request


@dataclass(frozen=True)
class Opening:
    """What never changes about a sequence."""

    prompt_len: int
    params: SamplingParams
    sample_index: int


@dataclass(frozen=True)
class Update:
    """The news about a sequence.

    Attributes:
        seq_id: the engine's id.
        start: position of ``token_ids[0]``.
        token_ids: committed tokens, anchor included, that the worker has not been told of.
        max_depth: as in ``DraftContext``.
        opening: with the first update; ``token_ids`` then starts at 0.
    """

    seq_id: int
    start: int
    token_ids: tuple[int, ...]
    max_depth: int
    opening: Opening | None


@dataclass(frozen=True)
class Draft:
    """Draft for these sequences: from the branches where one came true. Answered by ``Drafted``.

    Attributes:
        serial: number of the request.
        limits: of the proposal.
        miss_depth: deepest node where nothing came true.
        allow_soft: whether to take a branch that did not know the bonus token.
    """

    serial: int
    updates: tuple[Update, ...]
    limits: DraftLimits
    miss_depth: int
    allow_soft: bool


@dataclass(frozen=True)
class Ahead:
    """Draft branches while the target verifies. Not answered."""

    updates: tuple[Update, ...]
    tree: DraftTree
    anchors: IntArray
    num_rows: int | None


@dataclass(frozen=True)
class Observe:
    """Committed tokens."""

    committed: tuple[Committed, ...]


@dataclass(frozen=True)
class Truncate:
    """Forget positions ≥ ``length`` of a sequence."""

    seq_id: int
    length: int


@dataclass(frozen=True)
class Release:
    """Forget a sequence."""

    seq_id: int


Request = Draft | Ahead | Observe | Truncate | Release


@dataclass(frozen=True)
class Ready:
    """The worker has its drafter.

    Attributes:
        taps: target layers it needs; must be ().
        horizon: its deepest prefix.
        has_soft: whether it can draft from a node whose next token is unknown.
    """

    taps: tuple[int, ...]
    horizon: int
    has_soft: bool


@dataclass(frozen=True)
class Drafted:
    """Answer to ``Draft``.

    Attributes:
        serial: of the request.
        scored: one row per sequence.
        sources: where each row came from.
        draft_s: seconds of the drafter's pass for the misses; None without.
        ahead_s: seconds of the last pass over branches, once; None without.
    """

    serial: int
    scored: ScoredPrefixes
    sources: tuple[Source, ...]
    draft_s: float | None
    ahead_s: float | None


@dataclass(frozen=True)
class Failed:
    """The worker's last words."""

    error: str


Reply = Ready | Drafted | Failed


class Outbox:
    """The engine's side: what the worker knows of each sequence, hence what it must be told."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[Sampler, int]] = {}

    def updates(self, contexts: Sequence[DraftContext]) -> tuple[Update, ...]:
        """The news in ``contexts``; counts as told."""
        return tuple(self._update(context) for context in contexts)

    def forget(self, seq_id: int | None = None) -> None:
        """Begin anew with one sequence, or with all."""
        if seq_id is None:
            self._sent.clear()
        else:
            self._sent.pop(seq_id, None)

    def _update(self, context: DraftContext) -> Update:
        sampler, size = self._sent.get(context.seq_id, (None, 0))
        opening = None
        if sampler is not context.sampler:
            size = 0
            noise = context.sampler.noise
            index = noise.sample_index if noise is not None else 0
            opening = Opening(context.prompt_len, context.sampler.params, index)
        self._sent[context.seq_id] = (context.sampler, len(context.token_ids))
        news = tuple(context.token_ids[size:])
        return Update(context.seq_id, size, news, context.max_depth, opening)


@dataclass
class _Copy:
    token_ids: list[int]
    prompt_len: int
    sampler: Sampler


@dataclass
class Inbox:
    """The worker's side: its copies of the sequences."""

    _copies: dict[int, _Copy] = field(default_factory=dict)

    def contexts(self, updates: Sequence[Update]) -> list[DraftContext]:
        """Take in the news; the contexts are valid until the next."""
        return [self._context(update) for update in updates]

    def forget(self, seq_id: int) -> None:
        """Drop the copy of a sequence."""
        self._copies.pop(seq_id, None)

    def _context(self, update: Update) -> DraftContext:
        if update.opening is not None:
            self._copies[update.seq_id] = open_copy(update.opening, update.token_ids)
        else:
            copy = self._copies[update.seq_id]
            assert update.start == len(copy.token_ids), (update.start, len(copy.token_ids))
            copy.token_ids.extend(update.token_ids)
            copy.sampler.commit(update.token_ids)
        copy = self._copies[update.seq_id]
        return DraftContext(
            update.seq_id, copy.token_ids, copy.prompt_len, update.max_depth, copy.sampler
        )


def open_copy(opening: Opening, token_ids: Sequence[int]) -> _Copy:
    """A copy of a sequence; its sampler has the request's settings and noise, no processors."""
    sampler = Sampler(
        opening.params,
        token_ids[: opening.prompt_len],
        vocab_size=ANY_VOCABULARY,
        sample_index=opening.sample_index,
    )
    sampler.commit(token_ids[opening.prompt_len :])
    return _Copy(list(token_ids), opening.prompt_len, sampler)
