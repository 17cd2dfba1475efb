"""A tiny model folder as a user would have it: weights, configuration, tokenizer, chat template."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiny import tiny_model

SPECIAL = ("<pad>", "<s>", "</s>")
CHAT_TEMPLATE = (
    "<s>{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level, so that any text round-trips: 3 special tokens, then one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    return tokenizer


def save_tiny_folder(path: Path, *, family: str = "llama", chat: bool = True) -> Path:
    """Write a loadable random model with its tokenizer and return ``path``."""
    tokenizer = tiny_tokenizer(chat=chat)
    model = tiny_model(family, dtype=torch.float32, vocab=len(tokenizer), eos_token_id=2)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
