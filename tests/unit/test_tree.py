"""Draft trees as flat arrays: masks, packing, positions, prefix closure."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.tree.enumerate import top_prefixes
from draftwood.tree.tree import NO_PARENT, DraftTree, ScoredPrefixes


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """One or more random sequences, each parents first."""
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 9))
        parents = [NO_PARENT] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
        depths = [0]
        for node in range(1, size):
            depths.append(depths[parents[node]] + 1)
        parts.append(
            DraftTree(
                np.array(draw(st.lists(st.integers(0, 99), min_size=size, max_size=size))),
                np.array(parents),
                np.array(depths),
                np.zeros(size, dtype=np.int64),
                np.array([0, size]),
            )
        )
    return DraftTree.pack(parts)


def ancestors(tree: DraftTree, node: int) -> set[int]:
    """Packed indices of ``node`` and everything above it."""
    found = {node}
    while tree.parents[node] != NO_PARENT:
        node = int(tree.parents[node])
        found.add(node)
    return found


@settings(max_examples=200, deadline=None)
@given(trees())
def test_mask_is_self_and_ancestors(tree: DraftTree) -> None:
    for index in range(tree.num_seqs):
        start, end = tree.span(index)
        mask = tree.ancestor_mask(index)
        for row in range(start, end):
            seen = {int(column) + start for column in np.flatnonzero(mask[row - start])}
            assert seen == ancestors(tree, row)


@settings(max_examples=200, deadline=None)
@given(trees(), trees())
def test_pack_keeps_every_sequence(left: DraftTree, right: DraftTree) -> None:
    packed = DraftTree.pack([left, right])
    assert len(packed) == len(left) + len(right)
    assert packed.num_seqs == left.num_seqs + right.num_seqs
    for index in range(packed.num_seqs):
        tree, old = (left, index) if index < left.num_seqs else (right, index - left.num_seqs)
        start, end = packed.span(index)
        old_start, old_end = tree.span(old)
        assert (packed.seq[start:end] == index).all()
        assert np.array_equal(packed.token_ids[start:end], tree.token_ids[old_start:old_end])
        assert np.array_equal(packed.depths[start:end], tree.depths[old_start:old_end])
        assert np.array_equal(packed.ancestor_mask(index), tree.ancestor_mask(old))
        assert packed.parents[start] == NO_PARENT


@settings(max_examples=100, deadline=None)
@given(trees())
def test_depth_counts_ancestors_and_edges_invert_parents(tree: DraftTree) -> None:
    for node in range(len(tree)):
        assert tree.depths[node] == len(ancestors(tree, node)) - 1
    edges = tree.edges()
    pairs = set(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True))
    assert set(edges) == {pair for pair in pairs if pair[0] != NO_PARENT}
    for (node, token), child in edges.items():
        assert tree.parents[child] == node
        assert tree.token_ids[child] == token
    for index in range(tree.num_seqs):
        start, end = tree.span(index)
        in_order = [NO_PARENT, *range(start, end - 1)]
        assert tree.is_chain(index) == (tree.parents[start:end].tolist() == in_order)


def test_chain_and_empty_pack() -> None:
    tree = DraftTree.chain([5, 6, 7])
    assert tree.is_chain(0)
    assert tree.parents.tolist() == [NO_PARENT, 0, 1]
    assert tree.depths.tolist() == [0, 1, 2]
    assert len(DraftTree.pack([])) == 0


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(2, 9), st.integers(1, 40), st.data())
def test_grow_is_prefix_closed_for_every_budget(
    num_seqs: int, horizon: int, vocab_size: int, max_nodes: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    probs = rng.dirichlet(np.ones(vocab_size), (num_seqs, horizon))
    with np.errstate(divide="ignore"):
        scored = top_prefixes(np.log(probs), max_nodes)
    counts = [data.draw(st.integers(0, int(count))) for count in scored.counts]
    anchors = list(range(100, 100 + num_seqs))
    tree = DraftTree.grow(anchors, scored, counts)
    for index, count in enumerate(counts):
        start, end = tree.span(index)
        assert end - start == count + 1
        assert tree.token_ids[start] == anchors[index]
        assert np.array_equal(tree.token_ids[start + 1 : end], scored.token_ids[index, :count])
        for node in range(start + 1, end):
            assert start <= tree.parents[node] < node
            assert tree.depths[node] == tree.depths[tree.parents[node]] + 1
            tokens = [int(tree.token_ids[up]) for up in sorted(ancestors(tree, node))[1:]]
            stated = scored.log_probs[index, node - start - 1]
            summed = sum(np.log(probs[index, d, token]) for d, token in enumerate(tokens))
            assert abs(summed - stated) < 1e-9


def test_phi_and_stack() -> None:
    probs = np.array([[[0.5, 0.3, 0.2]]])
    one = top_prefixes(np.log(probs), 3)
    two = top_prefixes(np.log(probs), 2)
    stacked = ScoredPrefixes.stack([one, two, ScoredPrefixes.empty(1)])
    assert stacked.counts.tolist() == [3, 2, 0]
    np.testing.assert_allclose(
        stacked.phi(), [[0, 0.5, 0.8, 1.0], [0, 0.5, 0.8, 0.8], [0, 0, 0, 0]], atol=1e-12
    )
    assert np.array_equal(stacked.row(1).token_ids[:, :2], two.token_ids)
