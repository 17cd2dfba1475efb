"""Streams and whole generations that share an engine, or whose sequences end early."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from draftwood.draft.lookup import LookupDrafter
from draftwood.engine import Engine
from draftwood.errors import DraftwoodError
from draftwood.records import StepEvent
from draftwood.sampling import SamplingParams
from draftwood.target.model import Target
from draftwood.tree.budget import Fixed
from tiny import tiny_model
from tiny_folder import tiny_tokenizer

PARAMS = SamplingParams(max_new_tokens=24)
MOST_STEPS = 200


class Impatient(Engine):
    """Fails a caller that waits for what will never come."""

    num_steps = 0

    def step(self) -> list[StepEvent]:
        self.num_steps += 1
        assert self.num_steps < MOST_STEPS
        return super().step()


@pytest.fixture(scope="module")
def target() -> Target:
    tokenizer = tiny_tokenizer()
    return Target(tiny_model("llama", vocab=len(tokenizer)), tokenizer, probe=False)


@pytest.fixture
def engine(target: Target) -> Impatient:
    return Impatient(target, LookupDrafter(), Fixed(4))


def text_of(engine: Engine, prompt: str) -> str:
    return engine.generate(prompt, PARAMS)[0].text


def test_streams_can_be_read_in_any_order(engine: Impatient) -> None:
    expected = [text_of(engine, "one"), text_of(engine, "two")]
    first, second = engine.stream("one", PARAMS), engine.stream("two", PARAMS)
    begin = next(first)
    assert "".join(second) == expected[1]
    assert begin + "".join(first) == expected[0]


def test_a_generation_inside_a_stream_takes_nothing_from_it(engine: Impatient) -> None:
    expected = [text_of(engine, "one"), text_of(engine, "two")]
    stream = engine.stream("one", PARAMS)
    begin = next(stream)
    assert text_of(engine, "two") == expected[1]
    assert begin + "".join(stream) == expected[0]


def test_a_stream_whose_sequence_is_aborted_ends(engine: Impatient) -> None:
    expected = text_of(engine, "one")
    stream = engine.stream("one", PARAMS)
    begin = next(stream)
    (seq,) = engine._running
    engine.abort(seq.seq_id)
    assert expected.startswith(begin + "".join(stream))
    assert engine.kv_bytes == 0


def test_a_generation_whose_sequence_is_aborted_returns_what_there_is(engine: Impatient) -> None:
    step = engine.step

    def abort_the_last_of_two() -> list[StepEvent]:
        events = step()
        for seq in engine._running[1:]:
            engine.abort(seq.seq_id)
        return events

    engine.step = abort_the_last_of_two  # type: ignore[method-assign]
    first, second = engine.generate(["one", "two"], PARAMS)
    assert (first.finish_reason, second.finish_reason) == ("length", "abort")
    assert len(first.token_ids) == PARAMS.max_new_tokens


def test_a_stream_that_fails_says_so(
    engine: Impatient, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits: Callable[[torch.Tensor], torch.Tensor] = target.logits
    stream = engine.stream("one", PARAMS)
    next(stream)
    monkeypatch.setattr(target, "logits", lambda hidden: logits(hidden) * torch.nan)
    with pytest.raises(DraftwoodError, match="NaN"):
        list(stream)
    assert engine.num_active == 0
