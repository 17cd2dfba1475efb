"""Prompts from the target itself: what it writes after its own user header.

A chat model that has seen whole conversations also models the user's side (the Magpie method,
arXiv 2406.08464): the sampled turns follow the distribution it was tuned on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from draftwood.sampling import SamplingParams
from draftwood.train.prompts import Conversation
from draftwood.train.serving import Serves, run

_MARK = "\x01user\x01"  # no template contains it


@dataclass(frozen=True)
class SynthesisConfig:
    """How to sample user turns.

    Attributes:
        num_prompts: different prompts wanted.
        openings: beginnings that steer the topic, used in turn; "" leaves it to the target.
        params: sampling settings; the seed of sample i is derived from ``seed`` and i.
        seed: the same seed gives the same prompts.
        min_chars: shorter turns are dropped.
        max_attempts: give up after this many samples per wanted prompt.
        domain: label of the prompts.
    """

    num_prompts: int
    openings: tuple[str, ...] = ("",)
    params: SamplingParams = field(
        default_factory=lambda: SamplingParams(temperature=1.0, max_new_tokens=256)
    )
    seed: int = 0
    min_chars: int = 12
    max_attempts: int = 8
    domain: str = ""

    def __post_init__(self) -> None:
        if min(self.num_prompts, self.max_attempts, self.min_chars) < 1:
            raise ValueError(
                "num_prompts, max_attempts and min_chars must be ≥ 1, got "
                f"{self.num_prompts}, {self.max_attempts}, {self.min_chars}"
            )
        if self.params.temperature == 0:
            raise ValueError("temperature 0 gives the same prompt every time; use about 1")
        if not self.openings:
            raise ValueError('openings is empty; use ("",) to leave the topic to the target')


@dataclass(frozen=True)
class UserTurn:
    """The text of the chat template before a user turn, and from its end to the reply."""

    header: str
    footer: str


def user_turn(tokenizer: Any) -> UserTurn:
    """Header and footer of the first user turn, default system message included.

    Raises:
        ValueError: no chat template, or one that changes the user's text.
    """
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError(
            "the target has no chat template to sample user turns from; give prompts instead"
        )
    messages = [{"role": "user", "content": _MARK}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    header, mark, footer = text.partition(_MARK)
    if not mark:
        raise ValueError("the chat template changes the user's text; give prompts instead")
    return UserTurn(header, footer)


def synthesise(
    engine: Serves,
    tokenizer: Any,
    config: SynthesisConfig,
    *,
    on_prompt: Callable[[Conversation], None] | None = None,
) -> list[Conversation]:
    """Sample user turns until there are enough different ones.

    Unfinished, short and repeated turns are dropped (repeated: equal up to case and spaces).

    Args:
        engine: serves the target.
        tokenizer: the target's, with its chat template.
        config: what to sample.
        on_prompt: called with each new prompt, e.g. for a progress bar.

    Returns:
        At most ``config.num_prompts`` conversations of one turn, in order of their samples;
        fewer if the target repeats itself too often.
    """
    turn = user_turn(tokenizer)
    found: dict[str, Conversation] = {}
    next_sample, limit = 0, config.num_prompts * config.max_attempts
    while len(found) < config.num_prompts and next_sample < limit:
        wanted = max(config.num_prompts - len(found), engine.max_batch)
        samples = range(next_sample, min(next_sample + wanted, limit))
        next_sample = samples.stop
        for _, text in sorted(_sample(engine, tokenizer, turn, config, samples)):
            identity = " ".join(text.lower().split())
            is_new = len(text) >= config.min_chars and identity not in found
            if is_new and len(found) < config.num_prompts:
                conversation = Conversation((text,), domain=config.domain, source="synthesised")
                found[identity] = conversation
                if on_prompt is not None:
                    on_prompt(conversation)
    return list(found.values())


def _sample(
    engine: Serves, tokenizer: Any, turn: UserTurn, config: SynthesisConfig, samples: Sequence[int]
) -> Iterator[tuple[int, str]]:
    params = _with_end(config.params, turn.footer, tokenizer)

    def jobs() -> Iterator[tuple[int, list[int], SamplingParams]]:
        for sample in samples:
            opening = config.openings[sample % len(config.openings)]
            ids = tokenizer(turn.header + opening, add_special_tokens=False)["input_ids"]
            yield sample, list(ids), replace(params, seed=_seed(config.seed, sample))

    for sample, output in run(engine, partial(next, jobs(), None)):
        if isinstance(output, ValueError):
            raise output
        if output.finish_reason == "stop":
            yield sample, (config.openings[sample % len(config.openings)] + output.text).strip()


def _with_end(params: SamplingParams, footer: str, tokenizer: Any) -> SamplingParams:
    """Also stop where the template ends a user turn: by its token if it has one, else by text."""
    ids = tokenizer(footer, add_special_tokens=False)["input_ids"]
    if ids and ids[0] in tokenizer.all_special_ids:
        return replace(params, stop_token_ids=(*params.stop_token_ids, ids[0]))
    end = footer.strip()
    return replace(params, stop=(*params.stop, end)) if end else params


def _seed(seed: int, sample: int) -> int:
    digest = hashlib.blake2b(f"user turn {seed} {sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
