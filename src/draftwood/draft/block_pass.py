"""The DFlash network as decoding runs it: the same function as ``network.py``, made cheap.

Fused projections, no masks where attention is unlimited, context keys and values read in place,
one packed pass over the blocks of all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from draftwood.draft.config import DraftConfig
from draftwood.draft.context_cache import ContextCache
from draftwood.draft.native_blocks import NativeBlocks
from draftwood.draft.network import DraftNetwork, Layer
from draftwood.draft.products import Product, product
from draftwood.draft.rope import rotate


@dataclass(frozen=True)
class _LayerWeights:
    """One layer with fused projections."""

    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor

    @staticmethod
    def of(layer: Layer) -> _LayerWeights:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        return _LayerWeights(
            _fused(*projections),
            _fused(attention.o_proj),
            _fused(mlp.gate_proj, mlp.up_proj),
            _fused(mlp.down_proj),
            layer.input_layernorm.weight.detach(),
            layer.post_attention_layernorm.weight.detach(),
            attention.q_norm.weight.detach(),
            attention.k_norm.weight.detach(),
        )


def _fused(*linears: nn.Linear) -> Product:
    """Several layers over one input as one product."""
    biases: list[torch.Tensor] = [one.bias for one in linears if one.bias is not None]
    bias = torch.cat(biases).detach() if biases else None
    return product(torch.cat([one.weight for one in linears]).detach(), bias)


class BlockPass:
    """Runs a drafter's blocks on cached context.

    Holds copies of the fused weights and not the network, so that its own can be freed. Where there
    are compiled kernels for its shape, they run all layers at once.
    """

    def __init__(self, network: DraftNetwork) -> None:
        config = network.config
        self.config: DraftConfig = config
        self.dtype, self.device = network.fc.weight.dtype, network.fc.weight.device
        layers = network.stack()
        self._native = NativeBlocks.of(layers, config.head_dim)
        self._layers = [] if self._native is not None else [_LayerWeights.of(x) for x in layers]
        attentions = [layer.self_attn for layer in layers]
        self._kv = _fused(*[p for each in attentions for p in (each.k_proj, each.v_proj)])
        self._k_norms = torch.stack([each.k_norm.weight.detach() for each in attentions])
        self._fc = product(network.fc.weight.detach())
        self._hidden_norm = network.hidden_norm.weight.detach()
        self._norm = network.norm.weight.detach()
        self._angles = self._turns(0)

    def new_cache(self) -> ContextCache:
        """An empty context for one sequence."""
        c = self.config
        return ContextCache(
            c.num_hidden_layers, c.num_key_value_heads, c.head_dim, self.dtype, self.device
        )

    def context(self, features: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Keys and values [layers, 2, kv_heads, n, head_dim] of committed tokens.

        Args:
            features: [n, taps · target_hidden] raw outputs of the tapped target layers.
            positions: [n] absolute positions.
        """
        c = self.config
        fused = self._fc(features.to(self.device, self.dtype))
        fused = self._rms(fused, self._hidden_norm)
        cos, sin = (factor[:, None] for factor in self._at(positions))
        shape = (len(fused), c.num_hidden_layers, 2, c.num_key_value_heads, c.head_dim)
        keys, values = self._kv(fused).view(shape).unbind(2)
        keys = F.rms_norm(keys, (c.head_dim,), None, c.rms_norm_eps) * self._k_norms[:, None]
        return torch.stack([rotate(keys, cos, sin), values]).permute(2, 0, 3, 1, 4)

    def hidden(
        self, block: torch.Tensor, caches: Sequence[ContextCache], num_rows: int
    ) -> torch.Tensor:
        """Normed hidden states [S, num_rows, H] of rows 1 … num_rows of each block.

        Args:
            block: [S, B, H] embeddings of [anchor, mask, …]; the anchor's position is the length
                of its cache, so its context is strictly before it.
            caches: one per sequence.
            num_rows: rows after the anchor whose predictions are wanted; all B rows take part.
        """
        num_seqs, size, width = block.shape
        lengths = torch.tensor([cache.length for cache in caches], device=self.device)
        turn = self._at((lengths[:, None] + torch.arange(size, device=self.device)).flatten())
        for cache in caches:
            cache.reserve(cache.length + size)
        x = block.reshape(num_seqs * size, width)
        masks = self._masks(caches, size)
        if self._native is not None:
            x = self._native.run(x, turn, caches, [size] * num_seqs, masks)
        for index, layer in enumerate(self._layers):
            mixed = self._attention(
                index, self._rms(x, layer.input_norm), turn, caches, masks[index]
            )
            x = x + layer.out(mixed)
            gate, up = layer.gate_up(self._rms(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        rows = x.view(num_seqs, size, width)[:, 1 : num_rows + 1]
        return self._rms(rows, self._norm)

    def _attention(
        self,
        index: int,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        caches: Sequence[ContextCache],
        masks: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        """[S · B, heads · head_dim] attention of normed rows, before the output projection."""
        c, layer = self.config, self._layers[index]
        kv, dim = c.num_key_value_heads, c.head_dim
        share = c.num_attention_heads // kv
        fused = layer.qkv(x).view(len(x), -1, dim)
        query, keys, values = fused.split([kv * share, kv, kv], dim=1)
        query = rotate(self._rms(query, layer.q_norm), *turn).transpose(0, 1)
        keys = rotate(self._rms(keys, layer.k_norm), *turn).transpose(0, 1)
        values = values.transpose(0, 1)
        size = len(x) // len(caches)
        parts = []
        for s, cache in enumerate(caches):
            rows = slice(s * size, (s + 1) * size)
            own = cache.with_block(index, keys[:, rows], values[:, rows])
            mask = masks[s]
            # Query heads that share keys are stacked as rows: no copies of the keys.
            folded = query[:, rows].reshape(kv, share * size, dim)
            stacked = None if mask is None else mask.repeat(share, 1)
            out = sdpa(folded[None], own[0][None], own[1][None], attn_mask=stacked)
            out = out.view(kv * share, size, dim).transpose(0, 1)
            parts.append(out.reshape(size, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _masks(self, caches: Sequence[ContextCache], size: int) -> list[list[torch.Tensor | None]]:
        """What the rows of each layer and sequence see."""
        c = self.config
        kinds = [(c.window(i), c.is_causal[i]) for i in range(c.num_hidden_layers)]
        made = {
            kind: [self._mask(cache.length, size, *kind) for cache in caches] for kind in set(kinds)
        }
        return [made[kind] for kind in kinds]

    def _mask(
        self, context_len: int, size: int, window: int | None, causal: bool
    ) -> torch.Tensor | None:
        """[B, context + B] additive mask; None where every row sees everything."""
        if window is None and not causal:
            return None
        keys = torch.arange(context_len + size, device=self.device)
        gap = keys[context_len:, None] - keys  # row position − key position
        hidden = torch.zeros_like(gap, dtype=torch.bool)
        if causal:
            hidden |= gap < 0
        if window is not None:
            hidden |= gap.abs() >= window
        if not bool(hidden.any()):
            return None
        mask = torch.zeros(gap.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(hidden, -torch.inf)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [n, 1, head_dim / 2] of positions, from a table that grows."""
        longest = int(positions.max()) + 1
        if longest > len(self._angles[0]):
            self._angles = self._turns(2 * longest)
        return self._angles[0][positions, None], self._angles[1][positions, None]

    def _turns(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        c = self.config
        inverse, scale = c.rope.frequencies(c.head_dim, c.max_position_embeddings)
        exact = torch.float64 if self.dtype == torch.float64 else torch.float32
        positions = torch.arange(num_positions, dtype=exact)
        turns = positions[:, None] * inverse.to(exact)
        cos, sin = turns.cos() * scale, turns.sin() * scale
        return cos.to(self.device, self.dtype), sin.to(self.device, self.dtype)
