"""From what the worker sends to what the engine asked for: checked, then cut to the limits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftwood.ahead.messages import Drafted
from draftwood.draft.base import DraftContext, DraftLimits
from draftwood.tree.tree import NO_PARENT, IntArray, ScoredPrefixes


def problem(reply: Drafted, contexts: Sequence[DraftContext], vocab_size: int | None) -> str | None:
    """What makes a reply unusable; None if nothing does.

    A wrong but well-formed proposal costs time and nothing else, so only the form is checked.
    """
    scored: object = reply.scored
    if len(reply.sources) != len(contexts):
        return f"sources of {len(reply.sources)} sequences instead of {len(contexts)}"
    if not isinstance(scored, ScoredPrefixes):
        return f"{type(scored).__name__} instead of prefixes"
    arrays = (scored.token_ids, scored.parents, scored.depths, scored.log_probs)
    size = np.shape(scored.token_ids)[-1] if np.ndim(scored.token_ids) == 2 else 0
    if any(np.shape(array) != (len(contexts), size) for array in arrays):
        return "arrays of different shapes"
    if np.shape(scored.counts) != (len(contexts),):
        return "counts of other sequences"
    if (scored.counts < 0).any() or (scored.counts > size).any():
        return "more entries than there are columns"
    if size == 0:
        return None
    order = np.arange(size)
    wrong = (scored.parents < NO_PARENT) | (scored.parents >= order)
    parents = np.clip(scored.parents, 0, size - 1)
    above = np.take_along_axis(scored.depths, parents, axis=1)
    wrong |= scored.depths != np.where(scored.parents == NO_PARENT, 0, above) + 1
    wrong |= (scored.token_ids < 0) | ~(scored.log_probs <= 0.0)
    if vocab_size is not None:
        wrong |= scored.token_ids >= vocab_size
    valid = order < scored.counts[:, None]
    return "entries that are no prefixes" if (wrong & valid).any() else None


def narrowed(scored: ScoredPrefixes, limits: DraftLimits) -> ScoredPrefixes:
    """The prefixes within ``limits``: at most ``max_width`` children a node, then the best."""
    if limits.max_width is None:
        if scored.max_nodes <= limits.max_nodes:
            return scored
        return _columns(scored, [np.arange(limits.max_nodes)] * len(scored))
    kept = [_narrow(scored, s, limits) for s in range(len(scored))]
    return _columns(scored, kept)


def _narrow(scored: ScoredPrefixes, s: int, limits: DraftLimits) -> IntArray:
    """Columns of row ``s`` to keep; entries come best first, so the first children are the best."""
    width = limits.max_width or 1
    num_children: dict[int, int] = {}
    kept: list[int] = []
    is_kept = {-1}
    for column, parent in enumerate(scored.parents[s, : scored.counts[s]].tolist()):
        if parent not in is_kept or num_children.get(parent, 0) >= width:
            continue
        num_children[parent] = num_children.get(parent, 0) + 1
        is_kept.add(column)
        kept.append(column)
        if len(kept) == limits.max_nodes:
            break
    return np.array(kept, dtype=np.int64)


def _columns(scored: ScoredPrefixes, kept: Sequence[IntArray]) -> ScoredPrefixes:
    rows = []
    for s, columns in enumerate(kept):
        columns = columns[columns < scored.counts[s]]
        place = np.full(scored.max_nodes + 1, -1)
        place[columns] = np.arange(len(columns))
        rows.append(
            ScoredPrefixes(
                scored.token_ids[s : s + 1, columns],
                place[scored.parents[s : s + 1, columns]],  # −1 finds the last place, which is −1
                scored.depths[s : s + 1, columns],
                scored.log_probs[s : s + 1, columns],
                np.array([len(columns)], dtype=np.int64),
            )
        )
    return ScoredPrefixes.stack(rows)
