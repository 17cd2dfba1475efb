"""The target: the model whose output must not change, run on packed draft trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from draftwood.target import support
from draftwood.target.attention import NAME, PASS_KEYWORD, PackedPass
from draftwood.target.build_kernels import build_kernels
from draftwood.target.cache import KVCache
from draftwood.target.kernels import DEFAULT_KERNELS, KernelConfig, Kernels
from draftwood.target.model_lock import lock_of
from draftwood.target.probe import check_parity
from draftwood.tree.tree import DraftTree


@dataclass(frozen=True)
class TargetOutput:
    """What one packed forward of N rows returns.

    Attributes:
        hidden: [N, hidden_size] output of the final norm, the input of ``Target.logits``.
        features: [N, num_taps · hidden_size] raw decoder-layer outputs, concatenated in tap order;
            None without taps.
    """

    hidden: torch.Tensor
    features: torch.Tensor | None


class Target:
    """A decoder-only transformers model behind the few calls that decoding needs.

    The model stays the user's: its attention implementation is switched only inside ``forward``
    (one at a time, under a lock) and its own ``generate`` works as before.

    Args:
        model: in evaluation mode, as loaded by ``AutoModelForCausalLM``.
        tokenizer: its tokenizer, if text goes in or out.
        probe: compare a random packed tree with the model's own forward first.
        kernels: how to speed up a model on the CPU in float32; None: run its modules as they are.
        name: what to call it in traces; the model's own name if None.

    Raises:
        ValueError: this model cannot be run exactly on trees; the message says why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        probe: bool = True,
        kernels: KernelConfig | None = DEFAULT_KERNELS,
        name: str | None = None,
    ) -> None:
        self._lock = lock_of(model)
        with self._lock:
            support.check_supported(model)
        text_config = model.config.get_text_config(decoder=True)
        self.model = model
        self.tokenizer = tokenizer
        self.name = name if name is not None else str(getattr(model.config, "name_or_path", ""))
        self.num_layers = int(text_config.num_hidden_layers)
        self.hidden_size = int(text_config.hidden_size)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.max_len = support.max_length(text_config)
        self.eos_token_ids = support.eos_token_ids(model, tokenizer)
        self._decoder = support.decoder_of(model)
        self._layers = support.decoder_layers(self._decoder)
        self._configs = support.attention_configs(self._decoder)
        self._transform_logits = support.logit_transform(model)
        self.kernels = Kernels()
        with self._lock:
            if kernels is not None:
                head = model.get_output_embeddings()
                self.kernels = build_kernels(
                    self._decoder, list(self._layers), head, self._run, kernels
                )
            if probe:
                check_parity(self)

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return self.input_embeddings().device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def is_current(self) -> bool:
        """Whether the model still has the parts, the vocabulary and the weights it was read with.

        False at worst where nothing changed: in training mode, or with gradients wanted.
        """
        decoder = support.decoder_of(self.model)
        return (
            decoder is self._decoder
            and support.decoder_layers(decoder) is self._layers
            and len(self._layers) == self.num_layers
            and self.output_embeddings().shape[0] == self.vocab_size
            and self.kernels.is_current()
        )

    def new_cache(self) -> KVCache:
        """An empty cache for one sequence."""
        return KVCache(self.num_layers)

    def input_embeddings(self) -> torch.Tensor:
        """[V, hidden_size] embedding table, without the scale that some families apply."""
        return _weight(self.model.get_input_embeddings())

    def output_embeddings(self) -> torch.Tensor:
        """[V, hidden_size] weight of the language model head."""
        return _weight(self.model.get_output_embeddings())

    @torch.no_grad()
    def forward(
        self, tree: DraftTree, caches: Sequence[KVCache], taps: Sequence[int] = ()
    ) -> TargetOutput:
        """Run all rows of ``tree`` in one pass and append them to the caches, uncommitted.

        Args:
            tree: N nodes of S sequences; position = ``cache.length`` + depth.
            caches: one per sequence.
            taps: decoder layers whose raw outputs to return.
        """
        packed = PackedPass(tree, caches)
        self._check(packed, taps)
        with self._lock:
            direct = self.kernels.direct(packed)
            if direct is not None:
                hidden, layers = direct.forward(packed)
                outputs = {tap: layers[tap] for tap in taps}
            else:
                with _recorded(self._layers, taps) as outputs:
                    hidden = self._run(packed)
        features = [outputs[tap].to(hidden.device) for tap in taps]
        return TargetOutput(hidden, torch.cat(features, dim=-1) if features else None)

    @torch.no_grad()
    def _run(self, packed: PackedPass) -> torch.Tensor:
        """[N, hidden_size] of the decoder alone; one call at a time."""
        device = self.device
        with self._tree_attention(), self.kernels.active():
            result = self._decoder(
                input_ids=torch.from_numpy(packed.tree.token_ids)[None].to(device),
                position_ids=torch.from_numpy(packed.positions)[None].to(device),
                use_cache=False,
                **{PASS_KEYWORD: packed},
            )
        hidden: torch.Tensor = result.last_hidden_state[0]
        return hidden

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] rows of ``TargetOutput.hidden`` → [R, V], as the model gives them."""
        head = self.model.get_output_embeddings()
        return self._transform_logits(self.kernels.head(head, hidden))

    def _check(self, packed: PackedPass, taps: Sequence[int]) -> None:
        bad_taps = [tap for tap in taps if not 0 <= tap < self.num_layers]
        if bad_taps:
            raise ValueError(f"taps {bad_taps} are not decoder layers 0…{self.num_layers - 1}")
        if len(packed.positions) and packed.positions.max() >= self.max_len:
            raise ValueError(
                f"position {packed.positions.max()} is beyond the context of {self.max_len} tokens"
            )

    @contextmanager
    def _tree_attention(self) -> Iterator[None]:
        saved = [config._attn_implementation for config in self._configs]
        try:
            for config in self._configs:
                config._attn_implementation_internal = NAME
            yield
        finally:
            for config, implementation in zip(self._configs, saved, strict=True):
                config._attn_implementation_internal = implementation


def _weight(module: nn.Module) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach()


@contextmanager
def _recorded(layers: nn.ModuleList, taps: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Collect the raw outputs [N, hidden_size] of the tapped layers of one forward."""
    outputs: dict[int, torch.Tensor] = {}

    def hook_for(tap: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            outputs[tap] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    handles = [layers[tap].register_forward_hook(hook_for(tap)) for tap in set(taps)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
