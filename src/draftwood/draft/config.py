"""What a block-diffusion drafter is made of, read from either published checkpoint layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftwood.draft.rope import RopeConfig

SECTION = "draftwood"
KIND = "dflash"
FULL = "full_attention"
SLIDING = "sliding_attention"

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


@dataclass(frozen=True)
class DraftConfig:
    """A DFlash drafter.

    Attributes:
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
            num_key_value_heads, head_dim, rms_norm_eps, attention_bias: usual meanings.
        vocab_size: the target's vocabulary (anchor ids, mask id, ids the head stands for).
        draft_vocab_size: rows of a reduced head, None when the head covers the vocabulary.
        block_size: rows of a block, anchor included.
        mask_token_id: target token id that stands for a position to predict.
        target_layer_ids: taps, 0-based target layers whose raw output is read.
        num_target_layers: layers of the target it was trained for, None if not recorded.
        target_hidden_size: width of one tap.
        rope: position embedding of the drafter.
        layer_types: per layer ``full_attention`` or ``sliding_attention``.
        sliding_window: window of the sliding layers, None without any.
        is_causal: per layer, whether rows of a block see only rows before them.
        max_position_embeddings: longest position it was made for.
        own_embeddings, own_head: whether the checkpoint has these tables or borrows the target's.
        embedding_scale, logit_scale, logit_softcap: factors on block embeddings and logits.
        markov_rank: width of the Markov head (see ``markov``), 0 without one.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    target_hidden_size: int
    rms_norm_eps: float
    rope: RopeConfig
    layer_types: tuple[str, ...]
    sliding_window: int | None
    is_causal: tuple[bool, ...]
    attention_bias: bool
    max_position_embeddings: int
    draft_vocab_size: int | None
    own_embeddings: bool
    own_head: bool
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    markov_rank: int = 0

    def __post_init__(self) -> None:
        check_block(self.block_size, self.mask_token_id, self.vocab_size)
        taps = self.target_layer_ids
        if not taps or any(tap < 0 for tap in taps) or len(set(taps)) != len(taps):
            raise ValueError(f"target_layer_ids must be distinct layers ≥ 0, got {list(taps)}")
        check_heads(self.num_attention_heads, self.num_key_value_heads)
        most = self.hidden_size if self.logit_softcap is None else 0
        if not 0 <= self.markov_rank <= most:
            raise ValueError(
                f"markov_rank must be between 0 and {most} (the hidden size; 0 with a softcap of "
                f"the logits), got {self.markov_rank}"
            )
        self._check_layers()

    def _check_layers(self) -> None:
        if not len(self.layer_types) == len(self.is_causal) == self.num_hidden_layers:
            raise ValueError(
                f"layer_types must name {self.num_hidden_layers} layers, "
                f"got {list(self.layer_types)}"
            )
        unknown = set(self.layer_types) - {FULL, SLIDING}
        if unknown:
            raise ValueError(f"layer types {sorted(unknown)} are unknown; use {FULL} or {SLIDING}")
        if SLIDING in self.layer_types and not self.sliding_window:
            raise ValueError("a sliding_attention layer needs sliding_window in the configuration")
        if self.reduced and not self.own_head:
            raise ValueError("a reduced draft vocabulary needs a head of its own (lm_head.weight)")

    @property
    def horizon(self) -> int:
        """Deepest position it predicts."""
        return self.block_size - 1

    @property
    def reduced(self) -> bool:
        """Whether the head covers only part of the vocabulary (``d2t`` maps it)."""
        return self.draft_vocab_size is not None

    @property
    def head_size(self) -> int:
        """Columns of the logits."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    def window(self, layer: int) -> int | None:
        """Attention window of a layer, None for full attention."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None


def check_block(block_size: int, mask_token_id: int, vocab_size: int) -> None:
    """Refuse a block that cannot predict, and a mask that is no token."""
    if block_size < 2:
        raise ValueError(f"block_size must be at least 2 (anchor and a mask), got {block_size}")
    if not 0 <= mask_token_id < vocab_size:
        raise ValueError(
            f"mask_token_id {mask_token_id} is outside the vocabulary of "
            f"{vocab_size}; name an unused token of the target"
        )


def check_heads(num_attention_heads: int, num_key_value_heads: int) -> None:
    """Refuse query heads that do not share key heads evenly."""
    if num_attention_heads % num_key_value_heads:
        raise ValueError(
            f"num_attention_heads {num_attention_heads} must be a multiple of "
            f"num_key_value_heads {num_key_value_heads}"
        )


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
        block_size=int(_need(extra, "block_size")),
        mask_token_id=int(_need(extra, "mask_token_id")),
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
