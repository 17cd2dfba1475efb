"""A drafter folder as a GGUF file for llama.cpp's ``draft-dflash`` mode.

llama.cpp's own converter knows DFlash folders, but not their reduced draft vocabulary (``d2t``),
which its loader can read. This one writes both. The tokenizer, which llama.cpp wants in either
file, is copied from the target's GGUF. Needs ``pip install gguf``.

    python benchmarks/interop/to_gguf.py DRAFTER target.gguf draft.gguf
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from draftwood.draft.checkpoint import load_draft
from draftwood.draft.config import FULL, DraftConfig
from draftwood.draft.network import DraftNetwork

ARCH = "dflash"
NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def convert(drafter: Path, target_gguf: Path, out: Path) -> None:
    """Write ``out``; weights stay as exact as they are (float32).

    Raises:
        ValueError: the drafter has something this converter does not write.
    """
    config, network = load_draft(drafter)
    check(config)
    writer = GGUFWriter(out, ARCH)
    add_settings(writer, config)
    copy_tokenizer(writer, target_gguf)
    writer.add_mask_token_id(config.mask_token_id)
    add_tensors(writer, network)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check(config: DraftConfig) -> None:
    """Only what llama.cpp computes the same way without further keys."""
    plain = {
        "rope": (config.rope.kind, "default"),
        "layer types": (set(config.layer_types), {FULL}),
        "is_causal": (any(config.is_causal), False),
        "attention_bias": (config.attention_bias, False),
        "input_embedding_scale": (config.embedding_scale, 1.0),
        "output_multiplier": (config.logit_scale, 1.0),
        "final_logit_softcapping": (config.logit_softcap, None),
        "target_hidden_size": (config.target_hidden_size, config.hidden_size),
    }
    for name, (value, wanted) in plain.items():
        if value != wanted:
            raise ValueError(
                f"{name} is {value!r}; this converter writes only {wanted!r}. Use llama.cpp's own"
            )


def add_settings(writer: GGUFWriter, config: DraftConfig) -> None:
    """The keys that llama.cpp reads for this architecture."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_uint32(f"{ARCH}.block_size", config.block_size)
    # llama.cpp reads the input of a layer: the output of layer i is the input of i + 1.
    writer.add_array(f"{ARCH}.target_layers", [tap + 1 for tap in config.target_layer_ids])


def copy_tokenizer(writer: GGUFWriter, target_gguf: Path) -> None:
    """All ``tokenizer.*`` keys of the target but a mask token."""
    for field in GGUFReader(target_gguf).fields.values():
        if not field.name.startswith("tokenizer.") or field.name.endswith("mask_token_id"):
            continue
        is_array = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(
            field.name, field.contents(), field.types[0], field.types[-1] if is_array else None
        )


def add_tensors(writer: GGUFWriter, network: DraftNetwork) -> None:
    """Weights by their names in llama.cpp; ``d2t`` as target token ids instead of offsets."""
    ids = network.target_ids()
    if ids is not None:
        writer.add_tensor("d2t", ids.numpy().astype(np.int64))
    for name, value in network.state_dict().items():
        if name.startswith("markov."):  # llama.cpp drafts from the rows alone
            continue
        if name != "d2t":
            writer.add_tensor(gguf_name(name), value.float().contiguous().numpy())


def gguf_name(name: str) -> str:
    """``layers.0.mlp.up_proj.weight`` → ``blk.0.ffn_up.weight``."""
    if name in NAMES:
        return NAMES[name]
    _, layer, rest = name.split(".", 2)
    return f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafter", type=Path)
    parser.add_argument("target_gguf", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    convert(args.drafter, args.target_gguf, args.out)


if __name__ == "__main__":
    main()
