"""Which transformers models can be a target, and the facts read from their configuration."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from draftwood.target.attention import NAME, register_attention

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The text decoder inside a causal (or multi-modal) language model."""
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel) or decoder is model:
        raise ValueError(
            f"{type(model).__name__} has no decoder below a language model head; "
            "load it with AutoModelForCausalLM"
        )
    return decoder


def decoder_layers(decoder: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers, whatever the family calls them."""
    num_layers = decoder.config.num_hidden_layers
    found = [
        child
        for child in decoder.children()
        if isinstance(child, nn.ModuleList) and len(child) == num_layers
    ]
    if len(found) != 1:
        raise ValueError(f"cannot tell the {num_layers} decoder layers of {type(decoder).__name__}")
    return found[0]


def attention_configs(decoder: PreTrainedModel) -> list[PretrainedConfig]:
    """Every configuration object from which a part of the decoder reads its implementation."""
    configs: dict[int, PretrainedConfig] = {}
    for module in decoder.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            configs[id(config)] = config
    return list(configs.values())


def check_supported(model: PreTrainedModel) -> None:
    """Raise ValueError with the reason if this model cannot be a target."""
    reason = next(_objections(model), None)
    if reason is not None:
        raise ValueError(f"{type(model).__name__} cannot be a target: {reason}")


def _objections(model: PreTrainedModel) -> Iterator[str]:
    config = model.config
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder model"
    if model.training:
        yield "it is in training mode (dropout would change its output); call model.eval()"
    if getattr(model, "_is_stateful", False):
        yield "its layers carry a recurrent state, which cannot be rolled back to a tree node"
    unknown = sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()} - LAYER_TYPES)
    if unknown:
        yield f"layers of type {', '.join(unknown)} are not supported, only {sorted(LAYER_TYPES)}"
    if getattr(text, "attention_chunk_size", None):
        yield "its attention is chunked"
    if getattr(text, "num_kv_shared_layers", None):
        yield "some of its layers share the keys and values of others"
    if getattr(text, "use_bidirectional_attention", None) or not getattr(text, "is_causal", True):
        yield "it is configured for bidirectional attention"
    if getattr(text, "add_cross_attention", False):
        yield "it has cross-attention"
    if model.get_output_embeddings() is None:
        yield "it has no language model head; load it with AutoModelForCausalLM"
    decoder = decoder_of(model)
    decoder_layers(decoder)
    if not _takes_our_attention(decoder):
        yield "its attention cannot be replaced through transformers' AttentionInterface"


def _takes_our_attention(decoder: PreTrainedModel) -> bool:
    register_attention()
    configs = attention_configs(decoder)
    saved = [config._attn_implementation for config in configs]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            decoder.set_attn_implementation(NAME)
        # transformers only warns when it cannot; what counts is what the configurations say now.
        return all(config._attn_implementation == NAME for config in configs)
    except ValueError:
        return False
    finally:
        for config, implementation in zip(configs, saved, strict=True):
            config._attn_implementation_internal = implementation


def max_length(text_config: PretrainedConfig) -> int:
    """Longest sequence that can be decoded exactly.

    Rope variants whose factors depend on the longest position in a batch (longrope, dynamic NTK)
    are limited to the length below which the factors are constant: beyond it one long sequence
    would change its neighbours, and a cached key its own meaning.
    """
    limit = getattr(text_config, "max_position_embeddings", None) or sys.maxsize
    for rope in _rope_settings(text_config):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "longrope":
            original = rope.get("original_max_position_embeddings") or getattr(
                text_config, "original_max_position_embeddings", None
            )
            limit = min(limit, original or limit)
        elif "dynamic" in kind:
            limit -= 1
    return int(limit)


def _rope_settings(config: PretrainedConfig) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]


def eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """End-of-sequence ids as ``generate`` uses them; the tokenizer's if the model names none."""
    sources = (getattr(model, "generation_config", None), model.config, tokenizer)
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()


def logit_transform(model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """What this family does to the head's output: scaling (Granite, Cohere), then softcapping."""
    text = model.config.get_text_config(decoder=True)
    divisor = getattr(text, "logits_scaling", None) or 1.0
    factor = getattr(model, "logit_scale", None)
    scale = (1.0 if factor is None else factor) / divisor
    cap = getattr(text, "final_logit_softcapping", None)

    def transform(logits: torch.Tensor) -> torch.Tensor:
        if scale != 1.0:
            logits = logits * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return transform
