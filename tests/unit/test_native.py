"""The compiled kernels: right for all row counts, shapes and windows; gone where they must be."""

from __future__ import annotations

import copy
import subprocess

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.draft.products import HalfLinear, product
from draftwood.target import build_kernels as kernels_module
from draftwood.target import native as native_module
from draftwood.target.attention import PackedPass
from draftwood.target.cache import KVCache
from draftwood.target.kernels import KernelConfig
from draftwood.target.linear import Weights, plain
from draftwood.target.model import Target
from draftwood.target.native import Native, load_native
from draftwood.target.native_layer import NativeLinear
from draftwood.target.probe import check_parity
from draftwood.tree.tree import NO_PARENT, DraftTree
from tiny import tiny_model

WIDE = {"head_dim": 32, "hidden_size": 96, "intermediate_size": 200}


def model_of(family: str, **options):
    return tiny_model(family, dtype=torch.float32, **{**WIDE, **options})


def tree_of(size: int, seed: int = 0) -> DraftTree:
    rng = np.random.default_rng(seed)
    parents = np.array([NO_PARENT] + [int(rng.integers(0, i)) for i in range(1, size)])
    depths = np.zeros(size, np.int64)
    for node in range(1, size):
        depths[node] = depths[parents[node]] + 1
    tokens = rng.integers(2, 90, size)
    return DraftTree(tokens, parents, depths, np.zeros(size, np.int64), np.array([0, size]))


def passes(target: Target, sizes: list[int]) -> list[torch.Tensor]:
    """Logits of a prompt longer than every window, then of trees of these sizes behind it."""
    cache = target.new_cache()
    prompt = DraftTree.chain(np.random.default_rng(0).integers(2, 90, 150).tolist())
    found = [target.logits(target.forward(prompt, [cache]).hidden)]
    cache.commit(np.arange(150))
    for size in sizes:
        found.append(target.logits(target.forward(tree_of(size), [cache]).hidden))
        cache.commit(np.array([0]))
    return found


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 140),
    inputs=st.integers(1, 200),
    outputs=st.integers(1, 120),
    has_bias=st.booleans(),
)
def test_the_product(native: Native, rows: int, inputs: int, outputs: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + inputs)
    matrix = torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator) if has_bias else None
    x = torch.randn(rows, inputs, generator=generator)
    weights = Weights((matrix,), None if bias is None else (bias,))
    got = NativeLinear(native, weights)(x)
    want = torch.nn.functional.linear(
        x.double(), matrix.double(), bias.double() if has_bias else None
    )
    assert (got - want).norm() <= 1e-5 * want.norm()
    one = NativeLinear(native, weights)(x[-1:])
    assert torch.equal(one[0], got[-1])  # a row's sums do not depend on its company


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_models_own_logits(native: Native, family: str, threads: int) -> None:
    model = model_of(family)
    own = Target(model, kernels=None, probe=False)
    fast = Target(model, kernels=KernelConfig(native=True), probe=False)
    assert fast.kernels.is_native
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        sizes = [1, 2, 3, 5, 8, 9, 17, 40, 70]
        true = passes(Target(copy.deepcopy(model).double(), kernels=None, probe=False), sizes)
        errors = [
            max(
                float((got - want).norm() / want.norm())
                for got, want in zip(found, true, strict=True)
            )
            for found in (passes(fast, sizes), passes(own, sizes))
        ]
        # as near to float64 as torch's own, which is 1e-5 away in the worst of these passes
        assert errors[0] <= min(1.3 * errors[1], 1.3e-5)
        check_parity(fast)  # several sequences, the path committed in between
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_result_does_not_depend_on_its_company(
    native: Native, family: str, threads: int
) -> None:
    target = Target(model_of(family), kernels=KernelConfig(native=True), probe=False)
    ids = np.random.default_rng(1).integers(1, target.vocab_size, 90).tolist()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cache = target.new_cache()
        target.forward(DraftTree.chain(ids[:50]), [cache])
        cache.commit(np.arange(50))
        together = target.forward(DraftTree.chain(ids[50:]), [cache]).hidden
        cache.commit(np.arange(0))
        for token_id, row in zip(ids[50:], together, strict=True):
            alone = target.forward(DraftTree.chain([token_id]), [cache]).hidden
            cache.commit(np.arange(1))
            assert torch.equal(alone[0], row)
            assert torch.equal(target.logits(alone)[0], target.logits(row[None])[0])
    finally:
        torch.set_num_threads(before)


