"""The loop's promises to its users: stops, limits, bad input, joining, leaving, freeing."""

from __future__ import annotations

import gc
import weakref
from threading import Thread

import numpy as np
import pytest
import torch

from draftwood.draft.base import NullDrafter
from draftwood.draft.lookup import LookupDrafter
from draftwood.engine import Engine
from draftwood.sampling import SamplingParams
from draftwood.target.model import Target
from draftwood.tree.budget import Chain, Fixed, Off
from oracle import NoisyOracleDrafter
from tiny import tiny_model

PROMPT = [5, 6, 7, 8, 5, 6, 7]
OTHER = [9, 8, 7, 20, 31]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama"), probe=False)


def plain(target: Target, prompt: list[int], params: SamplingParams) -> list[int]:
    return Engine(target).generate([prompt], params)[0].token_ids


def oracle_engine(target: Target, *prompts: list[int], budget: int = 16) -> Engine:
    """An engine whose drafter nearly always knows what comes next."""
    params = SamplingParams(max_new_tokens=64)
    future = {tuple(prompt): plain(target, prompt, params) for prompt in prompts}
    return Engine(target, NoisyOracleDrafter(future), Fixed(budget))


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 7, 20])
def test_max_new_tokens_is_never_overshot(target: Target, max_new_tokens: int) -> None:
    engine = oracle_engine(target, PROMPT)
    params = SamplingParams(max_new_tokens=max_new_tokens)
    (output,) = engine.generate([PROMPT], params)
    assert len(output.token_ids) == max_new_tokens
    assert output.finish_reason == "length"
    assert sum(cycle.num_committed for cycle in output.cycles) == max_new_tokens
    assert output.acceptance_length == max_new_tokens / output.num_cycles
    assert output.token_ids == plain(target, PROMPT, params)


@pytest.mark.parametrize("stop_at", range(12))
def test_stop_token_anywhere_in_a_block_ends_the_output_there(target: Target, stop_at: int) -> None:
    """Fault 3 and 4: an end of sequence inside an accepted path, or as the very first token."""
    future = plain(target, PROMPT, SamplingParams(max_new_tokens=40))
    stop = future[stop_at]
    params = SamplingParams(max_new_tokens=40, stop_token_ids=(stop,))
    seen: list[int] = []
    engine = oracle_engine(target, PROMPT)
    engine.add(PROMPT, params)
    output = None
    while output is None:
        for event in engine.step():
            seen += event.token_ids
            output = event.output
    assert output.token_ids == future[: future.index(stop) + 1] == seen
    assert output.finish_reason == "stop"
    assert sum(cycle.num_committed for cycle in output.cycles) == len(seen)


def test_mask_like_token_ids_survive(target: Target) -> None:
    """Fault 1: no token id is special, in the prompt or in the output."""
    prompt = [0, 1, 0, 96, 0]
    params = SamplingParams(max_new_tokens=30)
    (output,) = oracle_engine(target, prompt).generate([prompt], params)
    assert output.prompt_token_ids == prompt
    assert output.token_ids == plain(target, prompt, params)


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_prefill_chunks_do_not_change_anything(target: Target, chunk: int) -> None:
    params = SamplingParams(max_new_tokens=12)
    engine = Engine(target, LookupDrafter(), Fixed(4), prefill_chunk_len=chunk)
    outputs = engine.generate([PROMPT, [3], OTHER], params)
    expected = [plain(target, prompt, params) for prompt in (PROMPT, [3], OTHER)]
    assert [output.token_ids for output in outputs] == expected


def test_cache_is_one_behind_the_tokens_after_every_cycle(target: Target) -> None:
    engine = oracle_engine(target, PROMPT, OTHER)
    for prompt in (PROMPT, OTHER):
        engine.add(prompt, SamplingParams(max_new_tokens=20))
    while engine.num_active:
        engine.step()
        for seq in engine._running:
            assert seq.cache.length == len(seq.token_ids) - 1
            if not seq.cycles:
                continue  # it has just been prefilled
            last = seq.cycles[-1]
            assert 1 <= last.num_committed <= last.num_drafted + 1
            assert last.num_accepted <= last.num_drafted


