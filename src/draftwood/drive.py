"""Whole generations on top of ``Engine.add``, ``step`` and ``abort``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from draftwood.records import Output
from draftwood.request import Prompt, prompt_list
from draftwood.sampling import SamplingParams

if TYPE_CHECKING:
    from draftwood.engine import Engine


def generate(
    engine: Engine,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    *,
    raw: bool,
) -> list[Output]:
    """Decode prompts to the end, see ``Engine.generate``."""
    many = prompt_list(prompts)
    settings = list(params) if isinstance(params, Sequence) else [params] * len(many)
    if len(settings) != len(many):
        raise ValueError(f"{len(settings)} sampling settings for {len(many)} prompts")
    ids: list[int] = []
    outputs: dict[int, Output] = {}
    try:
        for prompt, setting in zip(many, settings, strict=True):
            ids.append(engine.add(prompt, setting, raw=raw))
        while len(outputs) < len(ids):
            for event in engine.step():
                if event.output is not None and event.seq_id in ids:
                    outputs[event.seq_id] = event.output
    finally:
        for seq_id in set(ids) - set(outputs):
            engine.abort(seq_id)
    return [outputs[seq_id] for seq_id in ids]


def stream(
    engine: Engine, prompt: Prompt, params: SamplingParams | None, *, raw: bool
) -> Iterator[str]:
    """Yield text as it becomes certain, see ``Engine.stream``."""
    if engine.target.tokenizer is None:
        raise ValueError("stream yields text and this target has no tokenizer; use step()")
    seq_id = engine.add(prompt, params, raw=raw)
    done = False
    try:
        while not done:
            for event in engine.step():
                if event.seq_id == seq_id:
                    done = event.output is not None
                    if event.text:
                        yield event.text
    finally:
        if not done:
            engine.abort(seq_id)
