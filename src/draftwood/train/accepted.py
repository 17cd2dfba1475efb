"""How many drafted tokens the loop accepts at an anchor, and the cycles that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from draftwood.draft.block_ranking import num_candidates
from draftwood.draft.markov import MarkovTables
from draftwood.train.conditionals import conditionals
from draftwood.train.loss import UNKNOWN
from draftwood.train.prefixes import best_prefixes
from draftwood.tree.tree import IntArray

CHAIN = 0
"""Key of the single-chain policy among budgets."""


def accepted_lengths(
    log_probs: torch.Tensor, labels: torch.Tensor, budgets: Sequence[int]
) -> dict[int, IntArray]:
    """Accepted drafted tokens at every anchor, by budget.

    The tree of budget n holds the n most probable prefixes, so the true prefix of length d is in
    it exactly if its probability is at least that of the n-th prefix (ties aside).

    Args:
        log_probs: [A, L, V] marginals.
        labels: [A, L] draft ids of the true tokens, ``UNKNOWN`` where there is none.

    Returns:
        budget → [A], each between 0 and L.
    """
    known = labels != UNKNOWN
    label_scores = log_probs.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    label_scores = label_scores.masked_fill(~known, float("-inf"))
    path = torch.zeros_like(label_scores)
    total = torch.zeros_like(label_scores[:, 0])
    for depth in range(labels.shape[1]):
        total = total + label_scores[:, depth]
        path[:, depth] = total
    largest = max(budgets)
    if largest > 0:
        best = best_prefixes(log_probs, largest)
    result = {}
    for budget in budgets:
        if budget == CHAIN:
            inside = (log_probs.argmax(-1) == labels) & known
        else:
            bound = best[:, min(budget, best.shape[1]) - 1, None]
            inside = (path >= bound) & torch.isfinite(path)
        result[budget] = inside.long().cumprod(dim=1).sum(dim=1).cpu().numpy()
    return result


def conditional_lengths(
    log_probs: torch.Tensor,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    tables: MarkovTables,
    budgets: Sequence[int],
) -> dict[int, IntArray]:
    """``accepted_lengths`` where each depth is conditioned on the token of the one before.

    As in the loop, a tree of n nodes is made of the ``num_candidates(n)`` best tokens of every
    depth by the marginals.

    Args:
        hidden: [A, L, H] the rows of ``log_probs``.
    """
    result = {}
    by_width: dict[int, list[int]] = {}
    for budget in budgets:
        nodes = log_probs.shape[1] if budget == CHAIN else budget
        by_width.setdefault(num_candidates(nodes, log_probs.shape[-1]), []).append(budget)
    for width, of_width in by_width.items():
        table = conditionals(log_probs, hidden, tables, width)
        for budget in of_width:
            lengths = table.chain(labels) if budget == CHAIN else table.tree(labels, budget)
            result[budget] = lengths.cpu().numpy()
    return result


def chain_lengths(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    tables: MarkovTables | None = None,
) -> IntArray:
    """Accepted drafted tokens of the single chain at every anchor.

    The head, most of a small drafter's time, runs only on rows whose earlier rows are right:
    others cannot be accepted.

    Args:
        logits_of: [R, H] rows → [R, V].
        hidden: [A, L, H].
        labels: [A, L] as in ``accepted_lengths``.
        tables: condition each depth on the token of the one before, as ``conditional_lengths``.
    """
    accepted = torch.zeros(len(labels), dtype=torch.int64, device=hidden.device)
    alive = torch.arange(len(labels), device=hidden.device)
    for depth in range(labels.shape[1]):
        rows = hidden[alive, depth]
        scores = logits_of(rows)
        if depth == 0 or tables is None:
            best = scores.argmax(-1)
        else:
            width = num_candidates(labels.shape[1], scores.shape[-1])
            values, ids = scores.topk(width, dim=-1)
            values = values + tables.shift(rows, labels[alive, depth - 1], ids)
            best = ids.gather(1, values.argmax(-1, keepdim=True))[:, 0]
        alive = alive[best == labels[alive, depth]]
        accepted[alive] += 1
        if not len(alive):
            break
    lengths: IntArray = accepted.cpu().numpy()
    return lengths


def count_cycles(accepted: IntArray) -> int:
    """Cycles the loop takes over a response, given what each anchor would accept."""
    position = cycles = 0
    while position < len(accepted):
        position += int(accepted[position]) + 1
        cycles += 1
    return cycles