def test_sequences_join_and_leave_between_cycles(target: Target) -> None:
    params = SamplingParams(max_new_tokens=25)
    engine = Engine(target, LookupDrafter(), Fixed(6), max_batch=2)
    prompts = [PROMPT, OTHER, [4, 4, 4], [50, 60]]
    ids = [engine.add(prompts[0], params)]
    outputs = {}
    for number in range(200):
        if number in (1, 3, 4):
            ids.append(engine.add(prompts[len(ids)], params))
        outputs |= {event.seq_id: event.output for event in engine.step() if event.output}
        assert len(engine._running) <= 2
        if len(outputs) == 4:
            break
    got = [outputs[seq_id].token_ids for seq_id in ids]
    assert got == [plain(target, prompt, params) for prompt in prompts]


def test_abort_frees_and_leaves_the_others_unharmed(target: Target) -> None:
    params = SamplingParams(max_new_tokens=20)
    engine = Engine(target, LookupDrafter(), Fixed(6))
    first, second = engine.add(PROMPT, params), engine.add(OTHER, params)
    for _ in range(4):
        engine.step()
    cache = engine._running[0].cache
    output = engine.abort(first)
    assert output is not None
    assert output.finish_reason == "abort"
    assert cache.num_bytes == 0
    assert engine.abort(first) is None
    done = [event.output for _ in range(30) for event in engine.step() if event.output]
    assert [out.seq_id for out in done] == [second]
    assert done[0].token_ids == plain(target, OTHER, params)


class TensorRefs(NullDrafter):
    """Remembers its contexts weakly, to see whether the engine lets go of them."""

    horizon = 1

    def __init__(self) -> None:
        self.released: list[int] = []

    def release(self, seq_id: int) -> None:
        self.released.append(seq_id)


