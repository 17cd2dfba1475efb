"""Drafting ahead: the messages, the branches that come true, how many."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ahead_runs import (
    GREEDY,
    LIMITS,
    OPTIONS,
    PROMPTS,
    SAMPLED,
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
from draftwood.ahead.channel import InThread
from draftwood.ahead.choice import Choice, Grid, Likeliest
from draftwood.ahead.drafter import AheadDrafter
from draftwood.ahead.emulate import EmulatedBranches
from draftwood.ahead.load import load_ahead
from draftwood.ahead.messages import Ahead, Draft, Drafted, Inbox, Observe, Outbox
from draftwood.ahead.miss import MissDepth
from draftwood.ahead.outcomes import Outcomes, branch_tree, columns_of, frontier
from draftwood.ahead.pace import Pace
from draftwood.ahead.planner import AheadOptions, Planner
from draftwood.ahead.policy import AheadBudget
from draftwood.ahead.proposal import narrowed, problem
from draftwood.ahead.worker import Desk
from draftwood.draft.autoregressive import AutoregressiveDrafter
from draftwood.draft.base import Committed, DraftContext, Drafter, DraftLimits
from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.draft.lookup import LookupDrafter
from draftwood.engine import Engine
from draftwood.sampling import Sampler, SamplingParams
from draftwood.target.model import Target
from draftwood.tree.budget import BudgetPolicy, Chain, Fixed
from draftwood.tree.enumerate import top_prefixes
from draftwood.tree.tree import DraftTree, ScoredPrefixes
from faulty import Faulty
from tiny import tiny_model
from tiny_drafter import tiny_draft_network

# ---- what comes true ----------------------------------------------------------------------------


def emulated_model() -> Drafter:
    small = Target(tiny_model("llama", vocab=VOCAB, seed=1), probe=False)
    return AutoregressiveDrafter(small, target(), num_passes=2, expand_per_pass=2)


@pytest.mark.parametrize("make", [independent, LookupDrafter, emulated_model])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_hit_is_what_would_have_been_drafted(
    make: Callable[[], Drafter], params: SamplingParams
) -> None:
    """A branch that foresaw what then happened equals a fresh drafter's proposal."""
    before, path, bonus = [3, 9, 4, 3, 9, 5, 3, 9], [4, 3], 9

    def context(token_ids: list[int]) -> DraftContext:
        sampler = Sampler(params, token_ids[:4], vocab_size=VOCAB)
        sampler.commit(token_ids[4:])
        return DraftContext(0, token_ids, 4, 30, sampler)

    outbox, desk = Outbox(), Desk(make())
    told = Committed(0, 0, before[:-1], None, [], 0)
    desk.handle(Observe((told,)))
    desk.handle(Draft(0, outbox.updates([context(before)]), LIMITS, 99, allow_soft=False))
    tree = DraftTree.chain([before[-1], *path])
    outcomes = Outcomes(
        np.zeros(2, np.int64), np.array([1, 2]), np.array([7, bonus]), np.array([0.3, 0.6]),
        np.array([1, 2]),
    )  # fmt: skip
    wide, anchors = branch_tree(tree, outcomes)
    desk.handle(Ahead(outbox.updates([context(before)]), wide, anchors, None))
    record = Committed(0, len(before) - 1, [before[-1], *path], None, [], 2)
    desk.handle(Observe((record,)))
    after = context([*before, *path, bonus])
    reply = desk.handle(Draft(1, outbox.updates([after]), LIMITS, 99, allow_soft=False))
    assert isinstance(reply, Drafted)
    assert reply.sources == ("hit",)
    assert reply.draft_s is None
    same_as_fresh(reply.scored, make(), after)
    # What was kept of the path serves the next draft as well.
    desk.handle(Observe((Committed(0, len(after.token_ids) - 1, [bonus], None, [], 0),)))
    later = context([*after.token_ids, 12])
    reply = desk.handle(Draft(2, outbox.updates([later]), LIMITS, 99, allow_soft=False))
    assert isinstance(reply, Drafted)
    assert reply.sources == ("miss",)
    same_as_fresh(reply.scored, make(), later)


def same_as_fresh(scored: ScoredPrefixes, fresh: Drafter, context: DraftContext) -> None:
    """Equal to what a drafter says that sees these tokens for the first time."""
    fresh.observe([Committed(0, 0, context.token_ids[:-1], None, [], 0)])
    wanted = fresh.propose([context], LIMITS)
    assert scored.counts.tolist() == wanted.counts.tolist()
    assert scored.token_ids.tolist() == wanted.token_ids.tolist()
    np.testing.assert_allclose(scored.log_probs, wanted.log_probs, atol=1e-4)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", [Chain, lambda: Fixed(3), lambda: Fixed(24)])
