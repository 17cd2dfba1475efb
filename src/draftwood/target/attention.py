"""The attention that a packed tree forward runs inside a transformers model.

One function, registered under one name in transformers' ``AttentionInterface`` and not in its mask
interface: mask creation then returns None, and everything about who sees whom comes from the
``PackedPass`` that travels as a forward keyword argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from draftwood.errors import DraftwoodError
from draftwood.target.cache import KVCache
from draftwood.tree.tree import BoolArray, DraftTree, IntArray

if TYPE_CHECKING:
    from torch import nn

# Must contain none of the names transformers looks for: sdpa, flash, flex_attention, paged|, "/".
NAME = "draftwood_tree"
PASS_KEYWORD = "draftwood_pass"

# Keywords of transformers attention calls that change nothing here.
_HARMLESS = frozenset({
    "position_ids", "use_cache", "is_causal", "output_attentions", "output_hidden_states",
    "output_router_logits", "cache_position", "return_dict", "logits_to_keep",
})  # fmt: skip


def register_attention() -> None:
    """Make the attention known to transformers; calling it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, tree_attention)


@dataclass(frozen=True)
class _View:
    """What the rows of one sequence see in a layer.

    Attributes:
        start, end: packed rows.
        first_key: position of the first key that any of them sees.
        mask: [rows, keys] additive, or None: all keys (one row) or plain causal (``is_causal``).
    """

    cache: KVCache
    start: int
    end: int
    first_key: int
    mask: torch.Tensor | None
    is_causal: bool


