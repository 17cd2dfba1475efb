"""A trained drafter with more parts or another draft vocabulary that still knows what it knew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from draftwood.draft.independent_network import IndependentNetwork
from draftwood.draft.network import DraftNetwork
from draftwood.train.networks import Network
from draftwood.train.warm_start import set_vocabulary

# What a layer adds to the residual stream goes through these two.
_OUTPUTS = ("self_attn.o_proj.", "mlp.down_proj.")


@torch.no_grad()
def with_layers(network: DraftNetwork, count: int) -> DraftNetwork:
    """The same function in ``count`` more layers, put before the last one.

    They start as copies of the last layer that add nothing yet: their output projections are zero
    (as in Net2Net, arXiv 1511.05641, deeper networks that preserve the function).
    """
    config = network.config
    last = config.num_hidden_layers - 1
    sources = [*range(last), *[last] * count, last]
    wider = replace(
        config,
        num_hidden_layers=len(sources),
        layer_types=tuple(config.layer_types[i] for i in sources),
        is_causal=tuple(config.is_causal[i] for i in sources),
    )
    grown = DraftNetwork(wider)
    old = network.state_dict()
    state = {name: value for name, value in old.items() if not name.startswith("layers.")}
    for index, source in enumerate(sources):
        prefix = f"layers.{source}."
        is_new = last <= index < last + count
        for name in [name for name in old if name.startswith(prefix)]:
            part = name.removeprefix(prefix)
            silent = is_new and part.startswith(_OUTPUTS)
            state[f"layers.{index}.{part}"] = torch.zeros_like(old[name]) if silent else old[name]
    grown.load_state_dict(state)
    return grown


def with_markov(network: Network, rank: int) -> Network:
    """The same drafter with a Markov head of this rank that changes nothing yet."""
    grown: Network
    if isinstance(network, IndependentNetwork):
        grown = IndependentNetwork(replace(network.config, markov_rank=rank))
    else:
        grown = DraftNetwork(replace(network.config, markov_rank=rank))
    assert grown.markov is not None
    grown.markov.reset()
    grown.load_state_dict(network.state_dict(), strict=False)
    like = network.norm.weight
    return grown.to(like.device, like.dtype)


@torch.no_grad()
def with_vocabulary(
    network: DraftNetwork, vocabulary: Sequence[int], head: torch.Tensor
) -> DraftNetwork:
    """The same drafter with a head of its own for these target ids.

    Args:
        network: with or without a reduced head.
        vocabulary: target ids, ascending.
        head: [V, H] of the target; its rows are those of ids that the drafter had no row for.
    """
    changed = DraftNetwork(replace(network.config, draft_vocab_size=len(vocabulary), own_head=True))
    rows = head.detach().float()[list(vocabulary)].clone()
    if network.lm_head is not None:
        own = network.lm_head.weight
        known = network.target_ids()
        ids = list(range(len(own))) if known is None else known.tolist()
        row_of = {token: row for row, token in enumerate(ids)}
        for row, token in enumerate(vocabulary):
            if token in row_of:
                rows[row] = own[row_of[token]]
    state = {**network.state_dict(), "lm_head.weight": rows}
    state["d2t"] = torch.zeros(len(vocabulary), dtype=torch.int64)
    changed.load_state_dict(state)
    set_vocabulary(changed, torch.tensor(list(vocabulary)))
    return changed
