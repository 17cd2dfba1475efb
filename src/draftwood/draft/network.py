"""The DFlash drafter network (arXiv 2602.06036): one pass predicts a whole block of tokens.

Hidden states of the target at a few layers ("taps") are fused to one feature per committed
token. Every drafter layer projects that feature to keys and values; a block [anchor, mask, …]
attends to them and, bidirectionally, to itself. Training and decoding run the same two entry
points: ``context_kv`` for committed tokens and ``forward`` for blocks.

Shapes: G groups (a response in training, a sequence in decoding) of n blocks of B = block_size
rows; C committed tokens of a group; T target taps; H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from draftwood.draft.block_attention import LayerKV
from draftwood.draft.config import DraftConfig
from draftwood.draft.layers import Layer, Linear, RMSNorm, project
from draftwood.draft.markov import MarkovHead

NO_POSITION = 2**31 - 1
"""Position of padding in ``key_positions``: never before an anchor, hence never attended to."""


class DraftNetwork(nn.Module):
    """The drafter. Weight names are those of the z-lab DFlash checkpoint format.

    Embeddings and head are the target's, lent with ``borrow``, unless the configuration says
    that the checkpoint has its own. Works in any floating dtype and on any device.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        taps = len(config.target_layer_ids)
        self.fc = Linear(taps * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.embed_tokens: nn.Embedding | None = None
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lm_head: Linear | None = None
        if config.own_head:
            self.lm_head = Linear(config.hidden_size, config.head_size, bias=False)
        self.markov: MarkovHead | None = None
        if config.markov_rank:
            self.markov = MarkovHead(config.hidden_size, config.markov_rank, config.rms_norm_eps)
        self.d2t: torch.Tensor | None
        self.register_buffer(
            "d2t", torch.zeros(config.head_size, dtype=torch.int64) if config.reduced else None
        )
        self._lent: dict[str, torch.Tensor] = {}

    def stack(self) -> list[Layer]:
        """The layers, in order."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def borrow(self, input_embeddings: torch.Tensor, output_embeddings: torch.Tensor) -> None:
        """Use the target's tables [vocab, H] where the drafter has none of its own.

        They are not parameters of the drafter: never trained, saved or moved with it.
        """
        self._lent = {"input": input_embeddings.detach(), "output": output_embeddings.detach()}

    def target_ids(self) -> torch.Tensor | None:
        """[head_size] target token id of each draft id, or None when they are the same."""
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Block rows [..., H] of target token ids."""
        own = self.embed_tokens
        table = own.weight if own is not None else self._borrowed("input")
        rows = F.embedding(token_ids, table).to(self.fc.weight.dtype)
        return rows if self.config.embedding_scale == 1.0 else rows * self.config.embedding_scale

    def after(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows [..., B − 1, H] that know the tokens before them, by the Markov head.

        Args:
            hidden: [..., B − 1, H] normed rows.
            token_ids: [..., B − 1] target ids that the rows stand for; the last one is not read.
        """
        assert self.markov is not None
        return self.markov.later(hidden, self.embed(token_ids[..., :-1]))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores [..., head_size] of normed hidden states; columns are *draft* ids."""
        return self.shape_logits(project(hidden, self.head_weight().to(hidden.dtype)))

    def head_weight(self) -> torch.Tensor:
        """[head_size, H] its own or the target's."""
        return self.lm_head.weight if self.lm_head is not None else self._borrowed("output")

    def shape_logits(self, scores: torch.Tensor) -> torch.Tensor:
        """Scale and softcap raw head outputs."""
        if self.config.logit_scale != 1.0:
            scores = scores * self.config.logit_scale
        cap = self.config.logit_softcap
        return scores if cap is None else torch.tanh(scores / cap) * cap

    def _borrowed(self, name: str) -> torch.Tensor:
        if name not in self._lent:
            raise ValueError(
                f"this drafter has no {name} embeddings of its own; call "
                "borrow(target input embeddings, target output embeddings) first"
            )
        return self._lent[name]

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [..., head_dim / 2] of absolute positions."""
        config = self.config
        inverse, scale = config.rope.frequencies(config.head_dim, config.max_position_embeddings)
        dtype = self.fc.weight.dtype
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        turns = positions[..., None].to(exact) * inverse.to(device=positions.device, dtype=exact)
        return (turns.cos() * scale).to(dtype), (turns.sin() * scale).to(dtype)

    def context_kv(self, features: torch.Tensor, positions: torch.Tensor) -> list[LayerKV]:
        """Keys and values of committed tokens, one pair per layer.

        Args:
            features: [G, C, T · target_hidden] raw outputs of the tapped target layers.
            positions: [G, C] absolute positions.

        Returns:
            One (K, V) per layer, [G, kv_heads, C, head_dim] each. Append them to what earlier
            tokens gave: keys are already rotated, features can be dropped.
        """
        fused = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        cos, sin = self._angles(positions)
        return [layer.self_attn.keys_values(fused, cos, sin) for layer in self.stack()]

    def forward(
        self,
        block_hidden: torch.Tensor,
        anchor_positions: torch.Tensor,
        kv: Sequence[LayerKV],
        key_positions: torch.Tensor,
    ) -> torch.Tensor:
        """Final hidden states of the rows that predict (1 … B−1) of every block.

        A block sees the context tokens whose position is *before its anchor*, and itself. That
        one rule serves training (many blocks of a response) and decoding (one block per
        sequence; pad ragged contexts with ``key_positions = NO_POSITION``).

        Args:
            block_hidden: [G, n, B, H] ``embed`` of [anchor, mask, …].
            anchor_positions: [G, n] position of each anchor.
            kv: per layer, context keys and values of the group.
            key_positions: [G, C] positions of the context tokens.

        Returns:
            [G, n, B − 1, H], normed; row j − 1 is the prediction for position anchor + j.
        """
        size = block_hidden.shape[2]
        positions = anchor_positions[..., None] + torch.arange(size, device=block_hidden.device)
        cos, sin = self._angles(positions)
        x = block_hidden
        for index, layer in enumerate(self.stack()):
            # The anchor's row ends as keys and values of the last layer: nothing reads it after.
            first = 1 if index == len(self.layers) - 1 else 0
            masks = self._masks(index, positions, key_positions, first)
            normed = layer.input_layernorm(x)
            x = x[:, :, first:] + layer.self_attn(normed, cos, sin, kv[index], masks, first)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)

    def _masks(
        self, index: int, positions: torch.Tensor, key_positions: torch.Tensor, first_row: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Forbidden context [G, 1, n, 1 or R, C] and block columns [R, B] of layer ``index``."""
        window = self.config.window(index)
        keys = key_positions[:, None, None, None, :]
        hidden = keys >= positions[:, None, :, :1, None]
        if window is not None:
            hidden = hidden | (positions[:, None, :, first_row:, None] - keys >= window)
        row = torch.arange(positions.shape[-1], device=positions.device)
        gap = row[first_row:, None] - row[None, :]
        block = gap < 0 if self.config.is_causal[index] else None
        if window is not None and window < len(row):
            far = gap.abs() >= window
            block = far if block is None else block | far
        return hidden, block

    def draft(
        self,
        anchor_ids: torch.Tensor,
        anchor_positions: torch.Tensor,
        kv: Sequence[LayerKV],
        key_positions: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [S, B − 1, head_size] of one block per sequence.

        Args:
            anchor_ids, anchor_positions: [S] last committed token and its position.
            kv, key_positions: context as in ``forward`` with G = S.
        """
        block = torch.full(
            (len(anchor_ids), 1, self.config.block_size),
            self.config.mask_token_id,
            device=anchor_ids.device,
        )
        block[:, 0, 0] = anchor_ids
        hidden = self(self.embed(block), anchor_positions[:, None], kv, key_positions)
        return self.logits(hidden[:, 0])
