"""Loading and saving DFlash drafters (config.json + safetensors), strictly."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from draftwood.draft.config import DraftConfig
from draftwood.draft.config_json import config_to_json, parse_config
from draftwood.draft.folder import (
    CONFIG,
    MARKOV,
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
from draftwood.draft.network import DraftNetwork

_MAP = "d2t"


def load_draft(
    path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[DraftConfig, DraftNetwork]:
    """Load a drafter.

    Args:
        path: a local folder or a hub repository id, in z-lab or speculators DFlash layout.
        revision: hub revision.
        dtype, device: of the returned network.

    Returns:
        The configuration and the network in eval mode, without gradients. If it has no
        embeddings or head of its own, call ``network.borrow`` before use.

    Raises:
        ValueError: the folder, its configuration or its weights are incomplete, unreadable or
            not of this kind; every missing and unknown weight is listed.
    """
    folder = find_folder(path, revision)
    raw = read_json(folder / CONFIG)
    weights = read_weights(folder) | read_markov(folder)
    with reading(folder / CONFIG):
        config = parse_config(
            raw,
            has_embeddings="embed_tokens.weight" in weights,
            has_head="lm_head.weight" in weights,
        )
    with torch.device("meta"):
        network = DraftNetwork(config)
    check_weights(network, weights, folder)
    network.load_state_dict(weights, strict=True, assign=True)
    _check_map(network, config)
    network.to(device=device, dtype=dtype).requires_grad_(False).eval()
    return config, network


def save_draft(
    path: str | os.PathLike[str],
    config: DraftConfig,
    weights: DraftNetwork | Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype = torch.bfloat16,
    extra_files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a drafter folder in the z-lab layout, whole or not at all.

    Everything is written and synced under a temporary name in the same directory, then renamed;
    an interrupted save leaves at most a ``.tmp`` folder that does not load.

    Args:
        path: the folder; replaced if it exists.
        weights: a network or its state dict.
        dtype: of the floating-point weights on disk.
        extra_files: further files of the folder by name, e.g. ``README.md``.
    """
    state = weights.state_dict() if isinstance(weights, DraftNetwork) else weights
    tensors, ours = markov_apart(on_disk(state, dtype))
    raw = {**config_to_json(config), "dtype": str(dtype).removeprefix("torch.")}
    return write_folder(path, raw, tensors, {**ours, **(extra_files or {})})


def check_compatible(
    config: DraftConfig, *, vocab_size: int, hidden_size: int, num_layers: int
) -> None:
    """Refuse a drafter that was not made for this target.

    Args:
        vocab_size: rows of the target's input embeddings.
        hidden_size: width of the target's hidden states.
        num_layers: number of decoder layers of the target.

    Raises:
        ValueError: naming the differing value.
    """
    remedy = "use a drafter trained for this target"
    if config.target_hidden_size != hidden_size:
        raise ValueError(
            f"the drafter reads target hidden states of size {config.target_hidden_size}, the "
            f"target has {hidden_size}; {remedy}"
        )
    borrows = not (config.own_embeddings and config.own_head)
    if borrows and config.hidden_size != hidden_size:
        raise ValueError(
            f"the drafter's hidden size {config.hidden_size} differs from the target's "
            f"{hidden_size}, but it has no embeddings and head of its own; {remedy}"
        )
    if config.vocab_size != vocab_size:
        raise ValueError(
            f"the drafter's vocabulary has {config.vocab_size} tokens, the target's {vocab_size}; "
            f"{remedy}"
        )
    if config.num_target_layers not in (None, num_layers):
        raise ValueError(
            f"the drafter was trained for a target of {config.num_target_layers} layers, this one "
            f"has {num_layers}; {remedy}"
        )
    beyond = [tap for tap in config.target_layer_ids if tap >= num_layers]
    if beyond:
        raise ValueError(
            f"the drafter taps target layers {beyond}, but the target has only layers "
            f"0…{num_layers - 1}; {remedy}"
        )


def check_weights(network: nn.Module, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """All of the network's weights and nothing else, each of the right shape and type."""
    wanted = network.state_dict()
    problems = [f"missing: {name}" for name in sorted(wanted.keys() - weights.keys())]
    problems += [f"unknown: {name}" for name in sorted(weights.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & weights.keys()):
        have, want = weights[name], wanted[name]
        if have.shape != want.shape:
            problems.append(f"{name} is {list(have.shape)}, must be {list(want.shape)}")
        elif have.is_floating_point() != want.is_floating_point():
            problems.append(f"{name} is {have.dtype}, must be {want.dtype}")
    if problems:
        where = (
            f" (those of markov.* are in {MARKOV})" if MARKOV_PREFIX in "".join(problems) else ""
        )
        raise ValueError(
            f"the weights in {folder}{where} do not fit its configuration; fix config.json or the "
            "weights:\n  " + "\n  ".join(problems)
        )


def _check_map(network: DraftNetwork, config: DraftConfig) -> None:
    """``d2t`` holds offsets: target id = draft id + d2t[draft id]; they must be distinct ids."""
    ids = network.target_ids()
    if ids is None:
        return
    inside = bool(((ids >= 0) & (ids < config.vocab_size)).all())
    if not inside or len(ids.unique()) != len(ids):
        raise ValueError(
            f"{_MAP} does not map {len(ids)} draft ids to distinct target ids below "
            f"{config.vocab_size}; it must hold target id − draft id"
        )
