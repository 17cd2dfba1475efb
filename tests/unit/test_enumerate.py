"""Top-n prefixes against brute force, both implementations, and the top-K selection under them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.tree.best_first import best_first
from draftwood.tree.enumerate import top_prefixes, top_prefixes_from_candidates
from draftwood.tree.level_beam import level_beam
from draftwood.tree.topk import top_k
from draftwood.tree.tree import ScoredPrefixes


def brute_force(log_probs: np.ndarray, max_nodes: int) -> list[tuple[float, tuple[int, ...]]]:
    """The max_nodes best (log-prob, tokens) of all prefixes of one sequence [L, V]."""
    horizon, vocab_size = log_probs.shape
    found = []
    for depth in range(1, horizon + 1):
        for tokens in itertools.product(range(vocab_size), repeat=depth):
            total = 0.0
            for d, token in enumerate(tokens):
                total += float(log_probs[d, token])
            if total > -np.inf:
                found.append((total, tokens))
    return sorted(found, key=lambda item: -item[0])[:max_nodes]


def paths(scored: ScoredPrefixes, row: int) -> list[tuple[int, ...]]:
    """Tokens from the anchor to each node, checking parents, depths and order on the way."""
    out: list[tuple[int, ...]] = []
    for node in range(scored.counts[row]):
        parent = scored.parents[row, node]
        assert -1 <= parent < node
        above = out[parent] if parent >= 0 else ()
        out.append((*above, int(scored.token_ids[row, node])))
        assert len(out[-1]) == scored.depths[row, node]
        if node:
            assert scored.log_probs[row, node] <= scored.log_probs[row, node - 1]
    assert len(set(out)) == len(out)
    assert np.isneginf(scored.log_probs[row, scored.counts[row] :]).all()
    return out


def check(scored: ScoredPrefixes, log_probs: np.ndarray, max_nodes: int) -> None:
    """``scored`` [S] is the brute-force answer: node for node where scores differ."""
    for row, rows in enumerate(log_probs):
        want = brute_force(rows, max_nodes)
        got = paths(scored, row)
        assert len(got) == len(want)
        scores = [score for score, _ in want]
        assert scored.log_probs[row, : len(want)].tolist() == scores
        # Under ties any order will do, and at the last score any choice among the equal.
        for score in set(scores) - set(scores[-1:]):
            equal = {tokens for other, tokens in want if other == score}
            assert equal == {got[i] for i, other in enumerate(scores) if other == score}


def from_weights(weights: np.ndarray) -> np.ndarray:
    """Log-probabilities proportional to integer weights; 0 becomes −inf, rows of 0 all −inf."""
    total = np.maximum(weights.sum(axis=-1, keepdims=True), 1)
    with np.errstate(divide="ignore"):
        return np.log(weights / total)


def both(log_probs: np.ndarray, max_nodes: int) -> list[ScoredPrefixes]:
    order = np.argsort(-log_probs, axis=-1, kind="stable")
    costs = -np.take_along_axis(log_probs, order, axis=-1)
    return [
        best_first(costs, order, max_nodes),
        level_beam(torch.from_numpy(costs), torch.from_numpy(order), max_nodes),
    ]


@st.composite
def blocks(draw: st.DrawFn) -> np.ndarray:
    """[S, L, V] log-probabilities: many ties (small weights), zeros, sharp and flat rows."""
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    most = draw(st.sampled_from([1, 2, 3, 1000]))
    flat = draw(
        st.lists(st.integers(0, most), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))
    )
    return from_weights(np.array(flat, dtype=np.float64).reshape(shape))


@settings(max_examples=1000, deadline=None)
@given(blocks(), st.integers(1, 60))
def test_both_implementations_equal_brute_force(log_probs: np.ndarray, max_nodes: int) -> None:
    for scored in both(log_probs, max_nodes):
        check(scored, log_probs, max_nodes)


@settings(max_examples=200, deadline=None)
@given(blocks(), st.integers(1, 60))
def test_public_function_equals_brute_force(log_probs: np.ndarray, max_nodes: int) -> None:
    check(top_prefixes(log_probs, max_nodes), log_probs, max_nodes)


@settings(max_examples=100, deadline=None)
@given(blocks(), st.integers(1, 40), st.integers(1, 5), st.data())
def test_width_and_depth_limits(
    log_probs: np.ndarray, max_nodes: int, max_width: int, data: st.DataObject
) -> None:
    num_seqs, horizon, _ = log_probs.shape
    limits = data.draw(st.lists(st.integers(0, horizon), min_size=num_seqs, max_size=num_seqs))
    scored = top_prefixes(log_probs, max_nodes, max_width=max_width, max_depths=limits)
    for row, limit in enumerate(limits):
        kept = np.sort(log_probs[row, :limit], axis=-1)[:, ::-1][:, :max_width]
        want = brute_force(kept, max_nodes)
        assert len(paths(scored, row)) == len(want)
        assert scored.log_probs[row, : len(want)].tolist() == [score for score, _ in want]


def soft(shape: tuple[int, ...], scale: float, seed: int) -> torch.Tensor:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.log_softmax(logits * scale, dim=-1)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.05, 1.0, 3.0, 8.0]), min_size=4, max_size=4),
    st.sampled_from([1, 7, 64, 150, 512]),
    st.integers(0, 2**31),
)
def test_few_candidates_at_first_give_the_same_as_all(
    scales: list[float], max_nodes: int, seed: int
) -> None:
    # Flat depths need far more candidates than are looked at first, sharp ones do not.
    log_probs = torch.stack(
        [
            torch.cat([soft((1, 400), scale, seed + 7 * d + i) for d, scale in enumerate(order)])
            for i, order in enumerate((scales, scales[::-1]))
        ]
    )
    scored = top_prefixes(log_probs, max_nodes)
    for full in both(log_probs.numpy(), max_nodes):
        assert np.array_equal(scored.log_probs, full.log_probs)
        assert np.array_equal(scored.counts, full.counts)
        for row in range(2):
            assert len(paths(scored, row)) == full.counts[row]


def test_single_chain_follows_the_best_tokens() -> None:
    log_probs = soft((2, 5, 40), 2.0, seed=3)
    log_probs[1, 3] = -torch.inf  # nothing can follow depth 3
    scored = top_prefixes(log_probs, 4, max_width=1)
    assert scored.counts.tolist() == [4, 3]
    best = log_probs.argmax(-1)
    assert paths(scored, 0)[-1] == tuple(best[0, :4].tolist())
    assert paths(scored, 1)[-1] == tuple(best[1, :3].tolist())


def test_token_map_renames_tokens() -> None:
    log_probs = soft((2, 3, 10), 2.0, seed=4)
    token_map = torch.arange(10) * 7 + 1
    plain, mapped = top_prefixes(log_probs, 20), top_prefixes(log_probs, 20, token_map=token_map)
    assert np.array_equal(plain.token_ids * 7 + 1, mapped.token_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_summed_in_double(dtype: torch.dtype) -> None:
    log_probs = soft((1, 5, 3000), 3.0, seed=5).to(dtype)
    scored = top_prefixes(log_probs, 30)
    exact = top_prefixes(log_probs.double(), 30)
    assert np.array_equal(scored.log_probs, exact.log_probs)


def test_nan_is_never_proposed() -> None:
    log_probs = soft((1, 3, 2000), 3.0, seed=6)
    best = int(log_probs[0, 0].argmax())
    log_probs[0, 0, best] = torch.nan
    log_probs[0, 2] = torch.nan
    scored = top_prefixes(log_probs, 50)
    assert scored.counts[0] == 50
    assert scored.depths.max() == 2
    assert best not in scored.token_ids[0, scored.depths[0] == 1]


def test_nothing_to_propose() -> None:
    log_probs = soft((2, 3, 10), 1.0, seed=7)
    for scored in (
        top_prefixes(log_probs, 0),
        top_prefixes(log_probs, 5, max_depths=[0, 0]),
        top_prefixes(torch.full((2, 3, 10), -torch.inf), 5),
        top_prefixes(torch.full((2, 3, 10), -torch.inf), 5, max_width=1),
        top_prefixes(log_probs[:, :0], 5),
    ):
        assert scored.counts.tolist() == [0, 0]
        assert scored.phi().tolist() == [[0.0], [0.0]]


def test_bad_input_is_refused() -> None:
    log_probs = soft((1, 2, 10), 1.0, seed=8)
    with pytest.raises(ValueError, match=r"\[S, L, V\]"):
        top_prefixes(log_probs[0], 4)
    with pytest.raises(ValueError, match="log_softmax"):
        top_prefixes(log_probs + 5, 4)
    with pytest.raises(ValueError, match="max_width"):
        top_prefixes(log_probs, 4, max_width=0)
    ids = torch.arange(10).expand(1, 2, 10)
    with pytest.raises(ValueError, match="sorted"):
        top_prefixes_from_candidates(log_probs, ids, 4)
    with pytest.raises(ValueError, match="shapes"):
        top_prefixes_from_candidates(log_probs, ids[:, :1], 4)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 5),
    st.sampled_from([1, 7, 300, 3000, 40_001]),
    st.sampled_from([1, 2, 16, 64, 200]),
    st.sampled_from([2, 50, 10**6]),
    st.floats(0, 1),
    st.integers(0, 2**31),
)
def test_top_k_equals_a_full_sort(
    rows: int, width: int, k: int, levels: int, holes: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, levels, (rows, width)).astype(np.float32)  # few levels: many ties
    scores[rng.random((rows, width)) < holes * rng.integers(0, 2)] = -np.inf
    k = min(k, width)
    values, ids = top_k(torch.from_numpy(scores), k)
    assert np.array_equal(values.numpy(), -np.sort(-scores, axis=1)[:, :k])
    assert np.array_equal(np.take_along_axis(scores, ids.numpy(), axis=1), values.numpy())
    assert all(len(set(row)) == k for row in ids.tolist())
