"""Buffers of packed weights: apart from each other, aligned, and alive as long as they are held."""

from __future__ import annotations

import gc

import torch

from draftwood.target import arena as arena_module
from draftwood.target.arena import ALIGNMENT, CHUNK_BYTES, Arena


def test_buffers_are_aligned_apart_and_zero() -> None:
    arena = Arena()
    sizes = [1, 17, 1000, 64, CHUNK_BYTES // 16, 3, CHUNK_BYTES // 12, CHUNK_BYTES // 10, 5]
    buffers = [arena.take(size) for size in sizes]
    assert [len(buffer) for buffer in buffers] == sizes
    assert all(buffer.data_ptr() % ALIGNMENT == 0 for buffer in buffers)
    assert not any(buffer.any() for buffer in buffers)
    for index, buffer in enumerate(buffers):
        buffer.fill_(index + 1)
    for index, buffer in enumerate(buffers):
        assert bool((buffer == index + 1).all())


def test_small_buffers_share_a_mapping_and_outlive_the_arena(monkeypatch) -> None:
    made: list[int] = []
    real = arena_module._mapping
    monkeypatch.setattr(arena_module, "_mapping", lambda size: (made.append(size), real(size))[1])
    arena = Arena()
    buffers = [arena.take(100) for _ in range(50)]
    large = arena.take(CHUNK_BYTES // 4)
    later = arena.take(100)
    assert made == [CHUNK_BYTES, CHUNK_BYTES]
    assert later.data_ptr() == buffers[-1].data_ptr() + 4 * 112  # a large one is apart
    for buffer in buffers:
        buffer.fill_(7.0)
    del arena, later
    gc.collect()
    torch.randn(1 << 22).sum()  # takes memory that was wrongly given back
    assert all(bool((buffer == 7.0).all()) for buffer in buffers)
    assert not large.any()


def test_pages_without_advice(monkeypatch) -> None:
    monkeypatch.delattr(arena_module.mmap, "MADV_HUGEPAGE", raising=False)
    assert not Arena().take(10).any()
