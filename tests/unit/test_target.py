"""Target: packed trees against the model's own forward along every path, family by family."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from draftwood.engine import Engine
from draftwood.errors import DraftwoodError
from draftwood.sampling import SamplingParams
from draftwood.target import attention
from draftwood.target.attention import NAME, PackedPass
from draftwood.target.cache import KVCache
from draftwood.target.kernels import KernelConfig
from draftwood.target.linear import plain
from draftwood.target.model import Target
from draftwood.target.probe import parity_errors
from draftwood.tree.tree import DraftTree
from tiny import FAMILIES, SLIDING_WINDOW, tiny_model

TAPS = (0, 2, 3)
NUM_LAYERS = 4
# gemma2's own forward rounds its attention weights to fp32, even in an fp64 model.
TOLERANCE = 2e-5


def random_tree(rng: np.random.Generator, size: int, vocab: int = 97) -> DraftTree:
    parents = np.array([-1] + [int(rng.integers(0, node)) for node in range(1, size)])
    depths = np.zeros(size, dtype=np.int64)
    for node in range(1, size):
        depths[node] = depths[parents[node]] + 1
    token_ids = rng.integers(2, vocab, size)
    return DraftTree(token_ids, parents, depths, np.zeros(size, np.int64), np.array([0, size]))


def path_to(tree: DraftTree, node: int) -> list[int]:
    """Packed rows from the first node of its sequence down to ``node``."""
    path = [node]
    while tree.parents[path[-1]] >= 0:
        path.append(int(tree.parents[path[-1]]))
    return path[::-1]


def deepest(tree: DraftTree, index: int) -> list[int]:
    start, end = tree.span(index)
    return path_to(tree, start + int(np.argmax(tree.depths[start:end])))


class Reference:
    """The model's own forward over one sequence of tokens: hidden, logits, raw layer outputs."""

    def __init__(self, model):
        self.model = model

    @torch.no_grad()
    def last_row(self, token_ids):
        raw = {}
        handles = [
            layer.register_forward_hook(lambda _m, _a, out, i=i: raw.__setitem__(i, out[0, -1]))
            for i, layer in enumerate(self.model.model.layers)
        ]
        out = self.model(torch.tensor([token_ids]), use_cache=False, output_hidden_states=True)
        for handle in handles:
            handle.remove()
        features = torch.cat([raw[tap] for tap in TAPS])
        return out.hidden_states[-1][0, -1], out.logits[0, -1], features


def largest_error(target: Target, tree: DraftTree, contexts, output) -> float:
    """Largest absolute difference of any row's hidden state, logits or taps from the model's."""
    reference = Reference(target.model)
    logits = target.logits(output.hidden)
    worst = 0.0
    for node in range(len(tree)):
        tokens = contexts[tree.seq[node]] + tree.token_ids[path_to(tree, node)].tolist()
        ours = output.hidden[node], logits[node], output.features[node]
        for got, want in zip(ours, reference.last_row(tokens), strict=True):
            assert got.shape == want.shape
            worst = max(worst, float((got - want).abs().max()))
    return worst


