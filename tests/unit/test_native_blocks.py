"""A drafter's layers on the compiled kernels: what the layers compute, rounded or not."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftwood.draft import block_pass, independent_network, native_blocks
from draftwood.draft.block_pass import BlockPass
from draftwood.draft.config import FULL, SLIDING, DraftConfig
from draftwood.draft.independent_checkpoint import network_from_model
from draftwood.draft.independent_pass import new_cache, plan_rows, run_rows
from draftwood.draft.native_blocks import NativeBlocks
from draftwood.draft.network import DraftNetwork
from draftwood.draft.products import HalfLinear
from draftwood.draft.rope import RopeConfig
from draftwood.target.native import Native
from tiny import tiny_model

CONTEXTS = (0, 3, 70)
SMALL = {"hidden_size": 96, "intermediate_size": 200}
LARGE = {"hidden_size": 576, "intermediate_size": 640}  # weights of more than 1 MiB


def network_of(**changes: object) -> DraftNetwork:
    config = DraftConfig(
        hidden_size=96, intermediate_size=200, num_hidden_layers=2, num_attention_heads=18,
        num_key_value_heads=9, head_dim=32, vocab_size=90, block_size=5, mask_token_id=7,
        target_layer_ids=(1, 3), num_target_layers=4, target_hidden_size=64, rms_norm_eps=1e-5,
        rope=RopeConfig(10_000.0), layer_types=(FULL, FULL), sliding_window=None,
        is_causal=(False, False), attention_bias=False, max_position_embeddings=256,
        draft_vocab_size=None, own_embeddings=False, own_head=False,
    )  # fmt: skip
    torch.manual_seed(0)
    network = DraftNetwork(replace(config, **changes))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, weight in network.named_parameters():
            noise = torch.randn_like(weight)
            is_norm = "norm" in name
            weight.copy_(1 + 0.2 * noise if is_norm else noise * weight.shape[-1] ** -0.5)
    return network.eval()


@torch.inference_mode()
def blocks_of(network: DraftNetwork) -> tuple[torch.Tensor, BlockPass]:
    """Rows of a pass over sequences with contexts of several lengths, twice."""
    made = BlockPass(network)
    generator = torch.Generator().manual_seed(1)
    caches = [made.new_cache() for _ in CONTEXTS]
    for cache, length in zip(caches, CONTEXTS, strict=True):
        if length > 0:
            features = torch.randn(length, 2 * 64, generator=generator)
            cache.append(made.context(features, torch.arange(length)))
    shape = (len(CONTEXTS), network.config.block_size, network.config.hidden_size)
    blocks = [torch.randn(shape, generator=generator).to(made.dtype) for _ in range(2)]
    return torch.cat([made.hidden(block, caches, 4) for block in blocks]), made


VARIANTS = {
    "full": {},
    "causal": {"layer_types": (FULL, FULL), "is_causal": (True, False)},
    "window": {"layer_types": (SLIDING, FULL), "sliding_window": 6, "is_causal": (True, False)},
    "bias": {"attention_bias": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_of_dflash(
    native: Native, variant: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = network_of(**VARIANTS[variant])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got, made = blocks_of(network)
    finally:
        torch.set_num_threads(before)
    assert made._native is not None
    monkeypatch.setattr(block_pass.NativeBlocks, "of", staticmethod(lambda *_: None))
    want, plain = blocks_of(network.double())
    assert plain._native is None
    assert (got - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("variant", VARIANTS)
def test_large_layers_round_where_there_are_instructions(
    native: Native, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = network_of(**LARGE, **VARIANTS[variant])
    got, made = blocks_of(network)
    assert made._native is not None
    monkeypatch.setattr(block_pass.NativeBlocks, "of", staticmethod(lambda *_: None))
    want, _ = blocks_of(network.double())
    assert (got - want).norm() <= (0.03 if native.has_half else 1e-5) * want.norm()
    if native.has_half:  # weights of half the precision, or this would be as near as float32
        assert (got - want).norm() >= 1e-4 * want.norm()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_rows_of_an_independent_drafter(
    native: Native, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = tiny_model(
        family, dtype=torch.float32, use_sliding_window=False,
        head_dim=32, hidden_size=96, intermediate_size=200,
    )  # fmt: skip
    found = []
    for dtype in (torch.float32, torch.float64):
        network = network_from_model(body, block_size=4, mask_token_id=0).to(dtype).eval()
        if dtype == torch.float64:
            monkeypatch.setattr(
                independent_network.NativeBlocks, "of", staticmethod(lambda *_: None)
            )
        network.hasten()
        assert (network.blocks is None) == (dtype == torch.float64)
        caches = [new_cache(network) for _ in range(2)]
        with torch.inference_mode():
            chains = [list(range(5, 25)), [30, 31, 32]]
            run_rows(network, [plan_rows(chain, [], [], 4, 0) for chain in chains], caches)
            for cache, chain in zip(caches, chains, strict=True):
                cache.commit(range(len(chain)))
            nodes = [(40, -1), (41, 0), (42, 0), (43, 1)]
            plans = [
                plan_rows([33, 34], nodes, [(50, 3), (51, -1)], 4, 0),
                plan_rows([35], [], [(52, -1)], 4, 0),
            ]
            found.append(torch.cat(run_rows(network, plans, caches)))
    assert (found[0] - found[1]).norm() <= 1e-5 * found[1].norm()


def test_copies_share_weights_and_not_buffers(native: Native) -> None:
    network = network_of(**LARGE)
    made = BlockPass(network)
    twin = copy.deepcopy(made)
    block = torch.randn(1, network.config.block_size, network.config.hidden_size)
    with torch.inference_mode():
        want = made.hidden(block, [made.new_cache()], 4)
        got = twin.hidden(block, [twin.new_cache()], 4)
    assert torch.equal(got, want)
    ours, theirs = made._native, twin._native
    assert ours is not None
    assert theirs is not None
    assert theirs is not ours
    assert theirs._kept[0] is ours._kept[0]
    assert theirs._scratch is not ours._scratch


def test_what_the_kernels_cannot_run_is_left_alone(native: Native) -> None:
    for network in (network_of(head_dim=8), network_of().double()):
        assert NativeBlocks.of(network.stack(), network.config.head_dim) is None
    wide = network_of(num_attention_heads=2, num_key_value_heads=1, head_dim=512)
    assert NativeBlocks.of(wide.stack(), 512) is None


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_blocks, "load_native", lambda: None)
    assert NativeBlocks.of(network_of().stack(), 32) is None


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 32, 33, 70])
@pytest.mark.parametrize("inputs", [32, 64, 96, 34])
def test_products_over_tiles_of_rows(native: Native, rows: int, inputs: int) -> None:
    """All row counts around the 16 and 32 that a processor with matrix tiles takes at a time."""
    if not native.has_half:
        pytest.skip("no bfloat16 instructions on this CPU")
    generator = torch.Generator().manual_seed(rows * 1000 + inputs)
    matrix, x = (torch.randn(n, inputs, generator=generator) for n in (100, rows))
    half = HalfLinear(native, matrix, None)
    got = half(x)
    exact_x, exact = x.bfloat16().double(), matrix.bfloat16().double()
    terms = exact_x.abs() @ exact.abs().t() + 1.0
    assert ((got - exact_x @ exact.t()).abs() <= 1e-6 * terms).all()
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(half(x[row : row + 1])[0], got[row])
    assert np.isfinite(got.numpy()).all()
