"""Sizes of products."""

from __future__ import annotations

from draftwood.train.shapes import filled_up


def test_sizes_are_few_and_not_much_larger() -> None:
    sizes = [filled_up(n) for n in range(1, 4097)]
    assert all(0 <= size - n < max(32, n / 16 + 1) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) == 16 + 16 * 3
    assert filled_up(0) == 0
    assert filled_up(2250) == 2304