def two_cycles(target: Target, lengths=(21, 5, 1), sizes=(9, 1, 12), seed=0) -> float:
    """Prefill, verify trees, commit the deepest path of each, verify again; largest error."""
    rng = np.random.default_rng(seed)
    contexts = [rng.integers(2, 97, length).tolist() for length in lengths]
    caches = [target.new_cache() for _ in lengths]
    prefill = DraftTree.pack([DraftTree.chain(ids) for ids in contexts])
    worst = largest_error(target, prefill, [[]] * 3, target.forward(prefill, caches, TAPS))
    for cache, ids in zip(caches, contexts, strict=True):
        cache.commit(np.arange(len(ids)))
    gaps = 0
    for _ in range(2):
        tree = DraftTree.pack([random_tree(rng, size) for size in sizes])
        output = target.forward(tree, caches, TAPS)
        worst = max(worst, largest_error(target, tree, contexts, output))
        for index, cache in enumerate(caches):
            path = deepest(tree, index)
            rows = np.array(path) - tree.span(index)[0]
            gaps += int((rows != np.arange(len(rows))).any())
            cache.commit(rows)
            contexts[index] = contexts[index] + tree.token_ids[path].tolist()
            assert cache.length == len(contexts[index])
    assert gaps >= 2
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_equals_the_models_own_forward_over_its_path(family):
    assert two_cycles(Target(tiny_model(family))) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_the_way_of_other_devices(family, monkeypatch):
    """Grouped heads folded into rows, as on a GPU."""
    monkeypatch.setattr(attention, "shares_masks", lambda device: False)
    assert two_cycles(Target(tiny_model(family))) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_gives_every_token_its_features(family):
    target = Target(tiny_model(family), probe=False)
    token_ids = np.random.default_rng(1).integers(2, 97, 30).tolist()
    whole = target.forward(DraftTree.chain(token_ids), [target.new_cache()], TAPS)
    cache = target.new_cache()
    parts = []
    for start, end in ((0, 11), (11, 12), (12, 30)):
        parts.append(target.forward(DraftTree.chain(token_ids[start:end]), [cache], TAPS))
        cache.commit(np.arange(end - start))
    for name in ("hidden", "features"):
        joined = torch.cat([getattr(part, name) for part in parts])
        assert torch.allclose(joined, getattr(whole, name), atol=TOLERANCE, rtol=0)


def test_taps_are_raw_layer_outputs_in_the_order_asked_for():
    model = tiny_model("llama")
    target = Target(model, probe=False)
    token_ids = [5, 9, 33, 7]
    taps = (3, 0, 2)
    features = target.forward(DraftTree.chain(token_ids), [target.new_cache()], taps).features
    with torch.no_grad():
        states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    last, first, third = features.split(target.hidden_size, dim=-1)
    assert torch.allclose(first, states[1][0], atol=1e-9)
    assert torch.allclose(third, states[3][0], atol=1e-9)
    # hidden_states of the last layer are post-norm; the tap is not.
    assert torch.allclose(model.model.norm(last), states[4][0], atol=1e-9)
    assert not torch.allclose(last, states[4][0], atol=0.1)


def test_window_counts_positions_not_rows():
    """Fault 12: with 14 siblings between them, a deep row still sees its near ancestors."""
    target = Target(tiny_model("mistral"), probe=False)
    context = list(range(10, 10 + SLIDING_WINDOW + 3))
    siblings, depth = 2 * SLIDING_WINDOW, 4
    parents = [-1] + [0] * siblings + [siblings, *range(siblings + 1, siblings + depth)]
    depths = [0] + [1] * siblings + list(range(2, depth + 2))
    size = len(parents)
    tree = DraftTree(
        np.arange(20, 20 + size), np.array(parents), np.array(depths),
        np.zeros(size, np.int64), np.array([0, size]),
    )  # fmt: skip
    cache = target.new_cache()
    target.forward(DraftTree.chain(context), [cache])
    cache.commit(np.arange(len(context)))
    output = target.forward(tree, [cache], TAPS)
    assert largest_error(target, tree, [context], output) < TOLERANCE


@pytest.mark.parametrize("length", [SLIDING_WINDOW - 1, SLIDING_WINDOW, SLIDING_WINDOW + 1])
def test_window_edge(length):
    target = Target(tiny_model("mistral"), probe=False)
    context = list(range(10, 10 + length))
    tree = random_tree(np.random.default_rng(0), 6)
    cache = target.new_cache()
    target.forward(DraftTree.chain(context), [cache])
    cache.commit(np.arange(length))
    output = target.forward(tree, [cache], TAPS)
    assert largest_error(target, tree, [context], output) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_sequences_of_a_batch_do_not_touch_each_other(family):
    """Fault 11: a row gets the same result alone and beside any other sequences."""
    target = Target(tiny_model(family), probe=False)
    rng = np.random.default_rng(3)
    contexts = [rng.integers(2, 97, length).tolist() for length in (30, 2, 13)]
    trees = [random_tree(rng, size) for size in (5, 8, 1)]

    def run(indices):
        caches = [target.new_cache() for _ in indices]
        target.forward(DraftTree.pack([DraftTree.chain(contexts[i]) for i in indices]), caches)
        for cache, i in zip(caches, indices, strict=True):
            cache.commit(np.arange(len(contexts[i])))
        packed = DraftTree.pack([trees[i] for i in indices])
        hidden = target.forward(packed, caches).hidden
        return {i: hidden[slice(*packed.span(s))] for s, i in enumerate(indices)}

    together = run([0, 1, 2])
    for i in range(3):
        assert torch.allclose(run([i])[i], together[i], atol=TOLERANCE, rtol=0)