def test_the_output_is_the_targets_own(
    params: SamplingParams, policy: Callable[[], BudgetPolicy]
) -> None:
    drafter = AheadDrafter(InThread.of(Faulty(future(params))()), OPTIONS, vocab_size=VOCAB)
    drafter.wait_ready()
    outputs = run(drafter, params, policy())
    assert tokens(outputs) == reference(params)
    assert drafter.counters == {"starts": 1}
    assert sources(outputs)["hit"] + sources(outputs)["miss"] == sum(o.num_cycles for o in outputs)


def test_branches_come_true_as_often_as_predicted() -> None:
    """The oracle's probabilities are right, so the predicted hit rate is the observed one."""
    hits, predicted, spread = 0, 0.0, 0.0
    for seed in range(4):
        params = replace(SAMPLED, seed=seed)
        drafter = AheadDrafter(InThread.of(Faulty(future(params))()), OPTIONS, vocab_size=VOCAB)
        drafter.wait_ready()
        for output in run(drafter, params):
            probs = [c.ahead.hit_prob for c in output.cycles[:-1] if c.ahead is not None]
            predicted += sum(probs)
            spread += sum(p * (1 - p) for p in probs)
            hits += [c.ahead.source for c in output.cycles if c.ahead].count("hit")
    assert predicted > 10
    assert abs(hits - predicted) < 4 * spread**0.5


def test_an_independent_drafter_hits_and_uses_open_branches() -> None:
    drafter = AheadDrafter(InThread.of(independent()), OPTIONS, vocab_size=VOCAB)
    drafter.wait_ready()
    outputs = run(drafter)
    assert tokens(outputs) == reference()
    assert drafter.counters == {"starts": 1}
    assert sources(outputs)["hit"] + sources(outputs)["soft"] > 0


def test_the_budget_policy_reports_nodes_branches_and_hits() -> None:
    drafter = AheadDrafter(InThread.of(Faulty(future())()), AheadOptions(), vocab_size=VOCAB)
    drafter.wait_ready()
    policy = AheadBudget(drafter.planner)
    assert tokens(run(drafter, policy=policy)) == reference()
    assert all(name in policy.why for name in ("n=", "M=", "h="))


def test_without_room_for_more_tokens_nothing_is_drafted_ahead() -> None:
    drafter = AheadDrafter(InThread.of(Faulty(future())()), OPTIONS, vocab_size=VOCAB)
    drafter.wait_ready()
    outputs = run(drafter, SamplingParams(max_new_tokens=1))
    assert all(c.ahead is None or c.ahead.num_branches == 0 for o in outputs for c in o.cycles)


def test_sequences_come_and_go() -> None:
    drafter = AheadDrafter(InThread.of(independent()), OPTIONS, vocab_size=VOCAB)
    drafter.wait_ready()
    engine = Engine(target(), drafter, Fixed(4), max_batch=2)
    ids = [engine.add(prompt, GREEDY) for prompt in [*PROMPTS, PROMPTS[0]]]
    done: dict[int, list[int]] = {}
    for number in range(200):
        if number == 3:
            engine.abort(ids[1])
        for event in engine.step():
            if event.output is not None:
                done[event.seq_id] = event.output.token_ids
    texts = reference()
    assert [done[ids[0]], done[ids[2]], done[ids[3]]] == [texts[0], texts[2], texts[0]]
    assert drafter.counters == {"starts": 1}


def test_a_chat_that_goes_back_drafts_on() -> None:
    drafter = AheadDrafter(InThread.of(independent()), OPTIONS, vocab_size=VOCAB)
    drafter.wait_ready()
    engine, plain = Engine(target(), drafter, Fixed(6)), Engine(target())
    for cut in (0, 3):
        done = []
        for one in (engine, plain):
            seq_id = one.add(PROMPTS[0], GREEDY, keep=True)
            first = finish(one, seq_id).token_ids
            again = one.add([*PROMPTS[0], *first[: len(first) - cut], 11], GREEDY, resume=seq_id)
            done.append(finish(one, again).token_ids)
        assert done[0] == done[1]
    assert drafter.counters == {"starts": 1}


