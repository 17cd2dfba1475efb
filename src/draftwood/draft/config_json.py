"""A block-diffusion drafter's ``config.json``, read in either published layout, written in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftwood.draft.config import FULL, KIND, SECTION, SLIDING, DraftConfig, whole
from draftwood.draft.rope import RopeConfig

# Keys that change what the network computes and that this implementation does not have.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "sample_from_anchor": (False,),
    "shift_label": (False,),
    "projector_type": ("dflash",),
    "markov_rank": (0,),
    "use_aux_hidden_state": (True,),
    "attention_sink_bias": (False,),
    "selector_rank": (0,),
    "conv_kernel_size": (0,),
    "hidden_act": ("silu",),
}


def parse_config(raw: Mapping[str, Any], *, has_embeddings: bool, has_head: bool) -> DraftConfig:
    """Read a checkpoint's ``config.json``.

    Args:
        raw: the JSON object, z-lab layout (top-level Qwen3 keys and ``dflash_config``) or
            speculators layout (``speculators_model_type`` and ``transformer_layer_config``).
        has_embeddings, has_head: whether the weights include ``embed_tokens`` and ``lm_head``.

    Raises:
        ValueError: something needed is missing, or asks for a network we do not have.
    """
    speculators = "speculators_model_type" in raw
    if speculators and raw["speculators_model_type"] != "dflash":
        raise ValueError(
            f"speculators_model_type {raw['speculators_model_type']!r} is not 'dflash'; "
            "only block-diffusion (DFlash) drafters can be loaded here"
        )
    layer = raw.get("transformer_layer_config", raw) if speculators else raw
    extra = {**raw, **(raw.get("dflash_config") or {})}
    for key, allowed in _REFUSED.items():
        value = extra.get(key, layer.get(key))
        if value is not None and value not in allowed:
            raise ValueError(
                f"the drafter sets {key} = {value!r}, which is not supported (only "
                f"{allowed[0]!r}); use a plain DFlash checkpoint"
            )
    taps = _taps(raw, extra, speculators)
    num_layers = int(_need(layer, "num_hidden_layers"))
    heads = int(_need(layer, "num_attention_heads"))
    hidden = int(_need(layer, "hidden_size"))
    vocab = int(_need(layer, "vocab_size"))
    types = _layer_types(layer, num_layers)
    return DraftConfig(
        hidden_size=hidden,
        intermediate_size=int(_need(layer, "intermediate_size")),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=int(layer.get("num_key_value_heads") or heads),
        head_dim=int(layer.get("head_dim") or hidden // heads),
        vocab_size=vocab,
        block_size=whole("block_size", _need(extra, "block_size")),
        mask_token_id=whole("mask_token_id", _need(extra, "mask_token_id")),
        target_layer_ids=taps,
        num_target_layers=_optional_int(extra.get("num_target_layers")),
        target_hidden_size=int(extra.get("target_hidden_size") or hidden),
        rms_norm_eps=float(_need(layer, "rms_norm_eps")),
        rope=RopeConfig.from_json(layer),
        layer_types=types,
        sliding_window=_optional_int(layer.get("sliding_window")) if SLIDING in types else None,
        is_causal=_causal(layer, extra, types),
        attention_bias=bool(layer.get("attention_bias", False)),
        max_position_embeddings=int(layer.get("max_position_embeddings", 32768)),
        draft_vocab_size=_reduced(extra, vocab),
        own_embeddings=has_embeddings,
        own_head=has_head,
        embedding_scale=float(extra.get("input_embedding_scale") or 1.0),
        logit_scale=float(extra.get("output_multiplier") or layer.get("logit_scale") or 1.0),
        logit_softcap=_optional_float(extra.get("final_logit_softcapping")),
        markov_rank=_markov_rank(raw.get(SECTION)),
    )


def config_to_json(config: DraftConfig) -> dict[str, Any]:
    """The z-lab ``config.json`` of a drafter, with both transformers-4 and -5 rope keys."""
    rope = {"rope_type": config.rope.kind, **config.rope.parameters}
    default = config.rope.kind == "default"
    extra: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if config.embedding_scale != 1.0:
        extra["input_embedding_scale"] = config.embedding_scale
    if config.logit_scale != 1.0:
        extra["output_multiplier"] = config.logit_scale
    if config.logit_softcap is not None:
        extra["final_logit_softcapping"] = config.logit_softcap
    raw: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": None if default else rope,
        "rope_parameters": {"rope_theta": config.rope.theta, **rope},
        "layer_types": list(config.layer_types),
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": extra,
    }
    if config.is_causal != tuple(kind == SLIDING for kind in config.layer_types):
        raw["is_causal"] = config.is_causal[0]
    if config.target_hidden_size != config.hidden_size:
        raw["target_hidden_size"] = config.target_hidden_size
    if config.draft_vocab_size is not None:
        raw["draft_vocab_size"] = config.draft_vocab_size
    if config.markov_rank:
        raw[SECTION] = {"kind": KIND, "markov_rank": config.markov_rank}
    return raw


def _markov_rank(section: Any) -> int:
    """From our own section, which other loaders of the layout do not read."""
    if section is None:
        return 0
    known = isinstance(section, Mapping) and section.get("kind") == KIND
    rank = section.get("markov_rank") if known else None
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(
            f"the {SECTION!r} section of config.json must be of kind {KIND!r} with a markov_rank "
            f"≥ 1, got {section!r}; restore the file"
        )
    return rank


def _need(raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise ValueError(
            f"the draft configuration lacks {key!r}; add it to config.json, it is never guessed"
        )
    return raw[key]


def _taps(raw: Mapping[str, Any], extra: Mapping[str, Any], speculators: bool) -> tuple[int, ...]:
    """Our 0-based taps; speculators counts hidden_states entries, where 0 is the embedding."""
    if speculators:
        ids = [int(i) for i in _need(raw, "aux_hidden_state_layer_ids")]
        if min(ids, default=1) < 1:
            raise ValueError(
                f"aux_hidden_state_layer_ids {ids} include 0, the embedding output; "
                "only decoder layer outputs (≥ 1) can be tapped"
            )
        return tuple(i - 1 for i in ids)
    if extra.get("target_layer_ids") is None and extra.get("layer_ids") is not None:
        return tuple(int(i) for i in extra["layer_ids"])
    return tuple(int(i) for i in _need(extra, "target_layer_ids"))


def _layer_types(layer: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    types = layer.get("layer_types")
    if types is not None:
        return tuple(types)
    if layer.get("use_sliding_window"):
        raise ValueError(
            "use_sliding_window is set without layer_types; list each layer's type in layer_types"
        )
    return (FULL,) * num_layers


def _causal(
    layer: Mapping[str, Any], extra: Mapping[str, Any], types: tuple[str, ...]
) -> tuple[bool, ...]:
    """Sliding layers are causal by default, full ones bidirectional; explicit keys override."""
    for key in ("is_causal", "causal"):
        value = extra.get(key, layer.get(key))
        if value is not None:
            return (bool(value),) * len(types)
    if extra.get("sliding_window_non_causal"):
        return (False,) * len(types)
    return tuple(kind == SLIDING for kind in types)


def _reduced(extra: Mapping[str, Any], vocab_size: int) -> int | None:
    size = _optional_int(extra.get("draft_vocab_size"))
    if size is not None and not 0 < size <= vocab_size:
        raise ValueError(f"draft_vocab_size {size} must be between 1 and vocab_size {vocab_size}")
    return None if size == vocab_size else size


def _optional_int(value: Any) -> int | None:
    return None if value is None else int(value)


def _optional_float(value: Any) -> float | None:
    return None if not value else float(value)
