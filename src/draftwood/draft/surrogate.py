"""From what a drafter says to how often the target agrees: the probabilities behind Φ.

A drafter's probabilities are not acceptance rates. They come from a product of marginals, from a
model that is over- or underconfident, or from hit rates; given that a node was accepted, its first
choice and its other choices come true more or less often than stated. With q the stated
probability of a node given its parent and d its depth,

    logit P(target takes it | it took the parent) = a_d · logit q + b_d,

(a_d, b_d) linear in log₂ d (Platt 1999), one pair for the *spine* (the drafter's first choice at
that parent) and one for its *siblings*, per temperature regime (0, above 0). Eight numbers a
regime, pulled to the identity, fitted by the target's picks at every node it visited.

The drafter decides which tokens to propose and learns that itself (``ranking``, ``hit_rates``);
this says what its proposals are worth, for any drafter, and nothing else. It is a property of
drafter and target, slow and kept on disk; how the present text departs from it is what
``tree.trust`` follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from draftwood.draft.online_fit import OnlineFit
from draftwood.tree.tree import BoolArray, FloatArray, ScoredPrefixes

KINDS = ("spine", "sibling")
REGIMES = ("greedy", "sampled")
# a at depth 1, a per doubling of the depth, the same for b.
_IDENTITY = np.array([1.0, 0.0, 0.0, 0.0])
_PRECISION = np.array([40.0, 80.0, 20.0, 40.0])
_MIN_SLOPE = 0.1  # a higher probability never means less
_LOGIT_LIMIT = 12.0
_KEEP_EVERY = 64  # cycles


class _Asked(NamedTuple):
    """What one sequence's nodes stated, in the order handed out."""

    scored: ScoredPrefixes
    regime: int
    features: FloatArray  # [n, 4]
    is_spine: BoolArray  # [n]


