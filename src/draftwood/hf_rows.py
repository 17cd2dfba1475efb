"""transformers' batch-wise processors, criteria and streamers for rows that advance separately."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import generation as hf

from draftwood.hf_request import Request

# These treat every row of a batch alike, without looking at its index.
_ROW_WISE = (
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.ExponentialDecayLengthPenalty,
    hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor,
    hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
    hf.MinLengthLogitsProcessor,
    hf.MinNewTokensLengthLogitsProcessor,
    hf.MinPLogitsWarper,
    hf.NoBadWordsLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor,
    hf.SequenceBiasLogitsProcessor,
    hf.SuppressTokensAtBeginLogitsProcessor,
    hf.SuppressTokensLogitsProcessor,
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.MaxTimeCriteria,
    hf.StopStringCriteria,
)


class RowProcessor:
    """All processors of a request for one row, on its padded token ids.

    Attributes:
        failure: the exception that one of them raised.
    """

    def __init__(self, request: Request, row: int) -> None:
        self._processors = request.processors
        self._row = row
        self._num_rows = len(request.prompts)
        self._padding = _padding(request, row)
        self.failure: Exception | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[1, L] token ids and [1, V] scores → [1, V] scores."""
        try:
            with _as_in_generate():
                ids = torch.cat([self._padding.to(input_ids.device)[None], input_ids], dim=1)
                scores = scores.clone()
                for processor in self._processors:
                    scores = self._apply(processor, ids, scores)
        except Exception as error:
            self.failure = error
            raise
        return scores

    def _apply(self, processor: Any, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._num_rows == 1 or _is_row_wise(processor):
            return processor(ids, scores)
        size = (self._num_rows, 1)
        return processor(ids.repeat(size), scores.repeat(size))[self._row : self._row + 1]


class RowCriteria:
    """All stopping criteria of a request for one row, called with all its tokens.

    Attributes:
        failure: the exception that one of them raised.
    """

    def __init__(self, request: Request, row: int) -> None:
        self.failure: Exception | None = None
        self._criteria = request.criteria
        self._row = row
        self._num_rows = len(request.prompts)
        self._ids = _padding(request, row).to(request.input_ids.device)
        self._num_padding = len(self._ids)

    def __call__(self, token_ids: Sequence[int]) -> bool:
        try:
            with _as_in_generate():
                new = token_ids[len(self._ids) - self._num_padding :]
                added = torch.tensor(new, dtype=torch.int64, device=self._ids.device)
                self._ids = torch.cat([self._ids, added])
                return any(self._says_stop(criterion) for criterion in self._criteria)
        except Exception as error:
            self.failure = error
            raise

    def _says_stop(self, criterion: Any) -> bool:
        alone = self._num_rows == 1 or _is_row_wise(criterion)
        ids = self._ids[None] if alone else self._ids.repeat(self._num_rows, 1)
        said = torch.as_tensor(criterion(ids, None)).flatten()
        return bool(said[0] if len(said) == 1 else said[self._row])


@contextmanager
def _as_in_generate() -> Iterator[None]:
    """The engine's inference mode is off: tensors made here may be kept, changed and derived."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Puts(Protocol):
    """The part of a streamer that takes tokens."""

    def put(self, value: torch.Tensor) -> None: ...


class ColumnStream:
    """Collects the rows' tokens and streams them column by column, as ``generate`` does."""

    def __init__(self, num_rows: int, pad_token_id: int, streamer: Puts | None) -> None:
        self._rows: list[list[int]] = [[] for _ in range(num_rows)]
        self._finished = [False] * num_rows
        self._pad = pad_token_id
        self._streamer = streamer
        self._num_put = 0

    def add(self, row: int, token_ids: Sequence[int], *, finished: bool) -> None:
        """Append tokens to a row; whole columns go out to the streamer."""
        self._rows[row].extend(token_ids)
        self._finished[row] = finished
        while self._streamer is not None and self._num_put < self._num_whole():
            self._streamer.put(self._column(self._num_put))
            self._num_put += 1

    def tokens(self) -> torch.Tensor:
        """[num_rows, longest] int64, short rows padded."""
        longest = max(map(len, self._rows))
        padded = [row + [self._pad] * (longest - len(row)) for row in self._rows]
        return torch.tensor(padded, dtype=torch.int64).reshape(len(padded), longest)

    def _num_whole(self) -> int:
        """Columns that every row has reached, or never will."""
        pending = [
            len(row) for row, done in zip(self._rows, self._finished, strict=True) if not done
        ]
        return min(pending) if pending else max(map(len, self._rows))

    def _column(self, index: int) -> torch.Tensor:
        return torch.tensor([row[index] if index < len(row) else self._pad for row in self._rows])


def _is_row_wise(part: Any) -> bool:
    if type(part) is hf.RepetitionPenaltyLogitsProcessor:  # may hold one padding length per row
        return not isinstance(getattr(part, "prompt_ignore_length", None), torch.Tensor)
    return type(part) in _ROW_WISE


def _padding(request: Request, row: int) -> torch.Tensor:
    """The padding tokens before a row's prompt."""
    return request.input_ids[row, : request.input_ids.shape[1] - len(request.prompts[row])]
