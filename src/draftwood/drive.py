"""Whole generations on top of ``Engine.add``, ``step`` and ``abort``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from draftwood.errors import DraftwoodError
from draftwood.records import Output
from draftwood.request import Prompt, prompt_list
from draftwood.sampling import SamplingParams
from draftwood.sequence import SequenceState

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
    seqs: list[SequenceState] = []
    try:
        for prompt, setting in zip(many, settings, strict=True):
            seqs.append(_added(engine, prompt, setting, raw=raw))
        while not _are_done(engine, seqs):
            engine._advance()
    finally:
        _end(engine, seqs)
    return [seq.output() for seq in seqs]


def stream(
    engine: Engine, prompt: Prompt, params: SamplingParams | None, *, raw: bool
) -> Iterator[str]:
    """Yield text as it becomes certain, see ``Engine.stream``."""
    if engine.target.tokenizer is None:
        raise ValueError("stream yields text and this target has no tokenizer; use step()")
    seq = _added(engine, prompt, params, raw=raw)
    assert seq.text is not None
    num_given = 0
    try:
        while True:
            with engine._turn:  # whoever runs the last cycle writes the end of the text as well
                piece, is_done = seq.text.taken[num_given:], seq.finish_reason is not None
            num_given += len(piece)
            if piece:
                yield piece
            elif not is_done:
                engine._advance()
            elif seq.finish_reason == "error":
                raise DraftwoodError(seq.error)
            else:
                return
    finally:
        _end(engine, [seq])


def _added(
    engine: Engine, prompt: Prompt, params: SamplingParams | None, *, raw: bool
) -> SequenceState:
    """A new sequence's own record, so that nobody depends on who runs the cycles."""
    with engine._turn:
        engine._driven.add(engine.add(prompt, params, raw=raw))
        return engine._waiting[-1]


def _are_done(engine: Engine, seqs: Sequence[SequenceState]) -> bool:
    with engine._turn:
        return all(seq.finish_reason is not None for seq in seqs)


def _end(engine: Engine, seqs: Sequence[SequenceState]) -> None:
    for seq in seqs:
        if seq.finish_reason is None:
            engine.abort(seq.seq_id)
        engine._driven.discard(seq.seq_id)
