"""Attention of blocks to [context; block], the context being shared by a group's blocks.

Shapes: G groups of n blocks of B rows; C context tokens; R·share query rows of a block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from draftwood.draft.mixed import products_dtype

LayerKV = tuple[torch.Tensor, torch.Tensor]
"""Keys (normed and rotated) and values of one layer, each [G, kv_heads, C, head_dim]."""

Masks = tuple[torch.Tensor, torch.Tensor | None]
"""Hidden context [G, 1, n, 1 or R, C] and hidden block columns [R, B] or None; True is hidden."""


def attend_blocks(
    query: torch.Tensor, context: LayerKV, block: LayerKV, masks: Masks, share: int
) -> torch.Tensor:
    """Softmax attention over [context; block].

    query [G, kv, n, R·share, d], scaled; context [G, kv, C, d]; block [G, kv, n, B, d].
    """
    if torch.is_grad_enabled():
        dtype = products_dtype(query)
        given = [x.to(dtype) for x in (query, *context, *block)]
        bias = _bias(masks, share, dtype, context[0].shape[2] + block[0].shape[3])
        mixed: torch.Tensor = _BlockAttention.apply(*given, bias)
        return mixed
    groups, kv, n, rows, dim = query.shape
    context_len = context[0].shape[2]
    scores = query.reshape(groups, kv, n * rows, dim) @ context[0].transpose(-1, -2)
    scores = scores.view(groups, kv, n, rows, context_len)
    hidden_context, hidden_block = masks
    if hidden_context.shape[-2] > 1:
        hidden_context = hidden_context.repeat_interleave(share, dim=-2)
    scores = scores.masked_fill(hidden_context, float("-inf"))
    own = query @ block[0].transpose(-1, -2)
    if hidden_block is not None:
        own = own.masked_fill(hidden_block.repeat_interleave(share, dim=0), float("-inf"))
    both = torch.cat([scores, own], dim=-1)
    exact = both if both.dtype == torch.float64 else both.float()
    weights = exact.softmax(dim=-1).to(query.dtype)
    past, present = weights.split([context_len, own.shape[-1]], dim=-1)
    out = past.reshape(groups, kv, n * rows, context_len) @ context[1]
    return out.view(query.shape) + present @ block[1]


def _bias(masks: Masks, share: int, dtype: torch.dtype, width: int) -> torch.Tensor:
    """[G, 1, n, 1 or R·share, C + B] to add to the scores: −inf where hidden."""
    context, block = masks
    rows = context.shape[-2] if block is None else block.shape[0]
    hidden = context.new_zeros(*context.shape[:-2], rows, width)
    hidden[..., : context.shape[-1]] = context
    if block is not None:
        hidden[..., context.shape[-1] :] = block
    if rows > 1:
        hidden = hidden.repeat_interleave(share, dim=-2)
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))


class _BlockAttention(torch.autograd.Function):
    """The same with few passes over the scores, which take longer than the products.

    Scores stay in the products' dtype (a softmax adds up in float32 by itself), context and block
    share one buffer, and the groups come one after the other on a CPU so that it stays in cache.
    Padding keys and values with B zero rows is cheaper than to cut the buffer for products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_keys: torch.Tensor,
        block_values: torch.Tensor,
        bias: torch.Tensor,
    ) -> torch.Tensor:
        groups, kv, n, rows, _ = query.shape
        context_len, size = keys.shape[2], block_keys.shape[3]
        query = query.contiguous()
        keys, values = (F.pad(x, (0, 0, 0, size)) for x in (keys, values))
        weights = query.new_empty(groups, kv, n, rows, context_len + size)
        out = torch.empty_like(query)
        with torch.autocast(query.device.type, enabled=False):
            for part in _parts(groups, query.device):
                flat = query[part].flatten(2, 3)
                scores = (flat @ keys[part].transpose(-1, -2)).view(weights[part].shape)
                scores[..., context_len:] = query[part] @ block_keys[part].transpose(-1, -2)
                scores += bias[part]
                torch.softmax(scores, dim=-1, out=weights[part])
                mixed = (weights[part].flatten(2, 3) @ values[part]).view(query[part].shape)
                own = weights[part][..., context_len:].contiguous()
                torch.add(mixed, own @ block_values[part], out=out[part])
        ctx.save_for_backward(query, keys, values, block_keys, block_values, weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, keys, values, block_keys, block_values, weights = ctx.saved_tensors
        context_len = keys.shape[2] - block_keys.shape[3]
        steep = upstream[0].contiguous()
        all_inputs = (query, keys, values, block_keys, block_values)
        gradients = [torch.empty_like(x) for x in all_inputs]
        to_query, to_keys, to_values, to_block_keys, to_block_values = gradients
        with torch.autocast(query.device.type, enabled=False):
            for part in _parts(len(query), query.device):
                flat, blocks = steep[part].flatten(2, 3), steep[part]
                share = weights[part]
                own = share[..., context_len:].contiguous()
                to_values[part] = share.flatten(2, 3).transpose(-1, -2) @ flat
                to_block_values[part] = own.transpose(-1, -2) @ blocks
                gain = (flat @ values[part].transpose(-1, -2)).view(share.shape)
                gain[..., context_len:] = blocks @ block_values[part].transpose(-1, -2)
                gain = torch.ops.aten._softmax_backward_data(gain, share, -1, share.dtype)
                own = gain[..., context_len:].contiguous()
                to_query[part] = (gain.flatten(2, 3) @ keys[part]).view(blocks.shape)
                to_query[part] += own @ block_keys[part]
                to_keys[part] = gain.flatten(2, 3).transpose(-1, -2) @ query[part].flatten(2, 3)
                to_block_keys[part] = own.transpose(-1, -2) @ query[part]
        to_keys, to_values = to_keys[:, :, :context_len], to_values[:, :, :context_len]
        return to_query, to_keys, to_values, to_block_keys, to_block_values, None


def _parts(groups: int, device: torch.device) -> list[slice]:
    """Groups to compute at a time."""
    step = 1 if device.type == "cpu" else max(1, groups)
    return [slice(first, first + step) for first in range(0, groups, step)]