def test_a_drafter_that_reads_the_target_is_refused_with_the_reason() -> None:
    drafter = BlockDiffusionDrafter(tiny_draft_network(target()), target())
    with pytest.raises(ValueError, match="not verified yet"):
        load_ahead(drafter, target())
    with pytest.raises(ValueError, match="not verified yet"):
        AheadDrafter(InThread.of(drafter)).wait_ready()


@pytest.mark.parametrize(
    ("spec", "where", "why"),
    [
        ("lookup", "nowhere", "thread"),
        ("none", "thread", "never drafts"),
        ("lookup", "process:x", "cores"),
    ],
)
def test_what_cannot_run_ahead_is_refused(spec: str, where: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        load_ahead(spec, target(), where)


def test_an_object_cannot_move_to_a_process() -> None:
    with pytest.raises(ValueError, match="give its name"):
        load_ahead(LookupDrafter(), target(), "process")


# ---- parts --------------------------------------------------------------------------------------


def test_contexts_arrive_as_they_are() -> None:
    outbox, inbox = Outbox(), Inbox()
    params = SamplingParams(temperature=0.7, seed=5, top_p=0.9)
    sampler = Sampler(params, [1, 2, 3], vocab_size=VOCAB, sample_index=4)
    token_ids = [1, 2, 3]
    for news in ([], [7], [8, 9, 10]):
        token_ids.extend(news)
        sampler.commit(news)
        context = DraftContext(5, token_ids, 3, 20 - len(token_ids), sampler)
        (update,) = outbox.updates([context])
        (copy,) = inbox.contexts([update])
        assert len(update.token_ids) == (len(news) or 3)
        assert (list(copy.token_ids), copy.prompt_len, copy.max_depth) == (
            token_ids, 3, context.max_depth,
        )  # fmt: skip
        assert copy.token_ids is not token_ids
        assert copy.sampler.num_output == sampler.num_output
        assert copy.sampler.noise is not None
        assert copy.sampler.noise.sample_index == 4
        assert copy.sampler.params == params


def some_scores(seed: int = 0, num_seqs: int = 2) -> ScoredPrefixes:
    rng = np.random.default_rng(seed)
    return top_prefixes(np.log(rng.dirichlet(np.full(9, 0.4), (num_seqs, 4))), 50)


@given(st.integers(0, 30), st.integers(1, 60), st.one_of(st.none(), st.integers(1, 4)))
@settings(max_examples=40, deadline=None)
def test_narrowing_gives_what_the_limits_ask_for(seed: int, most: int, width: int | None) -> None:
    scored = some_scores(seed)
    cut = narrowed(scored, DraftLimits(most, width))
    contexts = [None, None]
    reply = Drafted(0, cut, ("miss", "miss"), None, None)
    assert problem(reply, contexts, 9) is None  # type: ignore[arg-type]
    for s in range(2):
        parents = cut.parents[s, : cut.counts[s]].tolist()
        assert len(parents) <= most
        if width is not None:
            assert max(Counter(parents).values(), default=0) <= width
    if width == 1:
        assert (cut.depths[0, : cut.counts[0]] == np.arange(1, cut.counts[0] + 1)).all()
    if width is None:
        assert cut.log_probs[0].tolist() == scored.log_probs[0, :most].tolist()


@pytest.mark.parametrize(
    "spoil",
    [
        {"token_ids": np.full((2, 50), 9)},
        {"token_ids": np.full((2, 50), -1)},
        {"parents": np.full((2, 50), 49)},
        {"depths": np.full((2, 50), 1)},
        {"log_probs": np.full((2, 50), np.nan)},
        {"log_probs": np.full((2, 50), 0.5)},
        {"counts": np.array([51, 0])},
        {"counts": np.array([3])},
        {"token_ids": np.zeros((2, 3), dtype=np.int64)},
        {"token_ids": None},
    ],
)
def test_a_malformed_proposal_is_named(spoil: dict) -> None:
    fields = {**some_scores().__dict__, **spoil}
    reply = Drafted(0, ScoredPrefixes(**fields), ("miss", "miss"), None, None)
    assert problem(reply, [None, None], 9) is not None  # type: ignore[list-item]


def test_as_many_branches_as_fit_the_window() -> None:
    pace = Pace(max_branches=32)
    assert pace.num_branches() > 0
    for branches in (2, 4, 8, 16, 32, 8, 16, 32):
        pace.observe_ahead(branches, 0.002 + 0.001 * branches)
    for _ in range(5):
        pace.observe_window(0.020)
    assert pace.num_branches() == 16  # 2 ms + 16 · 1 ms ≤ 90 % of 20 ms
    assert pace.num_branches(1.0) == 32
    assert pace.num_branches(0.0) == 0


def context_of(
    token_ids: list[int], params: SamplingParams = GREEDY, seq_id: int = 0
) -> DraftContext:
    sampler = Sampler(params, token_ids[:1], vocab_size=VOCAB)
    sampler.commit(token_ids[1:])
    return DraftContext(seq_id, token_ids, 1, 30, sampler)


def test_what_does_not_fit_is_not_drafted_but_tried_again() -> None:
    """A pass longer than the window: rests that get longer; as soon as it fits, branches."""
    planner = Planner(AheadOptions(max_branches=8))
    context, scored = context_of([3, 4, 5]), some_scores(num_seqs=1)
    tree = DraftTree.grow([5], scored, np.array([4]))

    def asked() -> int:
        found = planner.branches([context], scored, tree, has_soft=False)
        return 0 if found is None else len(found.anchors)

    def passes(seconds: float) -> list[int]:
        sizes = []
        for _ in range(400):
            sizes.append(asked())
            if sizes[-1]:
                planner.pace.observe_ahead(sizes[-1], seconds)
                planner.pace.observe_window(0.010)
        return sizes

    slow = passes(0.030)
    tries = np.flatnonzero(slow[10:])
    assert all(slow[10 + at] == 1 for at in tries)
    assert 3 <= len(tries) <= 20
    assert np.diff(tries)[-1] > np.diff(tries)[0]
    assert passes(0.001)[-1] == 8
    never = Planner(AheadOptions(num_branches=0))
    assert all(never.branches([context], scored, tree, has_soft=False) is None for _ in range(300))


def learned(planner: Planner, rounds: int) -> None:
    """The drafter is right at the first place and always wrong at the second."""
    for _ in range(rounds):
        scored = confident()
        planner.branches([context_of([3, 4])], scored, DraftTree.grow([4], scored, np.array([2])),
                         has_soft=False)  # fmt: skip
        planner.learn_picks([Committed(0, 1, [4], None, [0, 3], 2)])


def confident() -> ScoredPrefixes:
    """Two places; at each token 0 has 0.8 and the four others 0.05."""
    probs = np.array([0.8, 0.05, 0.05, 0.05, 0.05])
    return top_prefixes(np.log(np.stack([probs, probs])[None]), 30)


@pytest.mark.parametrize("choice", [Likeliest(soft_weight=0.0), Grid()])
def test_branches_follow_what_the_target_really_said(choice: Choice) -> None:
    """A place where the drafter is always wrong gets branches that its scores would not give it."""

    def at_second_place() -> int:
        planner = Planner(AheadOptions(choice, num_branches=4))
        learned(planner, rounds)
        scored = confident()
        tree = DraftTree.grow([4], scored, np.array([2]))
        found = planner.branches([context_of([3, 4])], scored, tree, has_soft=True)
        assert found is not None
        named = found.anchors[found.anchors >= len(tree)]  # not the one after the whole path
        return int((found.tree.depths[named] == 2).sum())

    rounds = 0
    before = at_second_place()
    rounds = 150
    assert at_second_place() > before


def test_a_time_when_branches_fit_makes_the_next_rest_short_again() -> None:
    planner = Planner(AheadOptions())
    planner.pace.observe_window(0.010)
    context, scored = context_of([3, 4, 5]), some_scores(num_seqs=1)
    tree = DraftTree.grow([5], scored, np.array([4]))

    def cycles_until_a_try() -> int:
        for number in range(200):
            if planner.branches([context], scored, tree, has_soft=False) is not None:
                return number
        return 200

    def take(seconds: float) -> None:
        for _ in range(200):
            planner.pace.observe_ahead(1, seconds)

    take(0.030)
    first, later = cycles_until_a_try(), [cycles_until_a_try() for _ in range(4)][-1]
    assert later > first
    take(0.001)
    assert cycles_until_a_try() == 0
    take(0.030)
    assert cycles_until_a_try() <= first


def test_the_window_is_the_cycles_and_not_the_time_between_requests() -> None:
    drafter = AheadDrafter(InThread.of(independent()), OPTIONS, vocab_size=VOCAB)
    drafter.wait_ready()
    engine = Engine(target(), drafter, Fixed(3))
    engine.add(PROMPTS[0], GREEDY)
    for _ in range(6):
        engine.step()
        time.sleep(0.5)
    window = drafter.planner.pace.window_s
    assert window is not None
    assert window < 0.5
    drafter.close()


@pytest.mark.parametrize("most", [1, 2, 5, 9])
def test_no_choice_takes_more_than_it_may(most: int) -> None:
    scored = some_scores(num_seqs=4)
    tree = DraftTree.grow([1, 2, 3, 4], scored, np.array([3, 3, 3, 3]))
    columns = [columns_of(scored, s, tree, s) for s in range(4)]
    outcomes = frontier(scored, columns)
    for choice in (Likeliest(), Grid(), Grid(2, 3), Grid(4, None)):
        chosen = choice.choose(outcomes, most)
        assert 0 < len(chosen) <= most


@pytest.mark.parametrize("fixed", [5, 7])
def test_a_given_number_of_branches_is_that_number_for_every_budget(fixed: int) -> None:
    for policy in (AheadBudget, lambda _: Fixed(3)):
        options = AheadOptions(num_branches=fixed)
        drafter = AheadDrafter(InThread.of(independent()), options, vocab_size=VOCAB)
        drafter.wait_ready()
        engine = Engine(target(), drafter, policy(drafter.planner))
        (output,) = engine.generate([PROMPTS[0]], GREEDY)
        drafted = [c.ahead.num_branches for c in output.cycles[1:-2] if c.ahead is not None]
        assert drafted
        assert set(drafted) <= {0, fixed}
        assert drafted.count(fixed) > len(drafted) / 2
        drafter.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"choice": "grid"}, {"choice": Grid}, {"choice": None}, {"num_branches": 2.5},
        {"num_branches": True}, {"num_branches": -1}, {"head_rows": 1.5}, {"head_rows": 0},
        {"max_branches": 0}, {"max_branches": None}, {"timeout_s": float("inf")},
        {"timeout_s": float("nan")}, {"timeout_s": 0.0}, {"start_wait_s": 1e12},
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AheadOptions(**wrong)


