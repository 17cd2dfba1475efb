"""Worker script (see ``worker.py``): llama.cpp's server in this process, by xllamacpp.

Runs in an environment with ``pip install xllamacpp``; the model is a GGUF file. Tokens are
counted and timed as the server streams them.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.request
from typing import Any


def load(message: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    """(server, versions)."""
    try:
        import xllamacpp
    except ImportError as error:
        raise ImportError(
            f"no xllamacpp in {sys.executable}; install it there: pip install xllamacpp"
        ) from error
    if not os.path.isfile(message["model"]):
        raise FileNotFoundError(f"{message['model']!r} is no GGUF file")
    params = xllamacpp.CommonParams()
    params.model.path = message["model"]
    params.n_parallel = message["max_concurrency"]
    params.n_ctx = message["context_len"] * message["max_concurrency"]
    params.cpuparams.n_threads = message["threads"]
    params.cpuparams_batch.n_threads = message["threads"]
    return xllamacpp.Server(params), {"xllamacpp": xllamacpp.__version__}


def run(server: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Outputs of requests that are sent at once."""
    outputs: list[Any] = [None] * len(requests)
    begin = time.perf_counter()

    def one(index: int) -> None:
        outputs[index] = complete(server, requests[index], begin)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall_s = time.perf_counter() - begin
    failed = [output for output in outputs if not isinstance(output, dict)]
    if failed:
        raise RuntimeError(f"the server did not answer: {failed[0]}")
    return {"outputs": outputs, "wall_s": wall_s}


def complete(server: Any, request: dict[str, Any], begin: float) -> dict[str, Any]:
    """One streamed completion, by the server's own address: only there tokens have numbers."""
    body = {
        "prompt": request["prompt_ids"],
        "n_predict": request["max_new_tokens"],
        "temperature": request["temperature"],
        "seed": request["seed"],
        "top_k": 0 if request["temperature"] > 0 else 1,
        "top_p": 1.0,
        "min_p": 0.0,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": True,
    }
    message = urllib.request.Request(
        f"{server.listening_address}/completion",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    arrivals: list[list[float]] = []
    tokens: list[int] = []
    final: dict[str, Any] = {}
    with urllib.request.urlopen(message) as stream:
        for line in stream:
            if not line.startswith(b"data: "):
                continue
            part = json.loads(line[6:])
            if part.get("tokens"):
                arrivals.append([time.perf_counter() - begin, len(part["tokens"])])
                tokens.extend(part["tokens"])
            if part.get("stop"):
                final = part
    first_s = arrivals[0][0] if arrivals else 0.0
    last_s = arrivals[-1][0] if arrivals else 0.0
    return {
        "token_ids": tokens,
        "finish_reason": "length" if final.get("stop_type") == "limit" else "stop",
        "prefill_s": final.get("timings", {}).get("prompt_ms", first_s * 1e3) / 1e3,
        "decode_s": last_s - first_s,
        "num_decoded": max(0, len(tokens) - 1),
        "arrivals": arrivals,
    }


if __name__ == "__main__":
    from serving import serve  # in this folder

    serve(load, run)
