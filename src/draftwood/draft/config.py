"""What a block-diffusion drafter is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftwood.draft.rope import RopeConfig

SECTION = "draftwood"
KIND = "dflash"
FULL = "full_attention"
SLIDING = "sliding_attention"


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
        check_sizes(self)
        check_block(self.block_size, self.mask_token_id, self.vocab_size)
        taps = self.target_layer_ids
        if not taps or any(tap < 0 for tap in taps) or len(set(taps)) != len(taps):
            raise ValueError(f"target_layer_ids must be distinct layers ≥ 0, got {list(taps)}")
        check_heads(self.num_attention_heads, self.num_key_value_heads)
        check_markov(self.markov_rank, self.hidden_size if self.logit_softcap is None else 0)
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
        if SLIDING in self.layer_types and (self.sliding_window or 0) < 1:
            raise ValueError(
                "a sliding_attention layer needs a sliding_window ≥ 1 in the configuration, got "
                f"{self.sliding_window}"
            )
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


_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
)  # fmt: skip


def check_sizes(config: Any) -> None:
    """Refuse sizes below 1, and an epsilon that is none."""
    for name in _SIZES:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be ≥ 1, got {getattr(config, name)}")
    if not 0 < config.rms_norm_eps < 1:
        raise ValueError(f"rms_norm_eps must be between 0 and 1, got {config.rms_norm_eps}")


def check_markov(rank: int, most: int) -> None:
    """Refuse a Markov head that is wider than the network's rows, or that softcapped logits have.

    Raises:
        ValueError: a rank outside 0 … ``most``.
    """
    if not 0 <= rank <= most:
        raise ValueError(
            f"markov_rank must be between 0 and {most} (the hidden size; 0 with a softcap of the "
            f"logits), got {rank}"
        )


def whole(name: str, value: Any) -> int:
    """A value of config.json that must be a whole number."""
    if type(value) is not int:
        raise ValueError(f"{name!r} in config.json must be a whole number, got {value!r}")
    return value


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
