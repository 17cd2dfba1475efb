"""Faults of existing implementations that no other test here would catch (docs/testing.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from draftwood.draft.base import DraftContext, DraftLimits, NullDrafter
from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.engine import Engine
from draftwood.records import CycleRecord, Output
from draftwood.sampling import SamplingParams
from draftwood.target.model import Target
from draftwood.tree.budget import Chain, CycleState, Fixed
from draftwood.tree.latency import LatencyModel
from draftwood.tree.tree import ScoredPrefixes
from oracle import NoisyOracleDrafter
from tiny import tiny_model
from tiny_drafter import tiny_draft_network
from tiny_folder import tiny_tokenizer

PROMPT = [5, 6, 7, 8, 5, 6, 7]
GREEDY = SamplingParams(max_new_tokens=30)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("qwen3"), probe=False)


def plain(target: Target, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return Engine(target).generate([prompt], params)[0].token_ids


def block_diffusion(target: Target, mask_token_id: int = 0) -> BlockDiffusionDrafter:
    network = tiny_draft_network(target)
    network.config = dataclasses.replace(network.config, mask_token_id=mask_token_id)
    return BlockDiffusionDrafter(network, target)


def oracle(target: Target, prompt: list[int]) -> NoisyOracleDrafter:
    return NoisyOracleDrafter({tuple(prompt): plain(target, prompt)})


def finish(engine: Engine) -> Output:
    """Step until the only sequence has ended."""
    while True:
        for event in engine.step():
            if event.output is not None:
                return event.output


def test_the_drafters_own_mask_token_is_a_token_like_any_other(target: Target) -> None:
    """Fault 1: in the prompt, and as what the target really says."""
    future = plain(target, PROMPT)
    mask = max(future, key=future.count)
    assert future.count(mask) > 0
    (output,) = Engine(target, block_diffusion(target, mask), Fixed(8)).generate([PROMPT], GREEDY)
    assert output.token_ids == future
    prompt = [mask, *PROMPT, mask, mask]
    (output,) = Engine(target, block_diffusion(target, mask), Fixed(8)).generate([prompt], GREEDY)
    assert output.prompt_token_ids == prompt
    assert output.token_ids == plain(target, prompt)


class AlwaysProposes:
    """Proposes one token at every depth, whatever the context."""

    taps: tuple[int, ...] = ()
    horizon = 4

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def propose(self, contexts: list[DraftContext], limits: DraftLimits) -> ScoredPrefixes:
        shape = (len(contexts), min(self.horizon, limits.max_nodes))
        depths = np.tile(np.arange(1, shape[1] + 1), (shape[0], 1))
        counts = np.array([min(shape[1], context.max_depth) for context in contexts])
        tokens = np.full(shape, self._token_id)
        return ScoredPrefixes(tokens, depths - 2, depths, -0.1 * depths, counts)

    def observe(self, committed: object) -> None:
        pass

    def truncate(self, seq_id: int, length: int) -> None:
        pass

    def release(self, seq_id: int) -> None:
        pass


@pytest.mark.parametrize("stop", [0, 8, 50])
def test_only_emitted_tokens_stop(target: Target, stop: int) -> None:
    """Fault 2: not tokens of the prompt, of rejected drafts, or of memory not yet written."""
    prompt = [stop, *PROMPT, stop]
    future = plain(target, prompt)
    assert stop not in future, "choose another stop token"
    params = SamplingParams(max_new_tokens=30, stop_token_ids=(stop,))
    (output,) = Engine(target, AlwaysProposes(stop), Fixed(4)).generate([prompt], params)
    assert output.token_ids == future
    assert output.finish_reason == "length"


@pytest.mark.parametrize("stop_at", [0, 2, 3, 9])
def test_nothing_after_a_stop_is_cached_or_counted(target: Target, stop_at: int) -> None:
    """Fault 3: what the tree had accepted beyond the stop leaves no trace; a chat can go on."""
    future = plain(target, PROMPT)
    stop = future[stop_at]
    params = SamplingParams(max_new_tokens=30, stop_token_ids=(stop,))
    accepted: list[int] = []
    engine = Engine(
        target, oracle(target, PROMPT), Fixed(32),
        on_cycle=lambda record: accepted.append(len(record.verdicts[0].picks)),
    )  # fmt: skip
    first = engine.add(PROMPT, params, keep=True)
    output = finish(engine)
    kept = engine._kept[first]
    assert output.token_ids == future[: future.index(stop) + 1]
    assert output.acceptance_length == len(output.token_ids) / output.num_cycles
    assert kept.cache.length == len(PROMPT) + len(output.token_ids) - 1
    assert kept.sampler.num_output == len(output.token_ids)
    engine.drafter = NullDrafter()  # the oracle does not know what comes
    longer = [*PROMPT, *output.token_ids, 40, 41]
    engine.add(longer, GREEDY, resume=first)
    assert finish(engine).token_ids == plain(target, longer)


def test_the_suite_has_drafts_beyond_the_stop(target: Target) -> None:
    """The test above would say nothing if no cycle accepted more than it emitted."""
    future = plain(target, PROMPT)
    cut = []
    for stop_at in (0, 2, 3, 9):
        params = SamplingParams(max_new_tokens=30, stop_token_ids=(future[stop_at],))
        records: list[CycleRecord] = []
        engine = Engine(target, oracle(target, PROMPT), Fixed(32), on_cycle=records.append)
        engine.generate([PROMPT], params)
        cut.append(len(records[-1].verdicts[0].picks) - records[-1].num_committed[0])
    assert max(cut) >= 2


def test_text_after_a_stop_is_not_streamed() -> None:
    """Fault 3, as text."""
    tokenizer = tiny_tokenizer(chat=False)
    target = Target(tiny_model("llama", vocab=len(tokenizer)), tokenizer, probe=False)
    prompt = tokenizer("hello there")["input_ids"]
    future = plain(target, prompt)
    stop = future[5]
    params = SamplingParams(max_new_tokens=30, stop_token_ids=(stop,))
    emitted = future[: future.index(stop) + 1]
    engine = Engine(target, oracle(target, prompt), Fixed(32))
    pieces = list(engine.stream(prompt, params))
    assert "".join(pieces) == tokenizer.decode(emitted, skip_special_tokens=True)


def chains_of(engine: Engine, prompt: list[int], **options: object) -> list[list[int]]:
    """The drafted tokens of every cycle that drafted."""
    chains: list[list[int]] = []

    def watch(record: CycleRecord) -> None:
        if record.drafted:
            chains.append(record.tree.token_ids[1:].tolist())

    engine.on_cycle = watch
    engine.add(prompt, SamplingParams(max_new_tokens=6), **options)  # type: ignore[arg-type]
    finish(engine)
    return chains


def test_a_resumed_chat_drafts_as_if_it_had_seen_everything(target: Target) -> None:
    """Fault 9: tokens whose target pass was saved by the cache have features all the same."""
    engine = Engine(target, block_diffusion(target), Chain(), prefill_chunk_len=3)
    first = engine.add(PROMPT, GREEDY, keep=True)
    output = finish(engine)
    longer = [*PROMPT, *output.token_ids[:10], 40, 41, 42]
    resumed = chains_of(engine, longer, resume=first)
    assert resumed == chains_of(Engine(target, block_diffusion(target), Chain()), longer)
    assert len(resumed) >= 2


class EveryThird:
    """Drafts in every third cycle only."""

    def __init__(self) -> None:
        self._count = 0

    def limits(self, state: CycleState, latency: LatencyModel) -> tuple[int, int | None]:
        self._count += 1
        return (7, 1) if self._count % 3 == 0 else (0, None)

    def choose(
        self, scored: ScoredPrefixes, state: CycleState, latency: LatencyModel
    ) -> np.ndarray:
        return scored.counts.copy()

    def observe(self, *args: object) -> None:
        pass


def test_plain_cycles_leave_no_holes_in_the_drafters_context(target: Target) -> None:
    """Fault 10: a draft after plain cycles is the draft of a drafter that never paused."""
    records: list[CycleRecord] = []
    drafter = block_diffusion(target)
    Engine(target, drafter, EveryThird(), on_cycle=records.append).generate([PROMPT], GREEDY)
    tokens = [*PROMPT, *plain(target, PROMPT)]
    drafted = [record for record in records if record.drafted]
    assert len(drafted) >= 5
    for record in drafted[:5]:
        prompt = tokens[: record.context_lens[0] + 1]
        chains = chains_of(Engine(target, block_diffusion(target), Chain()), prompt)
        count = min(len(chains[0]), len(record.tree) - 1)
        assert record.tree.token_ids[1 : count + 1].tolist() == chains[0][:count]


def test_a_failing_stop_test_ends_only_its_own_sequence() -> None:
    target = Target(tiny_model("llama"), probe=False)
    engine = Engine(target)

    def fail(token_ids: Sequence[int]) -> bool:
        if len(token_ids) == 6:
            raise RuntimeError("broken test")
        return False

    params = SamplingParams(max_new_tokens=8)
    bad = engine.add([5, 6, 7], params, stop_when=fail)
    good = engine.add([5, 6, 7], params)
    outputs = {}
    while engine.num_active:
        for event in engine.step():
            if event.output is not None:
                outputs[event.seq_id] = event.output
    assert outputs[bad].finish_reason == "error"
    assert "broken test" in (outputs[bad].error or "")
    assert outputs[good].finish_reason == "length"
    assert outputs[bad].token_ids == outputs[good].token_ids[:3]
    assert engine.generate([[5, 6, 7]], params)[0].token_ids == outputs[good].token_ids
