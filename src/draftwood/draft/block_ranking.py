"""From the hidden rows of drafted blocks to their best prefixes, through as much head as needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from draftwood.draft.base import DraftContext, DraftLimits
from draftwood.draft.markov import MarkovTables
from draftwood.draft.products import product
from draftwood.draft.ranking import Ranked, Ranker
from draftwood.draft.steering import Columns
from draftwood.tree.enumerate import top_prefixes_from_candidates
from draftwood.tree.markov_first import markov_prefixes
from draftwood.tree.tree import ScoredPrefixes

# On CPU the head costs as much as the rest of the pass; its deeper rows are computed only where
# they can matter.
_FIRST_DEPTHS = 8
# Learning costs a hundredth of a cycle; a few weights are soon known well enough to do it less.
_EAGER, _ONE_IN = 64, 4
# Candidates of a depth that a Markov head tells apart: for few nodes, and at most.
_FEW, MANY = 32, 64


def num_candidates(max_nodes: int, head_size: int) -> int:
    """Tokens of every depth that prefixes are made of where a Markov head conditions them."""
    return min(max(max_nodes, _FEW), MANY, head_size)


class BlockRanking:
    """Head, ranking and enumeration of a block-diffusion drafter.

    Args:
        head: [V, H] weight.
        columns: what the columns of the logits stand for.
        use_noise: at temperature > 0, rank by the request's noise too (see ``ranking``).
        scale, softcap: applied to the logits.
        markov: conditions every depth after the first on the token before; None without it.
    """

    def __init__(
        self,
        head: torch.Tensor,
        columns: Columns,
        *,
        use_noise: bool = True,
        scale: float = 1.0,
        softcap: float | None = None,
        markov: MarkovTables | None = None,
    ) -> None:
        self._head, self._scale, self._softcap = product(head), scale, softcap
        self._like = head[:0]
        self._ranker = Ranker(columns, use_noise=use_noise)
        self._markov = markov
        self._num_lessons = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., V] scores of normed rows [..., H]."""
        flat = hidden.reshape(-1, hidden.shape[-1]).to(self._like)
        scores = self._head(flat).reshape(*hidden.shape[:-1], -1)
        if self._scale != 1.0:
            scores = scores * self._scale
        cap = self._softcap
        return scores if cap is None else torch.tanh(scores / cap) * cap

    def draft(
        self,
        contexts: Sequence[DraftContext],
        limits: DraftLimits,
        horizon: int,
        hidden_of: Callable[[int], torch.Tensor],
    ) -> tuple[ScoredPrefixes, list[tuple[Ranked, ...]]]:
        """``best`` of a pass as deep as the contexts and limits allow; no pass where that is 0.

        Args:
            horizon: deepest row of a block.
            hidden_of: runs the pass: depth → [S, depth, H].

        Returns:
            As ``best``; without a pass no rankings at all.
        """
        max_depths = [min(horizon, context.max_depth) for context in contexts]
        depth = min(max(max_depths, default=0), limits.max_nodes)
        if depth <= 0:
            return ScoredPrefixes.empty(len(contexts)), []
        return self.best(hidden_of(depth), contexts, limits, max_depths)

    def best(
        self,
        hidden: torch.Tensor,
        contexts: Sequence[DraftContext],
        limits: DraftLimits,
        max_depths: Sequence[int],
        logits: torch.Tensor | None = None,
    ) -> tuple[ScoredPrefixes, list[tuple[Ranked, ...]]]:
        """The best prefixes, and the rankings they were made of (for ``learn``).

        Args:
            hidden: [S, depth, H] rows that predict depths 1 … depth.
            max_depths: [S] deepest prefix of each context.
            logits: [S, r, V] scores of the first rows, where they are already known.
        """
        depth = hidden.shape[1]
        if logits is None or logits.shape[1] == 0:
            few = hidden.device.type == "cpu" and limits.max_width != 1
            logits = self.logits(hidden[:, : _FIRST_DEPTHS if few else depth])
        logits = logits[:, :depth]
        first = logits.shape[1]
        if self._markov is not None:
            found = self._conditioned(self._markov, hidden, contexts, limits, max_depths, logits)
            if first < depth and not _is_closed(found[0], first, limits, max_depths):
                logits = torch.cat([logits, self.logits(hidden[:, first:])], dim=1)
                found = self._conditioned(
                    self._markov, hidden, contexts, limits, max_depths, logits
                )
            return found
        parts = [self._rank(logits, 0, contexts, limits)]
        scored = _enumerate(parts, limits, max_depths)
        if first < depth and not _is_settled(scored, parts[0], limits, max_depths):
            parts.append(self._rank(self.logits(hidden[:, first:]), first, contexts, limits))
            scored = _enumerate(parts, limits, max_depths)
        return scored, list(zip(*parts, strict=True))

    def learn(self, ranked: Sequence[Ranked], picks: Sequence[int]) -> None:
        """Take in the target's own tokens at depths 1, 2, … of a proposal, or let it pass."""
        self._num_lessons += 1
        if self._num_lessons > _EAGER and self._num_lessons % _ONE_IN:
            return
        for part in ranked:
            above = part.depths[0] - 1
            self._ranker.learn(part, picks[above : above + len(part.depths)])

    def _conditioned(
        self,
        markov: MarkovTables,
        hidden: torch.Tensor,
        contexts: Sequence[DraftContext],
        limits: DraftLimits,
        max_depths: Sequence[int],
        logits: torch.Tensor,
    ) -> tuple[ScoredPrefixes, list[tuple[Ranked, ...]]]:
        """``best`` where the rows alone name the candidates, and pairs of them have a score.

        Only rows that ``logits`` has are used.
        """
        hidden = hidden[:, : logits.shape[1]]
        width = DraftLimits(num_candidates(limits.max_nodes, logits.shape[-1]))
        ranked = self._rank(logits, 0, contexts, width)
        found = []
        for rows, one, max_depth in zip(hidden, ranked, max_depths, strict=True):
            later = self._ranker.after(one, markov.shifts(rows, one.columns))
            first = one.log_probs[0].numpy(force=True)
            found.append(
                markov_prefixes(
                    first, later.numpy(force=True), one.token_ids.numpy(force=True),
                    limits.max_nodes, max_width=limits.max_width, max_depth=max_depth,
                )
            )  # fmt: skip
        scored = found[0] if len(found) == 1 else ScoredPrefixes.stack(found)
        return scored, [(one,) for one in ranked]

    def _rank(
        self,
        scores: torch.Tensor,
        above: int,
        contexts: Sequence[DraftContext],
        limits: DraftLimits,
    ) -> list[Ranked]:
        """Candidates of each sequence at depths above + 1, above + 2, …; scores [S, depths, V]."""
        depths = range(above + 1, above + scores.shape[1] + 1)
        count = min(limits.max_nodes, limits.max_width or limits.max_nodes)
        return [
            self._ranker.rank(rows, depths, context, count)
            for rows, context in zip(scores, contexts, strict=True)
        ]


