"""Folders of independent drafters: a language model's own layout, plus a section in config.json.

A drafter with embeddings of its own also loads in transformers, as the causal language model that
it still is. One that borrows the target's has no ``embed_tokens`` and no ``lm_head``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftwood.draft.checkpoint import check_weights
from draftwood.draft.folder import (
    CONFIG,
    MARKOV_PREFIX,
    find_folder,
    markov_apart,
    on_disk,
    read_json,
    read_markov,
    read_weights,
    reading,
    write_folder,
)
from draftwood.draft.independent_config import (
    IndependentConfig,
    body_config,
    independent_to_json,
    is_independent,
    parse_independent,
)
from draftwood.draft.independent_network import IndependentNetwork
from draftwood.target.model import Target

_PREFIX = "model."
_HEAD = "lm_head.weight"


def fingerprint(tokenizer: Any) -> str | None:
    """Identity of a tokenizer's vocabulary: equal exactly if every id stands for the same token."""
    if tokenizer is None:
        return None
    entries = sorted((int(i), token) for token, i in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]


def check_fits(config: IndependentConfig, target: Target) -> None:
    """Refuse a drafter whose tokens are not the target's, or that cannot borrow its tables.

    Raises:
        ValueError: naming the difference.
    """
    remedy = "use a drafter trained for a target with this tokenizer"
    if config.vocab_size != target.vocab_size:
        raise ValueError(
            f"the drafter's vocabulary has {config.vocab_size} tokens, the target's "
            f"{target.vocab_size}; {remedy}"
        )
    theirs = fingerprint(target.tokenizer)
    if config.tokenizer is not None and theirs is not None and config.tokenizer != theirs:
        raise ValueError(
            f"the drafter's tokenizer ({config.tokenizer}) differs from the target's ({theirs}), "
            f"though both have {config.vocab_size} ids; {remedy}"
        )
    if config.borrows and config.hidden_size != target.hidden_size:
        raise ValueError(
            f"the drafter borrows the target's embeddings, but its hidden size is "
            f"{config.hidden_size} and the target's {target.hidden_size}; use a drafter trained "
            "for this target"
        )


def network_from_model(
    model: nn.Module,
    *,
    block_size: int,
    mask_token_id: int,
    layers: Sequence[int] | None = None,
    borrows: bool = False,
    pretrained: bool = True,
    tokenizer: str | None = None,
    seed: int = 0,
    markov_rank: int = 0,
) -> IndependentNetwork:
    """A drafter made of (some layers of) a causal language model, in its dtype.

    Args:
        model: a transformers causal LM; its weights are copied.
        layers: kept layers, all by default; negative ones count from the end.
        borrows: leave embeddings and head to the target (whose hidden size must be the body's).
        pretrained: False draws all weights anew, for comparison.
        tokenizer: its ``fingerprint``.
        seed: of random weights.
        markov_rank: width of a Markov head that changes nothing yet; 0 for none.

    Raises:
        ValueError: a body of another family, or a layer it does not have.
    """
    raw = model.config.to_dict()  # type: ignore[operator, union-attr]
    raw["architectures"] = [type(model).__name__]
    count = int(raw["num_hidden_layers"])
    wanted = range(count) if layers is None else layers
    outside = [i for i in wanted if not -count <= i < count]
    if outside:
        raise ValueError(f"layers {outside} are outside the body's {count} layers")
    kept = tuple(i % count for i in wanted)
    config = body_config(
        raw, block_size=block_size, mask_token_id=mask_token_id, layers=kept,
        borrows=borrows, tokenizer=tokenizer, markov_rank=markov_rank,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = IndependentNetwork(config)
        for weight in network.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, 0.0, float(raw.get("initializer_range", 0.02)))
    if network.markov is not None:
        network.markov.reset()
    first = next(model.parameters())
    network.to(first.device, first.dtype)
    if pretrained:
        weights = _kept_weights(model.state_dict(), kept)
        own = network.state_dict()
        have = {name: value for name, value in weights.items() if name in own}
        have |= {name: own[name] for name in own if name.startswith(MARKOV_PREFIX)}
        check_weights(network, have, Path(str(raw.get("_name_or_path") or "the body")))
        network.load_state_dict(have)
    return network


def load_independent(
    path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> IndependentNetwork:
    """Load a drafter in eval mode, without gradients.

    Args:
        path: folder or hub id; see ``save_independent`` for the layout.

    Raises:
        ValueError: it is incomplete, damaged or not of this kind.
    """
    folder = find_folder(path, revision)
    raw = read_json(folder / CONFIG)
    if not is_independent(raw):
        raise ValueError(
            f"{folder} is no independent drafter; 'draftwood train --kind independent' makes one"
        )
    with reading(folder / CONFIG):
        config = parse_independent(raw)
    weights = {name.removeprefix(_PREFIX): value for name, value in read_weights(folder).items()}
    weights |= read_markov(folder)
    with torch.device("meta"):
        network = IndependentNetwork(config)
    check_weights(network, weights, folder)
    network.load_state_dict(weights, strict=True, assign=True)
    return network.to(device=device, dtype=dtype).requires_grad_(False).eval()


def save_independent(
    path: str | os.PathLike[str],
    config: IndependentConfig,
    weights: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype = torch.bfloat16,
    extra_files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a drafter folder, whole or not at all.

    Args:
        weights: state dict of an ``IndependentNetwork``.
        dtype: of the weights on disk.
        extra_files: further files of the folder by name, e.g. those of the tokenizer.
    """
    body, ours = markov_apart(on_disk(weights, dtype))
    named = {name if name == _HEAD else _PREFIX + name: value for name, value in body.items()}
    raw = {**independent_to_json(config), "dtype": str(dtype).removeprefix("torch.")}
    return write_folder(path, raw, named, {**ours, **(extra_files or {})})


def _kept_weights(
    state: Mapping[str, torch.Tensor], kept: Sequence[int]
) -> dict[str, torch.Tensor]:
    """A body's weights under our names, its layers renumbered."""
    found = {}
    for name, value in state.items():
        plain = name.removeprefix(_PREFIX)
        if not plain.startswith("layers."):
            found[plain] = value
            continue
        _, number, rest = plain.split(".", 2)
        for index, layer in enumerate(kept):
            if layer == int(number):
                found[f"layers.{index}.{rest}"] = value
    return found
