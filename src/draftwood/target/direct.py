"""The decoder around compiled layers without its own Python: embedding, layers, last norm.

What transformers' decoder does between its modules takes a millisecond per pass, a twentieth of a
pass of a small model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from draftwood.target.attention import PackedPass
from draftwood.target.lean import rope_factors
from draftwood.target.native_stack import NativeStack

_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}


def is_plain_decoder(decoder: nn.Module) -> bool:
    """Whether the decoder has exactly the parts that ``DirectDecoder`` runs."""
    return {name for name, _ in decoder.named_children()} == _PARTS


class DirectDecoder:
    """Runs a packed pass as a decoder of the Llama shape does, on its own modules.

    Args:
        decoder: one for which ``is_plain_decoder`` holds. Whether it scales embeddings, say, is
            not seen here: compare before use.
        layers: its layers.
        stack: the same, compiled.
    """

    def __init__(self, decoder: Any, layers: Sequence[nn.Module], stack: NativeStack) -> None:
        self._decoder, self._stack = decoder, stack
        self._passed_over = [decoder, *layers]
        self._hooks = [part._forward_hooks for part in self._passed_over]
        self._hooks += [part._forward_pre_hooks for part in self._passed_over]

    def can_run(self, packed: PackedPass) -> bool:
        """Whether nobody changed or listens to the forwards that this pass would leave out."""
        return (
            all(cache.has_buffers for cache in packed.caches)
            and not any(self._hooks)
            and not any("forward" in part.__dict__ for part in self._passed_over)
            and not torch_module._has_any_global_hook()
        )

    def forward(self, packed: PackedPass) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of the decoder, [N, hidden_size], and its layers, [layers, N, hidden_size]."""
        decoder = self._decoder
        embedded = decoder.embed_tokens(torch.from_numpy(packed.tree.token_ids))
        rope = decoder.rotary_emb(embedded[None], torch.from_numpy(packed.positions)[None])
        outputs = self._stack.run(embedded, rope_factors(*rope), packed)
        return decoder.norm(outputs[-1]), outputs