def test_a_dropped_window_and_a_truncation_leave_no_trace():
    target = Target(tiny_model("qwen3"), probe=False)
    rng = np.random.default_rng(5)
    context = rng.integers(2, 97, 20).tolist()
    cache = target.new_cache()
    target.forward(DraftTree.chain([*context[:12], 3, 4, 5]), [cache])
    cache.commit(np.arange(15))
    cache.truncate(12)
    target.forward(random_tree(rng, 10), [cache])  # never committed
    target.forward(DraftTree.chain(context[12:]), [cache])
    cache.commit(np.arange(8))
    tree = random_tree(rng, 7)
    assert largest_error(target, tree, [context], target.forward(tree, [cache], TAPS)) < TOLERANCE


class TestUsersModel:
    """The model stays the user's."""

    @pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
    def test_generates_as_before(self, family):
        model = tiny_model(family)
        inputs = {
            "input_ids": torch.tensor([[0, 0, 0, 5, 6, 7], [8, 9, 10, 11, 12, 13]]),
            "attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6]),
        }

        def generate():
            return model.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)

        before, implementation = generate(), model.config._attn_implementation
        target = Target(model)
        assert torch.equal(generate(), before)
        target.forward(DraftTree.chain([5, 6, 7]), [target.new_cache()], TAPS)
        assert torch.equal(generate(), before)
        assert model.config._attn_implementation == implementation

    def test_gets_its_attention_back_after_an_error(self):
        model = tiny_model("llama")
        target = Target(model, probe=False)
        with pytest.raises(IndexError):
            target.forward(DraftTree.chain([5, 10_000]), [target.new_cache()])
        assert model.config._attn_implementation == "sdpa"
        assert not any(layer._forward_hooks for layer in model.model.layers)
        assert not parity_errors(target).gt(1e-6).any()

    def test_can_still_be_copied(self):
        model = tiny_model("llama")
        Target(model)
        copy.deepcopy(model)

    def test_cannot_run_through_our_attention_without_a_tree(self):
        model = tiny_model("llama", attn_implementation=None)
        attention.register_attention()
        model.set_attn_implementation(NAME)
        with pytest.raises(DraftwoodError):
            model(torch.tensor([[1, 2, 3]]))


class TestFacts:
    def test_sizes(self):
        target = Target(tiny_model("qwen2", eos_token_id=7), probe=False)
        assert (target.vocab_size, target.hidden_size, target.num_layers) == (97, 32, NUM_LAYERS)
        assert (target.max_len, target.eos_token_ids) == (512, (7,))
        assert (target.dtype, target.device) == (torch.float64, torch.device("cpu"))
        assert target.input_embeddings().shape == target.output_embeddings().shape == (97, 32)

    def test_eos_ids_are_those_of_generate(self):
        model = tiny_model("llama", eos_token_id=7)
        model.generation_config.eos_token_id = [3, 9]
        assert Target(model, probe=False).eos_token_ids == (3, 9)

    def test_no_eos(self):
        assert Target(tiny_model("llama"), probe=False).eos_token_ids == ()

    def test_longrope_is_limited_to_the_length_with_constant_factors(self):
        factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
        rope = {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 64,
            **factors,
        }
        model = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=64)
        target = Target(model)
        assert target.max_len == 64
        cache = target.new_cache()
        target.forward(DraftTree.chain(list(range(2, 66))), [cache])
        cache.commit(np.arange(64))
        with pytest.raises(ValueError, match="64"):
            target.forward(DraftTree.chain([5]), [cache])

    def test_dynamic_ntk_is_limited(self):
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
        assert Target(tiny_model("llama", rope_parameters=rope)).max_len <= 512

    @pytest.mark.parametrize("taps", [(-1,), (NUM_LAYERS,)])
    def test_tap_out_of_range(self, taps):
        target = Target(tiny_model("llama"), probe=False)
        with pytest.raises(ValueError, match="taps"):
            target.forward(DraftTree.chain([5]), [target.new_cache()], taps)


