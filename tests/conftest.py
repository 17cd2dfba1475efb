"""Shared test setup: one thread, and ``tests`` importable (``from tiny import tiny_model``)."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

from draftwood.target.native import Native, load_native

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start background jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A busy machine must not fail a test: times belong in benchmarks.
hypothesis.settings.register_profile("draftwood", deadline=None)
hypothesis.settings.load_profile("draftwood")


@pytest.fixture(autouse=True)
def own_cache(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What draftwood measures and learns stays inside a test; real models come from the cache."""
    if request.node.get_closest_marker("real") is None:
        monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path / "draftwood-cache"))


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Native:
    """The compiled kernels, built anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTWOOD_CACHE", str(tmp_path_factory.mktemp("cache")))
        load_native.cache_clear()
        found = load_native()
    if found is None:
        pytest.skip("no C++ compiler or no OpenMP of torch's own")
    return found
