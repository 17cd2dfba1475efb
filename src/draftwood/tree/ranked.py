"""The nodes of all sequences of a batch, competing for one budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draftwood.tree.tree import FloatArray, IntArray, ScoredPrefixes


@dataclass(frozen=True)
class RankedNodes:
    """Nodes of all sequences, most probable first.

    Attributes:
        seq: [N] sequence of each node.
        phi: [N + 1] expected accepted nodes of the 0, 1, … best.
        num_seqs: number of sequences.
    """

    seq: IntArray
    phi: FloatArray
    num_seqs: int

    def budgets(self, total: int) -> IntArray:
        """[S] nodes per sequence among the ``total`` best."""
        return np.bincount(self.seq[:total], minlength=self.num_seqs).astype(np.int64)


def rank_nodes(scored: ScoredPrefixes) -> RankedNodes:
    """Merge the sequences' nodes; those of one sequence stay in order, so parents stay first."""
    valid = np.arange(scored.max_nodes) < scored.counts[:, None]
    seq = np.nonzero(valid)[0]
    log_probs = scored.log_probs[valid]
    if len(scored) > 1:
        order = np.argsort(-log_probs, kind="stable")
        seq, log_probs = seq[order], log_probs[order]
    phi = np.concatenate([[0.0], np.cumsum(np.exp(log_probs))])
    return RankedNodes(seq, phi, len(scored))
