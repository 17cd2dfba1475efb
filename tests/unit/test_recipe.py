"""Building an untrained drafter for a target of any family."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftwood.train.recipe import Recipe, build_drafter, default_taps, describe
from draftwood.train.target_side import ResponseRow, run_target
from tiny import tiny_model

RECIPE = Recipe(mask_token_id=5, layers=(0, -1), draft_vocab_size=20, block_size=4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_drafter_starts_with_the_targets_layers(family: str) -> None:
    model = tiny_model(family).float().eval()
    vocab = model.config.vocab_size
    taps = (0, 2)
    recipe = Recipe(mask_token_id=5, layers=(0, 3), taps=taps, draft_vocab_size=20)
    row = ResponseRow(tuple(range(6, 16)), 4, "")
    features = run_target(model, row, taps, 0).features
    weights = np.arange(vocab, dtype=float)
    network = build_drafter(model, recipe, weights, features, row.token_ids)
    assert network.target_ids().tolist() == list(range(vocab - 20, vocab))
    # values of the context in the last layer are the target's own for its input, tap 2
    network.fc.weight.data.zero_()
    width = model.config.hidden_size
    network.fc.weight.data[:, width:] = torch.eye(width)
    seen = {}
    attention = model.model.layers[3].self_attn
    attention.v_proj.register_forward_hook(lambda _m, _i, out: seen.update(values=out))
    with torch.no_grad():
        model(torch.tensor([row.token_ids]))
        positions = torch.arange(10)[None]
        values = network.context_kv(features[None], positions)[1][1]
    want = seen["values"].view(10, 2, -1).repeat_interleave(2, dim=1).transpose(0, 1)
    torch.testing.assert_close(values[0], want, atol=1e-4, rtol=1e-4)
    hidden = network(
        network.embed(torch.tensor([[[6, 5, 5, 5]]])),
        torch.tensor([[10]]),
        network.context_kv(features[None], positions),
        positions,
    )
    assert torch.isfinite(network.logits(hidden)).all()


def test_refusals() -> None:
    model = tiny_model("llama")
    weights = np.ones(model.config.vocab_size)
    for recipe, naming in (
        (Recipe(mask_token_id=int(model.config.pad_token_id)), "pad_token_id"),
        (Recipe(mask_token_id=5, layers=(0, 9)), "layer 9"),
        (Recipe(mask_token_id=5, draft_vocab_size=10**6), "1000000"),
    ):
        with pytest.raises(ValueError, match=naming):
            build_drafter(model, recipe, weights, None, None)
    with pytest.raises(ValueError, match="token_weights"):
        build_drafter(model, RECIPE, None, None, None)
    with pytest.raises(ValueError, match="warm=False"):
        build_drafter(tiny_model("phi3"), RECIPE, weights, None, None)
    whole = Recipe(mask_token_id=5, warm=False, draft_vocab_size=None)
    assert build_drafter(tiny_model("phi3"), whole, None, None, None).lm_head is None


def test_default_taps_leave_out_the_last_layer() -> None:
    assert default_taps(30) == (1, 15, 28)
    for count in range(2, 12):
        taps = default_taps(count)
        assert max(taps) < count - 1 or count == 2
        assert len(set(taps)) == len(taps)


def test_description_counts_parameters() -> None:
    model = tiny_model("llama")
    network = build_drafter(model, RECIPE, np.ones(model.config.vocab_size), None, None)
    found = describe(network, blocks=8, head_columns=20)
    assert found["parameters"] == sum(p.numel() for p in network.parameters())
    assert found["flops_per_step"] > 6 * 8 * 4 * found["parameters"] * 0.3
