"""Random drafters that fit a tiny target."""

from __future__ import annotations

import torch

from draftwood.draft.config import FULL, DraftConfig
from draftwood.draft.independent_checkpoint import network_from_model
from draftwood.draft.independent_network import IndependentNetwork
from draftwood.draft.network import DraftNetwork
from draftwood.draft.rope import RopeConfig
from draftwood.target.model import Target
from tiny import tiny_model


def tiny_draft_network(
    target: Target, *, block_size: int = 8, num_layers: int = 2, seed: int = 0, std: float = 0.2
) -> DraftNetwork:
    """Random weights of ``target``'s width and dtype, tapping its first and last layer."""
    config = DraftConfig(
        hidden_size=target.hidden_size,
        intermediate_size=40,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=target.vocab_size,
        block_size=block_size,
        mask_token_id=0,
        target_layer_ids=(0, target.num_layers - 1),
        num_target_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=10000.0),
        layer_types=(FULL,) * num_layers,
        sliding_window=None,
        is_causal=(False,) * num_layers,
        attention_bias=False,
        max_position_embeddings=512,
        draft_vocab_size=None,
        own_embeddings=False,
        own_head=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = DraftNetwork(config)
        with torch.no_grad():
            for weight in network.parameters():
                noise = torch.randn_like(weight) * std
                weight.copy_(noise if weight.dim() > 1 else weight + noise)
    return network.to(target.dtype).eval()


def tiny_independent_network(
    target: Target,
    *,
    family: str = "llama",
    block_size: int = 8,
    num_layers: int = 2,
    seed: int = 0,
    borrows: bool = False,
    markov_rank: int = 0,
) -> IndependentNetwork:
    """A random language model of ``target``'s vocabulary and dtype as an independent drafter.

    A Markov head is one that matters.
    """
    body = tiny_model(
        family,
        dtype=target.dtype,
        vocab=target.vocab_size,
        seed=seed + 1,
        num_hidden_layers=num_layers,
        use_sliding_window=False,
    )
    network = network_from_model(
        body, block_size=block_size, mask_token_id=0, borrows=borrows, markov_rank=markov_rank
    )
    if network.markov is not None:
        generator = torch.Generator().manual_seed(seed + 4)
        with torch.no_grad():
            for weight in network.markov.parameters():
                weight.add_(torch.empty_like(weight).normal_(generator=generator), alpha=0.5)
    return network.requires_grad_(False).eval()
