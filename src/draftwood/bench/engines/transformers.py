"""transformers' own ``generate``: plain, and with a DFlash drafter as its assistant."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch

from draftwood.bench.engines.base import Batch, Generation
from draftwood.bench.engines.memory import PeakMemory
from draftwood.bench.runs import Request
from draftwood.target.model import Target


class Clock:
    """A streamer that notes when tokens come; what comes first is the prompt."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._is_prompt = True
        self.arrivals: list[tuple[float, int]] = []

    def put(self, token_ids: torch.Tensor) -> None:
        """Tokens of one step: [B] of a plain batch, [n] or [1, n] of one sequence."""
        if not self._is_prompt:
            self.arrivals.append((time.perf_counter() - self._begin, token_ids.numel()))
        self._is_prompt = False

    def end(self) -> None:
        pass


class TransformersRunner:
    """``generate`` on the target's model, with its own attention and without draftwood's kernels.

    Args:
        target: the model.
        temperature: of all requests; only greedy output can be compared token by token.
        assistant: a DFlash assistant; None decodes plainly.
    """

    def __init__(self, target: Target, temperature: float, assistant: Any = None) -> None:
        self._target = target
        self._assistant = assistant
        self.promises_identity = temperature == 0
        self.max_concurrency = 1 if assistant is not None else None

    def run(self, requests: Sequence[Request]) -> Batch:
        gc.collect()
        peak = PeakMemory(self._target.device)
        clock = Clock()
        begin = time.perf_counter()
        rows = self._generate(requests, streamer=clock).tolist()
        wall_s = time.perf_counter() - begin
        longest = max(len(request.prompt_ids) for request in requests)
        outputs = [self._output(row[longest:], r) for row, r in zip(rows, requests, strict=True)]
        return Batch([_timed(ids, clock, len(rows)) for ids in outputs], wall_s, None, peak.read())

    def row(
        self, requests: Sequence[Request], batch: Sequence[list[int]], index: int, position: int,
        budgets: Sequence[int] | None,
    ) -> torch.Tensor | None:  # fmt: skip
        result = self._generate(requests, output_logits=True, return_dict_in_generate=True)
        if position >= len(result.logits):
            return None
        row: torch.Tensor = result.logits[position][index]
        return row

    def _generate(self, requests: Sequence[Request], **options: Any) -> Any:
        (params,) = {request.params.temperature for request in requests}
        (num_new,) = {request.params.max_new_tokens for request in requests}
        lens = [len(request.prompt_ids) for request in requests]
        ids = torch.zeros(len(lens), max(lens), dtype=torch.int64, device=self._target.device)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, -lens[row] :] = torch.tensor(request.prompt_ids)
            mask[row, -lens[row] :] = 1
        sampling: dict[str, Any] = {"do_sample": False}
        if params > 0:
            sampling = {"do_sample": True, "temperature": params, "top_k": 0, "top_p": 1.0}
            torch.manual_seed((requests[0].params.seed or 0) % 2**63)
        if self._assistant is not None:
            options |= {"assistant_model": self._assistant, "speculation_type": "dflash"}
        return self._target.model.generate(  # type: ignore[operator]
            ids, attention_mask=mask, max_new_tokens=num_new, pad_token_id=0,
            eos_token_id=list(self._target.eos_token_ids) or None, **sampling, **options,
        )  # fmt: skip

    def _output(self, row: list[int], request: Request) -> list[int]:
        """A row up to and with its first end-of-sequence token."""
        stops = self._target.eos_token_ids
        end = next((i for i, token in enumerate(row) if token in stops), len(row) - 1)
        return row[: end + 1]

    def close(self) -> None:
        pass


def _timed(token_ids: list[int], clock: Clock, num_rows: int) -> Generation:
    """The first token comes out of the pass over the prompt, so decoding starts after it."""
    arrivals, left = [], len(token_ids)
    for seconds, count in clock.arrivals:
        count = min(count if num_rows == 1 else 1, left)
        if count:
            arrivals.append((seconds, count))
        left -= count
    first_s, first = arrivals[0] if arrivals else (0.0, 0)
    last_s = arrivals[-1][0] if arrivals else 0.0
    reason = "stop" if left == 0 and token_ids and len(arrivals) < len(clock.arrivals) else "length"
    return Generation(
        token_ids, reason, arrivals, first_s, last_s - first_s, len(token_ids) - first
    )
