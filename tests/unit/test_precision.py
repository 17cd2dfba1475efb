"""Training in bfloat16 where that is faster, and memory that is kept."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from draftwood.train import precision
from draftwood.train.precision import has_fast_bfloat16


@pytest.mark.parametrize(("float32_s", "bfloat16_s", "fast"), [(4.0, 1.0, True), (1.0, 0.9, False)])
def test_a_cpu_is_fast_in_bfloat16_if_it_measures_so(
    monkeypatch: pytest.MonkeyPatch, float32_s: float, bfloat16_s: float, fast: bool
) -> None:
    seconds = {torch.float32: float32_s, torch.bfloat16: bfloat16_s}
    monkeypatch.setattr(precision, "_seconds", seconds.__getitem__)
    assert has_fast_bfloat16("cpu") is fast


def test_it_really_measures() -> None:
    assert 0 < precision._seconds(torch.float32) < 10
    assert 0 < precision._seconds(torch.bfloat16) < 10
    assert has_fast_bfloat16("meta") is False


_STEPS = """
import resource, sys, torch
from draftwood.train.allocator import keep_freed_memory

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    x = torch.ones(2**22)
    z = torch.cat([x, x * 2])
    del x
    z + 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

kept = sys.argv[1] == "keep" and keep_freed_memory()
print(kept, sum([step() for _ in range(12)][6:]))
"""


def test_freed_memory_is_used_again() -> None:
    """Page faults of six steps after six others: what is mapped anew is faulted in anew."""
    kept, faults = _page_faults("keep")
    if not kept:
        pytest.skip("no GNU C library")
    assert faults < _page_faults("default")[1] / 10


def _page_faults(how: str) -> tuple[bool, int]:
    command = [sys.executable, "-c", _STEPS, how]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return shown[0] == "True", int(shown[1])
