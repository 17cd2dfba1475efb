"""Scored prefixes and the draft trees cut from them, as flat arrays.

One record holds every sequence of a batch. A *prefix* is a node of the tree that could be
drafted: the token sequence from the anchor's first successor down to that node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

NO_PARENT = -1


@dataclass(frozen=True)
class ScoredPrefixes:
    """The most probable prefixes of each sequence, best first.

    Row ``s`` holds ``counts[s]`` valid entries in non-increasing probability; a parent always
    comes before its children, so the first n entries are a prefix-closed tree for every n.
    Entries past ``counts[s]`` are padding (``log_probs`` −inf).

    Attributes:
        token_ids: [S, n] last token of each prefix.
        parents: [S, n] index of the parent in the same row, or −1 for a child of the anchor.
        depths: [S, n] prefix length, from 1.
        log_probs: [S, n] natural log of the prefix probability π(u) = Π_i q_i(u_i).
        counts: [S] number of valid entries.
    """

    token_ids: IntArray
    parents: IntArray
    depths: IntArray
    log_probs: FloatArray
    counts: IntArray

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def max_nodes(self) -> int:
        """Number of columns n."""
        return int(self.token_ids.shape[1])

    def phi(self) -> FloatArray:
        """Φ(n), the expected number of accepted nodes, for n = 0..max_nodes.

        Returns:
            [S, max_nodes + 1]; constant after ``counts[s]``. DDTree (2604.12989), eq. for E[α_T].
        """
        phi = np.zeros((len(self), self.max_nodes + 1))
        np.cumsum(np.exp(self.log_probs), axis=1, out=phi[:, 1:])
        return phi

    def row(self, index: int) -> ScoredPrefixes:
        """The record of one sequence alone."""
        part = slice(index, index + 1)
        return ScoredPrefixes(
            self.token_ids[part],
            self.parents[part],
            self.depths[part],
            self.log_probs[part],
            self.counts[part],
        )

    @staticmethod
    def empty(num_seqs: int) -> ScoredPrefixes:
        """No prefixes at all for ``num_seqs`` sequences."""
        ints = np.zeros((num_seqs, 0), dtype=np.int64)
        counts = np.zeros(num_seqs, dtype=np.int64)
        return ScoredPrefixes(ints, ints, ints, np.zeros((num_seqs, 0)), counts)

    @staticmethod
    def stack(rows: Sequence[ScoredPrefixes]) -> ScoredPrefixes:
        """Put records below each other, padded to the widest."""
        width = max((row.max_nodes for row in rows), default=0)

        def padded(name: str, fill: float, dtype: type) -> NDArray:
            out: NDArray = np.full((sum(map(len, rows)), width), fill, dtype=dtype)
            start = 0
            for row in rows:
                out[start : start + len(row), : row.max_nodes] = getattr(row, name)
                start += len(row)
            return out

        return ScoredPrefixes(
            padded("token_ids", 0, np.int64),
            padded("parents", NO_PARENT, np.int64),
            padded("depths", 0, np.int64),
            padded("log_probs", -np.inf, np.float64),
            np.concatenate([row.counts for row in rows]) if rows else np.zeros(0, np.int64),
        )


@dataclass(frozen=True)
class DraftTree:
    """The nodes of all sequences of a batch, packed; the input of one target forward.

    The nodes of one sequence are contiguous and ordered parents first. Its node 0 (at
    ``starts[s]``) is the anchor, or the first token of a prefill chunk.

    Attributes:
        token_ids: [N] token of each node.
        parents: [N] packed index of the parent, −1 for the first node of a sequence.
        depths: [N] distance from the sequence's first node (position = cache length + depth).
        seq: [N] which sequence of the batch a node belongs to.
        starts: [S + 1] packed offset where each sequence begins; ``starts[S] == N``.
    """

    token_ids: IntArray
    parents: IntArray
    depths: IntArray
    seq: IntArray
    starts: IntArray

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        return len(self.starts) - 1

    def span(self, index: int) -> tuple[int, int]:
        """Packed range [start, end) of sequence ``index``."""
        return int(self.starts[index]), int(self.starts[index + 1])

    def is_chain(self, index: int) -> bool:
        """Whether sequence ``index`` is a single path in order (causal mask, contiguous commit)."""
        start, end = self.span(index)
        return bool(np.array_equal(self.depths[start:end], np.arange(end - start)))

    def ancestor_mask(self, index: int) -> BoolArray:
        """[n, n] for sequence ``index``: True where column j is row i itself or its ancestor."""
        start, end = self.span(index)
        size = end - start
        mask = np.zeros((size, size), dtype=np.bool_)
        for row, parent in enumerate(self.parents[start:end]):
            if parent >= 0:
                mask[row] = mask[parent - start]
            mask[row, row] = True
        return mask

    def edges(self) -> dict[tuple[int, int], int]:
        """(packed parent, token id) → packed child, of all drafted nodes."""
        return {
            (parent, token_id): node
            for node, (parent, token_id) in enumerate(
                zip(self.parents.tolist(), self.token_ids.tolist(), strict=True)
            )
            if parent != NO_PARENT
        }

    def only(self, indices: Sequence[int]) -> DraftTree:
        """The trees of some sequences, in this order."""
        if list(indices) == list(range(self.num_seqs)):
            return self
        parts = []
        for start, end in map(self.span, indices):
            above = self.parents[start:end]
            local = np.where(above < 0, NO_PARENT, above - start)
            parts.append(_single(self.token_ids[start:end], local, self.depths[start:end]))
        return DraftTree.pack(parts)

    @staticmethod
    def grow(
        anchors: Sequence[int], scored: ScoredPrefixes, counts: Sequence[int] | IntArray
    ) -> DraftTree:
        """Cut the ``counts[s]`` best prefixes of each sequence and hang them under its anchor.

        Args:
            anchors: [S] last committed token of each sequence.
            scored: prefixes of the same S sequences.
            counts: [S] drafted nodes per sequence (the chosen budgets).
        """
        return DraftTree.pack(
            [
                _single(
                    np.concatenate([[anchor], scored.token_ids[s, :n]]),
                    np.concatenate([[NO_PARENT], scored.parents[s, :n] + 1]),
                    np.concatenate([[0], scored.depths[s, :n]]),
                )
                for s, (anchor, n) in enumerate(zip(anchors, counts, strict=True))
            ]
        )

    @staticmethod
    def chain(token_ids: Sequence[int]) -> DraftTree:
        """One sequence whose nodes follow each other: a prefill chunk, or a plain token."""
        size = len(token_ids)
        return _single(np.asarray(token_ids), np.arange(size) - 1, np.arange(size))

    @staticmethod
    def pack(trees: Sequence[DraftTree]) -> DraftTree:
        """Concatenate trees of one or more sequences each into one packed tree."""
        if len(trees) == 1:
            return trees[0]
        sizes = np.array([len(tree) for tree in trees], dtype=np.int64)
        nums = np.array([tree.num_seqs for tree in trees], dtype=np.int64)
        node_offset = np.concatenate([[0], np.cumsum(sizes)])
        seq_offset = np.concatenate([[0], np.cumsum(nums)])

        def shifted(tree: DraftTree, offset: int) -> IntArray:
            return np.where(tree.parents < 0, NO_PARENT, tree.parents + offset)

        def joined(parts: list[IntArray]) -> IntArray:
            return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

        return DraftTree(
            joined([tree.token_ids for tree in trees]),
            joined([shifted(tree, int(o)) for tree, o in zip(trees, node_offset, strict=False)]),
            joined([tree.depths for tree in trees]),
            joined([tree.seq + int(o) for tree, o in zip(trees, seq_offset, strict=False)]),
            joined(
                [tree.starts[:-1] + int(o) for tree, o in zip(trees, node_offset, strict=False)]
                + [node_offset[-1:]]
            ),
        )


def _single(token_ids: NDArray, parents: NDArray, depths: NDArray) -> DraftTree:
    size = len(token_ids)
    return DraftTree(
        token_ids.astype(np.int64),
        parents.astype(np.int64),
        depths.astype(np.int64),
        np.zeros(size, dtype=np.int64),
        np.array([0, size], dtype=np.int64),
    )