@pytest.mark.parametrize("wrong", [{"positions": 1.5}, {"alternatives": 0}])
def test_grids_that_cannot_be_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Grid(**wrong)


def test_open_branches_are_used_where_they_pay() -> None:
    pace = Pace()
    for _ in range(20):
        pace.observe_draft(0.010)
        pace.observe_tokens("soft", 2)
        pace.observe_tokens("miss", 4)
    assert not pace.takes_soft(rest_s=0.030)  # 2 in 30 ms against 4 in 40 ms
    assert pace.takes_soft(rest_s=0.008)  # 2 in 8 ms against 4 in 18 ms


@pytest.mark.parametrize(
    ("half_s", "after_half", "whole"), [(0.002, 5, False), (0.009, 5, True), (0.002, 1, True)]
)
def test_half_a_block_is_drafted_where_it_is_faster(
    half_s: float, after_half: int, whole: bool
) -> None:
    """Tokens 2 and 9 in turn after whole ones: half of 8 would keep 2 and 5, if as often right."""
    misses = MissDepth()
    asked = []
    for number in range(48):
        depth = misses.depth(8, rest_s=0.004)
        asked.append(depth)
        misses.observe(depth == 8, 0.010 if depth == 8 else half_s)
        misses.observe_tokens(depth == 8, (2, 9 if depth == 8 else after_half)[number % 2])
    assert {4, 8} <= set(asked)
    assert (asked[-1] == 8) == whole


def test_emulation_leaves_the_drafter_as_it_was() -> None:
    """After branches the same tokens are reported, and learned from, as without them."""
    plain, busy = LookupDrafter(), EmulatedBranches(LookupDrafter())
    token_ids = [3, 9, 4, 3, 9, 5, 3, 9]
    sampler = Sampler(GREEDY, token_ids[:4], vocab_size=VOCAB)
    context = DraftContext(0, token_ids, 4, 30, sampler)
    for drafter in (plain, busy):
        drafter.observe([Committed(0, 0, token_ids[:-1], None, [], 0)])
        drafter.propose([context], LIMITS)
    tree = DraftTree.chain([9, 4, 3])
    busy.draft_branches([context], tree, np.array([1, 2]))
    after = [*token_ids, 4, 8]
    proposals = []
    for drafter in (plain, busy):
        drafter.observe([Committed(0, 7, [9, 4], None, [4, 8], 2)])
        proposals.append(
            drafter.propose([DraftContext(0, after, 4, 30, sampler)], LIMITS).log_probs.tolist()
        )
    assert proposals[0] == proposals[1]
