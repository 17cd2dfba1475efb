"""Tiny random models of every supported family, with weights so large that context matters."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

SLIDING_WINDOW = 8

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_MIXED = ["sliding_attention", "full_attention"] * 2

# family → (transformers class prefix, extra configuration)
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True}),
    "qwen2": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": SLIDING_WINDOW, "layer_types": _MIXED},
    ),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "mistral": ("Mistral", {"sliding_window": SLIDING_WINDOW}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": SLIDING_WINDOW,
            "layer_types": _MIXED,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "attn_implementation": "eager",
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": SLIDING_WINDOW,
            "layer_types": _MIXED,
            "query_pre_attn_scalar": 10,
            "final_logit_softcapping": 6.0,
        },
    ),
    "phi3": ("Phi3", {"head_dim": 8}),
    "gpt_oss": (
        "GptOss",
        {
            "sliding_window": SLIDING_WINDOW,
            "layer_types": _MIXED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "attn_implementation": "eager",
        },
    ),
}

FAMILIES = tuple(_FAMILIES)


def tiny_config(
    family: str, *, vocab: int = 97, eos_token_id: int | None = None, **overrides: Any
) -> transformers.PretrainedConfig:
    """The configuration of ``tiny_model``; ``overrides`` replace single keys."""
    prefix, extra = _FAMILIES[family]
    name = f"{prefix}TextConfig" if family == "gemma3" else f"{prefix}Config"
    settings = {**_SIZES, **extra, "vocab_size": vocab, "eos_token_id": eos_token_id, **overrides}
    return getattr(transformers, name)(**settings)


def tiny_model(
    family: str,
    *,
    dtype: torch.dtype = torch.float64,
    vocab: int = 97,
    seed: int = 0,
    eos_token_id: int | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """A random causal language model of ``family``, in evaluation mode.

    Args:
        family: one of ``FAMILIES``.
        dtype: of the weights.
        vocab: vocabulary size; ids 0 and 1 are padding and beginning of sequence.
        seed: of the weights; the global generator is left alone.
        eos_token_id: None: no token ends a sequence.
        overrides: configuration keys to replace.
    """
    prefix, _ = _FAMILIES[family]
    config = tiny_config(family, vocab=vocab, eos_token_id=eos_token_id, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        randomise(model)
    return model.to(dtype).eval()


@torch.no_grad()
def randomise(model: PreTrainedModel, std: float = 0.35) -> None:
    """Large random weights: matrices around 0, vectors (norms, biases, sinks) around their own."""
    for weight in model.parameters():
        noise = torch.randn_like(weight) * std
        weight.copy_(noise if weight.dim() > 1 else weight + noise)
