"""The adaptive policy on simulated drafters and machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from draftwood.tree.budget import Fixed, Online
from draftwood.tree.enumerate import top_prefixes_from_candidates
from draftwood.tree.floor import Floor
from draftwood.tree.latency import LatencyModel, OnlineLatency
from draftwood.tree.online import _has_new_text
from draftwood.tree.policy import BudgetPolicy, CycleState
from draftwood.tree.tree import ScoredPrefixes
from draftwood.tree.trust import Trust

HORIZON, WIDTH = 8, 8


def linear(width: int) -> float:
    return 0.03 + 0.002 * width


def staircase(width: int) -> float:
    return (0.03 if width <= 8 else 0.06) + 0.0003 * width


def flat(width: int) -> float:
    return 0.03 + 0.00005 * width


@dataclass
class World:
    """A drafter whose stated probabilities come true ``honesty`` times as often as stated."""

    curve: Callable[[int], float] = linear
    draft_s: float = 0.006
    ease: float = 0.6
    num_seqs: int = 1
    honesty: Callable[[int], float] = lambda cycle: 1.0
    slowdown: Callable[[int], float] = lambda cycle: 1.0
    noise: float = 0.05

    def block(self, rng: np.random.Generator) -> np.ndarray:
        """[S, L, K] probabilities, non-increasing; cycles differ in how easy they are."""
        ease = np.clip(self.ease + 0.25 * rng.standard_normal((self.num_seqs, 1)), 0.05, 0.97)
        best = np.clip(ease * 0.97 ** np.arange(HORIZON), 0.05, 0.97)[..., None]
        tail = 0.5 ** np.arange(1, WIDTH)
        rest = (1 - best) * 0.8 * tail / tail.sum()
        return -np.sort(-np.concatenate([best, rest], axis=2), axis=2)


@dataclass
class Run:
    """What happened, per cycle."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)  # −1: nothing drafted
    why: list[str] = field(default_factory=list)

    def speed(self, start: int = 0, end: int | None = None) -> float:
        return sum(self.tokens[start:end]) / sum(self.seconds[start:end])

    def num_drafted(self, start: int, end: int) -> int:
        return sum(nodes >= 0 for nodes in self.nodes[start:end])


def accepted_nodes(scored: ScoredPrefixes, row: int, budget: int, picks: np.ndarray) -> list[int]:
    children = {
        (int(scored.parents[row, i]), int(scored.token_ids[row, i])): i for i in range(budget)
    }
    path: list[int] = []
    for pick in picks:
        node = children.get((path[-1] if path else -1, int(pick)))
        if node is None:
            break
        path.append(node)
    return path


def play(
    world: World, policy: BudgetPolicy, cycles: int, latency: LatencyModel | None = None
) -> Run:
    latency = latency if latency is not None else OnlineLatency()
    text, clock = np.random.default_rng(1), np.random.default_rng(2)
    ids = np.broadcast_to(np.arange(WIDTH), (world.num_seqs, HORIZON, WIDTH)).copy()
    run, lens = Run(), [100] * world.num_seqs
    for cycle in range(cycles):
        probs = world.block(text)
        come_true = np.cumsum(probs * world.honesty(cycle), axis=2)
        picks = (text.random((world.num_seqs, HORIZON, 1)) >= come_true).sum(axis=2)
        state = CycleState(lens, HORIZON)
        max_nodes, max_width = policy.limits(state, latency)
        assert max_width is None
        tokens, width, draft_s = world.num_seqs, world.num_seqs, None
        lens = [length + 1 for length in lens]
        if max_nodes:
            scored = top_prefixes_from_candidates(np.log(probs), ids, max_nodes)
            budgets = policy.choose(scored, state, latency)
            assert (budgets >= 0).all()
            assert (budgets <= scored.counts).all()
            paths = [accepted_nodes(scored, s, n, picks[s]) for s, n in enumerate(budgets)]
            policy.observe(scored, budgets, paths)
            tokens += sum(len(path) for path in paths)
            lens = [length + len(path) for length, path in zip(lens, paths, strict=True)]
            width += int(budgets.sum())
        speed = world.slowdown(cycle)
        wobble = np.exp(world.noise * clock.standard_normal(2))
        verify_s = speed * world.curve(width) * wobble[0]
        if max_nodes:
            draft_s = speed * world.draft_s * wobble[1]
        latency.observe(
            width=width, context_len=100, num_seqs=world.num_seqs, verify_s=verify_s,
            draft_s=draft_s, other_s=speed * 0.001,
        )  # fmt: skip
        run.tokens.append(tokens)
        run.seconds.append(verify_s + (draft_s or 0.0) + speed * 0.001)
        run.nodes.append(width - world.num_seqs if max_nodes else -1)
        run.why.append(getattr(policy, "why", ""))
    return run