def _enumerate(
    parts: Sequence[Sequence[Ranked]], limits: DraftLimits, max_depths: Sequence[int]
) -> ScoredPrefixes:
    """Best prefixes of S sequences, whose depths come in parts of S rankings each."""
    log_probs = [_stacked([one.log_probs for one in part]) for part in parts]
    token_ids = [_stacked([one.token_ids for one in part]) for part in parts]
    return top_prefixes_from_candidates(
        torch.cat(log_probs, dim=1) if len(parts) > 1 else log_probs[0],
        torch.cat(token_ids, dim=1) if len(parts) > 1 else token_ids[0],
        limits.max_nodes,
        max_depths=max_depths,
    )


def _stacked(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """``torch.stack``, without a copy of a single one."""
    return torch.stack(list(rows)) if len(rows) > 1 else rows[0][None]


def _is_closed(
    scored: ScoredPrefixes, depth: int, limits: DraftLimits, max_depths: Sequence[int]
) -> bool:
    """Whether no prefix deeper than ``depth`` is among the best: none is as deep, so no parent."""
    full = scored.max_nodes == limits.max_nodes
    for row, max_depth in enumerate(max_depths):
        count = int(scored.counts[row])
        done = full and count == limits.max_nodes
        if max_depth > depth and not (done and scored.depths[row, :count].max() < depth):
            return False
    return True


def _is_settled(
    scored: ScoredPrefixes,
    ranked: Sequence[Ranked],
    limits: DraftLimits,
    max_depths: Sequence[int],
) -> bool:
    """Whether no prefix deeper than the ranked rows is among the best, in any sequence.

    A deeper one is at most as probable as the best prefix of all ranked depths.
    """
    full = scored.max_nodes == limits.max_nodes
    for row, (one, max_depth) in enumerate(zip(ranked, max_depths, strict=True)):
        deepest = float(one.log_probs[:, 0].sum())
        if max_depth > len(one.depths) and not (full and scored.log_probs[row, -1] >= deepest):
            return False
    return True
