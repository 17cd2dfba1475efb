from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from draftwood.noise import MAX_GUMBEL, MIN_GUMBEL, KeyedNoise

VOCAB = torch.arange(50_000)


def table(seeds: list[int], samples: list[int], positions: list[int], vocab: int) -> np.ndarray:
    """[len(seeds) · len(samples) · len(positions), vocab] of noise."""
    ids = torch.arange(vocab)
    return np.stack(
        [
            KeyedNoise(seed, sample).gumbel(t, ids).numpy()
            for seed in seeds
            for sample in samples
            for t in positions
        ]
    )


@pytest.mark.parametrize("key", [(0, 0, 0), (1, 0, 17), (2**64 - 1, 5, 123_456)])
def test_noise_is_standard_gumbel(key):
    seed, sample_index, position = key
    noise = KeyedNoise(seed, sample_index).gumbel(position, VOCAB).numpy()
    assert stats.kstest(noise, stats.gumbel_r.cdf).pvalue > 1e-4


@pytest.mark.parametrize("axis", ["seed", "sample", "position"])
def test_noise_is_gumbel_along_every_counter(axis):
    many, one = list(range(5_000)), [3]
    columns = table(
        many if axis == "seed" else one,
        many if axis == "sample" else one,
        many if axis == "position" else one,
        vocab=2,
    )
    for column in columns.T:
        assert stats.kstest(column, stats.gumbel_r.cdf).pvalue > 1e-4


def test_ks_test_has_power():
    wrong = KeyedNoise(1).gumbel(0, VOCAB).numpy() * 1.06
    assert stats.kstest(wrong, stats.gumbel_r.cdf).pvalue < 1e-4


@pytest.mark.parametrize("axis", ["seed", "sample", "position"])
def test_neighbouring_keys_are_independent(axis):
    counters = list(range(40))
    one = [7]
    rows = table(
        counters if axis == "seed" else one,
        counters if axis == "sample" else one,
        counters if axis == "position" else one,
        vocab=20_000,
    )
    # rank correlation of Gumbel noise: through uniforms, so that heavy tails do not dominate
    uniform = np.exp(-np.exp(-rows))
    correlation = np.corrcoef(uniform)[np.triu_indices(len(rows), 1)] * math.sqrt(rows.shape[1])
    assert stats.kstest(correlation, "norm").pvalue > 1e-4
    assert np.abs(correlation).max() < 6


def test_neighbouring_tokens_are_independent():
    uniform = np.exp(-np.exp(-table([1], [0], list(range(10)), vocab=20_000)))
    for lag in (1, 2, 3, 64, 1024):
        pairs = np.corrcoef(uniform[:, lag:].ravel(), uniform[:, :-lag].ravel())[0, 1]
        assert abs(pairs) * math.sqrt(uniform.size) < 5


def test_seed_sample_and_position_are_not_interchangeable():
    keys = [(0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 0), (0, 1, 1)]
    first = {float(KeyedNoise(s, i).gumbel(t, VOCAB[:1])) for s, i, t in keys}
    assert len(first) == len(keys)


def test_random_access_equals_the_whole_row():
    noise = KeyedNoise(42, 3)
    row = noise.gumbel(9, VOCAB)
    some = torch.tensor([[5, 49_999], [0, 5]])
    assert torch.equal(noise.gumbel(9, some), row[some])
    assert torch.equal(KeyedNoise(42, 3).gumbel(9, VOCAB), row)


def test_values_never_change():
    """A stored seed must reproduce its text in later versions too."""
    noise = KeyedNoise(1234, 5).gumbel(6, torch.tensor([0, 1, 49_151]))
    expected = [3.246371153883388, -0.5656126319907889, -0.6802437587038673]
    assert noise.tolist() == pytest.approx(expected, abs=1e-12)


def test_bounds_hold_for_the_extreme_uniforms():
    for uniform in (0.5 * 2.0**-53, (2.0**53 - 1) * 2.0**-53):
        assert MIN_GUMBEL < -math.log(-math.log1p(-uniform)) < MAX_GUMBEL


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match=str(seed)):
        KeyedNoise(seed)