@pytest.mark.parametrize("curve", [linear, staircase, flat])
@pytest.mark.parametrize(("num_seqs", "ease"), [(1, 0.4), (1, 0.75), (4, 0.6)])
def test_near_or_above_the_best_fixed_budget(
    curve: Callable[[int], float], num_seqs: int, ease: float
) -> None:
    world = World(curve, ease=ease, num_seqs=num_seqs)
    fixed = [play(world, Fixed(n), 200).speed(80) for n in (0, 2, 4, 8, 16, 32, 64)]
    assert play(world, Online(), 200).speed(80) >= 0.96 * max(fixed)


def test_stays_below_the_step_of_a_staircase() -> None:
    run = play(World(staircase, ease=0.6), Online(), 300)
    below = np.mean([nodes <= 7 for nodes in run.nodes[50:]])
    assert below > 0.6
    assert np.mean([5 <= nodes <= 7 for nodes in run.nodes[50:]]) > 0.4  # uses what is free


def test_a_drafter_that_never_pays_is_dropped_and_rarely_probed() -> None:
    world = World(honesty=lambda cycle: 0.02, ease=0.8)
    run = play(world, Online(), 1200)
    assert run.num_drafted(0, 100) <= 30
    assert run.num_drafted(100, 1200) <= 25
    plain = play(world, Fixed(0), 1200)
    # 1 % is the promise; the tolerance is the noise of the two clocks.
    assert run.speed(100) >= 0.98 * plain.speed(100)


def test_a_drafter_that_starts_paying_is_taken_back() -> None:
    world = World(honesty=lambda cycle: 0.02 if cycle < 300 else 1.0, ease=0.8)
    run = play(world, Online(), 1100)
    assert run.num_drafted(100, 300) <= 12
    assert run.num_drafted(900, 1100) >= 190


def test_a_drafter_that_stops_paying_is_dropped_soon() -> None:
    world = World(honesty=lambda cycle: 1.0 if cycle < 300 else 0.02, ease=0.8)
    run = play(world, Online(), 500)
    assert run.num_drafted(100, 300) >= 190
    assert run.num_drafted(330, 430) <= 10


def test_no_flapping_when_drafting_pays_little() -> None:
    world = World(linear, draft_s=0.012, ease=0.45)
    run = play(world, Online(), 500)
    switches = sum(
        (a < 0) != (b < 0) for a, b in zip(run.nodes[100:], run.nodes[101:], strict=False)
    )
    assert switches <= 80  # a lone plain cycle as yardstick counts two
    assert run.speed(100) >= 0.97 * play(world, Fixed(0), 500).speed(100)


def test_another_process_changes_nothing_but_seconds() -> None:
    calm = play(World(linear, ease=0.7), Online(), 400)
    busy = play(
        World(linear, ease=0.7, slowdown=lambda cycle: 1.0 if cycle < 200 else 2.5), Online(), 400
    )
    assert busy.speed(220) * 2.5 >= 0.95 * calm.speed(220)


