"""Two drafters merged into one: closed, ordered, and trusting whoever is right."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.draft.base import Committed, DraftContext, DraftLimits, NullDrafter
from draftwood.draft.blend import BlendDrafter
from draftwood.sampling import Sampler, SamplingParams
from draftwood.tree.enumerate import top_prefixes
from draftwood.tree.tree import NO_PARENT, ScoredPrefixes

VOCAB, DEPTH = 6, 3


class Fixed(NullDrafter):
    """Always proposes the best prefixes of the same marginals [DEPTH, VOCAB]."""

    horizon = DEPTH

    def __init__(self, log_probs: np.ndarray) -> None:
        self.log_probs = log_probs

    def propose(self, contexts: Sequence[DraftContext], limits: DraftLimits) -> ScoredPrefixes:
        one = top_prefixes(self.log_probs[None], limits.max_nodes, max_width=limits.max_width)
        return ScoredPrefixes.stack([one] * len(contexts))


def sure_of(token_id: int, prob: float = 0.9) -> Fixed:
    probs = np.full((DEPTH, VOCAB), (1 - prob) / (VOCAB - 1))
    probs[:, token_id] = prob
    return Fixed(np.log(probs))


def context(seq_id: int = 0, length: int = 4) -> DraftContext:
    tokens = [1] * length
    return DraftContext(
        seq_id, tokens, length, 100, Sampler(SamplingParams(), tokens, vocab_size=9)
    )


def paths(scored: ScoredPrefixes, row: int = 0) -> dict[tuple[int, ...], float]:
    found: list[tuple[int, ...]] = []
    for i in range(int(scored.counts[row])):
        parent = int(scored.parents[row, i])
        assert parent < i
        above = found[parent] if parent != NO_PARENT else ()
        found.append((*above, int(scored.token_ids[row, i])))
        assert scored.depths[row, i] == len(found[-1])
    assert len(set(found)) == len(found)
    return dict(zip(found, scored.log_probs[row].tolist(), strict=False))


marginals = st.lists(
    st.lists(st.floats(-6, 6), min_size=VOCAB, max_size=VOCAB), min_size=DEPTH, max_size=DEPTH
).map(lambda rows: np.array(rows) - np.logaddexp.reduce(rows, axis=1, keepdims=True))


@given(marginals, marginals, st.integers(1, 40), st.sampled_from([None, 1, 2]))
def test_a_closed_tree_in_decreasing_probability(
    ours: np.ndarray, found: np.ndarray, max_nodes: int, max_width: int | None
) -> None:
    drafter = BlendDrafter(Fixed(ours), Fixed(found))
    scored = drafter.propose([context()], DraftLimits(max_nodes, max_width))
    merged = paths(scored)
    assert 1 <= len(merged) <= max_nodes
    scores = list(merged.values())
    assert scores == sorted(scores, reverse=True)
    for path, score in merged.items():
        assert score <= merged.get(path[:-1], 0.0) + 1e-12
    if max_width is not None:
        children: dict[tuple[int, ...], int] = {}
        for path in merged:
            children[path[:-1]] = children.get(path[:-1], 0) + 1
        assert max(children.values()) <= max_width


@given(marginals)
def test_agreeing_drafters_change_nothing(log_probs: np.ndarray) -> None:
    alone = Fixed(log_probs).propose([context()], DraftLimits(12))
    both = BlendDrafter(Fixed(log_probs), Fixed(log_probs)).propose([context()], DraftLimits(12))
    assert np.allclose(both.phi(), alone.phi())


def test_without_a_match_the_model_is_left_alone() -> None:
    model = sure_of(2)
    scored = BlendDrafter(model, NullDrafter()).propose([context()], DraftLimits(9))
    alone = model.propose([context()], DraftLimits(9))
    assert np.array_equal(scored.log_probs, alone.log_probs)
    assert np.array_equal(scored.token_ids, alone.token_ids)


@pytest.mark.parametrize("right", [2, 4])
def test_learns_whom_to_trust(right: int) -> None:
    drafter = BlendDrafter(sure_of(2), sure_of(4))
    for cycle in range(40):
        drafter.propose([context(length=4 + cycle)], DraftLimits(9))
        drafter.observe([Committed(0, 3 + cycle, [1], None, [right, right, right], 9)])
    merged = paths(drafter.propose([context(length=44)], DraftLimits(9)))
    assert next(iter(merged)) == (right,)
    assert math.exp(merged[(right,)]) > 0.6
    chain = drafter.propose([context(length=44)], DraftLimits(DEPTH, 1))
    assert list(paths(chain)) == [(right,) * n for n in range(1, DEPTH + 1)]


def test_only_the_proposal_at_the_committed_anchor_teaches() -> None:
    drafter = BlendDrafter(sure_of(2), sure_of(4))
    before = paths(drafter.propose([context()], DraftLimits(9)))
    drafter.observe([Committed(0, 0, [1, 1, 1, 1], None, [4, 4, 4], 9)])
    drafter.propose([context(1)], DraftLimits(9))
    drafter.truncate(1, 2)
    drafter.observe([Committed(1, 3, [1], None, [4, 4, 4], 9)])
    assert paths(drafter.propose([context()], DraftLimits(9))) == before
