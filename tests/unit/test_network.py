"""The drafter network: training forward equals inference forward, masks, rope, dtypes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftwood.draft.config import FULL, SLIDING, DraftConfig
from draftwood.draft.layers import project
from draftwood.draft.network import NO_POSITION, DraftNetwork
from draftwood.draft.rope import RopeConfig, rotate

TAPS = 2
HIDDEN = 32
VOCAB = 90


def tiny_config(**changes: object) -> DraftConfig:
    config = DraftConfig(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        block_size=5,
        mask_token_id=7,
        target_layer_ids=(1, 3),
        num_target_layers=4,
        target_hidden_size=HIDDEN,
        rms_norm_eps=1e-5,
        rope=RopeConfig(10_000.0),
        layer_types=(FULL, FULL),
        sliding_window=None,
        is_causal=(False, False),
        attention_bias=False,
        max_position_embeddings=256,
        draft_vocab_size=40,
        own_embeddings=False,
        own_head=True,
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def tiny_network(dtype: torch.dtype = torch.float64, **changes: object) -> DraftNetwork:
    torch.manual_seed(0)
    network = DraftNetwork(tiny_config(**changes))
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.4)
            else:
                parameter.uniform_(0.5, 1.5)
    table = torch.randn(VOCAB, network.config.hidden_size)
    network.borrow(table.to(dtype), table.to(dtype))
    return network.to(dtype)


def features(count: int, dtype: torch.dtype = torch.float64, groups: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(groups, count, TAPS * HIDDEN, generator=generator).to(dtype)


def packed_logits(
    network: DraftNetwork, context: torch.Tensor, anchor: torch.Tensor, first: torch.Tensor
) -> torch.Tensor:
    """All blocks of one response in one call, as training does it."""
    positions = torch.arange(context.shape[1])[None]
    size = network.config.block_size
    blocks = torch.full((1, len(anchor), size), network.config.mask_token_id)
    blocks[0, :, 0] = first
    kv = network.context_kv(context, positions)
    return network.logits(network(network.embed(blocks), anchor[None], kv, positions))[0]


VARIANTS = {
    "full": {},
    "causal": {"is_causal": (True, True)},
    "sliding causal": {
        "layer_types": (SLIDING, FULL),
        "sliding_window": 6,
        "is_causal": (True, False),
    },
    "narrow bidirectional window": {
        "layer_types": (SLIDING, SLIDING),
        "sliding_window": 3,
        "is_causal": (False, False),
    },
    "bias": {"attention_bias": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_training_forward_is_inference_forward(name: str) -> None:
    network = tiny_network(**VARIANTS[name])
    context = features(20)
    anchor = torch.tensor([0, 3, 4, 11, 19])
    first = torch.tensor([1, 2, 3, 4, 5])
    packed = packed_logits(network, context, anchor, first)
    for i, position in enumerate(anchor.tolist()):
        # decoding: the keys and values of committed tokens, appended in two pieces
        cut = position // 2
        where = torch.arange(position)[None]
        early = network.context_kv(context[:, :cut], where[:, :cut])
        late = network.context_kv(context[:, cut:position], where[:, cut:])
        kv = [
            (torch.cat([k0, k1], 2), torch.cat([v0, v1], 2))
            for (k0, v0), (k1, v1) in zip(early, late, strict=True)
        ]
        alone = network.draft(first[i : i + 1], anchor[i : i + 1], kv, where)
        torch.testing.assert_close(packed[i], alone[0], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_a_plain_dense_implementation(name: str) -> None:
    network = tiny_network(**VARIANTS[name])
    context, position = features(9), 9
    with torch.no_grad():
        expected = _dense(network, context[0], 4, position)
        kv = network.context_kv(context, torch.arange(9)[None])
        got = network.draft(torch.tensor([4]), torch.tensor([position]), kv, torch.arange(9)[None])
    torch.testing.assert_close(got[0], expected, atol=1e-9, rtol=1e-9)


def _dense(network: DraftNetwork, context: torch.Tensor, anchor: int, start: int) -> torch.Tensor:
    """The block's logits written out with one explicit mask over [context; block]."""
    config = network.config
    size, heads, dim = config.block_size, config.num_attention_heads, config.head_dim
    ids = torch.tensor([anchor] + [config.mask_token_id] * (size - 1))
    x = network.embed(ids)
    fused = network.hidden_norm(context @ network.fc.weight.t())
    where = torch.arange(start + size)
    frequency = config.rope.theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = where[:, None] * frequency
    for index, layer in enumerate(network.layers):
        attention = layer.self_attn
        rows = torch.cat([fused, layer.input_layernorm(x)])
        q = attention.q_norm(attention.q_proj(rows[start:]).view(size, heads, dim))
        k = attention.k_norm(attention.k_proj(rows).view(len(rows), -1, dim))
        v = attention.v_proj(rows).view(len(rows), -1, dim)
        q = rotate(q, angle[start:, None].cos(), angle[start:, None].sin())
        k = rotate(k, angle[:, None].cos(), angle[:, None].sin())
        k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
        gap = where[start:, None] - where[None, :]
        hidden = torch.zeros_like(gap, dtype=torch.bool)
        if config.is_causal[index]:
            hidden |= gap < 0
        if config.window(index) is not None:
            hidden |= gap.abs() >= config.window(index)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        x = x + attention.o_proj(torch.einsum("hqk,khd->qhd", weights, v).reshape(size, -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return network.logits(network.norm(x[1:]))


def test_ragged_contexts_in_one_call() -> None:
    network = tiny_network()
    long, short = features(12), features(5)
    anchors, positions = torch.tensor([3, 9]), torch.tensor([12, 5])
    padded = torch.zeros(2, 12, TAPS * HIDDEN, dtype=torch.float64)
    padded[0], padded[1, :5] = long[0], short[0]
    keys = torch.arange(12).repeat(2, 1)
    keys[1, 5:] = NO_POSITION
    both = network.draft(anchors, positions, network.context_kv(padded, keys), keys)
    for i, context in enumerate((long, short)):
        where = torch.arange(context.shape[1])[None]
        kv = network.context_kv(context, where)
        alone = network.draft(anchors[i : i + 1], positions[i : i + 1], kv, where)
        torch.testing.assert_close(both[i], alone[0], atol=1e-10, rtol=1e-10)


def test_nothing_at_or_after_the_anchor_is_seen() -> None:
    network = tiny_network()
    context = features(20).requires_grad_()
    anchor = torch.tensor([6, 13])
    logits = packed_logits(network, context, anchor, torch.tensor([1, 2]))
    for i, position in enumerate(anchor.tolist()):
        (gradient,) = torch.autograd.grad(logits[i].square().sum(), context, retain_graph=True)
        assert bool((gradient[0, :position].abs().sum(-1) > 0).all())
        assert bool((gradient[0, position:] == 0).all())


def test_positions_matter() -> None:
    network = tiny_network()
    context, where = features(6), torch.arange(6)[None]
    kv = network.context_kv(context, where)
    near = network.draft(torch.tensor([1]), torch.tensor([6]), kv, where)
    far = network.draft(torch.tensor([1]), torch.tensor([40]), kv, where)
    assert (near - far).abs().max() > 1e-3
    # only differences of positions enter
    shifted = network.context_kv(context, where + 34)
    moved = network.draft(torch.tensor([1]), torch.tensor([40]), shifted, where + 34)
    torch.testing.assert_close(near, moved, atol=1e-9, rtol=1e-9)


def test_reduced_vocabulary_maps_to_target_ids() -> None:
    network = tiny_network()
    chosen = torch.arange(3, 83, 2)
    assert network.d2t is not None
    network.d2t.copy_(chosen - torch.arange(40))
    assert torch.equal(network.target_ids(), chosen)
    whole = tiny_network(draft_vocab_size=None, own_head=False)
    assert whole.target_ids() is None
    assert whole.logits(torch.randn(3, HIDDEN, dtype=torch.float64)).shape == (3, VOCAB)


def test_borrowed_tables_are_required_and_never_saved() -> None:
    network = DraftNetwork(tiny_config(own_head=False, draft_vocab_size=None))
    with pytest.raises(ValueError, match="borrow"):
        network.embed(torch.tensor([1]))
    network.borrow(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN))
    assert network.embed(torch.tensor([1])).shape == (1, HIDDEN)
    names = set(network.state_dict())
    assert not any("embed" in name or "lm_head" in name for name in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_stays_close(dtype: torch.dtype) -> None:
    exact = tiny_network()
    low = tiny_network(dtype)
    where = torch.arange(10)[None]
    args = (torch.tensor([3]), torch.tensor([10]))
    with torch.no_grad():
        want = exact.draft(*args, exact.context_kv(features(10), where), where)
        got = low.draft(*args, low.context_kv(features(10, dtype), where), where)
    assert got.dtype == dtype
    error = (got.double() - want).abs().max() / want.abs().max()
    assert error < (1e-4 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("rows", [1, 2, 8, 33])
def test_project_is_a_linear_map_at_any_size(rows: int) -> None:
    x, weight, bias = torch.randn(rows, 6).double(), torch.randn(4, 6).double(), torch.randn(4)
    with torch.no_grad():
        torch.testing.assert_close(project(x, weight, bias.double()), x @ weight.t() + bias)


def test_rope_kinds() -> None:
    base, scale = RopeConfig(10_000.0).frequencies(8, 64)
    np.testing.assert_allclose(base, 10_000.0 ** (-np.arange(0, 8, 2) / 8))
    assert scale == 1.0
    linear, _ = RopeConfig(10_000.0, "linear", {"factor": 4.0}).frequencies(8, 64)
    torch.testing.assert_close(linear, base / 4)
    with pytest.raises(ValueError, match="dynamic"):
        RopeConfig(1e4, "dynamic", {"factor": 2.0})
    with pytest.raises(ValueError, match="factor"):
        RopeConfig(1e4, "yarn")


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_scaled_rope_agrees_with_transformers(parameters: dict[str, object]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = {**parameters, "rope_theta": 5000.0}
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters=raw,
    )
    module = LlamaRotaryEmbedding(config)
    ours, scale = RopeConfig.from_json({"rope_parameters": raw}).frequencies(32, 256)
    torch.testing.assert_close(ours.float(), module.inv_freq, atol=1e-7, rtol=1e-5)
    assert scale == pytest.approx(module.attention_scaling)
