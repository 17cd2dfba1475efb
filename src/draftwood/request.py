"""From what a user asks for to a sequence the engine can run; all request validation."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

import torch

from draftwood.sampling import Sampler, SamplingParams
from draftwood.sequence import SequenceState, StopWhen
from draftwood.target.model import Target
from draftwood.text import TextStream

Messages: TypeAlias = Sequence[Mapping[str, str]]
Prompt: TypeAlias = str | Sequence[int] | Messages


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from several: a string, a flat list of ints or of messages is one.

    Raises:
        ValueError: neither a prompt nor a list of them.
    """
    given = _plain(prompts)
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Iterable) or isinstance(given, (bytes, Mapping)):
        raise _no_prompt(given)
    many: list[Any] = list(given)
    is_one = bool(many) and (isinstance(many[0], Mapping) or _is_int(many[0]))
    return [many] if is_one else many


def encode(target: Target, prompt: Prompt, *, raw: bool) -> list[int]:
    """Token ids of a prompt.

    Text goes through the chat template as one user turn where the tokenizer has one, unless
    ``raw``; messages always do; token ids are taken as they are.

    Raises:
        ValueError: text without a tokenizer, messages without a chat template, an empty prompt,
            a token id outside the vocabulary, no room left in the context, messages that the chat
            template rejects, or anything that is no prompt.
    """
    token_ids = _to_ids(target, prompt, raw=raw)
    if not token_ids:
        raise ValueError("the prompt is empty; give at least one token")
    bad = [t for t in token_ids if not 0 <= t < target.vocab_size]
    if bad:
        raise ValueError(f"token id {bad[0]} is outside the vocabulary 0..{target.vocab_size - 1}")
    if target.max_len is not None and len(token_ids) >= target.max_len:
        raise ValueError(
            f"the prompt has {len(token_ids)} tokens and the context holds {target.max_len}; "
            "shorten the prompt so that at least one token can follow"
        )
    return token_ids


def _to_ids(target: Target, prompt: Prompt, *, raw: bool) -> list[int]:
    prompt = _plain(prompt)
    if not isinstance(prompt, str):
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise _no_prompt(prompt)
        if all(_is_int(t) for t in prompt):
            return [int(t) for t in prompt]  # type: ignore[arg-type]
        if not all(isinstance(message, Mapping) for message in prompt):
            raise _no_prompt(prompt)
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ValueError("a text prompt needs a tokenizer; give token ids or load one")
    if isinstance(prompt, str) and not prompt:
        return []
    if isinstance(prompt, str) and (raw or not tokenizer.chat_template):
        return list(tokenizer(prompt)["input_ids"])
    if not tokenizer.chat_template:
        raise ValueError("this tokenizer has no chat template; give text or token ids")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return list(tokenizer(_templated(tokenizer, messages), add_special_tokens=False)["input_ids"])


def _templated(tokenizer: Any, messages: list[Any]) -> str:
    from jinja2 import TemplateError  # there as soon as transformers applies a template

    try:
        return str(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        )
    except TemplateError as error:
        raise ValueError(
            f"the chat template rejects the messages ({error}); each is usually a dictionary with "
            "'role' and 'content'"
        ) from error


def new_sequence(
    target: Target,
    seq_id: int,
    prompt: Prompt,
    params: SamplingParams,
    *,
    raw: bool,
    processors: Sequence[Callable[..., torch.Tensor]],
    stop_when: StopWhen | None,
    sample_index: int,
    keep: bool,
    old: SequenceState | None,
) -> SequenceState:
    """Validate a request and build its state, on the cache of ``old`` as far as tokens agree."""
    if not isinstance(params, SamplingParams):
        raise ValueError(f"the settings must be SamplingParams, got {type(params).__name__}")
    token_ids = encode(target, prompt, raw=raw)
    if params.stop and target.tokenizer is None:
        raise ValueError(f"stop strings {params.stop!r} need a tokenizer; use stop_token_ids")
    if params.temperature > 0 and params.seed is None:
        params = dataclasses.replace(params, seed=secrets.randbits(63))
    eos = () if params.ignore_eos else target.eos_token_ids
    sampler = Sampler(
        params, token_ids, vocab_size=target.vocab_size, eos_token_ids=target.eos_token_ids,
        sample_index=sample_index, processors=processors,
    )  # fmt: skip
    cache = target.new_cache() if old is None else old.cache
    if old is not None:
        cache.truncate(min(_common_len(old.token_ids, token_ids), cache.length, len(token_ids) - 1))
    limit = len(token_ids) + params.max_new_tokens
    return SequenceState(
        seq_id=seq_id if old is None else old.seq_id,
        token_ids=token_ids,
        prompt_len=len(token_ids),
        params=params,
        sampler=sampler,
        cache=cache,
        stop_token_ids=frozenset(eos) | frozenset(params.stop_token_ids),
        limit=limit if target.max_len is None else min(limit, target.max_len),
        text=TextStream(target.tokenizer, params.stop) if target.tokenizer is not None else None,
        stop_when=stop_when,
        keep=keep,
    )


def _common_len(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """Tensors and arrays as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _no_prompt(value: object) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
    return ValueError(f"a prompt is text, chat messages or a flat list of token ids, got {shown}")
