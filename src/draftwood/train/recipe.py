"""From a target to an untrained drafter for it: shape, vocabulary, taps, warm start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from draftwood.draft.config import FULL, DraftConfig
from draftwood.draft.network import DraftNetwork
from draftwood.draft.rope import RopeConfig
from draftwood.train.networks import Network
from draftwood.train.warm_start import (
    can_warm_start,
    draft_vocabulary,
    match_norms,
    set_vocabulary,
    warm_start,
)
from draftwood.tree.tree import FloatArray


@dataclass(frozen=True)
class Recipe:
    """The choices that make a drafter.

    Attributes:
        mask_token_id: an unused special token of the target; never its pad, bos or eos.
        layers: target layer that each drafter layer starts from. The first target layer knows
            how to read raw embeddings, the last how to write for the head.
        taps: target layers to read; None spreads three over the depth. The last target layer
            is left out: other loaders hand out its output after the final norm.
        block_size: rows of a block, anchor included.
        draft_vocab_size: rows of a reduced head, None to use the target's whole head.
        num_key_value_heads: None gives every query head its own, so that values are as wide as
            the hidden state: with few layers they are all a block learns of its context.
        markov_rank: width of a Markov head, 0 for none.
        warm: copy target layers; False starts from noise.
        seed: of the random part of the weights.
    """

    mask_token_id: int
    layers: tuple[int, ...] = (0, -1)
    taps: tuple[int, ...] | None = None
    block_size: int = 8
    draft_vocab_size: int | None = 8192
    num_key_value_heads: int | None = None
    markov_rank: int = 0
    warm: bool = True
    seed: int = 0

    @property
    def can_sample_head(self) -> bool:
        """Whether the drafter has a head of its own; ``head_negatives`` needs one."""
        return self.draft_vocab_size is not None


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Three taps: near the input, the middle, and the last layer but one."""
    return tuple(sorted({min(1, num_layers - 1), num_layers // 2, max(num_layers - 2, 0)}))


def draft_config(target: Any, recipe: Recipe, *, attention_bias: bool) -> DraftConfig:
    """The drafter's configuration for a target's (text) ``config``.

    Args:
        attention_bias: whether the target's attention projections have biases to copy.

    Raises:
        ValueError: the mask token is one the target uses, or a layer or tap does not exist.
    """
    num_layers = int(target.num_hidden_layers)
    used = {
        name: getattr(target, name, None)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id")
    }
    for name, value in used.items():
        if recipe.mask_token_id in (value if isinstance(value, list) else [value]):
            raise ValueError(
                f"mask_token_id {recipe.mask_token_id} is the target's {name}; choose a special "
                "token that its text never contains"
            )
    for layer in recipe.layers:
        if not -num_layers <= layer < num_layers:
            raise ValueError(f"layer {layer} is outside the target's {num_layers} layers")
    heads = int(target.num_attention_heads)
    hidden = int(target.hidden_size)
    count = len(recipe.layers)
    return DraftConfig(
        hidden_size=hidden,
        intermediate_size=int(target.intermediate_size),
        num_hidden_layers=count,
        num_attention_heads=heads,
        num_key_value_heads=recipe.num_key_value_heads or heads,
        head_dim=int(getattr(target, "head_dim", None) or hidden // heads),
        vocab_size=int(target.vocab_size),
        block_size=recipe.block_size,
        mask_token_id=recipe.mask_token_id,
        target_layer_ids=recipe.taps or default_taps(num_layers),
        num_target_layers=num_layers,
        target_hidden_size=hidden,
        rms_norm_eps=float(target.rms_norm_eps),
        rope=RopeConfig.from_json(target.to_dict()),
        layer_types=(FULL,) * count,
        sliding_window=None,
        is_causal=(False,) * count,
        attention_bias=attention_bias,
        max_position_embeddings=int(target.max_position_embeddings),
        draft_vocab_size=recipe.draft_vocab_size,
        own_embeddings=False,
        own_head=recipe.draft_vocab_size is not None,
        markov_rank=recipe.markov_rank,
    )


def build_drafter(
    model: nn.Module,
    recipe: Recipe,
    token_weights: FloatArray | None,
    features: torch.Tensor | None,
    token_ids: Sequence[int] | None,
) -> DraftNetwork:
    """An untrained drafter that borrows the target's tables.

    Args:
        model: the target, a transformers causal LM.
        token_weights: [vocab] for a reduced vocabulary, see ``FeatureStore.token_weights``.
        features: [N, T · H] some target features, to set the scale of q/k norms; with None
            they stay at one.
        token_ids: some tokens of responses, for the same purpose.

    Raises:
        ValueError: the target's layers have another structure than a warm start needs.
    """
    target: Any = model.config
    weights = dict(model.state_dict())
    has_bias = recipe.warm and any(name.endswith("self_attn.q_proj.bias") for name in weights)
    config = draft_config(target, recipe, attention_bias=has_bias)
    torch.manual_seed(recipe.seed)
    network = DraftNetwork(config)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
        if network.markov is not None:
            network.markov.reset()
    inputs = model.get_input_embeddings().weight  # type: ignore[operator]
    outputs = model.get_output_embeddings().weight  # type: ignore[operator]
    network.borrow(inputs, outputs)
    if config.draft_vocab_size is not None:
        if token_weights is None:
            raise ValueError(
                "a reduced draft vocabulary needs token_weights from the responses; pass them "
                "or set draft_vocab_size to None"
            )
        set_vocabulary(network, draft_vocabulary(token_weights, config.draft_vocab_size))
    if recipe.warm:
        layers = [layer % config.num_target_layers for layer in recipe.layers]  # type: ignore[operator]
        reason = can_warm_start(weights, layers)
        if reason:
            raise ValueError(f"this target cannot be copied from ({reason}); set warm=False")
        weights.setdefault("lm_head.weight", outputs)
        warm_start(network, weights, layers, tap=len(config.target_layer_ids) - 1)
        has_norms = f"model.layers.{layers[0]}.self_attn.q_norm.weight" in weights
        if features is not None and token_ids is not None and not has_norms:
            rows = network.embed(torch.tensor(token_ids, device=inputs.device))
            match_norms(network, features, rows.to(features.device))
    return network


def describe(network: Network, blocks: int, head_columns: int) -> dict[str, float]:
    """Sizes and cost before a run.

    Args:
        blocks: blocks of a step.
        head_columns: columns of the head that a step computes.

    Returns:
        parameters, trained parameters, bytes of the saved bf16 weights, bytes of weights,
        gradients and AdamW moments in training, and flops of a step's block rows (forward and
        backward, without context), all matmul-bound estimates.
    """
    config = network.config
    parameters = sum(p.numel() for p in network.parameters())
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    per_layer = sum(p.numel() for p in network.layers[0].parameters() if p.dim() > 1)
    rows = blocks * config.block_size
    head = blocks * config.horizon * head_columns * config.hidden_size
    if rank := config.markov_rank:  # its own products, and the head once more
        head = 2 * head + rows * 4 * rank * config.hidden_size
    return {
        "parameters": parameters,
        "trained_parameters": trained,
        "saved_bytes": 2 * parameters,
        "training_bytes": 4 * parameters + 12 * trained,
        "flops_per_step": 6 * (rows * per_layer * config.num_hidden_layers + head),
    }