def test_failure_in_one_sequence_leaves_the_others(target: Target) -> None:
    def poison(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * float("nan") if input_ids.shape[1] >= len(PROMPT) + 3 else scores

    params = SamplingParams(max_new_tokens=15)
    drafter = TensorRefs()
    engine = Engine(target, drafter, Off())
    bad = engine.add(PROMPT, params, processors=[poison])
    good = engine.add(OTHER, params)
    outputs = {e.seq_id: e.output for _ in range(40) for e in engine.step() if e.output}
    assert outputs[bad].finish_reason == "error"
    assert "NaN" in (outputs[bad].error or "")
    assert outputs[bad].token_ids == plain(target, PROMPT, params)[:3]
    assert outputs[good].token_ids == plain(target, OTHER, params)
    assert sorted(drafter.released) == [bad, good]


def test_failing_target_forward_leaves_the_engine_usable(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_new_tokens=10)
    engine = Engine(target, LookupDrafter(), Fixed(4))
    calls = iter(range(100))
    real = target.logits

    def sometimes(hidden: torch.Tensor) -> torch.Tensor:
        if next(calls) == 4:
            raise RuntimeError("out of memory")
        return real(hidden)

    monkeypatch.setattr(target, "logits", sometimes)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate([PROMPT], params)
    assert engine.num_active == 0
    assert engine.generate([PROMPT], params)[0].token_ids == plain(target, PROMPT, params)


@pytest.mark.parametrize(
    ("prompt", "word"),
    [([], "empty"), ("text", "tokenizer"), ([5, 97], "97"), ([-1], "-1"), ([1] * 512, "512"),
     (None, "None"), ([1.5], "1.5"), ([5, "a"], "'a'"), (b"abc", "abc")],
)  # fmt: skip
def test_bad_prompts_are_refused_by_name(target: Target, prompt: object, word: str) -> None:
    engine = Engine(target)
    with pytest.raises(ValueError, match=word):
        engine.add(prompt)  # type: ignore[arg-type]
    assert engine.num_active == 0


def test_stop_strings_and_streams_need_a_tokenizer(target: Target) -> None:
    engine = Engine(target)
    with pytest.raises(ValueError, match="tokenizer"):
        engine.add(PROMPT, SamplingParams(stop=("x",)))
    with pytest.raises(ValueError, match="tokenizer"):
        next(engine.stream(PROMPT))


@pytest.mark.parametrize("budget", [Fixed(8), Fixed(500), Chain()])
def test_the_end_of_the_context_is_used_up_and_not_passed(budget: object) -> None:
    """Fault 8, and a budget larger than the vocabulary and the remaining context."""
    small = Target(tiny_model("llama", max_position_embeddings=24), probe=False)
    params = SamplingParams(max_new_tokens=100)
    expected = plain(small, PROMPT, params)
    assert len(expected) == 24 - len(PROMPT)
    drafter = NoisyOracleDrafter({tuple(PROMPT): [*expected, 1, 2, 3, 4, 5, 6, 7, 8]})
    (output,) = Engine(small, drafter, budget).generate([PROMPT], params)  # type: ignore[arg-type]
    assert output.token_ids == expected
    assert output.finish_reason == "length"


def test_resume_reuses_the_cache_and_gives_the_same_tokens(target: Target) -> None:
    params = SamplingParams(max_new_tokens=10)
    engine = Engine(target, LookupDrafter(), Fixed(4))
    first = engine.add(PROMPT, params, keep=True)
    output = None
    while output is None:
        output = next((e.output for e in engine.step()), None)
    longer = [*PROMPT, *output.token_ids[:8], 40, 41, 42]
    fed: list[int] = []
    engine.on_cycle = lambda record: fed.append(len(record.tree))
    again = engine.add(longer, params, resume=first)
    output = None
    while output is None:
        output = next((e.output for e in engine.step()), None)
    assert again == first
    assert output.token_ids == plain(target, longer, params)
    assert fed[0] == 2  # of 18 prompt tokens, all but 40 and 41 were in the cache; 42 is the anchor
    with pytest.raises(ValueError, match="resume"):
        engine.add(longer, params, resume=first)


def test_memory_of_finished_sequences_is_freed(target: Target) -> None:
    engine = Engine(target, LookupDrafter(), Fixed(4))
    engine.add(PROMPT, SamplingParams(max_new_tokens=5))
    engine.step()
    ref = weakref.ref(engine._running[0])
    while engine.num_active:
        engine.step()
    gc.collect()
    assert ref() is None


def test_threads_share_an_engine(target: Target) -> None:
    prompts = [[*PROMPT, i] for i in range(2, 8)]
    params = SamplingParams(max_new_tokens=24)
    wanted = [plain(target, prompt, params) for prompt in prompts]
    engine = oracle_engine(target, *prompts)
    found: dict[int, list[int]] = {}

    def work(index: int) -> None:
        for _ in range(3):
            found[index] = engine.generate([prompts[index]], params)[0].token_ids
            assert found[index] == wanted[index]

    threads = [Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found.get(i) for i in range(len(prompts))] == wanted
    assert engine.num_active == 0
    assert engine.step() == []


def test_generate_accepts_one_prompt_or_many(target: Target) -> None:
    engine = Engine(target)
    params = SamplingParams(max_new_tokens=3)
    assert engine.generate([], params) == []
    (one,) = engine.generate(PROMPT, params)
    many = engine.generate([PROMPT, OTHER], [params, SamplingParams(max_new_tokens=5)])
    assert one.token_ids == many[0].token_ids
    assert len(many[1].token_ids) == 5
    for same in (np.array(PROMPT), torch.tensor([PROMPT]), [np.array(PROMPT)], iter([PROMPT])):
        assert engine.generate(same, params)[0].token_ids == one.token_ids
    for nothing in (None, 5):
        with pytest.raises(ValueError, match="a prompt is"):
            engine.generate(nothing, params)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="SamplingParams, got dict"):
        engine.add(PROMPT, {"top_k": 1})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 prompts"):
        engine.generate([PROMPT, OTHER], [params])


def test_growing_the_cache_copies_amortised_constant_bytes_per_token(target: Target) -> None:
    """A thousand decoded tokens move only O(1) cache rows each."""
    big = Target(tiny_model("llama", max_position_embeddings=2048), probe=False)
    engine = Engine(big)
    engine.add([1, 2], SamplingParams(max_new_tokens=1000))
    capacities = []
    while engine.num_active:
        engine.step()
        capacities += [seq.cache.num_bytes for seq in engine._running]
    assert len(np.unique(capacities)) <= 1 + np.ceil(np.log2(1002 / 64))
    per_token = 4 * 2 * 2 * 12 * 8  # layers · (k, v) · heads · dim · bytes
    assert max(capacities) <= 2 * 1002 * per_token
