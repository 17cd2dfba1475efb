"""Drafting workers that fail, hang, die, start late or answer nonsense cost no token."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahead_runs import (
    GREEDY,
    OPTIONS,
    PROMPTS,
    VOCAB,
    finish,
    future,
    independent,
    reference,
    run,
    sources,
    target,
    tokens,
)
from draftwood.ahead.channel import Channel, Connect, InProcess, InThread
from draftwood.ahead.drafter import AheadDrafter
from draftwood.ahead.link import Link
from draftwood.ahead.messages import Failed, Ready, Reply, Request
from draftwood.ahead.planner import AheadOptions
from draftwood.draft.base import Drafter
from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.engine import Engine
from draftwood.errors import DraftwoodError
from draftwood.tree.budget import Fixed
from faulty import Fault, Faulty, Lossy, StopsMidway
from tiny_drafter import tiny_draft_network

THREAD_EFFECTS = ("raise", "hang")
PROCESS_EFFECTS = ("raise", "hang", "exit")
STAGES = ("start", "branch", "propose", "adopt", "observe", "release")


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    """Processes are forked from one that has imported what they need: seconds each otherwise."""
    forkserver.set_forkserver_preload(
        [
            "draftwood.ahead.load",
            "draftwood.engine",
            "transformers.models.llama.modeling_llama",
            "transformers.generation",
        ]
    )
    forkserver.ensure_running()


def in_thread(fault: Fault | None) -> Connect:
    return InThread(Faulty(future(), fault))


def in_process(fault: Fault | None) -> Connect:
    return InProcess(Faulty(future(), fault), num_threads=1, method="forkserver")


def link_of(connect: Connect, fault: Fault | None) -> Link:
    is_slow = fault is not None and fault.stage == "start" and fault.effect == "hang"
    return Link(connect, start_timeout_s=0.2 if is_slow else 60.0, backoff_s=0.0)


def check_faulty(connect: Connect, fault: Fault) -> AheadDrafter:
    """Two generations, one after the other, are right whatever happens; returns what was used."""
    link = link_of(connect, fault)
    if fault.stage != "start":
        link.wait_ready()
    options = AheadOptions(num_branches=6, timeout_s=0.4 if fault.effect == "hang" else 30.0)
    drafter = AheadDrafter(link, options, vocab_size=VOCAB)
    engine = Engine(target(), drafter, Fixed(3), prefill_chunk_len=5)
    for _ in range(2):
        assert tokens(engine.generate(PROMPTS, GREEDY)) == reference()
        _wait_for(lambda: link.is_up() or (fault.stage == "start" and failures(drafter) > 0))
    drafter.close()
    return drafter


def _wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)


def failures(drafter: AheadDrafter) -> int:
    kinds = ("crash", "timeout", "garbage", "slow_start")
    return sum(drafter.counters[kind] for kind in kinds)


@pytest.mark.parametrize("effect", THREAD_EFFECTS)
@pytest.mark.parametrize("stage", STAGES)
def test_faults_of_a_thread_cost_no_token(stage: str, effect: str) -> None:
    fault = Fault(stage, effect)
    drafter = check_faulty(in_thread(fault), fault)
    assert failures(drafter) >= 1
    assert drafter.counters["starts"] >= 2


@pytest.mark.parametrize("effect", PROCESS_EFFECTS)
@pytest.mark.parametrize("stage", STAGES)
def test_faults_of_a_process_cost_no_token(stage: str, effect: str) -> None:
    fault = Fault(stage, effect)
    drafter = check_faulty(in_process(fault), fault)
    assert failures(drafter) >= 1


@pytest.mark.parametrize(
    ("stage", "effect"),
    [*((stage, "raise") for stage in STAGES), ("propose", "garbage"), ("adopt", "garbage")],
)
def test_faults_of_an_independent_drafter_cost_no_token(stage: str, effect: str) -> None:
    fault = Fault(stage, effect, call=3)
    connect = InThread(Faulty({}, fault, make=independent))
    drafter = check_faulty(connect, fault)
    assert failures(drafter) >= 1


@pytest.mark.parametrize(
    ("place", "effect"),
    [*(("thread", one) for one in THREAD_EFFECTS), *(("process", one) for one in PROCESS_EFFECTS)],
)
def test_faults_when_a_chat_goes_back_cost_no_token(place: str, effect: str) -> None:
    """``truncate`` fails: the next turn begins where the reply was cut."""
    fault = Fault("truncate", effect, call=1)
    make = Faulty({}, fault, make=independent)
    in_process = InProcess(make, num_threads=1, method="forkserver")
    link = Link(InThread(make) if place == "thread" else in_process, backoff_s=0.0)
    link.wait_ready()
    options = AheadOptions(num_branches=6, timeout_s=0.4 if effect == "hang" else 30.0)
    drafter = AheadDrafter(link, options, vocab_size=VOCAB)
    engine, plain = Engine(target(), drafter, Fixed(4)), Engine(target())
    turns: list[list[list[int]]] = [[], []]
    for texts, one in zip(turns, (engine, plain), strict=True):
        seq_id = one.add(PROMPTS[0], GREEDY, keep=True)
        texts.append(finish(one, seq_id).token_ids)
        for _ in range(3):
            prompt = [*PROMPTS[0], *texts[0][:7], len(texts)]
            seq_id = one.add(prompt, GREEDY, keep=True, resume=seq_id)
            texts.append(finish(one, seq_id).token_ids)
    assert turns[0] == turns[1]
    assert failures(drafter) >= 1
    drafter.close()


@pytest.mark.parametrize("stage", ["branch", "adopt"])
def test_an_independent_drafters_process_may_die(stage: str) -> None:
    fault = Fault(stage, "exit", call=3)
    connect = InProcess(Faulty({}, fault, make=independent), num_threads=1, method="forkserver")
    drafter = check_faulty(connect, fault)
    assert failures(drafter) >= 1


@pytest.mark.parametrize("connect", [in_thread, in_process])
@pytest.mark.parametrize("stage", ["propose", "adopt"])
def test_garbage_is_noticed(connect: Callable[[Fault | None], Connect], stage: str) -> None:
    fault = Fault(stage, "garbage")
    assert check_faulty(connect(fault), fault).counters["garbage"] >= 1


@pytest.mark.parametrize("what", ["lost", "twice", "spoiled", "gone"])
@pytest.mark.parametrize("connect", [in_thread, in_process])
def test_trouble_on_the_way_costs_no_token(
    connect: Callable[[Fault | None], Connect], what: str
) -> None:
    lossy = Lossy(connect(None), {3: what, 5: what})
    drafter = check_faulty(lossy, Fault("way", what))
    kind = {"lost": "timeout", "twice": "stale", "spoiled": "garbage", "gone": "timeout"}[what]
    assert drafter.counters[kind] >= 1


@given(st.dictionaries(st.integers(1, 12), st.sampled_from(["lost", "twice", "spoiled", "gone"])))
@settings(max_examples=8, deadline=None)
def test_any_sequence_of_trouble_costs_no_token(plan: dict[int, str]) -> None:
    drafter = AheadDrafter(
        Link(Lossy(in_thread(None), plan), backoff_s=0.0), OPTIONS, vocab_size=VOCAB
    )
    assert tokens(run(drafter)) == reference()
    drafter.close()


def test_a_drafter_that_failed_is_used_again_from_nothing() -> None:
    """The same object: the sequences it knew are dropped, and it is told all of them anew."""
    real = Faulty(future(), Fault("propose", "raise", call=3))()
    link = Link(InThread.of(real), backoff_s=0.0)
    link.wait_ready()
    drafter = AheadDrafter(link, OPTIONS, vocab_size=VOCAB)
    engine = Engine(target(), drafter, Fixed(3))
    outputs = engine.generate(PROMPTS, GREEDY)
    _wait_for(link.is_up)
    outputs += engine.generate(PROMPTS, GREEDY)
    assert tokens(outputs) == [*reference(), *reference()]
    assert drafter.counters == {"starts": 2, "crash": 1}
    assert {"standby", "hit", "miss"} <= set(sources(outputs))


# ---- the link -----------------------------------------------------------------------------------


class FakeChannel:
    """Replies that are given beforehand."""

    def __init__(self, *replies: Reply | None) -> None:
        self.replies = list(replies)
        self.is_closed = False

    def send(self, request: Request) -> None:
        pass

    def receive(self, timeout_s: float) -> Reply | None:
        return self.replies.pop(0) if self.replies else None

    def close(self) -> None:
        self.is_closed = True


READY = Ready((), 8, False)


def test_restarts_wait_twice_as_long_every_time() -> None:
    now, starts = 0.0, []

    def connect() -> Channel:
        starts.append(now)
        return FakeChannel(Failed("no"))

    link = Link(connect, backoff_s=1.0, clock=lambda: now)
    while now < 40.0:
        link.is_up()
        now += 0.25
    gaps = np.diff(starts)
    assert (np.diff(gaps) > 0).all()
    assert gaps[2] == pytest.approx(2 * gaps[1], abs=0.5)
    assert link.counters["crash"] == len(starts)


def test_a_worker_that_is_never_ready_is_given_up() -> None:
    now = 0.0
    channels = [FakeChannel(None, None, None), FakeChannel(READY)]
    waiting = iter(channels)
    link = Link(lambda: next(waiting), start_timeout_s=5.0, clock=lambda: now)
    assert not link.is_up()
    now = 6.0
    assert not link.is_up()
    assert link.counters["slow_start"] == 1
    assert channels[0].is_closed
    now = 60.0
    assert link.is_up()


def test_half_a_message_does_not_hold_up_the_engine() -> None:
    channel = InProcess(StopsMidway(), num_threads=1, method="forkserver")()
    begin = time.monotonic()
    assert channel.receive(3.0) is None
    assert channel.receive(0.0) is None
    assert time.monotonic() - begin < 30.0
    channel.close()
    assert isinstance(channel.receive(20.0), Failed)


@pytest.mark.parametrize("is_closed", [False, True])
def test_starting_a_process_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    go = threading.Event()
    start = BaseProcess.start

    def slowly(self: BaseProcess) -> None:
        assert go.wait(30.0)
        start(self)

    monkeypatch.setattr(BaseProcess, "start", slowly)
    channel = InProcess(Faulty({}, None, make=independent), num_threads=1, method="forkserver")()
    assert channel.receive(0.0) is None
    if is_closed:
        channel.close()
    go.set()
    assert isinstance(channel.receive(30.0), Failed if is_closed else Ready)
    channel.close()


def test_a_process_that_cannot_start_has_failed() -> None:
    channel = InProcess(lambda: independent(), num_threads=1, method="forkserver")()
    failed = channel.receive(30.0)  # a lambda cannot be pickled
    assert isinstance(failed, Failed)
    assert "did not start" in failed.error
    channel.close()


class NamesVariable:
    """Fails with the value of an environment variable of the worker."""

    def __call__(self) -> Drafter:
        raise ValueError(f"value: {os.environ.get('DRAFTWOOD_TEST')}")


def test_a_process_has_the_environment_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("one", "two", None):
        if value is None:
            monkeypatch.delenv("DRAFTWOOD_TEST")
        else:
            monkeypatch.setenv("DRAFTWOOD_TEST", value)
        channel = InProcess(NamesVariable(), num_threads=1, method="forkserver")()
        failed = channel.receive(30.0)
        assert isinstance(failed, Failed)
        assert f"value: {value}" in failed.error
        channel.close()


class Late:
    """Starts a worker that is ready only once ``go`` is set."""

    def __init__(self, drafter: Drafter) -> None:
        self.go = threading.Event()
        self._drafter = drafter

    def __call__(self) -> Drafter:
        assert self.go.wait(30.0)
        return self._drafter


def test_decoding_begins_without_a_worker_that_starts_slowly() -> None:
    late = Late(independent())
    drafter = AheadDrafter(InThread(late), OPTIONS, vocab_size=VOCAB)
    assert not drafter.wait_ready(at_most_s=0.01)
    before = run(drafter)
    late.go.set()
    assert drafter.wait_ready(at_most_s=20.0)
    after = run(drafter)
    assert tokens(before) == tokens(after) == reference()
    assert set(sources(before)) == {"standby"}
    assert "standby" not in sources(after)
    assert drafter.counters == {"starts": 1}
    drafter.close()


def test_a_late_worker_that_cannot_draft_ahead_is_not_used() -> None:
    late = Late(BlockDiffusionDrafter(tiny_draft_network(target()), target()))
    drafter = AheadDrafter(InThread(late), OPTIONS, vocab_size=VOCAB)
    assert not drafter.wait_ready(at_most_s=0.01)
    late.go.set()
    outputs = run(drafter)
    _wait_for(lambda: tokens(run(drafter)) == reference() and drafter.counters["refused"] > 0)
    assert drafter.counters == {"starts": 1, "refused": 1}  # the next would be no better
    assert tokens(outputs) == reference()
    assert "not verified yet" in str(drafter.last_error)
    drafter.close()


def test_waiting_for_a_worker_that_fails_says_why() -> None:
    link = Link(lambda: FakeChannel(Failed("no such file")))
    with pytest.raises(DraftwoodError, match="no such file"):
        link.wait_ready()