def test_taps_are_the_layers_outputs(native: Native) -> None:
    model = model_of("mistral")
    found = []
    for kernels in (None, KernelConfig(native=True)):
        target = Target(model, kernels=kernels, probe=False)
        cache = target.new_cache()
        parts = [target.forward(tree_of(12), [cache], (0, 2)).features]
        cache.commit(np.array([0]))
        parts.append(target.forward(tree_of(9), [cache], (0, 2)).features)
        found.append(torch.cat([part for part in parts if part is not None]))
    own, fast = found
    assert own.shape == (21, 2 * 96)
    assert (own - fast).norm() <= 1e-5 * own.norm()


def test_changed_weights_run_on_the_models_own_code(native: Native) -> None:
    model = model_of("llama")
    fast = Target(model, kernels=KernelConfig(native=True), probe=False)
    passes(fast, [4])
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)
        model.lm_head.weight.add_(0.1)
    own = Target(model, kernels=None, probe=False)
    for got, want in zip(passes(fast, [4]), passes(own, [4]), strict=True):
        assert torch.equal(got, want)


def test_nan_is_not_hidden(native: Native) -> None:
    model = model_of("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight[3, 5] = torch.nan
    fast = Target(model, kernels=KernelConfig((plain,)), probe=False)
    kernels = kernels_module.Kernels()
    layers = list(model.model.layers)
    kernels.add_native(native, layers, [None] * len(layers), model.lm_head)
    fast.kernels = kernels
    assert fast.forward(tree_of(3), [fast.new_cache()]).hidden.isnan().all()


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {"head_dim": 12}), ("gemma3", {}), ("gpt_oss", {}), ("llama", {"mlp_bias": True})],
)
def test_other_shapes_are_left_alone(native: Native, family: str, options: dict) -> None:
    target = Target(model_of(family, **options), kernels=KernelConfig(native=True), probe=False)
    assert not target.kernels.is_native
    assert torch.isfinite(target.forward(tree_of(3), [target.new_cache()]).hidden).all()


def test_used_when_faster(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    monkeypatch.setattr(kernels_module, "MIN_BYTES", 0)
    seconds = {"native": 1.0, "torch": 2.0}
    asked = []

    def timed(_run, kernels, _num_layers):
        asked.append(kernels)
        return seconds["native" if kernels.is_native else "torch"]

    monkeypatch.setattr(kernels_module, "_pass_s", timed)
    assert Target(model, probe=False).kernels.is_native
    seconds["native"] = 3.0
    assert Target(model, probe=False).kernels.is_native  # the verdict was kept
    assert len(asked) == 2
    own = model_of("llama", hidden_size=64)
    assert not Target(own, probe=False).kernels.is_native


def test_built_once_and_not_without_a_compiler(
    native: Native, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path))
    calls = []
    run = subprocess.run

    def counted(command, **options):
        calls.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", counted)
    build = load_native.__wrapped__
    assert build() is not None
    assert len([c for c in calls if native_module.FLAGS[0] in c]) == 1
    assert build() is not None
    assert len([c for c in calls if native_module.FLAGS[0] in c]) == 1
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(native_module, "COMPILERS", ("no-such-compiler",))
    assert build() is None


def test_a_failing_compiler_is_no_error_but_said(
    native: Native, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path))
    monkeypatch.setattr(native_module, "FLAGS", ("--no-such-flag",))
    with pytest.warns(UserWarning, match=r"could not be built: .*no-such-flag.*slower"):
        assert load_native.__wrapped__() is None
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_costs_no_kernels(
    native: Native, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path / "file" / "cache"))
    found, said = native_module.find_native()
    assert found is not None
    assert said.startswith("compiled")
    weights = Weights((torch.eye(40),))
    assert torch.equal(NativeLinear(found, weights)(torch.ones(3, 40)), torch.ones(3, 40))


