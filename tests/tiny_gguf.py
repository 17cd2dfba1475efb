"""A tiny Llama as a GGUF file, with a byte-level BPE tokenizer."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from tiny import tiny_model

SPECIAL = ["<unk>", "<s>", "</s>", "<|eot|>"]
TEMPLATE = "{% for m in messages %}{{ '<s>' + m['content'] + '</s>' }}{% endfor %}"


def write_tiny_gguf(path: Path, *, seed: int = 0) -> PreTrainedModel:
    """Write the file and return the fp32 model that it holds."""
    characters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    tokens = [*SPECIAL, *characters, "yo", "hi"]
    model = tiny_model(
        "llama", dtype=torch.float32, vocab=len(tokens), seed=seed, eos_token_id=2, head_dim=8,
        attention_bias=False,
    )  # fmt: skip
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["y o", "h i"])
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in _tensors(model):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _tensors(model: PreTrainedModel) -> list[tuple[str, np.ndarray]]:
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    found = [
        ("token_embd.weight", weights["model.embed_tokens.weight"]),
        ("output_norm.weight", weights["model.norm.weight"]),
        ("output.weight", weights["lm_head.weight"]),
    ]
    config = model.config
    for layer in range(config.num_hidden_layers):
        own = f"model.layers.{layer}."
        pairs = {
            "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
            "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
            "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
        }  # fmt: skip
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        for short, name in pairs.items():
            tensor = weights[f"{own}{name}.weight"]
            if short in heads:
                tensor = _interleaved(tensor, heads[short])
            found.append((f"blk.{layer}.{short}.weight", tensor))
    return found


def _interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from rotate-half order to GGUF's pairs."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)
