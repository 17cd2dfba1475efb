"""What a request does to scores, applied to a drafter's rows; an approximation is enough there.

A wrong draft costs time, never correctness, so what depends on the path inside the tree or on
user code (logits processors) is left out.
"""

from __future__ import annotations

import math
from collections import Counter

import torch

from draftwood.draft.base import DraftContext
from draftwood.sampling import SamplingParams
from draftwood.tree.topk import top_k

MAX_NUCLEUS = 512  # a larger top-p nucleus is not worth cutting


class Columns:
    """Which column of a drafter's logits stands for which token of the target.

    Args:
        num_columns: V; without a map, columns past the vocabulary are padding.
        vocab_size: the target's vocabulary.
        token_map: [V] target token id of each column; None if they are equal.
        device: of the logits.

    Attributes:
        token_ids: target token id of each usable column.
    """

    def __init__(
        self,
        num_columns: int,
        vocab_size: int,
        token_map: torch.Tensor | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self._column_of: torch.Tensor | None = None
        if token_map is None:
            self.token_ids = torch.arange(min(num_columns, vocab_size), device=device)
            return
        assert len(token_map) == num_columns, (len(token_map), num_columns)
        self.token_ids = token_map.to(device, torch.int64)
        self._column_of = torch.full((vocab_size,), -1, device=device)
        self._column_of[self.token_ids] = torch.arange(num_columns, device=device)

    def __len__(self) -> int:
        return len(self.token_ids)

    def find(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of those tokens that have one, and which of ``token_ids`` they are."""
        if self._column_of is None:
            found = token_ids < len(self)
            return token_ids[found], found
        columns = self._column_of[token_ids]
        found = columns >= 0
        return columns[found], found

    def of(self, token_id: int) -> int | None:
        """The column of one token, None if the drafter cannot propose it."""
        if self._column_of is None:
            return token_id if token_id < len(self) else None
        column = int(self._column_of[token_id])
        return column if column >= 0 else None


def steered(logits: torch.Tensor, context: DraftContext, columns: Columns) -> torch.Tensor:
    """Apply biases and penalties as of the committed tokens to draft logits [R, V].

    Returns:
        [R, V]; ``logits`` itself where the request asks for nothing of the kind.
    """
    params = context.sampler.params
    banned = [word[0] for word in params.bad_words if len(word) == 1]
    penalised = params.presence_penalty != 0 or params.frequency_penalty != 0
    repeats = params.repetition_penalty != 1
    if not (params.logit_bias or banned or penalised or repeats):
        return logits
    rows = logits.clone()
    if params.logit_bias:
        _add(rows, columns, dict(params.logit_bias))
    if repeats:
        seen = torch.tensor(sorted(set(context.token_ids)), device=rows.device)
        at, _ = columns.find(seen)
        old = rows[:, at]
        penalty = params.repetition_penalty
        rows[:, at] = torch.where(old < 0, old * penalty, old / penalty)
    if penalised:
        counts = Counter(context.token_ids[context.prompt_len :])
        presence, frequency = params.presence_penalty, params.frequency_penalty
        _add(rows, columns, {t: -(presence + frequency * n) for t, n in counts.items()})
    if banned:
        _add(rows, columns, dict.fromkeys(banned, -math.inf))
    return rows


def _add(rows: torch.Tensor, columns: Columns, values: dict[int, float]) -> None:
    if not values:
        return
    at, found = columns.find(torch.tensor(list(values), device=rows.device))
    rows[:, at] += torch.tensor(list(values.values()), device=rows.device, dtype=rows.dtype)[found]


def truncation_edge(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """[R, 1] score below which top-k, top-p or min-p drop a token; None if they are off.

    Args:
        scores: [R, V] logits / temperature.
    """
    if not params.truncates:
        return None
    edge = torch.full((len(scores), 1), -math.inf, dtype=scores.dtype, device=scores.device)
    width = scores.shape[1]
    size = min(width, max(params.top_k, MAX_NUCLEUS if params.top_p < 1 else 1))
    values, _ = top_k(scores, size)
    if 0 < params.top_k < width:
        edge = torch.maximum(edge, values[:, params.top_k - 1 : params.top_k])
    if params.top_p < 1:
        total = scores.logsumexp(dim=1, keepdim=True)
        before = (values - total).exp().cumsum(1) - (values - total).exp()
        nucleus = torch.where(before < params.top_p, values, math.inf).amin(1, keepdim=True)
        reached = before[:, -1:] >= params.top_p
        edge = torch.maximum(edge, torch.where(reached, nucleus, edge))
    if params.min_p > 0:
        edge = torch.maximum(edge, values[:, :1] + math.log(params.min_p))
    return edge
