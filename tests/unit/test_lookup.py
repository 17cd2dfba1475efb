"""Prompt lookup: its index, its trees, and what it learns."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.draft.base import Committed, DraftContext, DraftLimits
from draftwood.draft.lookup import LookupDrafter
from draftwood.draft.suffix_index import MAX_MATCH_LEN, ORDERS, SuffixIndex
from draftwood.sampling import Sampler, SamplingParams
from draftwood.tree.tree import ScoredPrefixes

few_tokens = st.lists(st.integers(0, 3), max_size=40)


def context(tokens: list[int], *, seq_id: int = 0, max_depth: int = 100) -> DraftContext:
    sampler = Sampler(SamplingParams(), tokens, vocab_size=1000)
    return DraftContext(seq_id, tokens, len(tokens), max_depth, sampler)


def propose(
    drafter: LookupDrafter, tokens: list[int], max_nodes: int = 16, max_width: int | None = None
) -> ScoredPrefixes:
    return drafter.propose([context(tokens)], DraftLimits(max_nodes, max_width))


def paths(scored: ScoredPrefixes, row: int = 0) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for i in range(int(scored.counts[row])):
        parent = int(scored.parents[row, i])
        above = found[parent] if parent >= 0 else ()
        found.append((*above, int(scored.token_ids[row, i])))
    return found


def decode(drafter: LookupDrafter, truth: list[int], start: int, seq_id: int = 0) -> list[int]:
    """Decode ``truth`` greedily from ``start`` tokens; acceptance lengths of the cycles."""
    known = start
    drafter.observe([Committed(seq_id, 0, truth[: start - 1], None, [], 0)])
    lengths = []
    while known < len(truth):
        room = len(truth) - known - 1
        one = [context(truth[:known], seq_id=seq_id, max_depth=room)]
        drafted = set(paths(drafter.propose(one, DraftLimits(16))))
        accepted = 0
        while tuple(truth[known : known + accepted + 1]) in drafted:
            accepted += 1
        picks = truth[known : known + accepted + 1]
        tokens = truth[known - 1 : known + accepted]
        drafter.observe([Committed(seq_id, known - 1, tokens, None, picks, len(drafted))])
        lengths.append(len(picks))
        known += len(picks)
    return lengths


@given(few_tokens)
def test_index_finds_the_longest_earlier_match(tokens: list[int]) -> None:
    index = SuffixIndex()
    index.extend(tokens)
    for match_len, position in index.matches():
        assert tokens[position - match_len : position] == tokens[len(tokens) - match_len :]
        assert position < len(tokens)
    longest = max(
        (
            size
            for size in range(1, len(tokens))
            for at in range(size, len(tokens))
            if tokens[at - size : at] == tokens[-size:]
        ),
        default=0,
    )
    found = max((match_len for match_len, _ in index.matches()), default=0)
    if longest in (0, *ORDERS):  # the indexed lengths are found with certainty
        assert found == longest
    assert (found > 0) == (longest > 0)
    assert found <= min(longest, MAX_MATCH_LEN)


@given(few_tokens, few_tokens, st.data())
def test_truncated_index_equals_a_new_one(
    first: list[int], then: list[int], data: st.DataObject
) -> None:
    length = data.draw(st.integers(0, len(first)))
    index, fresh = SuffixIndex(), SuffixIndex()
    index.extend(first)
    index.truncate(length)
    index.extend(then)
    fresh.extend(first[:length] + then)
    assert len(index) == len(fresh)
    assert sorted(index.matches()) == sorted(fresh.matches())


@given(few_tokens.filter(len), st.integers(1, 24), st.sampled_from([None, 1, 2]))
def test_proposal_is_a_prefix_closed_tree_in_decreasing_probability(
    tokens: list[int], max_nodes: int, max_width: int | None
) -> None:
    scored = propose(LookupDrafter(horizon=6), tokens, max_nodes, max_width)
    count = int(scored.counts[0])
    assert count <= max_nodes
    assert (scored.parents[0, :count] < np.arange(count)).all()
    assert (np.diff(scored.log_probs[0, :count]) <= 0).all()
    assert (scored.log_probs[0, :count] < 0).all()
    found = paths(scored)
    assert len(set(found)) == count
    assert [len(path) for path in found] == scored.depths[0, :count].tolist()
    assert max(map(len, found), default=0) <= 6
    for parent in {path[:-1] for path in found}:
        children = [path for path in found if path[:-1] == parent]
        assert len(children) <= (max_width or 6)
        probs = np.exp([scored.log_probs[0, found.index(path)] for path in children])
        above = math.exp(scored.log_probs[0, found.index(parent)]) if parent else 1.0
        assert probs.sum() < above


def test_several_continuations_become_one_tree() -> None:
    scored = propose(LookupDrafter(), [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3], 48)
    found = set(paths(scored))
    assert {(4,), (5,), (4, 9, 1), (5, 9, 1)} <= found


def test_longer_match_comes_before_a_more_frequent_shorter_one() -> None:
    tokens = [7, 8, 1, 2, 50, 3, 2, 60, 4, 2, 60, 5, 2, 60, 7, 8, 1, 2]
    assert paths(propose(LookupDrafter(), tokens))[0] == (50,)


def test_single_best_chain() -> None:
    tokens = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3]
    found = paths(propose(LookupDrafter(), tokens, max_width=1))
    assert all(path[:-1] == before for before, path in itertools.pairwise(found))
    assert found[-1][0] == 5  # the more recent of two equal matches


def test_a_loop_is_continued_past_the_end_of_the_text() -> None:
    found = paths(propose(LookupDrafter(horizon=10), [9, 1, 2, 3, 1, 2, 3], max_width=1))
    assert found[-1] == (1, 2, 3, 1, 2, 3, 1, 2, 3, 1)


def test_respects_depth_and_node_limits() -> None:
    drafter, tokens = LookupDrafter(horizon=10), [1, 2, 3] * 5
    shallow = drafter.propose([context(tokens, max_depth=2)], DraftLimits(16))
    assert shallow.depths.max() == 2
    assert drafter.propose([context(tokens, max_depth=0)], DraftLimits(16)).counts[0] == 0
    assert propose(drafter, tokens, max_nodes=3).counts[0] == 3
    assert propose(LookupDrafter(), [5]).counts[0] == 0
    with pytest.raises(ValueError, match="horizon"):
        LookupDrafter(horizon=0)


def test_probabilities_follow_what_the_target_does() -> None:
    """Texts that repeat are trusted more, texts that never do less, each for itself."""
    drafter = LookupDrafter()
    pattern = [1, 2, 3, 4, 5, 6, 7]
    tail = [*pattern, 9, *pattern[:3]]

    def best(seq_id: int) -> float:
        drafter.truncate(seq_id, 0)
        scored = drafter.propose([context(tail, seq_id=seq_id)], DraftLimits(1))
        return math.exp(scored.log_probs[0, 0])

    before = best(0)
    assert max(decode(drafter, pattern * 12, 14, seq_id=1)) > 10
    assert best(1) > before
    chaos = np.random.default_rng(0).integers(0, 50, 400).tolist()
    decode(drafter, chaos, 14, seq_id=2)
    assert best(2) < min(before, best(1))


def test_phi_is_calibrated_on_a_noisy_repeating_source() -> None:
    rng = np.random.default_rng(1)
    expected = accepted = 0.0
    drafter = LookupDrafter()
    for seq_id in range(6):
        text = rng.integers(0, 50, 12).tolist()
        truth: list[int] = []
        while len(truth) < 400:  # a copied text with one token in eight replaced
            truth += [t if rng.random() > 0.125 else int(rng.integers(0, 50)) for t in text]
        known = 12
        drafter.observe([Committed(seq_id, 0, truth[: known - 1], None, [], 0)])
        while known < 380:
            one = [context(truth[:known], seq_id=seq_id)]
            scored = drafter.propose(one, DraftLimits(12))
            found = set(paths(scored))
            depth = 0
            while tuple(truth[known : known + depth + 1]) in found:
                depth += 1
            picks = truth[known : known + depth + 1]
            record = Committed(seq_id, known - 1, truth[known - 1 : known + depth], None, picks, 12)
            drafter.observe([record])
            known += depth + 1
            if seq_id > 0:
                expected += float(scored.phi()[0, -1])
                accepted += depth
        drafter.release(seq_id)
    assert expected == pytest.approx(accepted, rel=0.2)


def test_released_sequence_leaves_nothing_to_the_next_one() -> None:
    drafter = LookupDrafter()
    propose(drafter, [1, 2, 3, 4, 1, 2])
    drafter.release(0)
    drafter.release(77)
    assert propose(drafter, [8, 9, 1, 2]).counts[0] == 0


def test_sequences_do_not_mix() -> None:
    drafter = LookupDrafter()
    one, two = context([1, 2, 3, 1, 2], seq_id=1), context([2, 7, 7, 1, 2], seq_id=2)
    both = drafter.propose([one, two], DraftLimits(8))
    alone = [LookupDrafter().propose([c], DraftLimits(8)) for c in (one, two)]
    assert [paths(both, 0), paths(both, 1)] == [paths(alone[0]), paths(alone[1])]


def test_truncate_forgets_edited_tokens() -> None:
    drafter = LookupDrafter()
    propose(drafter, [1, 2, 3, 4, 5])
    drafter.truncate(0, 2)
    assert paths(propose(drafter, [1, 2, 9, 8, 1, 2]), 0)[0] == (9,)
