"""A language model's layers, run on rows whose attention somebody else defines.

The body of an independent drafter (D3D): a causal language model that also predicts blocks. What
a row sees is the only difference between its prefix rows, its block rows, training and decoding,
so the network takes attention as a function and knows nothing of masks.

Shapes: N packed rows; G groups (responses) of C tokens with n blocks of B rows; H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from draftwood.draft.block_attention import attend_blocks
from draftwood.draft.independent_config import IndependentConfig
from draftwood.draft.independent_layers import BodyLayer, Projection
from draftwood.draft.layers import RMSNorm
from draftwood.draft.markov import MarkovHead
from draftwood.draft.native_blocks import NativeBlocks
from draftwood.draft.products import few_rows

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, queries [N, heads, d], keys [N, kv, d], values [N, kv, d]) → [N, heads · d]; all three
rotated and normed, queries not scaled."""

# Weights of causal attention among this many tokens are kept for the backward pass on a CPU, which
# takes a third of the time of computing them again as ``sdpa`` does.
_FEW_TOKENS = 512


class IndependentNetwork(nn.Module):
    """The drafter's network. Weight names are the body's own, without their ``model.`` prefix.

    Embeddings and head are its own, or lent by the target (``borrow``) where the configuration
    says so. Works in any floating dtype and on any device.
    """

    def __init__(self, config: IndependentConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(BodyLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.embed_tokens: nn.Embedding | None = None
        self.lm_head: nn.Linear | None = None
        if not config.borrows:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            if not config.tied:
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.markov: MarkovHead | None = None
        if config.markov_rank:
            self.markov = MarkovHead(config.hidden_size, config.markov_rank, config.rms_norm_eps)
        self._lent: tuple[torch.Tensor, torch.Tensor] | None = None
        self.blocks: NativeBlocks | None = None

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def stack(self) -> list[BodyLayer]:
        """The layers, in order."""
        return [layer for layer in self.layers if isinstance(layer, BodyLayer)]

    def hasten(self) -> None:
        """Prepare the layers for decoding; later changes of their weights have no effect there.

        ``blocks`` runs all of them at once where there are compiled kernels for their shape.
        """
        self.blocks = NativeBlocks.of(self.stack(), self.config.head_dim)
        for module in self.modules() if self.blocks is None else ():
            if isinstance(module, Projection):
                module.hasten()

    def borrow(self, input_embeddings: torch.Tensor, output_embeddings: torch.Tensor) -> None:
        """Use the target's tables [vocab, H]; they are never trained, saved or moved with it."""
        self._lent = (input_embeddings.detach(), output_embeddings.detach())

    def without(self, layer: int) -> IndependentNetwork:
        """The same network minus one layer; all weights are shared."""
        return self.keeping([i for i in range(len(self.layers)) if i != layer])

    def keeping(self, kept: Sequence[int]) -> IndependentNetwork:
        """The same network with only the layers ``kept``; all weights are shared.

        Raises:
            ValueError: nothing is kept.
        """
        if not kept:
            raise ValueError("a drafter needs at least one layer")
        raw = {**self.config.raw, "num_hidden_layers": len(kept)}
        if raw.get("layer_types") is not None:
            raw["layer_types"] = [raw["layer_types"][i] for i in kept]
        layers = tuple(self.config.layers[i] for i in kept)
        config = replace(self.config, raw=raw, layers=layers, num_hidden_layers=len(kept))
        with torch.device("meta"):
            smaller = IndependentNetwork(config)
        smaller.layers = nn.ModuleList(self.layers[i] for i in kept)
        smaller.norm, smaller.embed_tokens, smaller.lm_head = (
            self.norm, self.embed_tokens, self.lm_head,
        )  # fmt: skip
        smaller.markov, smaller._lent = self.markov, self._lent
        return smaller.train(self.training)

    def target_ids(self) -> None:
        """Columns of the logits are target token ids."""

    def input_table(self) -> torch.Tensor:
        """[vocab, H] embeddings, own or borrowed."""
        return self.embed_tokens.weight if self.embed_tokens is not None else self._borrowed()[0]

    def head_weight(self) -> torch.Tensor:
        """[vocab, H] head, own or borrowed."""
        if self.lm_head is not None:
            return self.lm_head.weight
        return self.embed_tokens.weight if self.embed_tokens is not None else self._borrowed()[1]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows [..., H] of token ids."""
        return F.embedding(token_ids.to(self.input_table().device), self.input_table()).to(
            self.device, self.dtype
        )

    def after(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """As ``DraftNetwork.after``: rows [..., B − 1, H] that know the tokens before them."""
        assert self.markov is not None
        return self.markov.later(hidden, self.embed(token_ids[..., :-1]))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores [..., vocab] of normed hidden states."""
        head = self.head_weight()
        flat = hidden.reshape(-1, hidden.shape[-1]).to(head.device, head.dtype)
        product = F.linear if torch.is_grad_enabled() else few_rows
        return product(flat, head).view(*hidden.shape[:-1], len(head))

    def _borrowed(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._lent is None:
            raise ValueError(
                "this drafter has no embeddings of its own; call borrow(target input embeddings, "
                "target output embeddings) first"
            )
        return self._lent

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [N, 1, head_dim / 2] of absolute positions [N]."""
        c = self.config
        inverse, scale = c.rope.frequencies(c.head_dim, c.max_position_embeddings)
        exact = torch.float64 if self.dtype == torch.float64 else torch.float32
        turns = positions[:, None, None].to(exact) * inverse.to(positions.device, exact)
        return (turns.cos() * scale).to(self.dtype), (turns.sin() * scale).to(self.dtype)

    def run(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Normed hidden states [N, H] of embedded rows x [N, H] at ``positions`` [N]."""
        turn = self.angles(positions)
        for index, layer in enumerate(self.stack()):
            x = layer(x, turn, lambda q, k, v, index=index: attend(index, q, k, v))
        return self.norm(x)

    def pack(
        self, context_ids: torch.Tensor, anchor_positions: torch.Tensor, block_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Attend]:
        """The rows of ``forward``, of all groups: what ``run`` takes.

        Returns:
            Embedded rows [G (C + n B), H], their positions, and what each of them sees.
        """
        groups, context_len = context_ids.shape
        num_blocks, size = block_ids.shape[1:]
        where = torch.arange(context_len, device=context_ids.device).expand(groups, -1)
        rows = torch.arange(size, device=context_ids.device)
        inside = (anchor_positions[..., None] + rows).reshape(groups, -1)
        ids = torch.cat([context_ids, block_ids.reshape(groups, -1)], dim=1)
        positions = torch.cat([where, inside], dim=1).flatten()
        hidden_keys = (where[:, None] >= anchor_positions[..., None])[:, None, :, None]
        attend = self._packed_attention(groups, context_len, num_blocks, hidden_keys)
        return self.embed(ids.flatten()), positions, attend

    def forward(
        self, context_ids: torch.Tensor, anchor_positions: torch.Tensor, block_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One packed pass over responses and many blocks of each.

        Rows of the context are causal and see no block. A block sees the context *before its
        anchor*, and itself in both directions.

        Args:
            context_ids: [G, C] tokens from position 0; padding only at the end.
            anchor_positions: [G, n].
            block_ids: [G, n, B] [anchor, mask, …].

        Returns:
            Normed hidden states: [G, C, H] of the context (row i predicts token i + 1), and
            [G, n, B − 1, H] of the blocks (row j − 1 predicts token anchor + j).
        """
        hidden = self.run(*self.pack(context_ids, anchor_positions, block_ids))
        return split_rows(hidden, context_ids, block_ids)

    def _packed_attention(
        self, groups: int, context_len: int, num_blocks: int, hidden_keys: torch.Tensor
    ) -> Attend:
        """Causal rows first, then blocks, in every group; hidden_keys [G, 1, n, 1, C]."""
        c = self.config
        kv, dim = c.num_key_value_heads, c.head_dim
        share = c.num_attention_heads // kv

        def attend(
            _layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            packed = (x.view(groups, -1, x.shape[1], dim) for x in (query, keys, values))
            # split, not sliced: its gradient is joined in one pass
            parts = [x.split([context_len, x.shape[1] - context_len], dim=1) for x in packed]
            past = [x.transpose(1, 2) for x, _ in parts]
            causal = _causal(past[0], past[1], past[2], share).transpose(1, 2).flatten(2)
            if num_blocks == 0:
                return causal.flatten(0, 1)
            own = [
                x.reshape(groups, num_blocks, -1, kv, dim).permute(0, 3, 1, 2, 4)
                for _, x in parts[1:]
            ]
            size = own[0].shape[3]
            folded = parts[0][1].reshape(groups, num_blocks, size, kv, share, dim)
            folded = folded.permute(0, 3, 1, 2, 4, 5).reshape(groups, kv, num_blocks, -1, dim)
            mixed = attend_blocks(
                folded * dim**-0.5, (past[1], past[2]), (own[0], own[1]), (hidden_keys, None), share
            )
            mixed = mixed.view(groups, kv, num_blocks, size, share, dim).permute(0, 2, 3, 1, 4, 5)
            return torch.cat([causal, mixed.reshape(groups, num_blocks * size, -1)], 1).flatten(
                0, 1
            )

        return attend


def split_rows(
    hidden: torch.Tensor, context_ids: torch.Tensor, block_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``forward`` returns, from the normed states [G (C + n B), H] of packed rows."""
    groups, context_len = context_ids.shape
    rows = hidden.view(groups, -1, hidden.shape[-1])
    blocks = rows[:, context_len:].unflatten(1, block_ids.shape[1:])
    return rows[:, :context_len], blocks[:, :, 1:]


def _causal(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, share: int
) -> torch.Tensor:
    """Causal attention of unscaled queries [G, heads, C, d] to keys and values [G, kv, C, d]."""
    groups, kv, length, dim = keys.shape
    if query.device.type != "cpu" or not torch.is_grad_enabled() or length > _FEW_TOKENS:
        every_key, every_value = (x.repeat_interleave(share, dim=1) for x in (keys, values))
        return sdpa(query, every_key, every_value, is_causal=True)
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    folded = (
        query.view(groups, kv, share, length, dim).transpose(2, 3).reshape(groups, kv, 1, -1, dim)
    )
    nothing = keys[:, :, None, :0]
    masks = (later.expand(groups, 1, 1, -1, -1), None)
    mixed = attend_blocks(folded * dim**-0.5, (keys, values), (nothing, nothing), masks, share)
    return mixed.view(groups, kv, length, share, dim).transpose(2, 3).reshape(query.shape)
