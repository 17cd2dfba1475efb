"""Fast kernels: the same numbers, the model left as it was, and the ways back to its own code."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear

from draftwood.target import build_kernels as kernels_module
from draftwood.target import kernels as choosing_module
from draftwood.target import lean as lean_module
from draftwood.target import linear as linear_module
from draftwood.target.choices import FILE, KernelChoices
from draftwood.target.kernels import KernelConfig
from draftwood.target.linear import (
    ROWS,
    FastLinear,
    Weights,
    choose_kernels,
    default_kernels,
    onednn,
    plain,
    transposed,
)
from draftwood.target.model import Target
from draftwood.tree.tree import NO_PARENT, DraftTree
from tiny import FAMILIES, tiny_model

ALL = default_kernels()
LLAMA_SHAPED = {"llama", "qwen2", "qwen3", "mistral"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path))


def forced(kernel=ALL[-1], **options) -> KernelConfig:
    return KernelConfig((kernel,), **options)


def small_model(family: str = "llama", **overrides):
    return tiny_model(family, dtype=torch.float32, **overrides)


def verify(target: Target) -> torch.Tensor:
    """Logits of a tree behind a prompt that is longer than every sliding window."""
    cache = target.new_cache()
    prompt = np.random.default_rng(0).integers(2, 90, 20).tolist()
    target.forward(DraftTree.chain(prompt), [cache])
    cache.commit(np.arange(len(prompt)))
    parents = np.array([NO_PARENT, 0, 0, 1, 1, 4, 5, 2])
    depths = np.array([0, 1, 1, 2, 2, 3, 4, 2])
    tree = DraftTree(np.arange(8) + 5, parents, depths, np.zeros(8, np.int64), np.array([0, 8]))
    return target.logits(target.forward(tree, [cache]).hidden)


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert got.shape == expected.shape
    assert (got - expected).norm() <= tolerance * expected.norm()


# ---- one product ------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ALL)
@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 70),
    in_features=st.integers(1, 130),
    outs=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_kernels_compute_the_product(kernel, num_rows, in_features, outs, has_bias, seed):
    generator = torch.Generator().manual_seed(seed)
    matrices = tuple(torch.randn(out, in_features, generator=generator) for out in outs)
    biases = tuple(torch.randn(out, generator=generator) for out in outs) if has_bias else None
    rows = torch.randn(num_rows, in_features, generator=generator)
    expected = torch.cat(
        [
            linear(rows.double(), matrix.double(), biases[i].double() if biases else None)
            for i, matrix in enumerate(matrices)
        ],
        dim=-1,
    )
    assert_close(kernel(Weights(matrices, biases))(rows).double(), expected)


@pytest.mark.parametrize("kernel", ALL)
def test_rows_that_are_a_view(kernel):
    matrix = torch.randn(12, 8)
    rows = torch.randn(8, 5).t()
    assert_close(kernel(Weights((matrix,)))(rows), linear(rows, matrix))


def test_each_row_count_runs_on_its_kernel():
    used: list[str] = []

    def named(name):
        def kernel(_weights):
            return lambda rows: used.append(name) or rows

        return kernel

    fast = FastLinear(Weights((torch.zeros(4, 4),)))
    fast.use([named(str(count)) for count in ROWS])
    for count in (*ROWS, 0, 2, 12, 13, 24, 25, 1000):
        fast(torch.zeros(count, 4))
    expected = ["1", "4", "9", "17", "33", "1", "4", "9", "17", "17", "33", "33"]
    assert used == expected


# ---- the choice -------------------------------------------------------------------------------

COLUMNS = len(ROWS)


def chosen(times: dict, max_copies: int, monkeypatch) -> tuple:
    table = [times[kernel] for kernel in (plain, transposed, onednn)]
    monkeypatch.setattr(linear_module, "_measure", lambda *_: (table, True))
    weights = [Weights((torch.zeros(4, 4),))]
    kernels, is_worth_keeping = choose_kernels(weights, (plain, transposed, onednn), max_copies)
    assert is_worth_keeping
    return kernels


def test_fastest_kernel_per_row_count(monkeypatch):
    inf = float("inf")
    times = {
        plain: [3.0, 3.0, 3.0, 3.0, 1.0],
        transposed: [1.0, inf, inf, inf, inf],
        onednn: [2.0, 1.0, 1.0, 1.0, 1.1],
    }
    assert chosen(times, 2, monkeypatch) == (transposed, onednn, onednn, onednn, plain)
    assert chosen(times, 1, monkeypatch) == (onednn, onednn, onednn, onednn, plain)
    assert chosen(times, 0, monkeypatch) == (plain,) * COLUMNS


def test_a_copy_that_saves_little_is_not_made(monkeypatch):
    times = {plain: [1.0] * COLUMNS, transposed: [0.97] * COLUMNS, onednn: [0.98] * COLUMNS}
    assert chosen(times, 2, monkeypatch) == (plain,) * COLUMNS
    times = {plain: [2.0] * COLUMNS, transposed: [0.99] * COLUMNS, onednn: [1.0] * COLUMNS}
    assert chosen(times, 2, monkeypatch) == (transposed,) * COLUMNS


def test_measured_choice_is_one_of_the_candidates():
    weights = [Weights((torch.randn(40, 24), torch.randn(8, 24))) for _ in range(3)]
    kernels, _ = choose_kernels(weights, ALL, 2)
    assert len(kernels) == COLUMNS
    assert set(kernels) <= set(ALL)


@pytest.mark.parametrize("stall", [0.0, 5.0])
def test_a_disturbed_measurement_is_neither_believed_nor_kept(stall, monkeypatch):
    now, calls = [0.0], [0]

    def clock():
        now[0] += 1.0  # every pass takes one second
        return now[0]

    def slow(weights: Weights):
        product = plain(weights)

        def run(rows):
            calls[0] += 1
            now[0] += 1.0 + (stall if calls[0] % 3 else 0.0)  # one undisturbed repeat of three
            return product(rows)

        return run

    monkeypatch.setattr(linear_module.time, "perf_counter", clock)
    weights = [Weights((torch.zeros(4, 4),))]
    kernels, is_worth_keeping = choose_kernels(weights, (plain, slow), 1)
    assert is_worth_keeping == (stall == 0)
    assert kernels == ((plain if stall == 0 else slow),) * COLUMNS


def test_choices_are_kept():
    mixed = (ALL[-1],) + (plain,) * (COLUMNS - 1)
    assert KernelChoices(ALL).get("shape", lambda: (mixed, True)) == mixed
    assert KernelChoices(ALL).get("shape", pytest.fail) == mixed
    other = (plain,) * COLUMNS
    assert KernelChoices(ALL).get("unsure", lambda: (other, False)) == other
    assert KernelChoices(ALL).get("unsure", lambda: (mixed, False)) == mixed
    assert KernelChoices(ALL).get("another shape", lambda: (other, True)) == other
    assert KernelChoices(ALL[:2]).get("shape", lambda: (other, True)) == other


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}'])
def test_a_broken_file_of_choices_is_replaced(content, tmp_path):
    (tmp_path / FILE).write_text(content)
    kernels = (plain,) * COLUMNS
    assert KernelChoices(ALL).get("shape", lambda: (kernels, True)) == kernels
    assert KernelChoices(ALL).get("shape", pytest.fail) == kernels
    json.loads((tmp_path / FILE).read_text())


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path / "file"))
    kernels = (plain,) * COLUMNS
    assert KernelChoices(ALL).get("shape", lambda: (kernels, True)) == kernels


def test_without_onednn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert default_kernels() == (plain, transposed)


# ---- in a model -------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_same_logits(family, kernel):
    model = small_model(family)
    fast = Target(model, probe=False, kernels=forced(kernel))
    assert fast.kernels.linears
    assert fast.kernels.num_lean_layers == (4 if family in LLAMA_SHAPED else 0)
    assert_close(verify(fast), verify(Target(model, probe=False, kernels=None)))


@pytest.mark.parametrize("family", sorted(LLAMA_SHAPED))
def test_taps_and_batches_pass_through_lean_layers(family):
    model = small_model(family)
    trees = [DraftTree.chain([3, 4, 5]), DraftTree.chain([6]), DraftTree.chain([7, 8])]
    outputs = []
    for kernels in (forced(), None):
        target = Target(model, kernels=kernels)
        caches = [target.new_cache() for _ in trees]
        outputs.append(target.forward(DraftTree.pack(trees), caches, taps=(0, 2, 3)))
    for name in ("hidden", "features"):
        assert_close(getattr(outputs[0], name), getattr(outputs[1], name))


def test_without_lean_layers():
    model = small_model()
    target = Target(model, kernels=forced(lean_layers=False))
    assert target.kernels.num_lean_layers == 0
    assert len(target.kernels.linears) == 4 * 7 + 1
    assert_close(verify(target), verify(Target(model, kernels=None)))


def test_measured_in_a_model():
    model = small_model()
    target = Target(model, kernels=KernelConfig(ALL))
    assert_close(verify(target), verify(Target(model, kernels=None)))


def test_copies_stop_where_memory_ends(monkeypatch):
    model = small_model()
    monkeypatch.setattr(kernels_module, "available_bytes", lambda: 30_000)
    assert Target(model, kernels=KernelConfig(ALL, memory_share=0.0)).kernels.copied_bytes == 0
    monkeypatch.setattr(
        choosing_module,
        "choose_kernels",
        lambda _w, known, copies: ((known[min(copies, 1)],) * COLUMNS, False),
    )
    kernels = Target(model, kernels=KernelConfig(ALL, memory_share=1.0)).kernels
    assert 0 < kernels.copied_bytes <= 30_000


def test_small_models_and_other_dtypes_are_left_alone():
    assert Target(small_model()).kernels.linears == []
    assert Target(tiny_model("llama"), kernels=forced()).kernels.linears == []


@pytest.mark.parametrize("options", [{"memory_share": 1.5}, {"candidates": ()}])
def test_impossible_configurations(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        KernelConfig(**options)


# ---- the model stays the user's ---------------------------------------------------------------


def own_state(model) -> dict:
    return {
        "forwards": [name for name, part in model.named_modules() if "forward" in part.__dict__],
        "parameters": [(name, p.data_ptr(), p._version) for name, p in model.named_parameters()],
        "modules": [(name, type(part)) for name, part in model.named_modules()],
    }


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_model_is_as_before(family):
    model = small_model(family)
    ids = torch.tensor([[3, 4, 5, 6]])
    logits, state = model(ids).logits, own_state(model)
    text = model.generate(ids, max_new_tokens=8, do_sample=False)
    verify(Target(model, kernels=forced()))
    assert own_state(model) == state
    assert torch.equal(model(ids).logits, logits)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), text)


def test_the_model_can_still_be_trained():
    model = small_model()
    ids = torch.tensor([[3, 4, 5, 6]])

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(ids).logits.logsumexp(-1).sum().backward()
        return model.model.layers[1].mlp.up_proj.weight.grad.clone()

    before = gradient()
    target = Target(model, kernels=forced())
    verify(target)
    assert torch.equal(gradient(), before)
    with target.kernels.active():  # gradients are wanted: not with our forwards
        assert torch.equal(gradient(), before)


def test_forwards_are_restored_after_an_error(monkeypatch):
    model = small_model()
    target = Target(model, kernels=forced())

    def fail(*_args):
        raise RuntimeError("broken")

    monkeypatch.setattr(lean_module.LeanLayer, "forward", fail)
    with pytest.raises(RuntimeError, match="broken"):
        verify(target)
    assert own_state(model)["forwards"] == []


@pytest.mark.parametrize("lean_layers", [True, False])
def test_changed_weights_are_noticed(lean_layers):
    model = small_model()
    target = Target(model, kernels=forced(lean_layers=lean_layers))
    before = verify(target)
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight.mul_(1.5)
        model.lm_head.weight[3] += 1
    after = verify(target)
    assert (after - before).norm() > 1e-2 * before.norm()
    assert_close(after, verify(Target(model, kernels=None)))


def test_replaced_weights_are_noticed():
    model = small_model()
    target = Target(model, kernels=forced())
    model.model.layers[0].mlp.down_proj.weight.data = torch.zeros(32, 48)
    assert_close(verify(target), verify(Target(model, kernels=None)))


def test_hooks_inside_a_layer_still_run():
    model = small_model()
    target = Target(model, kernels=forced())
    calls: list[int] = []
    part = model.model.layers[1].mlp.gate_proj
    handle = part.register_forward_hook(lambda *_: calls.append(1))
    verify(target)
    assert len(calls) == 2  # prompt and tree
    handle.remove()
    verify(target)
    assert len(calls) == 2


def test_modules_that_others_have_changed_are_not_taken_over():
    model = small_model()
    part = model.model.layers[1].mlp.gate_proj
    own = part.forward
    part.forward = lambda rows: own(rows) * 0.5
    target = Target(model, probe=False, kernels=forced())
    assert target.kernels.num_lean_layers == 3
    assert_close(verify(target), verify(Target(model, probe=False, kernels=None)))
    assert "forward" in part.__dict__


def test_a_layer_that_only_looks_like_llama(monkeypatch):
    model = small_model()
    layer_class = type(model.model.layers[0])
    own = layer_class.forward

    def damped(self, hidden_states, *args, **kwargs):
        return 0.5 * own(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(layer_class, "forward", damped)
    target = Target(model, kernels=forced())
    assert target.kernels.num_lean_layers == 0
    assert target.kernels.linears
    assert_close(verify(target), verify(Target(model, kernels=None)))


def test_a_kernel_that_computes_something_else_is_not_used():
    def wrong(weights: Weights):
        product = plain(weights)
        return lambda rows: product(rows) * 1.01

    model = small_model()
    target = Target(model, kernels=forced(wrong))
    assert target.kernels.linears == []
    assert_close(verify(target), verify(Target(model, kernels=None)))
