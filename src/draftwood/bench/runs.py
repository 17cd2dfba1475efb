"""Runs that can be compared: outputs, and a way to see again the logits behind any token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from draftwood.bench.compare import Divergence, Tally, explain
from draftwood.engine import Engine
from draftwood.records import Output
from draftwood.sampling import SamplingParams
from draftwood.target.model import Target


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, and what was asked for."""

    prompt_ids: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True)
class Run:
    """The same requests decoded by one computation.

    Attributes:
        token_ids: the output of each request.
        row_of: (request, output position) → raw logits [V], None past the end.
        outputs: the engine's records; empty for other computations.
    """

    token_ids: list[list[int]]
    row_of: Callable[[int, int], torch.Tensor | None]
    outputs: Sequence[Output] = ()

    @property
    def acceptance_length(self) -> float:
        """τ over all requests."""
        num_cycles = sum(output.num_cycles for output in self.outputs)
        return sum(map(len, self.token_ids)) / max(1, num_cycles)


def engine_run(new_engine: Callable[[], Engine], requests: Sequence[Request]) -> Run:
    """Decode with a fresh engine; another one will show the logits if they are asked for."""
    prompts = [request.prompt_ids for request in requests]
    outputs = new_engine().generate(prompts, [request.params for request in requests])
    failed = [output.error for output in outputs if output.error is not None]
    assert not failed, failed

    def row_of(index: int, position: int) -> torch.Tensor | None:
        return rerun_row(new_engine(), requests, index, position)

    return Run([output.token_ids for output in outputs], row_of, outputs)


def generate_run(target: Target, requests: Sequence[Request]) -> Run:
    """Greedy decoding by transformers' ``generate``, all prompts in one left-padded batch."""
    lens = [len(request.prompt_ids) for request in requests]
    (num_new,) = {request.params.max_new_tokens for request in requests}
    (ignore_eos,) = {request.params.ignore_eos for request in requests}
    ids = torch.zeros(len(lens), max(lens), dtype=torch.int64, device=target.device)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        ids[row, -lens[row] :] = torch.tensor(request.prompt_ids)
        mask[row, -lens[row] :] = 1
    result = target.model.generate(  # type: ignore[operator]
        ids, attention_mask=mask, max_new_tokens=num_new, do_sample=False, pad_token_id=0,
        eos_token_id=[target.vocab_size] if ignore_eos else list(target.eos_token_ids),
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    outputs = []
    for row in result.sequences[:, max(lens) :].tolist():
        ends = [] if ignore_eos else [at for at, t in enumerate(row) if t in target.eos_token_ids]
        outputs.append(row[: ends[0] + 1] if ends else row)

    def row_of(index: int, position: int) -> torch.Tensor | None:
        return result.logits[position][index] if position < len(outputs[index]) else None

    return Run(outputs, row_of)


def compare_runs(
    tally: Tally,
    name: str,
    left: Run,
    right: Run,
    requests: Sequence[Request],
    eos_token_ids: Sequence[int] = (),
) -> None:
    """Add the outputs of two runs of the same requests to ``tally``."""
    for index, request in enumerate(requests):
        tally.add(
            f"{name}, prompt {index}",
            left.token_ids[index],
            right.token_ids[index],
            partial(_explain, left, right, index, request, eos_token_ids),
        )


def _explain(
    left: Run,
    right: Run,
    index: int,
    request: Request,
    eos_token_ids: Sequence[int],
    position: int,
) -> Divergence:
    return explain(
        left.token_ids[index],
        right.token_ids[index],
        position,
        (left.row_of(index, position), right.row_of(index, position)),
        request.params,
        request.prompt_ids,
        eos_token_ids,
    )


def rerun_row(
    engine: Engine, requests: Sequence[Request], index: int, position: int
) -> torch.Tensor | None:
    """Decode again, as ``Engine.generate`` did, to see the logits of one output token.

    Args:
        engine: in the state in which the compared run began; drafters learn, so make a new one.
        requests: all of that run.
        index: the request in question.
        position: the output token in question.

    Returns:
        [V] the raw logits it was drawn from; None if the output ended before.
    """
    recorder = _Recorder(len(requests[index].prompt_ids) + position)
    ids = [
        engine.add(
            request.prompt_ids, request.params, processors=[recorder] if number == index else []
        )
        for number, request in enumerate(requests)
    ]
    while recorder.row is None and engine.num_active:
        engine.step()
    for seq_id in ids:
        engine.abort(seq_id)
    return recorder.row


class _Recorder:
    """A logits processor that changes nothing and keeps the scores after ``length`` tokens."""

    def __init__(self, length: int) -> None:
        self.row: torch.Tensor | None = None
        self._length = length

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if token_ids.shape[1] == self._length:
            self.row = scores[0].clone()
        return scores
