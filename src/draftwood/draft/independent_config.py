"""What an independent drafter is made of: a language model's own configuration, and our section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftwood.draft.config import KIND as DFLASH
from draftwood.draft.config import (
    SECTION,
    check_block,
    check_heads,
    check_markov,
    check_sizes,
    whole,
)
from draftwood.draft.rope import RopeConfig

KIND = "independent"

# Model types whose layers are RMS norms, rotary attention without window, and SwiGLU.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

# Keys that change what the network computes and that this implementation does not have.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0,),
}

_DROPPED = (SECTION, "_name_or_path", "id2label", "label2id", "return_dict", "problem_type")


@dataclass(frozen=True)
class IndependentConfig:
    """An independent block-diffusion drafter (D3D).

    Attributes:
        raw: the body's own configuration as transformers writes it, without our section.
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
            num_key_value_heads, head_dim, vocab_size, rms_norm_eps, max_position_embeddings:
            of the body.
        qkv_bias, out_bias, has_qk_norm: what its attention has.
        rope: its position embedding.
        tied: whether its head is its embedding table.
        block_size: rows of a block, anchor included.
        mask_token_id: token that stands for a position to predict.
        layers: layers of the original body that are kept, by their index there.
        borrows: its embeddings and head are the target's.
        tokenizer: fingerprint of the tokenizer it was trained with; None if not recorded.
        markov_rank: width of the Markov head (see ``markov``), 0 without one.
    """

    raw: Mapping[str, Any] = field(repr=False, compare=False)
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    qkv_bias: bool
    out_bias: bool
    has_qk_norm: bool
    rope: RopeConfig
    tied: bool
    block_size: int
    mask_token_id: int
    layers: tuple[int, ...]
    borrows: bool
    tokenizer: str | None = None
    markov_rank: int = 0

    def __post_init__(self) -> None:
        check_sizes(self)
        check_block(self.block_size, self.mask_token_id, self.vocab_size)
        if not self.layers or len(self.layers) != self.num_hidden_layers:
            raise ValueError(
                f"the drafter has {self.num_hidden_layers} layers but lists {list(self.layers)} "
                "as kept; list each once"
            )
        check_heads(self.num_attention_heads, self.num_key_value_heads)
        check_markov(self.markov_rank, self.hidden_size)

    @property
    def horizon(self) -> int:
        """Deepest position it predicts."""
        return self.block_size - 1

    @property
    def head_size(self) -> int:
        """Columns of the logits."""
        return self.vocab_size


def body_config(
    raw: Mapping[str, Any],
    *,
    block_size: int,
    mask_token_id: int,
    layers: tuple[int, ...],
    borrows: bool,
    tokenizer: str | None,
    markov_rank: int = 0,
) -> IndependentConfig:
    """A drafter from a language model's ``config.json`` (or ``config.to_dict()``).

    Args:
        layers: kept layers of the original body; as many as the returned drafter has.

    Raises:
        ValueError: a family or feature that blocks cannot run through, or a missing key.
    """
    body = {key: value for key, value in raw.items() if value is not None and key not in _DROPPED}
    family = str(body.get("model_type"))
    if family not in FAMILIES:
        raise ValueError(
            f"a body of type {family!r} cannot be an independent drafter; use one of "
            f"{', '.join(FAMILIES)}"
        )
    for key, allowed in _REFUSED.items():
        if body.get(key) is not None and body[key] not in allowed:
            raise ValueError(f"the body sets {key} = {body[key]!r}; only {allowed[0]!r} works here")
    longest = int(_need(body, "max_position_embeddings"))
    window = body.get("sliding_window")
    if family == "mistral" and window is not None and window < longest:
        raise ValueError(
            f"the body has a sliding window of {window} tokens, shorter than its context of "
            f"{longest}; use a body with full attention"
        )
    body["num_hidden_layers"] = len(layers)
    if isinstance(body.get("layer_types"), (list, tuple)):
        body["layer_types"] = ["full_attention"] * len(layers)
    heads, hidden = int(_need(body, "num_attention_heads")), int(_need(body, "hidden_size"))
    has_bias = bool(body.get("attention_bias", False))
    return IndependentConfig(
        raw=body,
        hidden_size=hidden,
        intermediate_size=int(_need(body, "intermediate_size")),
        num_hidden_layers=len(layers),
        num_attention_heads=heads,
        num_key_value_heads=int(body.get("num_key_value_heads") or heads),
        head_dim=int(body.get("head_dim") or hidden // heads),
        vocab_size=int(_need(body, "vocab_size")),
        rms_norm_eps=float(_need(body, "rms_norm_eps")),
        max_position_embeddings=longest,
        qkv_bias=family == "qwen2" or has_bias,
        out_bias=family in ("llama", "qwen3") and has_bias,
        has_qk_norm=family == "qwen3",
        rope=RopeConfig.from_json(body),
        tied=bool(body.get("tie_word_embeddings", False)),
        block_size=block_size,
        mask_token_id=mask_token_id,
        layers=layers,
        borrows=borrows,
        tokenizer=tokenizer,
        markov_rank=markov_rank,
    )


def is_independent(raw: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of an independent drafter.

    Raises:
        ValueError: it has our section, but of a kind that there is not.
    """
    if SECTION not in raw:
        return False
    section = raw[SECTION]
    kind = section.get("kind") if isinstance(section, Mapping) else None
    if kind not in (KIND, DFLASH):
        raise ValueError(
            f"config.json has a {SECTION!r} section that is not of kind {KIND!r} or {DFLASH!r}: "
            f"{section!r}; restore the file"
        )
    return kind == KIND


def parse_independent(raw: Mapping[str, Any]) -> IndependentConfig:
    """Read the ``config.json`` of a drafter folder.

    Raises:
        ValueError: it is not one, lacks a key, or asks for a network we do not have.
    """
    if not is_independent(raw):
        raise ValueError(
            f"config.json has no {SECTION!r} section of kind {KIND!r}; this is no independent "
            "drafter"
        )
    section = raw[SECTION]
    listed = _need(section, "layers")
    if not isinstance(listed, list) or not all(type(i) is int for i in listed):
        raise ValueError(f"'layers' in config.json must be a list of numbers, got {listed!r}")
    if "tokenizer" not in section:
        raise ValueError(f"the {SECTION!r} section of config.json lacks 'tokenizer'; restore it")
    layers = tuple(listed)
    if raw.get("num_hidden_layers") != len(layers):
        raise ValueError(
            f"config.json has num_hidden_layers = {raw.get('num_hidden_layers')} but keeps layers "
            f"{list(layers)}; restore the file"
        )
    return body_config(
        raw,
        block_size=whole("block_size", _need(section, "block_size")),
        mask_token_id=whole("mask_token_id", _need(section, "mask_token_id")),
        layers=layers,
        borrows=_flag(section, "borrows"),
        tokenizer=section.get("tokenizer"),
        markov_rank=whole("markov_rank", section.get("markov_rank", 0)),
    )


def independent_to_json(config: IndependentConfig) -> dict[str, Any]:
    """The ``config.json`` of a drafter: the body's, with our section."""
    section = {
        "kind": KIND,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "layers": list(config.layers),
        "borrows": config.borrows,
        "tokenizer": config.tokenizer,
    }
    if config.markov_rank:
        section["markov_rank"] = config.markov_rank
    return {**config.raw, SECTION: section}


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = _need(raw, key)
    if not isinstance(value, bool):
        raise ValueError(f"{key!r} in config.json must be true or false, got {value!r}")
    return value


def _need(raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise ValueError(f"the drafter's configuration lacks {key!r}; add it to config.json")
    return raw[key]
