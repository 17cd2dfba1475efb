"""Walk a draft tree by the target's own rule: draw its next token, follow it if it was drafted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan

import numpy as np
import torch

from draftwood.errors import DraftwoodError
from draftwood.sampling import Pick, Sampler, bad_scores
from draftwood.tree.tree import DraftTree, IntArray


@dataclass(frozen=True)
class Verdict:
    """What the target said about one sequence's tree.

    Attributes:
        path: [1 + num_accepted] packed nodes from the sequence's first node to the last accepted;
            for a prefill chunk, all its nodes.
        picks: the target's tokens: of the accepted nodes, then the bonus token, so one per node of
            ``path``. Empty for a prefill chunk.
        error: why the next token could not be drawn; the picks before it are still the target's.
    """

    path: IntArray
    picks: list[Pick] = field(default_factory=list)
    error: str | None = None


@dataclass
class _Walker:
    """One sequence on its way down."""

    sampler: Sampler
    path: list[int]
    picks: list[Pick] = field(default_factory=list)
    error: str | None = None

    @property
    def tokens(self) -> list[int]:
        return [pick.token_id for pick in self.picks]


def walk(
    tree: DraftTree,
    logits_of: Callable[[IntArray], torch.Tensor],
    samplers: Sequence[Sampler | None],
) -> list[Verdict]:
    """Let the target draw its own tokens down the tree, all sequences in step.

    At every node the target draws its next token exactly as without a tree; if a child carries it
    the walk goes there, else it ends. The tree decides only how far one cycle gets.

    Args:
        tree: N packed nodes of S sequences.
        logits_of: packed node indices [R] → target logits [R, V] after those nodes. Called once per
            depth with the nodes that the walk visits there, at most one per sequence.
        samplers: one per sequence; None accepts the whole (prefill) chain and draws nothing.

    Returns:
        One verdict per sequence. A failure (NaN logits, a failing processor) concerns only its own.
    """
    assert len(samplers) == tree.num_seqs, (len(samplers), tree.num_seqs)
    walkers = [
        _Walker(sampler, [int(start)]) if sampler is not None else None
        for sampler, start in zip(samplers, tree.starts, strict=False)
    ]
    active = [walker for walker in walkers if walker is not None]
    children = tree.edges()
    while active:
        nodes = np.array([walker.path[-1] for walker in active], dtype=np.int64)
        _draw(active, logits_of(nodes))
        active = [walker for walker in active if _step(walker, children)]
    return [
        Verdict(np.arange(*tree.span(s), dtype=np.int64))
        if walker is None
        else Verdict(np.array(walker.path, dtype=np.int64), walker.picks, walker.error)
        for s, walker in enumerate(walkers)
    ]


def _draw(walkers: Sequence[_Walker], logits: torch.Tensor) -> None:
    """Append one pick, or the error, to each walker; ``logits`` [R, V] holds their rows."""
    plain = [row for row, walker in enumerate(walkers) if walker.sampler.is_plain_greedy]
    if plain:
        rows = logits if len(plain) == len(walkers) else logits[plain]
        for row, value, token_id in zip(plain, *_maxima(rows), strict=True):
            walker = walkers[row]
            if isnan(value) or value == -torch.inf:
                position = walker.sampler.num_output + len(walker.picks)
                walker.error = bad_scores(value, position)
            else:
                walker.picks.append(Pick(token_id))
    for row, walker in enumerate(walkers):
        if row in plain:
            continue
        try:
            walker.picks.append(walker.sampler.pick(logits[row], walker.tokens))
        except DraftwoodError as error:
            walker.error = str(error)


def _maxima(rows: torch.Tensor) -> tuple[list[float], list[int]]:
    """Value and place of the first maximum of each row [R, V]; NaN where there is one."""
    if rows.device.type != "cpu" or rows.dtype not in (torch.float32, torch.float64):
        values, ids = rows.max(dim=-1)
        return values.tolist(), ids.tolist()
    scores = rows.numpy()  # its argmax is vectorised, unlike torch's maximum with indices
    places = [int(row.argmax()) for row in scores]
    return [float(row[place]) for row, place in zip(scores, places, strict=True)], places


def _step(walker: _Walker, children: Mapping[tuple[int, int], int]) -> bool:
    """Go to the child that carries the last pick; False where the walk ends."""
    if walker.error is not None:
        return False
    child = children.get((walker.path[-1], walker.picks[-1].token_id))
    if child is None:
        return False
    walker.path.append(child)
    return True


def row_logits(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    tree: DraftTree,
    seqs: Sequence[int],
    *,
    rows_together: int = 1,
) -> Callable[[IntArray], torch.Tensor]:
    """The ``logits_of`` of ``walk`` for the hidden rows of one target forward.

    On CPU the head runs as the walk asks, which costs less than all rows. Elsewhere one call for
    all rows of ``seqs`` is cheaper than one per depth.

    Args:
        head: [R, H] → [R, V].
        hidden: [N, H] packed rows of ``tree``.
        seqs: the sequences whose rows the walk may visit.
        rows_together: rows that the head computes in the time of one. Where the walk asks for
            fewer, the likeliest nodes below come along: they may be asked for next.
    """
    if hidden.device.type != "cpu":
        wanted = np.isin(tree.seq, seqs)
        table = head(hidden[torch.from_numpy(wanted)])
        place = np.cumsum(wanted) - 1
        return lambda rows: table[torch.from_numpy(place[rows])]
    known: dict[int, tuple[torch.Tensor, int]] = {}  # scores of several rows, and which is its own

    def logits_of(nodes: IntArray) -> torch.Tensor:
        asked = nodes.tolist()
        missing = [node for node in asked if node not in known]
        if missing:
            batch = _with_best_below(tree, missing, rows_together // len(missing) - 1)
            scores = head(hidden.index_select(0, torch.from_numpy(np.array(batch))))
            known.update((node, (scores, place)) for place, node in enumerate(batch))
        rows = [scores[place : place + 1] for scores, place in map(known.__getitem__, asked)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    return logits_of


def _with_best_below(tree: DraftTree, nodes: Sequence[int], count: int) -> list[int]:
    """Each node and up to ``count`` of its descendants; they come in decreasing probability."""
    if count <= 0:
        return list(nodes)
    parents, batch = tree.parents.tolist(), []
    for node in nodes:
        found = [node]
        _, end = tree.span(int(tree.seq[node]))
        for below in range(node + 1, end):
            if len(found) > count:
                break
            if parents[below] in found:
                found.append(below)
        batch += found
    return batch
