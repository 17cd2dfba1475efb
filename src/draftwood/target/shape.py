"""What a target's operations and memory traffic follow from."""

from __future__ import annotations

import torch

from draftwood.target.model import Target
from draftwood.tree.roofline import ModelShape


def model_shape(target: Target) -> ModelShape:
    """Shape of a target for a roofline model; of experts, the active ones count.

    Raises:
        ValueError: its configuration does not say.
    """
    config = target.model.config.get_text_config(decoder=True)

    def number(*names: str) -> int:
        for name in names:
            value = getattr(config, name, None)
            if isinstance(value, int) and value > 0:
                return value
        raise ValueError(
            f"the configuration of this {config.model_type} target has no {' or '.join(names)}, "
            "which a roofline needs; use budget 'auto'"
        )

    num_heads = number("num_attention_heads")
    num_kv_heads = number("num_key_value_heads", "num_attention_heads")
    head_size = getattr(config, "head_dim", None) or target.hidden_size // num_heads
    active = getattr(config, "num_experts_per_tok", None)
    ffn_size = (
        number("moe_intermediate_size", "intermediate_size") * active
        if isinstance(active, int)
        else number("intermediate_size")
    )
    return ModelShape(
        num_layers=target.num_layers,
        hidden_size=target.hidden_size,
        query_size=num_heads * head_size,
        kv_size=num_kv_heads * head_size,
        num_heads=num_heads,
        ffn_size=ffn_size,
        vocab_size=target.vocab_size,
        bytes_per_value=torch.finfo(target.dtype).bits // 8,
    )
