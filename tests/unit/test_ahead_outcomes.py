"""Outcomes of a verification, the choice among them, and the budgets that weigh them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.ahead.choice import Grid, Likeliest
from draftwood.ahead.outcomes import (
    UNKNOWN,
    Outcomes,
    branch_tree,
    columns_of,
    frontier,
)
from draftwood.ahead.planner import AheadOptions, Planner
from draftwood.ahead.policy import AheadBudget, hit_probs
from draftwood.ahead.proposal import narrowed
from draftwood.draft.base import DraftLimits
from draftwood.tree.budget import CycleState
from draftwood.tree.enumerate import top_prefixes
from draftwood.tree.ranked import rank_nodes
from draftwood.tree.tree import DraftTree, ScoredPrefixes

EVERYTHING = 10_000


def marginals(seed: int, depth: int, vocab: int, num_seqs: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(vocab, 0.4), (num_seqs, depth))


def scored_of(probs: np.ndarray, max_nodes: int = EVERYTHING) -> ScoredPrefixes:
    return top_prefixes(np.log(np.maximum(probs, 1e-300)), max_nodes)


def first(*counts: int) -> list[np.ndarray]:
    return [np.arange(count) for count in counts]


def paths(tree: DraftTree, index: int = 0) -> list[tuple[int, ...]]:
    """Drafted tokens down to each node of a sequence."""
    start, end = tree.span(index)
    found: list[tuple[int, ...]] = []
    for node in range(start, end):
        parent = int(tree.parents[node])
        above = found[parent - start] if parent >= 0 else None
        token = int(tree.token_ids[node])
        found.append(() if above is None else (*above, token))
    return found


small = st.tuples(st.integers(0, 99), st.integers(1, 3), st.integers(2, 5))


@given(small, st.integers(0, 30), st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_outcomes_sum_to_one_whatever_was_enumerated(shape, nodes: int, more: int) -> None:
    scored = scored_of(marginals(*shape), nodes + more)
    outcomes = frontier(scored, first(min(nodes, int(scored.counts[0]))))
    assert outcomes.probs.sum() == pytest.approx(1.0)
    assert (outcomes.probs >= 0).all()


@given(small, st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_outcomes_are_those_of_the_walk(shape, nodes: int) -> None:
    """Every text the marginals can produce, walked down the tree by hand."""
    probs = marginals(*shape)
    scored = scored_of(probs)
    nodes = min(nodes, int(scored.counts[0]))
    tree = DraftTree.grow([0], scored, [nodes])
    known = {path: node for node, path in enumerate(paths(tree))}
    _, depth, vocab = shape
    wanted: dict[tuple[int, int], float] = {}
    for text in itertools.product(range(vocab), repeat=depth):
        prob = float(np.prod([probs[0, d, token] for d, token in enumerate(text)]))
        d = 0
        while d < depth and text[: d + 1] in known:
            d += 1
        end = (known[text[:d]], text[d] if d < depth else UNKNOWN)
        wanted[end] = wanted.get(end, 0.0) + prob
    outcomes = frontier(scored, first(nodes))
    found = {
        (int(node), int(token)): float(prob)
        for node, token, prob in zip(outcomes.nodes, outcomes.bonus, outcomes.probs, strict=True)
    }
    for end, prob in wanted.items():
        assert found[end] == pytest.approx(prob, abs=1e-12)
    assert all(found[end] == pytest.approx(0, abs=1e-9) for end in found.keys() - wanted.keys())


@given(small, st.integers(1, 20), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_the_best_outcomes_are_the_next_entries_of_the_enumeration(
    shape, nodes: int, branches: int
) -> None:
    scored = scored_of(marginals(*shape))
    nodes = min(nodes, int(scored.counts[0]))
    chosen = Likeliest(soft_weight=0.0).choose(frontier(scored, first(nodes)), branches)
    parents = scored.parents[0]
    following = [j for j in range(nodes, int(scored.counts[0])) if parents[j] < nodes]
    assert chosen.bonus.tolist() == scored.token_ids[0, following[:branches]].tolist()
    assert chosen.nodes.tolist() == (parents[following[:branches]] + 1).tolist()


def test_columns_are_found_by_tokens() -> None:
    scored = scored_of(marginals(3, 4, 6, num_seqs=2), 40)
    tree = DraftTree.grow([9, 8], scored, [7, 12])
    assert columns_of(scored, 0, tree, 0).tolist() == list(range(7))
    assert columns_of(scored, 1, tree, 1).tolist() == list(range(12))


def test_nodes_from_elsewhere_are_never_reached() -> None:
    """A tree may hold nodes that the drafter did not propose; what hangs on them is unknown."""
    scored = scored_of(np.array([[[0.6, 0.4], [0.7, 0.3]]]), 6)
    foreign = DraftTree(
        np.array([9, 0, 77, 1]), np.array([-1, 0, 0, 2]), np.array([0, 1, 1, 2]),
        np.zeros(4, dtype=np.int64), np.array([0, 4]),
    )  # fmt: skip
    columns = columns_of(scored, 0, foreign, 0)
    assert columns.tolist()[1:] == [-1, -1]
    outcomes = frontier(scored, [columns])
    assert outcomes.probs.sum() == pytest.approx(1.0)
    assert outcomes.probs[np.isin(outcomes.nodes, [2, 3])].sum() == 0.0


def test_branches_of_all_sequences_compete() -> None:
    scored = scored_of(marginals(5, 3, 6, num_seqs=3), 60)
    outcomes = frontier(scored, first(4, 0, 9))
    chosen = Likeliest().choose(outcomes, 12)
    rest = np.sort(outcomes.probs[outcomes.is_known])[::-1]
    known = chosen.probs[chosen.is_known]
    assert known.tolist() == rest[: len(known)].tolist()
    tree = DraftTree.grow([50, 51, 52], scored, [4, 0, 9])
    wide, anchors = branch_tree(tree, chosen)
    assert wide.num_seqs == 3
    for i, anchor in enumerate(anchors.tolist()):
        seq = int(chosen.seq[i])
        assert wide.seq[anchor] == seq
        before = paths(tree, seq)[int(chosen.nodes[i])]
        bonus = () if chosen.bonus[i] == UNKNOWN else (int(chosen.bonus[i]),)
        assert paths(wide, seq)[anchor - wide.span(seq)[0]] == before + bonus
        assert wide.depths[anchor] == len(before + bonus)


def chain(depth: int, vocab: int, seed: int = 0) -> tuple[Outcomes, np.ndarray]:
    """Outcomes of verifying the best chain, and the marginals."""
    probs = np.sort(marginals(seed, depth, vocab), axis=2)[:, :, ::-1]
    scored = scored_of(probs)
    best = [int(np.flatnonzero(scored.depths[0] == d + 1)[0]) for d in range(depth)]
    return frontier(scored, [np.array(best)]), probs[0]


def test_the_grid_is_rejections_by_alternatives_and_full_acceptance() -> None:
    outcomes, probs = chain(4, 6)
    chosen = Grid(positions=4, alternatives=2).choose(outcomes, 100)
    cells = {(int(n), int(b)) for n, b in zip(chosen.nodes, chosen.bonus, strict=True)}
    # The chain takes token 0 everywhere, tokens are sorted by probability.
    assert cells == {(4, UNKNOWN)} | {(node, token) for node in range(3) for token in (1, 2)}
    wanted = sum(np.prod(probs[:d, 0]) * probs[d, t] for d in range(3) for t in (1, 2))
    assert chosen.probs[chosen.is_known].sum() == pytest.approx(wanted)


@given(st.integers(0, 99), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_no_grid_beats_the_most_probable_outcomes(seed: int, most: int) -> None:
    outcomes, _ = chain(3, 6, seed)
    free = Likeliest(soft_weight=1.0).choose(outcomes, most)
    for grid in (Grid(), Grid(positions=3), Grid(alternatives=2), Grid(2, 3)):
        chosen = grid.choose(outcomes, most)
        assert 0 < len(chosen) <= most
        assert chosen.probs.sum() <= free.probs.sum() + 1e-12


def test_an_open_grid_takes_the_best_shape_that_fits() -> None:
    outcomes, _ = chain(4, 6, seed=1)
    most = 9
    best = max(
        Grid(c, f).choose(outcomes, most).probs.sum()
        for c in range(1, 6)
        for f in range(1, 9)
        if (c - 1) * f + 1 <= most
    )
    assert Grid().choose(outcomes, most).probs.sum() == pytest.approx(best)


@pytest.mark.parametrize("bad", [{"positions": 0}, {"alternatives": 0}])
def test_an_empty_grid_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="≥ 1"):
        Grid(**bad)


@pytest.mark.parametrize("num_seqs", [1, 3])
def test_hit_probabilities_are_those_of_the_chosen_outcomes(num_seqs: int) -> None:
    scored = scored_of(marginals(7, 4, 8, num_seqs), 120)
    ranked = rank_nodes(scored)
    totals, branches = np.array([0, 1, 5, 20, 60]), np.array([0, 1, 4, 16])
    table = hit_probs(scored, totals, branches)
    for i, total in enumerate(totals.tolist()):
        columns = [np.arange(n) for n in ranked.budgets(total)]
        outcomes = frontier(scored, columns)
        for j, most in enumerate(branches.tolist()):
            chosen = Likeliest(soft_weight=0.0).choose(outcomes, most)
            assert table[i, j] == pytest.approx(chosen.probs.sum())


class Machine:
    """Seconds that are known exactly."""

    def __init__(self, per_row: float) -> None:
        self._per_row = per_row

    def verify_s(self, widths: np.ndarray, context_len: float, num_seqs: int) -> np.ndarray:
        return 0.030 + self._per_row * widths

    def draft_s(self, context_len: float, num_seqs: int) -> float:
        return 0.010

    def other_s(self) -> float:
        return 0.001


def decided(per_row: float, ahead_s: float, draft_s: float) -> tuple[int, int, int]:
    """(n, best n without branches, M) on a machine that took these seconds so far."""
    planner = Planner(AheadOptions())
    for _ in range(8):
        for m in (2, 4, 8, 16, 32):
            planner.pace.observe_ahead(m, 0.001 + ahead_s * m)
        planner.pace.observe_draft(draft_s)
    policy = AheadBudget(planner)
    scored = scored_of(marginals(11, 8, 40), 200)
    state, machine = CycleState([100], 15), Machine(per_row)
    for _ in range(6):  # it looks at twice as many nodes each time
        budgets = policy.choose(scored, state, machine)
    phi = scored.phi()[0]
    speed = (1 + phi) / (machine.verify_s(1 + np.arange(len(phi)), 100, 1) + draft_s + 0.001)
    assert planner.planned is not None
    return int(budgets[0]), int(np.argmax(speed)), planner.planned


@pytest.mark.parametrize("fixed", [4, 24, None])
def test_the_policy_asks_for_the_outcomes_of_the_trees_it_compares(fixed: int | None) -> None:
    full = scored_of(marginals(11, 8, 40), 400)
    planner = Planner(AheadOptions(num_branches=fixed))
    planner.pace.observe_ahead(12, 0.01)  # it may try twice as many
    policy = AheadBudget(planner)
    most, _ = policy.limits(CycleState([100], 15), Machine(0.001))
    totals, branches = np.array([2, 8, 15]), np.array([2, fixed or 24])
    seen = hit_probs(narrowed(full, DraftLimits(most)), totals, branches)
    assert seen == pytest.approx(hit_probs(full, totals, branches), abs=0.01)


def test_branches_are_drafted_while_they_fit_and_drafting_costs() -> None:
    _, _, many = decided(per_row=0.001, ahead_s=0.0002, draft_s=0.02)
    _, _, few = decided(per_row=0.001, ahead_s=0.05, draft_s=0.02)
    assert many > few


def test_without_branches_the_budget_is_the_synchronous_one() -> None:
    budget, synchronous, branches = decided(per_row=0.001, ahead_s=9.0, draft_s=0.02)
    assert branches == 0
    assert abs(budget - synchronous) <= 0.15 * synchronous + 1
