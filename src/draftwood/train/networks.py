"""What training does the same way with every kind of drafter network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeAlias

import torch

from draftwood.draft.checkpoint import save_draft
from draftwood.draft.independent_checkpoint import save_independent
from draftwood.draft.independent_network import IndependentNetwork
from draftwood.draft.network import DraftNetwork
from draftwood.train.anchors import BlockBatch

Network: TypeAlias = DraftNetwork | IndependentNetwork


def device_of(network: Network) -> torch.device:
    """Where the network computes."""
    return network.norm.weight.device


def block_hidden(network: Network, batch: BlockBatch) -> torch.Tensor:
    """[G, n, B − 1, H] normed states of the rows that predict, one packed pass."""
    if isinstance(network, IndependentNetwork):
        return network(batch.context_ids, batch.anchor_positions, batch.block_ids)[1]
    kv = network.context_kv(batch.features, batch.key_positions)
    block = network.embed(batch.block_ids)
    return network(block, batch.anchor_positions, kv, batch.key_positions)


def save_network(
    path: str | os.PathLike[str],
    network: Network,
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write the drafter folder of a network with these weights."""
    if isinstance(network, IndependentNetwork):
        save_independent(path, network.config, weights, dtype=dtype)
    else:
        save_draft(path, network.config, weights, dtype=dtype)
