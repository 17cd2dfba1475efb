"""A DFlash folder as the assistant of transformers' own DFlash loop.

``generate(assistant_model=…, speculation_type="dflash")`` (transformers ≥ 5.16) drives any module
that turns block embeddings and target hidden states into final hidden states; this is that module
for our checkpoints::

    assistant = DFlashAssistant.from_pretrained("drafter-folder")
    model.generate(ids, assistant_model=assistant, speculation_type="dflash", do_sample=False)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast

from draftwood.draft.block_attention import LayerKV
from draftwood.draft.checkpoint import load_draft
from draftwood.draft.network import NO_POSITION, DraftNetwork


class DFlashAssistantConfig(PreTrainedConfig):
    """What the loop asks of an assistant's configuration.

    The cache it makes from this has a full-attention layer per drafter layer; windows are masks.
    """

    model_type = "draftwood_dflash_assistant"


class DFlashAssistant(nn.Module):
    """A drafter with the call signature of transformers' DFlash loop.

    The loop embeds the block and turns hidden states into candidates with the *target's* tables
    and never gives away token ids, so a drafter with embeddings of its own cannot serve it. A
    head of its own (reduced vocabulary) can: see ``DraftRows``.

    Args:
        network: the drafter.

    Raises:
        ValueError: the loop cannot feed this drafter what it was trained on.
    """

    def __init__(self, network: DraftNetwork) -> None:
        super().__init__()
        config = network.config
        if config.own_embeddings or config.embedding_scale != 1.0:
            raise ValueError(
                "transformers' DFlash loop embeds the block with the target's table as it is, "
                "this drafter has an embedding of its own; use draftwood.load instead"
            )
        if config.num_target_layers is not None and (
            config.num_target_layers - 1 in config.target_layer_ids
        ):
            raise ValueError(
                f"the drafter taps the target's last layer ({config.num_target_layers - 1}), of "
                "which transformers hands out only the normed output; use draftwood.load instead"
            )
        self.network = network
        settings: dict[str, Any] = {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_hidden_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
        }
        self.config = DFlashAssistantConfig(**settings)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> DFlashAssistant:
        """Load a drafter folder or hub id; ``dtype`` and ``device`` as the target's."""
        _, network = load_draft(path, revision=revision, dtype=dtype, device=device)
        return cls(network).eval()

    @property
    def device(self) -> torch.device:
        return self.network.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.network.fc.weight.dtype

    @torch.no_grad()
    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
    ) -> BaseModelOutputWithPast:
        """Hidden states of a block, given what the target newly committed.

        Args:
            noise_embeds: [1, B, H] embeddings of [anchor, mask, …].
            context_hidden_states: [1, n, T · H] taps of the n tokens since the last call.
            position_ids: [1, n + B] positions of those tokens and of the block.
            attention_mask: [1, C + B] over the whole context and the block, 0 for padding.
            cache, past_key_values: the loop's cache (its name changed with transformers 5.24).
                It removes as many entries as a block has before the next call.

        Returns:
            ``last_hidden_state`` [1, B, H]; row 0, the anchor's, predicts nothing.
        """
        store = cache if cache is not None else past_key_values
        new = context_hidden_states.shape[1]
        kv = self.network.context_kv(context_hidden_states, position_ids[:, :new])
        block_size = noise_embeds.shape[1]
        kv = [
            _stored(store, layer, keys_values, block_size) for layer, keys_values in enumerate(kv)
        ]
        anchor = position_ids[:, new : new + 1]
        keys = _key_positions(kv[0][0].shape[2], anchor, attention_mask)
        block = noise_embeds.to(self.dtype)[:, None]
        hidden = self.network(block, anchor, kv, keys)[:, 0]
        hidden = torch.cat([torch.zeros_like(hidden[:, :1]), hidden], dim=1)
        if self.network.lm_head is not None:
            hidden = DraftRows.of(hidden, self._target_logits)
        return BaseModelOutputWithPast(last_hidden_state=hidden)

    def _target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The drafter's logits as columns of the target's vocabulary, −inf where it has none."""
        logits = self.network.logits(hidden)
        ids = self.network.target_ids()
        if ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.network.config.vocab_size), -torch.inf)
        whole[..., ids] = logits
        return whole


class DraftRows(torch.Tensor):
    """Hidden states that bring their own head: ``linear(rows, weight)`` ignores the weight.

    The loop applies the target's head to whatever the assistant returns, and a drafter with a
    reduced vocabulary has another one. Slices and copies to a device keep the head; everything
    else gives plain tensors.
    """

    head: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def of(cls, rows: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> DraftRows:
        """``rows`` with ``head``."""
        result = rows.as_subclass(cls)
        result.head = head
        return result

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        rows = next((value for value in args if isinstance(value, DraftRows)), None)
        head = None if rows is None else rows.__dict__.get("head")
        with torch._C.DisableTorchFunctionSubclass():
            plain = [v.as_subclass(torch.Tensor) if isinstance(v, DraftRows) else v for v in args]
            if head is not None and func is F.linear:
                return head(plain[0])
            result = func(*plain, **(kwargs or {}))
        if head is not None and func in (torch.Tensor.__getitem__, torch.Tensor.to):
            return cls.of(result, head)
        return result


def _stored(store: Any, layer: int, new: LayerKV, block_size: int) -> LayerKV:
    """This layer's keys and values of the whole context, the new ones appended to the store.

    The loop takes ``block_size`` entries off before its next call, for the block's own keys and
    values; the drafter keeps those to itself, so empty entries stand in for them.
    """
    if store is None:
        return new
    keys, values = (F.pad(part, (0, 0, 0, block_size)) for part in new)
    keys, values = store.update(keys, values, layer)
    return keys[:, :, :-block_size], values[:, :, :-block_size]


def _key_positions(
    length: int, anchor: torch.Tensor, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """[1, length] positions of the context: up to the anchor, padding nowhere."""
    positions = anchor - torch.arange(length, 0, -1, device=anchor.device)
    if attention_mask is None:
        return positions
    return positions.masked_fill(attention_mask[:, :length] == 0, NO_POSITION)