class Surrogate:
    """Calibrated scores of a drafter's prefixes, learned while decoding.

    Per cycle: ``calibrated``, then ``learn`` once the target's picks are known.

    Args:
        keep: called with ``state()`` every now and then, to store it.
    """

    def __init__(self, keep: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._fits = [[OnlineFit(_IDENTITY, _PRECISION) for _ in KINDS] for _ in REGIMES]
        self._keep = keep
        self._asked: list[_Asked] = []
        self._num_cycles = 0

    def calibrated(self, scored: ScoredPrefixes, sampled: Sequence[bool]) -> ScoredPrefixes:
        """The same prefixes with calibrated scores, best first again.

        A child's score is its parent's times a probability, so that sorting keeps parents first
        and every n best nodes a tree.

        Args:
            scored: what a drafter proposed for S sequences.
            sampled: [S] whether the sequence decodes at a temperature above 0.
        """
        self._asked = []
        rows = [self._row(scored.row(s), int(flag)) for s, flag in enumerate(sampled)]
        return rows[0] if len(rows) == 1 else ScoredPrefixes.stack(rows)

    def learn(self, picks: Sequence[Sequence[int]]) -> None:
        """Take in the target's own tokens after each anchor, as far as it went.

        Args:
            picks: [S] tokens at depth 1, 2, …: accepted nodes, then the bonus token.
        """
        for asked, tokens in zip(self._asked, picks, strict=True):
            columns, hits = visited_children(asked.scored, tokens)
            for kind, fit in enumerate(self._fits[asked.regime]):
                wanted = asked.is_spine[columns] == (kind == 0)
                _update(fit, asked.features[columns[wanted]], hits[wanted])
        self._asked = []
        self._num_cycles += 1
        if self._num_cycles % _KEEP_EVERY == 0:
            self.store()

    def store(self) -> None:
        """Give ``keep`` the state, if anything was learned since it was made."""
        if self._keep is not None and self._num_cycles > 0:
            self._keep(self.state())

    def weights(self, regime: int, kind: int, depth: int) -> tuple[float, float]:
        """(a, b) at a depth; indices into ``REGIMES`` and ``KINDS``."""
        a, a_trend, b, b_trend = self._fits[regime][kind].mean.tolist()
        octave = float(np.log2(depth))
        return max(a + a_trend * octave, _MIN_SLOPE), b + b_trend * octave

    def state(self) -> dict[str, Any]:
        """What ``restore`` takes: plain numbers."""
        return {
            regime: {
                kind: {"mean": fit.mean.tolist(), "precision": fit.precision.tolist()}
                for kind, fit in zip(KINDS, fits, strict=True)
            }
            for regime, fits in zip(REGIMES, self._fits, strict=True)
        }

    def restore(self, state: Any) -> None:
        """Continue from a ``state``.

        Raises:
            ValueError: it is none, in any way; nothing is changed then.
        """
        try:
            found = [
                [_restored(state[regime][kind]) for kind in KINDS] for regime in REGIMES
            ]  # fmt: skip
        except (KeyError, TypeError, IndexError, np.linalg.LinAlgError) as error:
            raise ValueError(f"no state of a surrogate: {error!r}") from error
        self._fits = found

    def _row(self, scored: ScoredPrefixes, regime: int) -> ScoredPrefixes:
        count = int(scored.counts[0])
        if count == 0:
            self._asked.append(_Asked(scored, regime, np.zeros((0, 4)), np.zeros(0, np.bool_)))
            return scored
        features, is_spine = stated(scored)
        log_probs = self._log_probs(features, is_spine, regime)
        parents = scored.parents[0, :count]
        totals = np.zeros(count + 1)  # the last one stands for the anchor
        for node, (parent, value) in enumerate(
            zip(parents.tolist(), log_probs.tolist(), strict=True)
        ):
            totals[node] = totals[parent] + value
        order = np.argsort(-totals[:count], kind="stable")
        result = _reordered(scored, totals, order)
        self._asked.append(_Asked(result, regime, features[order], is_spine[order]))
        return result

    def _log_probs(self, features: FloatArray, is_spine: BoolArray, regime: int) -> FloatArray:
        """[n] log P(node | parent), calibrated."""
        spine, sibling = (fit.mean for fit in self._fits[regime])
        logits = np.where(is_spine, _score(features, spine), _score(features, sibling))
        return -np.logaddexp(0.0, -logits)


def stated(scored: ScoredPrefixes) -> tuple[FloatArray, BoolArray]:
    """What the nodes of one sequence say, in their order.

    Returns:
        features: [n, 4] logit q, logit q · log₂ d, 1, log₂ d.
        is_spine: [n] whether the node is the first choice at its parent.
    """
    count = int(scored.counts[0])
    parents, own = scored.parents[0, :count], scored.log_probs[0, :count]
    above = np.where(parents < 0, 0.0, own[parents])
    log_q = np.minimum(own - above, -1e-9)
    logit = np.clip(log_q - np.log(-np.expm1(log_q)), -_LOGIT_LIMIT, _LOGIT_LIMIT)
    octave = np.log2(scored.depths[0, :count])
    features = np.stack([logit, logit * octave, np.ones(count), octave], axis=1)
    _, firsts = np.unique(parents, return_index=True)
    is_spine = np.zeros(count, dtype=np.bool_)
    is_spine[firsts] = True
    return features, is_spine


def visited_children(scored: ScoredPrefixes, picks: Sequence[int]) -> tuple[np.ndarray, BoolArray]:
    """(columns of all proposed children of nodes the target visited, which of them it took)."""
    count = int(scored.counts[0])
    parents, tokens = scored.parents[0, :count], scored.token_ids[0, :count]
    node, columns, hits = -1, [], []
    for pick in picks:
        children = np.flatnonzero(parents == node)
        taken = tokens[children] == pick
        columns.append(children)
        hits.append(taken)
        if not taken.any():
            break
        node = int(children[taken][0])
    none = np.zeros(0, dtype=np.int64)
    return np.concatenate([none, *columns]), np.concatenate([none.astype(np.bool_), *hits])


def _score(features: FloatArray, weights: FloatArray) -> FloatArray:
    """[n] a_d · logit q + b_d, with a_d kept positive."""
    slope = np.maximum(weights[0] + weights[1] * features[:, 3], _MIN_SLOPE)
    return slope * features[:, 0] + weights[2] + weights[3] * features[:, 3]


def _update(fit: OnlineFit, features: FloatArray, hits: BoolArray) -> None:
    if len(features) == 0:
        return
    probs = 1.0 / (1.0 + np.exp(-_score(features, fit.mean)))
    spread = probs * (1.0 - probs)
    fit.update(features.T @ (hits - probs), (features.T * spread) @ features)


def _reordered(scored: ScoredPrefixes, totals: FloatArray, order: np.ndarray) -> ScoredPrefixes:
    place = np.empty(len(order) + 1, dtype=np.int64)
    place[order], place[-1] = np.arange(len(order)), -1
    parents = place[scored.parents[0, order]]
    return ScoredPrefixes(
        scored.token_ids[:, order], parents[None], scored.depths[:, order],
        totals[order][None], scored.counts,
    )  # fmt: skip


def _restored(state: Any) -> OnlineFit:
    fit = OnlineFit(_IDENTITY, _PRECISION)
    mean, precision = np.array(state["mean"], float), np.array(state["precision"], float)
    if mean.shape != fit.mean.shape or precision.shape != fit.precision.shape:
        raise ValueError(f"shapes {mean.shape} and {precision.shape} of a surrogate's state")
    if not (np.isfinite(mean).all() and np.isfinite(precision).all()):
        raise ValueError("a surrogate's state with values that are not finite")
    np.linalg.cholesky(precision)
    fit.mean, fit.precision = mean, precision
    return fit
