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
MOST_CYCLES = 200


class Impatient(Engine):
    """Fails a caller that waits for what will never come."""

    num_cycles = 0

    def _advance(self) -> None:
        self.num_cycles += 1
        assert self.num_cycles < MOST_CYCLES
        super()._advance()


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
    advance = engine._advance

    def abort_the_last_of_two() -> None:
        advance()
        for seq in engine._running[1:]:
            engine.abort(seq.seq_id)

    engine._advance = abort_the_last_of_two  # type: ignore[method-assign]
    first, second = engine.generate(["one", "two"], PARAMS)
    assert (first.finish_reason, second.finish_reason) == ("length", "abort")
    assert len(first.token_ids) == PARAMS.max_new_tokens


def test_nothing_of_a_sequence_added_by_hand_is_lost(engine: Impatient) -> None:
    expected = [text_of(engine, "one"), text_of(engine, "two")]
    added = engine.add("two", PARAMS)
    assert text_of(engine, "one") == expected[0]  # the other is done by then, or nearly
    list(engine.stream("one", PARAMS))
    events: list[StepEvent] = []
    while engine.num_active:
        events += engine.step()
    assert {event.seq_id for event in events} == {added}
    assert "".join(event.text for event in events) == expected[1]
    assert [event.output.text for event in events if event.output] == [expected[1]]


def test_a_listener_may_abort_what_just_ended(target: Target) -> None:
    engine = Engine(target, LookupDrafter(), Fixed(4))
    engine.on_cycle = lambda record: [engine.abort(one) for one in record.seq_ids][:0]
    engine.add("one", PARAMS)
    (event,) = engine.step()
    assert event.output is not None
    assert event.output.finish_reason == "abort"
    assert engine.num_active == 0
    assert engine.kv_bytes == 0


def test_a_stop_test_cannot_change_the_text(engine: Impatient) -> None:
    expected = engine.generate("one", PARAMS)[0].token_ids
    engine.add("one", PARAMS, stop_when=lambda token_ids: bool(token_ids.clear()))
    outputs = []
    while engine.num_active:
        outputs += [event.output for event in engine.step() if event.output]
    assert outputs[0].token_ids == expected


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