class PackedPass:
    """One packed forward: its tree, its caches, and the masks, built once per window size."""

    def __init__(self, tree: DraftTree, caches: Sequence[KVCache]) -> None:
        assert tree.num_seqs == len(caches) == len({id(cache) for cache in caches})
        self.tree = tree
        self.caches = caches
        lengths = np.array([cache.length for cache in caches], dtype=np.int64)
        self.positions: IntArray = lengths[tree.seq] + tree.depths
        self._views: dict[tuple[Any, ...], list[_View]] = {}
        self._ancestors: dict[int, BoolArray] = {}

    def views(
        self, window: int | None, repeats: int, device: torch.device, dtype: torch.dtype
    ) -> list[_View]:
        """The sequences' views for layers with this sliding window (None: unlimited).

        ``repeats``: how often the rows are stacked below each other in the mask.
        """
        key = (window, repeats, device, dtype)
        if key not in self._views:
            self._views[key] = [
                self._view(index, window, repeats, device, dtype)
                for index in range(self.tree.num_seqs)
            ]
        return self._views[key]

    def _view(
        self,
        index: int,
        window: int | None,
        repeats: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> _View:
        start, end = self.tree.span(index)
        cache = self.caches[index]
        first = 0 if window is None else max(0, cache.length - window + 1)
        visible = self.visible(index, window, first)
        is_causal = False
        mask = None
        if end - start > 1:
            unlimited = window is None or cache.length + end - start <= window
            is_causal = cache.length == 0 and unlimited and self.tree.is_chain(index)
            mask = None if is_causal else _float_mask(visible, repeats, device, dtype)
        return _View(cache, start, end, first, mask, is_causal)

    def visible(self, index: int, window: int | None, first_key: int) -> BoolArray:
        """[rows, keys] of sequence ``index``: which keys from ``first_key`` on each row sees.

        A row sees the committed tokens, its ancestors and itself, as far as
        ``row position − key position < window``.
        """
        start, end = self.tree.span(index)
        context_len = self.caches[index].length
        if index not in self._ancestors:
            self._ancestors[index] = self.tree.ancestor_mask(index)
        rows = self.positions[start:end]
        keys = np.concatenate([np.arange(first_key, context_len), rows])
        context = np.ones((end - start, context_len - first_key), dtype=np.bool_)
        seen: BoolArray = np.concatenate([context, self._ancestors[index]], axis=1)
        if window is not None:
            seen &= rows[:, None] - keys[None, :] < window
        return seen


def _float_mask(
    visible: BoolArray, repeats: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    num_rows, num_keys = visible.shape
    # A row stride of a multiple of 16 spares CUDA kernels a padded copy per layer.
    mask = torch.zeros(num_rows, -(-num_keys // 16) * 16, device=device, dtype=dtype)[:, :num_keys]
    mask.masked_fill_(torch.from_numpy(~visible).to(device), -torch.inf)
    return mask.repeat(repeats, 1) if repeats > 1 else mask


def tree_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    draftwood_pass: PackedPass | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of packed tree rows over their own sequence's cache and window.

    Called by transformers layers. query: [1, heads, N, dim]; key, value: [1, kv_heads, N, dim];
    s_aux: [heads] sink logits. Returns [1, N, heads, value_dim] and no weights.
    """
    _check_call(draftwood_pass, attention_mask, kwargs)
    assert draftwood_pass is not None
    _, num_heads, _, dim = query.shape
    groups = num_heads // key.shape[1]
    scale = dim**-0.5 if scaling is None else scaling
    is_plain = softcap is None and s_aux is None
    repeats = 1 if is_plain and shares_masks(query.device) else groups
    layer_idx = module.layer_idx
    assert isinstance(layer_idx, int)
    parts = []
    for view in draftwood_pass.views(sliding_window, repeats, query.device, query.dtype):
        rows = slice(view.start, view.end)
        keys, values = view.cache.append(layer_idx, key[0, :, rows], value[0, :, rows])
        keys, values = keys[:, view.first_key :], values[:, view.first_key :]
        if is_plain:
            part = _attend(query[0, :, rows], keys, values, scale, view)
        else:
            part = _attend_explicitly(query[0, :, rows], keys, values, scale, view, softcap, s_aux)
        parts.append(part.transpose(0, 1))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None


def _check_call(
    draftwood_pass: PackedPass | None, mask: torch.Tensor | None, extra: dict[str, Any]
) -> None:
    if draftwood_pass is None:
        raise DraftwoodError(
            "no draft tree reached the attention: the model's layers do not pass keyword arguments "
            "on to it, or the model's own forward ran while draftwood was using it"
        )
    unknown = [name for name in extra.keys() - _HARMLESS if extra[name] is not None]
    if unknown or mask is not None:
        raise DraftwoodError(f"attention with {unknown or 'a mask of its own'} is not supported")


def shares_masks(device: torch.device) -> bool:
    """Whether SDPA takes grouped heads and one mask for all of them without losing speed."""
    return device.type == "cpu"


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, view: _View
) -> torch.Tensor:
    """[heads, n, dim] × [kv_heads, L, dim] → [heads, n, value_dim] by SDPA."""
    num_heads, num_rows, dim = query.shape
    groups = num_heads // keys.shape[0]
    if shares_masks(query.device) or groups == 1:
        return sdpa(
            query[None], keys[None], values[None], attn_mask=view.mask,
            is_causal=view.is_causal, scale=scale, enable_gqa=groups > 1,
        )[0]  # fmt: skip
    if view.is_causal:
        keys, values = (x.repeat_interleave(groups, dim=0) for x in (keys, values))
        return sdpa(query[None], keys[None], values[None], is_causal=True, scale=scale)[0]
    # Elsewhere masks and grouped heads together mean the slowest kernel: let the heads of a group
    # be rows instead.
    folded = query.reshape(1, -1, groups * num_rows, dim)
    out = sdpa(folded, keys[None], values[None], attn_mask=view.mask, scale=scale)
    return out.view(num_heads, num_rows, -1)


def _attend_explicitly(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    view: _View,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As ``_attend``, with what SDPA lacks: capped scores, and a sink logit per head.

    A sink is one virtual key of score s_h and zero value: it only adds to the denominator.
    """
    num_heads, num_rows, dim = query.shape
    kv_heads = keys.shape[0]
    folded = query.reshape(kv_heads, -1, dim)
    scores = torch.matmul(folded, keys.transpose(1, 2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float()
    if view.mask is not None:
        scores = scores + view.mask
    elif view.is_causal:
        mask = torch.ones(num_rows, num_rows, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(mask.repeat(num_heads // kv_heads, 1), -torch.inf)
    top = scores.amax(dim=-1, keepdim=True)
    if sinks is not None:
        per_row = sinks.to(scores.dtype).view(kv_heads, -1).repeat_interleave(num_rows, dim=1)
        top = torch.maximum(top, per_row[..., None])
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(per_row[..., None] - top)
    out = torch.matmul((weights / total).to(values.dtype), values)
    return out.view(num_heads, num_rows, -1)