def direct_pass(target: Target, cache: KVCache) -> tuple[bool, torch.Tensor]:
    """Whether a pass leaves the decoder's forward out, and the pass's output."""
    tree = tree_of(9)
    is_direct = target.kernels.direct(PackedPass(tree, [cache])) is not None
    out = target.forward(tree, [cache], (0, 2))
    cache.commit(np.arange(0))
    assert out.features is not None
    return is_direct, torch.cat([out.hidden, out.features], dim=-1)


@torch.no_grad()
def test_the_decoder_is_left_out_until_somebody_wants_it(native: Native) -> None:
    model = model_of("qwen3")
    target = Target(model, kernels=KernelConfig(native=True), probe=False)
    cache = target.new_cache()
    target.forward(tree_of(12), [cache])
    cache.commit(np.array([0]))
    is_direct, alone = direct_pass(target, cache)
    assert is_direct
    calls: list[int] = []

    def hook(*_: object) -> None:
        calls.append(1)

    handles = [
        lambda: model.model.register_forward_hook(hook),
        lambda: model.model.layers[1].register_forward_pre_hook(hook),
        lambda: torch.nn.modules.module.register_module_forward_hook(hook),
    ]
    for register in handles:
        handle = register()
        calls.clear()
        is_direct, heard = direct_pass(target, cache)
        handle.remove()
        assert not is_direct
        assert calls
        assert torch.equal(heard, alone)
    own = model.model.forward
    model.model.forward = lambda *args, **kwargs: (calls.append(2), own(*args, **kwargs))[1]
    assert not direct_pass(target, cache)[0]
    assert calls[-1] == 2
    del model.model.forward
    model.model.norm.weight.mul_(2)  # what runs as it is may change
    is_direct, doubled = direct_pass(target, cache)
    assert is_direct
    size = target.hidden_size
    assert torch.allclose(doubled[:, :size], 2 * alone[:, :size])
    assert torch.equal(doubled[:, size:], alone[:, size:])


def test_a_decoder_that_scales_its_embeddings_is_not_left_out(native: Native) -> None:
    model = model_of("llama")
    own = type(model.model).forward

    class Scaled(type(model.model)):
        def forward(self, input_ids=None, **kwargs):
            embeds = 3.0 * self.embed_tokens(input_ids)
            return own(self, inputs_embeds=embeds, **kwargs)

    model.model.__class__ = Scaled
    target = Target(model, kernels=KernelConfig(native=True), probe=False)
    assert target.kernels.is_native
    cache = target.new_cache()
    target.forward(tree_of(12), [cache])
    cache.commit(np.array([0]))
    assert not direct_pass(target, cache)[0]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 60).map(lambda n: 2 * n),
    outputs=st.integers(1, 120),
    has_bias=st.booleans(),
)
def test_the_product_of_drafts(
    native: Native, rows: int, inputs: int, outputs: int, has_bias: bool
) -> None:
    """In bfloat16 with float32 sums: exact but for the order of the sums once x is rounded."""
    if not native.has_half:
        pytest.skip("no bfloat16 instructions on this CPU")
    generator = torch.Generator().manual_seed(rows * 1000 + inputs)
    matrix = torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator) if has_bias else None
    x = torch.randn(rows, inputs, generator=generator)
    half = HalfLinear(native, matrix, bias)
    got = half(x)
    exact_x, exact = x.bfloat16().double(), matrix.bfloat16().double()
    want = torch.nn.functional.linear(exact_x, exact, bias.double() if has_bias else None)
    terms = exact_x.abs() @ exact.abs().t() + 1.0  # what the sums may cancel
    assert ((got - want).abs() <= 1e-6 * terms).all()
    assert torch.equal(half(x[-1:])[0], got[-1])  # a row's sums do not depend on its company
    assert half(torch.full_like(x, torch.nan)).isnan().all()


def test_only_large_products_of_drafts_round(native: Native) -> None:
    large, small = torch.randn(1024, 512), torch.randn(512, 64)
    assert isinstance(product(large), HalfLinear) == native.has_half
    assert isinstance(product(small), NativeLinear)
    for dtype in (torch.float64, torch.bfloat16):
        x = torch.randn(3, 512, dtype=dtype)
        assert torch.allclose(product(large.to(dtype))(x), x @ large.to(dtype).t())
