"""From a verdict to committed tokens: truncate at the first stop, then keep the rows that count."""

from __future__ import annotations

import torch

from draftwood.draft.base import Committed
from draftwood.sequence import SequenceState
from draftwood.tree.tree import DraftTree
from draftwood.verify import Verdict


def accept(seq: SequenceState, verdict: Verdict) -> list[int]:
    """Truncate a verdict into the sequence's output; a failed row ends only its own sequence."""
    emitted = seq.accept(verdict.picks)
    if verdict.error is not None and seq.finish_reason is None:
        seq.finish_reason, seq.error = "error", verdict.error
    return emitted


def commit(
    seq: SequenceState,
    tree: DraftTree,
    index: int,
    verdict: Verdict,
    num_emitted: int,
    features: torch.Tensor | None,
) -> Committed | None:
    """Keep the K/V rows of the emitted path: the anchor and all emitted tokens but the last."""
    start, end = tree.span(index)
    picks = [pick.token_id for pick in verdict.picks]
    drew = bool(picks) or verdict.error is not None
    path = verdict.path[:num_emitted] if drew else verdict.path
    if not len(path):
        return None
    position = seq.cache.length
    seq.cache.commit(path - start)
    if features is not None and len(path) < len(features):  # else the path is all of it
        features = features.index_select(0, torch.from_numpy(path).to(features.device))
    return Committed(
        seq.seq_id, position, tree.token_ids[path].tolist(), features, picks,
        end - start - 1 if drew else 0,
    )  # fmt: skip
