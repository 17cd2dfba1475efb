"""Worker script (see ``worker.py``): vLLM without a server.

Runs in an environment that has vLLM (its CPU build where there is no GPU); the model is a folder or
hub id. vLLM's offline interface does not stream: first tokens are timed by its own statistics
where it keeps them, and inter-token latencies are not known.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any


def load(message: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    """(engine, versions)."""
    os.environ.setdefault("OMP_NUM_THREADS", str(message["threads"]))
    try:
        import vllm
    except ImportError as error:
        raise ImportError(f"no vLLM in {sys.executable}; install it there") from error
    engine = vllm.LLM(
        model=message["model"],
        dtype=message["dtype"],
        max_model_len=message["context_len"],
        max_num_seqs=message["max_concurrency"],
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    return engine, {"vllm": vllm.__version__}


def run(engine: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Outputs of requests that are sent at once."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=request["temperature"],
            seed=request["seed"],
            max_tokens=request["max_new_tokens"],
            stop_token_ids=request["stop_token_ids"],
            detokenize=False,
        )
        for request in requests
    ]
    prompts = [{"prompt_token_ids": request["prompt_ids"]} for request in requests]
    begin = time.perf_counter()
    results = engine.generate(prompts, params, use_tqdm=False)
    wall_s = time.perf_counter() - begin
    return {"outputs": [describe(one, wall_s) for one in results], "wall_s": wall_s}


def describe(result: Any, wall_s: float) -> dict[str, Any]:
    """One output in the words of the protocol."""
    completion = result.outputs[0]
    tokens = list(completion.token_ids)
    first_s = getattr(result.metrics, "first_token_latency", None) or 0.0
    return {
        "token_ids": tokens,
        "finish_reason": "length" if completion.finish_reason == "length" else "stop",
        "prefill_s": first_s,
        "decode_s": wall_s - first_s,
        "num_decoded": len(tokens) - 1 if first_s else len(tokens),
        "arrivals": [],
    }


if __name__ == "__main__":
    from serving import serve  # in this folder

    serve(load, run)
