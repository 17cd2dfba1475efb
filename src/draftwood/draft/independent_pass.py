"""One packed decoding pass of an independent drafter: new tokens and blocks of many sequences.

A pass runs, for every sequence, rows behind its cached tokens: committed tokens that are not
cached yet (a causal chain), nodes of a tree that may be committed, and blocks [anchor, mask, …]
that start from a node. Blocks are never kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from draftwood.draft.context_cache import ContextCache
from draftwood.draft.independent_network import Attend, IndependentNetwork
from draftwood.tree.tree import BoolArray, IntArray


@dataclass(frozen=True)
class Rows:
    """New rows of one sequence, behind its cache.

    Attributes:
        token_ids: [n] the new tokens, chain first, then tree nodes, parents first, then blocks.
        offsets: [n] position − cache length.
        visible: [n, n] which new rows a row sees; all see the whole cache.
        num_kept: rows before the first block: their keys and values may be committed.
    """

    token_ids: IntArray
    offsets: IntArray
    visible: BoolArray
    num_kept: int

    def __len__(self) -> int:
        return len(self.token_ids)


def plan_rows(
    chain: Sequence[int],
    nodes: Sequence[tuple[int, int]],
    blocks: Sequence[tuple[int, int]],
    block_size: int,
    mask_token_id: int,
) -> Rows:
    """Lay out the new rows of one sequence.

    Args:
        chain: committed tokens that are not cached.
        nodes: (token, parent) of tree nodes, parents first; parent −1 follows the chain.
        blocks: (anchor token, node it follows); −1 follows the chain. A block sees that node, its
            ancestors, the chain, and itself.
    """
    before, kept = len(chain), len(chain) + len(nodes)
    total = kept + len(blocks) * block_size
    token_ids = np.full(total, mask_token_id, dtype=np.int64)
    offsets = np.zeros(total, dtype=np.int64)
    visible = np.zeros((total, total), dtype=np.bool_)
    token_ids[:before], offsets[:before] = chain, np.arange(before)
    visible[:before, :before] = np.tri(before, dtype=np.bool_)
    after_chain = np.zeros(total, dtype=np.bool_)
    after_chain[:before] = True
    for i, (token_id, parent) in enumerate(nodes, start=before):
        above = before + parent
        visible[i] = visible[above] if parent >= 0 else after_chain
        visible[i, i] = True
        token_ids[i] = token_id
        offsets[i] = offsets[above] + 1 if parent >= 0 else before
    for number, (token_id, parent) in enumerate(blocks):
        start = kept + number * block_size
        inside, above = slice(start, start + block_size), before + parent
        visible[inside] = visible[above] if parent >= 0 else after_chain
        visible[inside, inside] = True
        token_ids[start] = token_id
        first = offsets[above] + 1 if parent >= 0 else before
        offsets[inside] = first + np.arange(block_size)
    return Rows(token_ids, offsets, visible, kept)


def new_cache(network: IndependentNetwork) -> ContextCache:
    """An empty cache for one sequence."""
    c = network.config
    return ContextCache(
        c.num_hidden_layers, c.num_key_value_heads, c.head_dim, network.dtype, network.device
    )


def run_rows(
    network: IndependentNetwork, rows: Sequence[Rows], caches: Sequence[ContextCache]
) -> list[torch.Tensor]:
    """Normed hidden states [n, H] of the rows of each sequence, in one pass.

    Keys and values of the rows lie behind each cache afterwards, until its next pass;
    ``ContextCache.commit`` keeps some.
    """
    for cache, one in zip(caches, rows, strict=True):
        cache.reserve(cache.length + len(one))
    ids = torch.from_numpy(np.concatenate([one.token_ids for one in rows]))
    where = np.concatenate(
        [cache.length + one.offsets for cache, one in zip(caches, rows, strict=True)]
    )
    positions = torch.from_numpy(where).to(network.device)
    sizes = [len(one) for one in rows]
    masks = [_mask(one, cache.length, network) for one, cache in zip(rows, caches, strict=True)]
    x = network.embed(ids)
    if network.blocks is not None and not torch.is_grad_enabled():
        turn, layers = network.angles(positions), len(network.layers)
        hidden = network.norm(network.blocks.run(x, turn, caches, sizes, [masks] * layers))
    else:
        hidden = network.run(x, positions, _cached_attention(network, caches, sizes, masks))
    return list(hidden.split(sizes))


def _cached_attention(
    network: IndependentNetwork,
    caches: Sequence[ContextCache],
    sizes: Sequence[int],
    masks: Sequence[torch.Tensor | None],
) -> Attend:
    c = network.config
    kv, dim = c.num_key_value_heads, c.head_dim
    share = c.num_attention_heads // kv
    # Query heads that share keys are stacked as rows: no copies of the keys.
    stacked = [None if mask is None else mask.repeat(share, 1) for mask in masks]

    def attend(
        layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        parts = []
        q, k, v = (x.transpose(0, 1).split(list(sizes), dim=1) for x in (query, keys, values))
        for s, (cache, size) in enumerate(zip(caches, sizes, strict=True)):
            every_key, every_value = cache.with_block(layer, k[s], v[s])
            folded = q[s].reshape(kv, share * size, dim)
            out = sdpa(folded[None], every_key[None], every_value[None], attn_mask=stacked[s])
            parts.append(out.view(kv * share, size, dim).transpose(0, 1).reshape(size, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return attend


def _mask(rows: Rows, cache_len: int, network: IndependentNetwork) -> torch.Tensor | None:
    """[n, cache + n] additive mask; None where every row sees everything."""
    if rows.visible.all():
        return None
    mask = torch.zeros(len(rows), cache_len + len(rows), dtype=network.dtype)
    mask[:, cache_len:].masked_fill_(torch.from_numpy(~rows.visible), -torch.inf)
    return mask.to(network.device)
