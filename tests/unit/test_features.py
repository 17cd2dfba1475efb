"""The target's side of training: taps, top-k, the store on disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftwood.train.features import FeatureStore, StoreSource
from draftwood.train.target_side import (
    LiveSource,
    ResponseRow,
    build_store,
    read_rows,
    run_target,
    split_rows,
)

TAPS = (0, 2)
HIDDEN = 16


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


def rows(count: int = 5) -> list[ResponseRow]:
    rng = np.random.default_rng(1)
    return [
        ResponseRow(tuple(rng.integers(3, 50, 8 + i).tolist()), 4, "ab"[i % 2])
        for i in range(count)
    ]


def test_taps_are_raw_layer_outputs(model: LlamaForCausalLM) -> None:
    row = rows()[0]
    got = run_target(model, row, TAPS, top_k=4)
    with torch.no_grad():
        out = model(torch.tensor([row.token_ids]), output_hidden_states=True)
    torch.testing.assert_close(got.features[:, :HIDDEN], out.hidden_states[1][0])
    # the last layer: hidden_states holds it after the final norm, the tap before
    last = model.model.norm(got.features[:, HIDDEN:])
    torch.testing.assert_close(last, out.hidden_states[3][0])
    assert not torch.allclose(got.features[:, HIDDEN:], out.hidden_states[3][0])
    assert got.top_log_probs is not None
    assert got.top_ids is not None
    want = out.logits[0].log_softmax(-1).topk(4)
    torch.testing.assert_close(got.top_log_probs[3:], want.values[3:])
    assert torch.equal(got.top_ids[3:], want.indices[3:])
    assert torch.isinf(got.top_log_probs[:3]).all()
    with pytest.raises(ValueError, match="tap 3"):
        run_target(model, row, (3,), 0)


def test_store_holds_what_the_target_says(model: LlamaForCausalLM, tmp_path: Path) -> None:
    assert build_store(tmp_path, rows(), model, TAPS, top_k=4) == 5
    store = FeatureStore(tmp_path, (2, 0))
    live = LiveSource(rows(), model, (2, 0), 4)
    for i in range(5):
        got, want = store.example(i), live.example(i)
        assert got.token_ids.tolist() == want.token_ids.tolist()
        assert (got.response_start, got.domain) == (want.response_start, want.domain)
        torch.testing.assert_close(got.features.float(), want.features, atol=0.02, rtol=2e-3)
        assert got.top_ids is not None
        assert want.top_ids is not None
        assert torch.equal(got.top_ids.long()[3:], want.top_ids[3:])
        assert live.num_anchors(i) == got.num_anchors
    with pytest.raises(ValueError, match=r"\[1\]"):
        FeatureStore(tmp_path, (0, 1))
    with pytest.raises(ValueError, match="no feature store"):
        FeatureStore(tmp_path / "none", (0,))
    with pytest.raises(ValueError, match="another folder"):
        build_store(tmp_path, rows(), model, TAPS, top_k=2)


def test_interrupted_build_continues(model: LlamaForCausalLM, tmp_path: Path) -> None:
    def stopping() -> object:
        yield from rows()[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_store(tmp_path, stopping(), model, TAPS, top_k=4)  # type: ignore[arg-type]
    # as a kill in the middle of a row would leave it
    with (tmp_path / "features.f16").open("ab") as handle:
        handle.write(b"half a row")
    with (tmp_path / "index.jsonl").open("a") as handle:
        handle.write('{"key": "half')
    assert len(FeatureStore(tmp_path, TAPS)) == 2
    assert build_store(tmp_path, rows(), model, TAPS, top_k=4) == 3
    store = FeatureStore(tmp_path, TAPS)
    want = run_target(model, rows()[4], TAPS, 4).features
    torch.testing.assert_close(store.example(4).features.float(), want, atol=0.02, rtol=2e-3)


def test_split_is_by_prompt_and_stable(model: LlamaForCausalLM, tmp_path: Path) -> None:
    many = [ResponseRow((i, 5, 6, 7 + i % 3), 2, "") for i in range(3, 49)]
    twice = [ResponseRow((*row.token_ids, 9), 2, "") for row in many]
    train, held = split_rows([*many, *twice, *many], percent=30.0)
    assert len(train) + len(held) == 92
    assert not {r.prompt_key for r in train} & {r.prompt_key for r in held}
    assert held
    build_store(tmp_path, many[:10], model, TAPS, top_k=0)
    source = StoreSource(tmp_path, TAPS, held_out=False, percent=30.0)
    other = StoreSource(tmp_path, TAPS, held_out=True, percent=30.0)
    names = [source.name(i) for i in range(len(source))]
    assert len(source) + len(other) == 10
    assert set(names) <= {r.key for r in train}
    build_store(tmp_path, many, model, TAPS, top_k=0)
    source.refresh()
    assert [source.name(i) for i in range(len(names))] == names
    assert len(source) > len(names)


def test_token_weights_count_responses_prompts_and_the_targets_mass(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    row = ResponseRow((3, 4, 5, 6, 6), 3, "")
    build_store(tmp_path / "a", [row], model, TAPS, top_k=0)
    weights = FeatureStore(tmp_path / "a", TAPS).token_weights(50, prompt_share=0.5)
    assert weights[[3, 5, 6, 7]].tolist() == [0.5, 0.5, 2.0, 0.0]
    build_store(tmp_path / "b", [row], model, TAPS, top_k=50)
    more = FeatureStore(tmp_path / "b", TAPS).token_weights(50, prompt_share=0.5) - weights
    assert more.sum() == pytest.approx(3.0, abs=0.01)  # three predicting positions


def test_rows_are_read_strictly(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    good = json.dumps({"token_ids": [1, 2, 3], "response_start": 1, "domain": "math", "x": 0})
    file.write_text(good + "\n" + good[:20])
    assert list(read_rows([file])) == [ResponseRow((1, 2, 3), 1, "math")]
    file.write_text('{"token_ids": [1, 2]}\n')
    with pytest.raises(ValueError, match="response_start"):
        list(read_rows([file]))
    file.write_text('{"token_ids": [1, 2], "response_start": 5}\n')
    with pytest.raises(ValueError, match="5"):
        list(read_rows([file]))
