"""KVCache against a list of tokens, for any sequence of operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.errors import DraftwoodError
from draftwood.target.cache import MIN_CAPACITY, KVCache

# (kv_heads, key_dim, value_dim) per layer: two shapes, interleaved.
SHAPES = ((2, 3, 3), (1, 4, 2), (2, 3, 3))


def rows_of(layer: int, stamps: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that name the layer, the head, the token and the dimension."""
    heads, key_dim, value_dim = SHAPES[layer]

    def block(dim: int, sign: float) -> torch.Tensor:
        tokens = torch.tensor(stamps, dtype=torch.float64)[None, :, None]
        head = torch.arange(heads, dtype=torch.float64)[:, None, None]
        return sign * (tokens * 1000 + layer * 100 + head * 10 + torch.arange(dim))

    return block(key_dim, 1.0), block(value_dim, -1.0)


class Model:
    """What the cache should hold: a stamp per token."""

    def __init__(self) -> None:
        self.cache = KVCache(len(SHAPES))
        self.tokens: list[int] = []
        self.next_stamp = 1

    def forward(self, count: int) -> list[int]:
        window = list(range(self.next_stamp, self.next_stamp + count))
        self.next_stamp += count
        for layer in range(len(SHAPES)):
            seen = self.cache.append(layer, *rows_of(layer, window))
            for got, want in zip(seen, rows_of(layer, self.tokens + window), strict=True):
                assert torch.equal(got, want)
        assert self.cache.window_len == count
        assert self.cache.length == len(self.tokens)
        return window


steps = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.integers(1, 90), st.randoms(use_true_random=False)),
        st.tuples(st.just("prefix"), st.integers(1, 90), st.integers(0, 90)),
        st.tuples(st.just("drop"), st.integers(1, 20), st.none()),
        st.tuples(st.just("truncate"), st.floats(0, 1), st.none()),
        st.tuples(st.just("release"), st.none(), st.none()),
    ),
    min_size=1,
    max_size=12,
)


@given(steps)
@settings(max_examples=150, deadline=None)
def test_holds_the_committed_tokens_then_the_window(plan):
    model = Model()
    for kind, size, choice in plan:
        if kind == "truncate":
            keep = int(size * len(model.tokens))
            model.cache.truncate(keep)
            del model.tokens[keep:]
            continue
        if kind == "release":
            model.cache.release()
            model.tokens = []
            assert model.cache.num_bytes == 0
            continue
        window = model.forward(size)
        if kind == "commit":
            rows = [row for row in range(size) if choice.random() < 0.5]
        elif kind == "prefix":
            rows = list(range(min(choice, size)))
        else:
            continue  # a forward whose window is abandoned, as after an error
        model.cache.commit(np.array(rows, dtype=np.int64))
        model.tokens += [window[row] for row in rows]
        assert model.cache.length == len(model.tokens)
        assert model.cache.window_len == 0
    model.forward(1)


def test_a_contiguous_commit_moves_nothing():
    model = Model()
    model.tokens += model.forward(10)
    model.cache.commit(np.arange(10))
    keys, values = model.cache.append(0, *rows_of(0, list(range(11, 16))))
    before = keys.data_ptr(), values.data_ptr(), keys._version, values._version
    model.cache.commit(np.arange(3))
    assert before == (keys.data_ptr(), values.data_ptr(), keys._version, values._version)


def test_growth_is_amortised_and_memory_bounded(monkeypatch):
    from draftwood.target import cache as module

    moved = []
    original = module._Group._moved

    def counting(self, old, keep):
        moved.append(keep)
        return original(self, old, keep)

    monkeypatch.setattr(module._Group, "_moved", counting)
    cache = KVCache(1)
    for _ in range(1024):
        cache.append(0, torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))
        cache.commit(np.array([0, 2, 3]))
    assert cache.length == 3072
    assert sum(moved) <= 2 * 2 * cache.length
    needed = 2 * 4 * 8 * cache.length
    assert cache.num_bytes <= 2 * needed + 2 * 4 * 8 * MIN_CAPACITY


def test_a_layer_that_stores_nothing_is_an_error():
    cache = KVCache(2)
    cache.append(0, torch.zeros(1, 3, 8), torch.zeros(1, 3, 8))
    with pytest.raises(DraftwoodError, match=r"\[1\]"):
        cache.commit(np.arange(3))


@pytest.mark.parametrize("rows", [[0, 3], [1, 0], [0, 0], [-1]])
def test_rows_that_are_no_path_are_refused(rows):
    cache = KVCache(1)
    cache.append(0, torch.zeros(1, 3, 8), torch.zeros(1, 3, 8))
    with pytest.raises(AssertionError):
        cache.commit(np.array(rows))
