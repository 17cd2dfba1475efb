"""Start a drafter from layers of its target instead of from noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from draftwood.draft.layers import Attention
from draftwood.draft.network import DraftNetwork
from draftwood.tree.tree import FloatArray, IntArray

_LAYER = {
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
}
_OPTIONAL = {
    *(f"self_attn.{name}_proj.bias" for name in "qkvo"),
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
}


def draft_vocabulary(weights: FloatArray, size: int) -> torch.Tensor:
    """[size] target ids of largest weight, ascending; ties go to the lower id.

    Args:
        weights: [vocab] how much each token matters, e.g. its count in the target's responses
            plus the probability the target gave it there.
    """
    if not 0 < size <= len(weights):
        raise ValueError(f"draft vocabulary size {size} must be between 1 and {len(weights)}")
    order = np.lexsort((np.arange(len(weights)), -np.asarray(weights)))
    return torch.from_numpy(np.sort(order[:size]).astype(np.int64))


def coverage(responses: Iterable[IntArray], vocabulary: torch.Tensor) -> float:
    """Share of response tokens inside a draft vocabulary."""
    kept = set(vocabulary.tolist())
    tokens = np.concatenate([np.asarray(response) for response in responses])
    return float(np.isin(tokens, list(kept)).mean())


def set_vocabulary(network: DraftNetwork, vocabulary: torch.Tensor) -> None:
    """Store a reduced vocabulary as offsets (target id − draft id)."""
    assert network.d2t is not None
    assert len(vocabulary) == len(network.d2t)
    network.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))


def can_warm_start(target: Mapping[str, torch.Tensor], layers: Sequence[int]) -> str:
    """Empty if ``warm_start`` knows the target's layer structure, else what is in the way."""
    names = {name.removeprefix("model.") for name in target}
    for layer in layers:
        prefix = f"layers.{layer}."
        have = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        missing, extra = _LAYER - have, have - _LAYER - _OPTIONAL
        if missing:
            return f"layer {layer} has no {', '.join(sorted(missing))}"
        if extra:
            return f"layer {layer} also has {', '.join(sorted(extra))}"
    return ""


@torch.no_grad()
def warm_start(
    network: DraftNetwork,
    target: Mapping[str, torch.Tensor],
    layers: Sequence[int],
    *,
    tap: int,
) -> None:
    """Copy target decoder layers into the drafter so that most of their function survives.

    A drafter layer feeds the fused context feature to k/v_proj without the layer's own input
    norm. Folding that norm's weight into q/k/v_proj (and leaving the norm at one) makes the
    drafter's context keys and values those of the target's layer for the tap ``tap``, which fc
    passes through at first. q/k_norm start at one here; ``match_norms`` sets their scale.

    Args:
        target: the target's state dict with Llama-style names, "model." prefix or not.
        layers: target layer for each drafter layer.
        tap: index into the taps that fc starts with.
    """
    weights = {name.removeprefix("model."): value.float() for name, value in target.items()}
    for layer, source in zip(network.stack(), layers, strict=True):
        prefix = f"layers.{source}."
        norm = weights[prefix + "input_layernorm.weight"]
        for name in ("q_proj", "k_proj", "v_proj"):
            folded = weights[f"{prefix}self_attn.{name}.weight"] * norm
            own = getattr(layer.self_attn, name).weight
            own.copy_(_repeat_heads(folded, own.shape[0], network.config.head_dim))
        layer.input_layernorm.weight.fill_(1.0)
        layer.self_attn.o_proj.weight.copy_(weights[prefix + "self_attn.o_proj.weight"])
        for name in ("q_norm", "k_norm"):
            if f"{prefix}self_attn.{name}.weight" in weights:
                getattr(layer.self_attn, name).weight.copy_(
                    weights[f"{prefix}self_attn.{name}.weight"]
                )
        _copy_biases(layer.self_attn, weights, prefix)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).weight.copy_(weights[f"{prefix}mlp.{name}.weight"])
        layer.post_attention_layernorm.weight.copy_(
            weights[prefix + "post_attention_layernorm.weight"]
        )
    _pass_through(network, tap)
    network.hidden_norm.weight.fill_(1.0)
    network.norm.weight.copy_(weights["norm.weight"])
    _copy_head(network, weights)


def _copy_biases(attention: Attention, weights: Mapping[str, torch.Tensor], prefix: str) -> None:
    """Projection biases, zero where the target has none."""
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        own = getattr(attention, name).bias
        if own is None:
            continue
        bias = weights.get(f"{prefix}self_attn.{name}.bias")
        if bias is None:
            own.zero_()
        else:
            own.copy_(_repeat_heads(bias[:, None], len(own), attention.head_dim)[:, 0])


def _repeat_heads(weight: torch.Tensor, rows: int, head_dim: int) -> torch.Tensor:
    """Give every query head its own copy of a shared key/value head where the drafter has more."""
    copies, rest = divmod(rows, weight.shape[0])
    if rest:
        raise ValueError(
            f"the drafter's {rows} projection rows are no multiple of the target's "
            f"{weight.shape[0]}; choose a head count that is"
        )
    if copies == 1:
        return weight
    return weight.view(-1, head_dim, weight.shape[1]).repeat_interleave(copies, 0).flatten(0, 1)


def _pass_through(network: DraftNetwork, tap: int) -> None:
    width = network.config.target_hidden_size
    network.fc.weight.normal_(0.0, 0.02 / len(network.config.target_layer_ids) ** 0.5)
    size = min(width, network.config.hidden_size)
    block = network.fc.weight[:size, tap * width : tap * width + size]
    block.copy_(torch.eye(size))


def _copy_head(network: DraftNetwork, weights: Mapping[str, torch.Tensor]) -> None:
    if network.lm_head is None:
        return
    head = weights.get("lm_head.weight", weights["embed_tokens.weight"])
    ids = network.target_ids()
    network.lm_head.weight.copy_(head if ids is None else head[ids.to(head.device)])


@torch.no_grad()
def match_norms(network: DraftNetwork, features: torch.Tensor, block_hidden: torch.Tensor) -> None:
    """Set q/k_norm to the mean size that the warm-started projections had without them.

    The norm divides each head's vector by its root mean square; multiplying by the average of
    those keeps direction and typical scale of the attention scores.

    Args:
        features: [N, T · H] some target features.
        block_hidden: [M, H] some block embeddings.
    """
    fused = network.hidden_norm(network.fc(features.to(network.fc.weight.dtype)))
    for layer in network.stack():
        attention = layer.self_attn
        rows = layer.input_layernorm(block_hidden)
        for projection, norm, x in (
            (attention.q_proj, attention.q_norm, rows),
            (attention.k_proj, attention.k_norm, torch.cat([fused, rows])),
        ):
            heads = projection(x).view(len(x), -1, network.config.head_dim)
            norm.weight.fill_(float(heads.square().mean(-1).sqrt().mean()))