class TestLogits:
    def test_granite_divides(self):
        from transformers import GraniteConfig, GraniteForCausalLM

        check_head(GraniteForCausalLM, GraniteConfig, logits_scaling=3.0, embedding_multiplier=2.0)

    def test_cohere_multiplies(self):
        from transformers import CohereConfig, CohereForCausalLM

        check_head(CohereForCausalLM, CohereConfig, logit_scale=0.25)


SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def check_head(model_class, config_class, **extra):
    """The probe compares logits, so that it passes only with the right scaling."""
    model = model_class(config_class(**SMALL, **extra)).double().eval()
    target = Target(model)
    target._transform_logits = lambda logits: logits
    assert parity_errors(target).min() > 0.1


class TestRefused:
    def refuse(self, model, match):
        with pytest.raises(ValueError, match=match):
            Target(model)

    def test_training_mode(self):
        self.refuse(tiny_model("llama").train(), "eval")

    def test_encoder_decoder(self):
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=50)
        self.refuse(T5ForConditionalGeneration(config).eval(), "encoder-decoder")

    def test_recurrent(self):
        from transformers import MambaConfig, MambaForCausalLM

        config = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4)
        self.refuse(MambaForCausalLM(config).eval(), "recurrent")

    def test_hybrid(self):
        from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

        config = Qwen3NextConfig(
            **SMALL, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
            shared_expert_intermediate_size=8, linear_num_key_heads=2, linear_num_value_heads=2,
            linear_key_head_dim=8, linear_value_head_dim=8, head_dim=8,
            layer_types=["linear_attention", "full_attention"],
        )  # fmt: skip
        self.refuse(Qwen3NextForCausalLM(config).eval(), "linear_attention|recurrent")

    def test_chunked(self):
        model = tiny_model("llama")
        model.config.layer_types = ["chunked_attention"] * NUM_LAYERS
        self.refuse(model, "chunked_attention")

    def test_unknown_layer_type(self):
        model = tiny_model("llama")
        model.config.layer_types = ["full_attention", "hologram"]
        self.refuse(model, "hologram")

    def test_bidirectional(self):
        self.refuse(tiny_model("gemma3", use_bidirectional_attention=True), "bidirectional")

    def test_shared_keys_and_values(self):
        model = tiny_model("llama")
        model.config.num_kv_shared_layers = 2
        self.refuse(model, "share")

    def test_attention_of_its_own(self):
        from transformers import BloomConfig, BloomForCausalLM

        config = BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2)
        self.refuse(BloomForCausalLM(config).eval(), "attention cannot be replaced")

    def test_layers_that_swallow_keyword_arguments(self):
        from transformers import StableLmConfig, StableLmForCausalLM

        self.refuse(StableLmForCausalLM(StableLmConfig(**SMALL)).eval(), "keyword arguments")

    def test_no_head(self):
        self.refuse(tiny_model("llama").model, "head")

    def test_what_the_probe_finds(self, monkeypatch):
        """A model that treats rows by their place in the input, which only the probe can see."""
        model = tiny_model("llama")
        forward = model.model.layers[1].forward

        def placed(hidden_states, **kwargs):
            place = torch.arange(hidden_states.shape[1])[None, :, None]
            return forward(hidden_states * (1 + 0.1 * place), **kwargs)

        monkeypatch.setattr(model.model.layers[1], "forward", placed)
        self.refuse(model, "differ")


