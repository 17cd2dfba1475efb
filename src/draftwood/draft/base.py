"""What a drafter is: the protocol, what it is told, and the drafter that never drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch

from draftwood.sampling import Sampler
from draftwood.tree.tree import DraftTree, ScoredPrefixes


@dataclass(frozen=True)
class DraftLimits:
    """How much a drafter may propose per sequence.

    Attributes:
        max_nodes: most drafted nodes per sequence (anchor excluded).
        max_width: most candidate tokens per depth; 1 asks for the single best chain, ``None``
            leaves the width to the drafter.
        max_depth: deepest node worth proposing; a block drafter may then run a shorter block,
            which is cheaper and a little less often right. ``None``: its horizon.
    """

    max_nodes: int
    max_width: int | None = None
    max_depth: int | None = None


@dataclass(frozen=True)
class DraftContext:
    """One sequence to draft for.

    Attributes:
        seq_id: the engine's id; a drafter keys its own state by it.
        token_ids: all committed tokens, prompt and output; ``token_ids[-1]`` is the anchor. The
            engine's own list: read it, do not keep or change it.
        prompt_len: number of prompt tokens in ``token_ids``.
        max_depth: deepest node that could still be emitted; 0 means propose nothing.
        sampler: the request's sampler, for its temperature, truncation and keyed noise.
    """

    seq_id: int
    token_ids: Sequence[int]
    prompt_len: int
    max_depth: int
    sampler: Sampler


@dataclass(frozen=True)
class Committed:
    """What one cycle (or one prefill chunk) added to a sequence; the drafter sees every token.

    Attributes:
        seq_id: the engine's id.
        start: position of ``token_ids[0]``; equals the number of tokens reported before.
        token_ids: tokens that entered the target's KV cache: [anchor, accepted nodes…], or a
            prefill chunk.
        features: [len(token_ids), num_taps · hidden] raw decoder-layer outputs of those tokens
            at the drafter's taps, concatenated in tap order; ``None`` when it has no taps.
        picks: the target's own tokens at depth 1, 2, … of this cycle's walk (accepted nodes, then
            the bonus token), before truncation at a stop; empty for prefill.
        num_drafted: nodes that were verified this cycle (0: the sequence decoded plainly).
    """

    seq_id: int
    start: int
    token_ids: Sequence[int]
    features: torch.Tensor | None
    picks: Sequence[int]
    num_drafted: int


class Drafter(Protocol):
    """Proposes prefixes. Never decides anything: the output is the target's whatever it says.

    ``observe`` is called for every committed token of a sequence in order and without gaps,
    also for cycles that decoded plainly and for prefill chunks. Sequences appear with their
    first ``observe`` or ``propose`` and end with ``release``, which must free all their memory.
    """

    @property
    def taps(self) -> tuple[int, ...]:
        """Target decoder layers whose raw outputs this drafter needs, () if none."""
        ...

    @property
    def horizon(self) -> int:
        """Deepest prefix it can propose (block_size − 1 for block diffusion); 0: never drafts."""
        ...

    def propose(self, contexts: Sequence[DraftContext], limits: DraftLimits) -> ScoredPrefixes:
        """The at most ``limits.max_nodes`` best prefixes of each context, best first."""
        ...

    def observe(self, committed: Sequence[Committed]) -> None:
        """Take in committed tokens and learn from the verdicts."""
        ...

    def truncate(self, seq_id: int, length: int) -> None:
        """Forget everything about positions ≥ ``length`` (a chat turn was edited)."""
        ...

    def release(self, seq_id: int) -> None:
        """Drop all state of a sequence; unknown ids are fine."""
        ...


AheadSource = Literal["hit", "soft", "miss", "standby"]


@dataclass(frozen=True)
class AheadStats:
    """What one cycle of one sequence had to do with drafting ahead.

    Attributes:
        source: where its draft came from: a branch that foresaw the bonus token (``"hit"``), one
            that left it open (``"soft"``), a draft made on the spot (``"miss"``), or the drafter
            that stands in while the worker is away (``"standby"``).
        num_branches: branches drafted while this cycle was verified.
        hit_prob: the predicted probability that one of them foresees the next bonus token.
    """

    source: AheadSource
    num_branches: int = 0
    hit_prob: float = 0.0


class Prefetching(Protocol):
    """A drafter that can work while the target verifies."""

    def prefetch(self, contexts: Sequence[DraftContext], tree: DraftTree) -> None:
        """Start drafting for the likely outcomes of ``tree``; must not block.

        Args:
            contexts: the sequences of the last ``propose``.
            tree: what is verified of them; one sequence per context.
        """
        ...

    def take_stats(self, seq_id: int) -> AheadStats | None:
        """Of the cycle that was just observed; None if it drafted nothing. Forgets them."""
        ...


def prefetching(drafter: Drafter) -> Prefetching | None:
    """The drafter, if it can work while the target verifies."""
    return cast(Prefetching, drafter) if hasattr(drafter, "prefetch") else None


class NullDrafter:
    """Never drafts: plain autoregressive decoding on the same loop."""

    taps: tuple[int, ...] = ()
    horizon = 0

    def propose(self, contexts: Sequence[DraftContext], limits: DraftLimits) -> ScoredPrefixes:
        return ScoredPrefixes.empty(len(contexts))

    def observe(self, committed: Sequence[Committed]) -> None:
        pass

    def truncate(self, seq_id: int, length: int) -> None:
        pass

    def release(self, seq_id: int) -> None:
        pass
