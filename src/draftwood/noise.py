"""Keyed Gumbel noise: the same number for the same (seed, sample, position, token) everywhere."""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # SplitMix64, Stafford variant 13
_LAST_SHIFT = 31
_WORD = (1 << 64) - 1
_UNIFORM_BITS = 53

MAX_SEED = _WORD

# u is at least 2⁻⁵⁴ and at most 1 − 2⁻⁵³, hence −log(53·log 2) ≤ g ≤ 54·log 2.
MIN_GUMBEL = -3.61
MAX_GUMBEL = 37.43


class KeyedNoise:
    """Standard Gumbel noise g_t(v) by random access, for the Gumbel-max trick.

    g = −log E, E = −log1p(−u), u a 53-bit uniform: the SplitMix64 output (Steele et al. 2014) of
    stream (seed, sample_index, t) at index v. The integer part is exact on every device; the
    logarithms may differ in the last bit.

    Args:
        seed: 0 … 2⁶⁴ − 1.
        sample_index: independent samples of one seed, 0 … 2⁶⁴ − 1.
    """

    def __init__(self, seed: int, sample_index: int = 0) -> None:
        for name, value in (("seed", seed), ("sample_index", sample_index)):
            if not 0 <= value <= _WORD:
                raise ValueError(f"{name} must lie in 0 … 2**64 − 1, got {value}")
        self.seed = seed
        self.sample_index = sample_index
        self._key = _absorb(_absorb(_GOLDEN, seed), sample_index)

    def gumbel(self, position: int, token_ids: torch.Tensor) -> torch.Tensor:
        """Noise of tokens at one output position.

        Args:
            position: t, the number of output tokens before the drawn one; ≥ 0.
            token_ids: [...] int64 ids in the target's vocabulary.

        Returns:
            [...] float64 on the device of ``token_ids``, between MIN_GUMBEL and MAX_GUMBEL.
        """
        assert position >= 0, position
        assert token_ids.dtype == torch.int64, token_ids.dtype
        bits = token_ids * _signed(_GOLDEN)
        bits += _signed(_absorb(self._key, position))
        for shift, factor in _MIX:
            bits ^= _shifted(bits, shift)
            bits *= _signed(factor)
        bits ^= _shifted(bits, _LAST_SHIFT)
        uniform = _shifted(bits, 64 - _UNIFORM_BITS).double()
        # 0 becomes half a step: the noise stays finite.
        uniform.clamp_(min=0.5).mul_(2.0**-_UNIFORM_BITS)
        return uniform.neg_().log1p_().neg_().log_().neg_()


def _shifted(bits: torch.Tensor, shift: int) -> torch.Tensor:
    """Logical right shift; torch's own copies the sign bit."""
    return (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _absorb(key: int, word: int) -> int:
    """A new 64-bit key from a key and one more word."""
    bits = (key * _MIX[0][1] + word + _GOLDEN) & _WORD
    for shift, factor in _MIX:
        bits = ((bits ^ (bits >> shift)) * factor) & _WORD
    return bits ^ (bits >> _LAST_SHIFT)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