class TestTheTestsHavePower:
    """Each part broken on purpose: the comparison above must fail, and so must the probe."""

    @pytest.fixture
    def target(self):
        return Target(tiny_model("mistral"), probe=False)

    def assert_seen(self, target, probe=True):
        assert two_cycles(target) > 1e-2
        if probe:
            assert parity_errors(target).max() > 1e-2

    def test_mask_of_a_chain(self, target, monkeypatch):
        monkeypatch.setattr(
            DraftTree, "ancestor_mask",
            lambda tree, index: np.tri(np.diff(tree.span(index))[0], dtype=bool),
        )  # fmt: skip
        self.assert_seen(target)

    def test_position_by_row(self, target, monkeypatch):
        original = PackedPass.__init__

        def by_row(self, tree, caches):
            original(self, tree, caches)
            rows = np.arange(len(tree)) - tree.starts[tree.seq]
            self.positions = self.positions - tree.depths + rows

        monkeypatch.setattr(PackedPass, "__init__", by_row)
        self.assert_seen(target)

    @pytest.mark.parametrize("window", [None, SLIDING_WINDOW - 1, SLIDING_WINDOW + 1])
    def test_window(self, target, monkeypatch, window):
        original = PackedPass.views
        monkeypatch.setattr(
            PackedPass, "views", lambda self, _, *rest: original(self, window, *rest)
        )
        self.assert_seen(target)

    def test_window_by_row(self, target, monkeypatch):
        original = PackedPass.visible

        def by_row(self, index, window, first_key):
            depths = self.positions
            rows = np.arange(len(self.tree)) - self.tree.starts[self.tree.seq]
            self.positions = self.positions - self.tree.depths + rows
            seen = original(self, index, window, first_key)
            self.positions = depths
            return seen

        monkeypatch.setattr(PackedPass, "visible", by_row)
        self.assert_seen(target, probe=False)

    def test_commit_of_the_first_rows(self, target, monkeypatch):
        original = KVCache.commit
        monkeypatch.setattr(
            KVCache, "commit", lambda self, rows: original(self, np.arange(len(rows)))
        )
        self.assert_seen(target)

    def test_last_committed_row_unseen(self, target, monkeypatch):
        original = PackedPass.visible

        def skip_first(self, index, window, first_key):
            seen = original(self, index, window, first_key).copy()
            if self.caches[index].length > first_key:
                seen[:, self.caches[index].length - first_key - 1] = False
            return seen

        monkeypatch.setattr(PackedPass, "visible", skip_first)
        self.assert_seen(target)


class TestLowPrecision:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_rounding_is_no_reason_to_refuse(self, family, dtype):
        Target(tiny_model(family, dtype=dtype))

    def test_a_fault_is(self, monkeypatch):
        original = KVCache.commit
        monkeypatch.setattr(
            KVCache, "commit", lambda self, rows: original(self, np.arange(len(rows)))
        )
        with pytest.raises(ValueError, match="differ"):
            Target(tiny_model("llama", dtype=torch.bfloat16))


def test_loads_through_auto_classes(tmp_path):
    tiny_model("qwen3", dtype=torch.float32).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert two_cycles(Target(model)) < 1e-3


def test_targets_of_one_model_take_turns() -> None:
    model = tiny_model("llama")
    before = model.config._attn_implementation
    prompt = torch.tensor([[5, 9, 11, 3]])
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, 4:].tolist()
    found: list[object] = []

    def decode() -> None:
        for _ in range(4):
            try:
                engine = Engine(Target(model), None)
                (out,) = engine.generate(prompt[0].tolist(), SamplingParams(max_new_tokens=8))
                found.append(out.token_ids)
            except Exception as error:
                found.append(error)

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 16
    assert model.config._attn_implementation == before


def test_a_target_knows_when_its_model_has_changed() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    target = Target(model, kernels=KernelConfig(candidates=(plain,)), probe=False)
    with torch.no_grad():
        assert target.is_current()
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
        assert not target.is_current()
        other = Target(model, probe=False)
        assert other.is_current()
        model.resize_token_embeddings(target.vocab_size + 3)
        assert not other.is_current()
