"""Rank draft tokens by how likely the target is to *draw* them, noise included.

At temperature 0 the target takes its argmax and the draft distribution ranks. At temperature
T > 0 its draw of output token t is argmax_v(z_v/T + g_t(v)) with noise that anyone can compute.
Knowing g, a drafter whose logits are the target's plus errors should rank by

    s_d(v) = a_d · z̃_d(v) + b_d · g_t(v) − c · [v is truncated],    r_d = softmax(s_d),

z̃ the draft logits over T. (a, b) = (1, 0) is the draft distribution itself, which is right only
on average over g. If the errors are Gumbel of scale σ, the law of the draw given z̃ and g is the
softmax with a = b = 1/σ exactly. Hence the prior (1, 1): errors of about one nat, the size seen
between a drafter and its target; evidence moves (a, b) either way, to (1, 0) if g does not help.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draftwood.draft.base import DraftContext
from draftwood.draft.markov import conditional
from draftwood.draft.noise_rows import NoiseRows
from draftwood.draft.online_fit import OnlineFit
from draftwood.draft.steering import Columns, steered, truncation_edge
from draftwood.tree.topk import top_k
from draftwood.tree.tree import FloatArray

# Prior of one feature: its weight at depth 1, and per doubling of the depth.
_SCORE_PRIOR, _NOISE_PRIOR, _FLOOR_PRIOR = (1.0, 0.0), (1.0, 0.0), (4.0, 0.0)
_PRECISION = (8.0, 16.0)
_MIN_WEIGHT = 0.05  # never turn a ranking round
_LOWEST = -60.0  # a feature so far below the best one has no probability left


@dataclass(frozen=True)
class Ranked:
    """The best candidates of R rows of draft logits.

    Attributes:
        log_probs: [R, K] log r of the candidates, in decreasing order; float64.
        columns, token_ids: [R, K] their columns of the logits and target token ids.
        features: what the score of each column is a weighted sum of, each [R, V].
        probs: [R, V] r, not yet divided by ``norm``.
        norm: [R, 1] their sums.
        depths: [R] depth of the predicted token, from 1.
        temperature: of the request.
    """

    log_probs: torch.Tensor
    columns: torch.Tensor
    token_ids: torch.Tensor
    features: tuple[torch.Tensor, ...]
    probs: torch.Tensor
    norm: torch.Tensor
    depths: Sequence[int]
    temperature: float


class Ranker:
    """Turns draft logits into ranked candidates; learns the weights from the target's picks.

    Weights depend on the depth (level + trend · log₂ depth) and are fitted per temperature by
    maximum likelihood of the target's picks. At temperature 0 there is no noise and ``a`` is an
    inverse temperature that calibrates Φ without changing the order within a depth.

    Args:
        columns: what the columns of the logits stand for.
        use_noise: False ranks by the draft distribution alone, b = 0 (for comparison).
    """

    def __init__(self, columns: Columns, *, use_noise: bool = True) -> None:
        self._columns = columns
        self._use_noise = use_noise
        self._noise_rows = NoiseRows(columns.token_ids)
        self._fits: dict[tuple[float, int], OnlineFit] = {}
        self._weights: dict[tuple[float, int, Sequence[int]], FloatArray] = {}

    def rank(
        self,
        logits: torch.Tensor,
        depths: Sequence[int],
        context: DraftContext,
        num_candidates: int,
    ) -> Ranked:
        """The ``num_candidates`` best tokens of each row.

        Args:
            logits: [R, V] draft logits of one sequence.
            depths: [R] depth of the token that each row predicts, from 1.
            context: the sequence.
        """
        params = context.sampler.params
        scores = steered(logits[:, : len(self._columns)].float(), context, self._columns)
        if params.temperature not in (0.0, 1.0):
            scores = scores / params.temperature
        features = (scores, *self._extra_features(scores, depths, context))
        weights = self.weights(params.temperature, len(features), depths)
        total = _weighted_sum(features, weights)
        values, at = top_k(total, min(num_candidates, total.shape[1]))
        probs = total.sub_(values[:, :1]).exp_()
        norm = probs.sum(dim=1, keepdim=True)
        log_probs = (values - values[:, :1]).double().sub_(norm.double().log_()).clamp_(max=0.0)
        token_ids = self._columns.token_ids[at]
        return Ranked(log_probs, at, token_ids, features, probs, norm, depths, params.temperature)

    def after(self, ranked: Ranked, shifts: torch.Tensor) -> torch.Tensor:
        """[R − 1, K, K] log r of each candidate after each candidate of the row before.

        Args:
            shifts: [R − 1, K, K] what the logits of rows 2 … gain by the token before.
        """
        scale = self.weights(ranked.temperature, len(ranked.features), ranked.depths)[1:, 0]
        scale = scale / (ranked.temperature or 1.0)
        weights = torch.from_numpy(scale).to(shifts.device)[:, None, None]
        return conditional(ranked.log_probs[1:], shifts.double() * weights)

    def learn(self, ranked: Ranked, token_ids: Sequence[int], first_row: int = 0) -> None:
        """Take in that the target picked ``token_ids`` where row ``first_row`` and on predicted."""
        columns = [self._columns.of(token_id) for token_id in token_ids]
        if all(column is None for column in columns):
            return
        rows = slice(first_row, first_row + len(columns))
        at = torch.tensor([[column or 0] for column in columns], device=ranked.probs.device)
        features = [feature[rows] for feature in ranked.features]
        picked = torch.cat([f.gather(1, at) for f in features], dim=1).double().numpy(force=True)
        probs = ranked.probs[rows] / ranked.norm[rows]
        if features[0].amin() == -math.inf:  # forbidden tokens have no share, but 0 · ∞ is NaN
            features[0] = features[0].clamp(min=features[0].amax(1, keepdim=True) + _LOWEST)
        means, seconds = _moments(features, probs)
        fit = self._fit(ranked.temperature, len(features))
        self._weights.clear()
        for i, column in enumerate(columns):
            if column is None or not math.isfinite(picked[i, 0]):
                continue
            slope = np.array([1.0, math.log2(ranked.depths[first_row + i])])
            gradient = np.outer(picked[i] - means[i], slope).ravel()
            spread = seconds[i] - np.outer(means[i], means[i])
            fit.update(gradient, np.kron(spread, np.outer(slope, slope)))

    def weights(self, temperature: float, num_features: int, depths: Sequence[int]) -> FloatArray:
        """[depths, num_features] current weights: a, then b, then c."""
        key = (temperature, num_features, tuple(depths))
        if key not in self._weights:
            level_trend = self._fit(temperature, num_features).mean.reshape(-1, 2)
            octaves = np.log2(np.asarray(depths, dtype=np.float64))[:, None]
            # The score keeps its order; noise and floor may have no weight.
            lowest = np.array([_MIN_WEIGHT] + [0.0] * (num_features - 1))
            found = np.maximum(level_trend[:, 0] + octaves * level_trend[:, 1], lowest)
            self._weights[key] = found
        return self._weights[key]

    def _extra_features(
        self, scores: torch.Tensor, depths: Sequence[int], context: DraftContext
    ) -> list[torch.Tensor]:
        noise = context.sampler.noise
        if noise is None:
            return []
        extra = []
        if self._use_noise:
            first = context.sampler.num_output - 1
            extra.append(self._noise_rows.rows(noise, [first + depth for depth in depths]))
        edge = truncation_edge(scores, context.sampler.params)
        if edge is not None:
            extra.append((scores < edge).to(scores.dtype).neg_())
        return extra

    def _fit(self, temperature: float, num_features: int) -> OnlineFit:
        key = (round(temperature, 2), num_features)
        if key not in self._fits:
            priors = [_SCORE_PRIOR]
            if temperature > 0 and self._use_noise:
                priors.append(_NOISE_PRIOR)
            priors += [_FLOOR_PRIOR] * (num_features - len(priors))
            mean = np.array(priors[:num_features]).ravel()
            self._fits[key] = OnlineFit(mean, np.tile(_PRECISION, num_features))
        return self._fits[key]


def _weighted_sum(features: Sequence[torch.Tensor], weights: FloatArray) -> torch.Tensor:
    """[R, V] sum of features [R, V] with weights [R, features]."""
    columns = torch.from_numpy(weights).to(features[0])
    total = features[0] * columns[:, :1]
    for index, feature in enumerate(features[1:], start=1):
        total.addcmul_(feature, columns[:, index : index + 1])
    return total


def _moments(
    features: Sequence[torch.Tensor], probs: torch.Tensor
) -> tuple[FloatArray, FloatArray]:
    """Means [R, features] and second moments [R, features, features] of features [R, V]."""
    weighted = [feature * probs for feature in features]
    means = torch.stack([part.sum(dim=1) for part in weighted], dim=1)
    pairs = [[(part * f).sum(dim=1) for f in features] for part in weighted]
    seconds = torch.stack([torch.stack(row, dim=1) for row in pairs], dim=1)
    return means.double().numpy(force=True), seconds.double().numpy(force=True)
