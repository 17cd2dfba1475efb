"""llama.cpp's DFlash mode on one of our drafters, as ``compare.py`` asks for it.

Runs in an environment with ``pip install xllamacpp``. Standard input is JSON, ``{"prompts":
[[token, …], …], "max_new_tokens": n}``; the last line of standard output is JSON, ``{"versions":
{…}, "outputs": [{"token_ids": […], "num_cycles": n}, …]}``. Target and drafter are GGUF files.

    python llama_dflash.py TARGET.gguf DRAFT.gguf < request.json
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any

HORIZON = 64  # llama.cpp clamps it to the drafter's block


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp prints there
    target, draft = sys.argv[1:]
    request = json.load(sys.stdin)
    server, versions = load(target, draft)
    outputs = [complete(server, ids, request["max_new_tokens"]) for ids in request["prompts"]]
    answers.write(json.dumps({"versions": versions, "outputs": outputs}) + "\n")
    answers.flush()


def load(target: str, draft: str) -> tuple[Any, dict[str, str]]:
    """(server, versions); KV caches in float32, as ours."""
    import xllamacpp

    float32 = xllamacpp.ggml_type.GGML_TYPE_F32
    params = xllamacpp.CommonParams()
    params.model.path = target
    params.n_parallel = 1
    params.n_ctx = 2048
    params.cache_type_k = params.cache_type_v = float32
    speculative = params.speculative
    speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH]
    speculative.draft.mparams.path = draft
    speculative.draft.n_max = HORIZON
    speculative.draft.n_min = 0
    speculative.draft.p_min = 0.0
    speculative.draft.cache_type_k = speculative.draft.cache_type_v = float32
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    for cpu in (params, speculative.draft):
        cpu.cpuparams.n_threads = cpu.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params), {"xllamacpp": xllamacpp.__version__}


def complete(server: Any, prompt_ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    """Greedy decoding of one prompt."""
    body = {
        "prompt": prompt_ids,
        "n_predict": max_new_tokens,
        "temperature": 0.0,
        "top_k": 1,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": True,
    }
    message = urllib.request.Request(
        f"{server.listening_address}/completion",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    tokens: list[int] = []
    timings: dict[str, Any] = {}
    with urllib.request.urlopen(message) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                part = json.loads(line[6:])
                tokens.extend(part.get("tokens") or [])
                timings = part.get("timings") or timings
    # the prompt's own pass gives the first token, every cycle one more than it accepts
    accepted = timings.get("draft_n_accepted", 0)
    num_cycles = timings["predicted_n"] - 1 - accepted
    return {"token_ids": tokens, "num_cycles": num_cycles, "timings": timings}


if __name__ == "__main__":
    main()