def test_one_budget_goes_to_the_sequence_that_gains_most() -> None:
    probs = np.array([[[0.95, 0.01]] * HORIZON, [[0.3, 0.2]] * HORIZON])
    ids = np.zeros(probs.shape, dtype=np.int64)
    ids[..., 1] = 1
    scored = top_prefixes_from_candidates(np.log(probs), ids, 32)
    state = CycleState([100, 100], HORIZON)
    budgets = Online().choose(scored, state, OnlineLatency())
    assert budgets[0] > budgets[1]


def test_every_budget_has_a_reason() -> None:
    liar = World(honesty=lambda cycle: 0.02, ease=0.8)
    good, bad = play(World(ease=0.7), Online(), 150), play(liar, Online(), 400)
    drafted = {"speed", "all", "limit", "explore", "trial", "plain"}
    for run in (good, bad):
        for nodes, why in zip(run.nodes, run.why, strict=True):
            assert why in (drafted if nodes >= 0 else {"yardstick", "floor"})
            assert (why == "plain") == (nodes == 0) or why in ("trial", "explore")
    assert good.why[0] == "yardstick"
    assert good.why.count("speed") > 75
    assert bad.why.count("floor") > 300
    assert "trial" in bad.why


def test_a_measured_machine_needs_less_finding_out() -> None:
    run = play(World(ease=0.7), Online(is_calibrated=True), 40)
    assert run.why[0] not in ("yardstick", "floor")
    assert run.why[:30].count("yardstick") == 0
    assert run.why[:30].count("explore") <= play(World(ease=0.7), Online(), 30).why.count("explore")


def test_nothing_proposed_is_fine() -> None:
    policy, latency, state = Online(), OnlineLatency(), CycleState([5, 6], HORIZON)
    for _ in range(20):
        if policy.limits(state, latency)[0]:
            scored = ScoredPrefixes.empty(2)
            budgets = policy.choose(scored, state, latency)
            assert budgets.tolist() == [0, 0]
            policy.observe(scored, budgets, [[], []])
    assert policy.limits(CycleState([5], 0), latency) == (0, None)


def test_trust_learns_slowly_and_notices_a_change() -> None:
    trust = Trust()
    assert trust.ratio == 1.0
    for _ in range(200):
        trust.observe(3.2, 4.0)
    assert trust.ratio == pytest.approx(0.8, abs=0.03)
    for _ in range(20):
        trust.observe(0.0, 4.0)
    assert trust.ratio < 0.25  # forgetting alone would leave 0.65


def test_floor_pays_for_trials_from_savings() -> None:
    floor = Floor()
    cycles = []
    for _ in range(5000):
        drafts = floor.drafts()
        cycles.append(drafts)
        if drafts:
            floor.observe(1.0, 1.0, 2.0)  # one token in the time of two plain cycles
    assert sum(cycles[:20]) <= 6
    lost = sum(cycles[20:]) * 1.0  # each drafted cycle loses one plain cycle
    assert lost <= 0.01 * len(cycles)


@pytest.mark.parametrize("earned", [0, 40])
def test_a_new_text_is_tried_at_once_where_drafting_has_earned_it(earned: int) -> None:
    floor = Floor()
    for _ in range(earned):
        assert floor.drafts()
        floor.observe(2.0, 2.0, 1.0)
    while floor.drafts():
        floor.observe(1.0, 1.0, 1.5)
    assert not floor.drafts()
    assert floor.drafts(new_text=True) == floor.in_trial == (earned > 0)


def test_texts_are_told_apart_by_their_lengths() -> None:
    def joined(before: list[int], now: list[int]) -> bool:
        return _has_new_text(before, CycleState(now, HORIZON))

    assert joined([], [40])
    assert not joined([40, 90], [41, 90 + HORIZON + 1])
    assert not joined([40, 90], [41])  # one has left
    assert joined([40], [42, 10])
    assert joined([140], [30])
    assert joined([140], [200])
