"""The autoregressive draft model: its tree, its cache, and its vocabulary check."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from draftwood.draft.autoregressive import AutoregressiveDrafter
from draftwood.draft.base import Committed, DraftContext, DraftLimits
from draftwood.engine import Engine
from draftwood.sampling import Sampler, SamplingParams
from draftwood.target.model import Target
from draftwood.tree.budget import Chain, Fixed
from draftwood.tree.tree import ScoredPrefixes
from tiny import tiny_model

TOKENS = torch.randint(2, 90, (60,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def model() -> Target:
    return Target(tiny_model("llama", seed=1), probe=False)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("qwen3"), probe=False)


def context(
    tokens: list[int], *, seq_id: int = 0, max_depth: int = 99, **params: Any
) -> DraftContext:
    sampler = Sampler(SamplingParams(**params), tokens, vocab_size=97)
    return DraftContext(seq_id, tokens, len(tokens), max_depth, sampler)


def feed(drafter: AutoregressiveDrafter, tokens: list[int], seq_id: int = 0) -> DraftContext:
    drafter.observe([Committed(seq_id, 0, tokens[:-1], None, [], 0)])
    return context(tokens, seq_id=seq_id)


def paths(scored: ScoredPrefixes, row: int = 0) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for i in range(int(scored.counts[row])):
        parent = int(scored.parents[row, i])
        above = found[parent] if parent >= 0 else ()
        found.append((*above, int(scored.token_ids[row, i])))
    return found


@torch.no_grad()
def log_prob(model: Target, tokens: list[int], path: tuple[int, ...]) -> float:
    """Log-probability of ``path`` after ``tokens`` by transformers' own forward."""
    scores = model.model(torch.tensor([[*tokens, *path]])).logits[0].log_softmax(-1)
    at = range(len(tokens) - 1, len(tokens) - 1 + len(path))
    return sum(float(scores[i, token]) for i, token in zip(at, path, strict=True))


@pytest.mark.parametrize("expand", [1, 4])
def test_probabilities_are_the_draft_models_own(model: Target, target: Target, expand: int) -> None:
    drafter = AutoregressiveDrafter(model, target, num_passes=4, expand_per_pass=expand)
    scored = drafter.propose([feed(drafter, TOKENS[:20])], DraftLimits(20))
    found = paths(scored)
    assert len(set(found)) == len(found) == 20
    assert (scored.parents[0] < np.arange(20)).all()
    assert (np.diff(scored.log_probs[0]) <= 0).all()
    assert scored.depths[0].tolist() == [len(path) for path in found]
    for path, value in zip(found, scored.log_probs[0], strict=True):
        assert value == pytest.approx(log_prob(model, TOKENS[:20], path), abs=1e-4)


def test_enough_expansions_find_the_exact_best_prefixes(model: Target, target: Target) -> None:
    drafter = AutoregressiveDrafter(model, target, num_passes=3, expand_per_pass=300)
    scored = drafter.propose([feed(drafter, TOKENS[:8])], DraftLimits(40))
    every: dict[tuple[int, ...], float] = {}
    layer: list[tuple[int, ...]] = [()]
    for _ in range(3):
        children = []
        for path in layer:
            with torch.no_grad():
                ids = torch.tensor([[*TOKENS[:8], *path]])
                scores = model.model(ids).logits[0, -1].log_softmax(-1)
            above = every.get(path, 0.0)
            for token, value in enumerate(scores.tolist()):
                every[(*path, token)] = above + value
                children.append((*path, token))
        layer = sorted(children, key=lambda path: -every[path])[:40]
    best = sorted(every, key=lambda path: -every[path])[:40]
    assert set(paths(scored)) == set(best)


@pytest.mark.parametrize("budget", [Chain(), Fixed(9)])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 2}])
def test_cache_stays_that_of_the_committed_tokens(
    model: Target, target: Target, budget: Any, params: dict[str, Any]
) -> None:
    """After many cycles the next proposal equals that of a drafter that starts there."""
    drafter = AutoregressiveDrafter(model, model, num_passes=4)
    engine = Engine(model, drafter, budget, prefill_chunk_len=7)
    settings = SamplingParams(max_new_tokens=25, **params)
    ids = [engine.add(TOKENS[a:b], settings, keep=True) for a, b in ((0, 20), (20, 23))]
    outputs = {}
    while len(outputs) < 2:
        outputs |= {e.seq_id: e.output for e in engine.step() if e.output is not None}
    for seq_id in ids:
        output = outputs[seq_id]
        tokens = [*output.prompt_token_ids, *output.token_ids]
        assert drafter._states[seq_id].known == len(tokens) - 1
        fresh = AutoregressiveDrafter(model, model, num_passes=4)
        one = context(tokens, seq_id=seq_id)
        drafter._ranker._fits.clear()
        got = drafter.propose([one], DraftLimits(12))
        want = fresh.propose([feed(fresh, tokens, seq_id)], DraftLimits(12))
        assert paths(got) == paths(want)
        assert got.log_probs == pytest.approx(want.log_probs, abs=1e-5)


def test_the_target_itself_as_draft_model_is_always_right(model: Target) -> None:
    for params in ({}, {"temperature": 1.0, "seed": 2}):
        drafter = AutoregressiveDrafter(model, model, num_passes=5)
        engine = Engine(model, drafter, Chain())
        settings = SamplingParams(max_new_tokens=24, **params)
        (output,) = engine.generate([TOKENS[:9]], settings)
        assert [cycle.num_committed for cycle in output.cycles] == [6, 6, 6, 6]
        (plain,) = Engine(model).generate([TOKENS[:9]], settings)
        assert output.token_ids == plain.token_ids


def test_accepted_tokens_are_not_computed_again(model: Target) -> None:
    drafter = AutoregressiveDrafter(model, model, num_passes=4)
    tokens = TOKENS[:12]
    scored = drafter.propose([feed(drafter, tokens)], DraftLimits(4, max_width=1))
    path = paths(scored)[-1]
    picks = [*path, 5]
    drafter.observe([Committed(0, 11, [tokens[-1], *path], None, picks, 4)])
    # The last drafted token was never an input of the draft model.
    assert drafter._states[0].cache.length == 12 + 3
    again = drafter.propose([context([*tokens, *picks])], DraftLimits(6))
    fresh = AutoregressiveDrafter(model, model, num_passes=4)
    fresh._ranker = drafter._ranker
    want = fresh.propose([feed(fresh, [*tokens, *picks])], DraftLimits(6))
    assert paths(again) == paths(want)


def test_sequences_of_a_batch_draft_as_alone(model: Target, target: Target) -> None:
    drafter = AutoregressiveDrafter(model, target)
    prompts = {3: TOKENS[:20], 4: TOKENS[20:23], 5: TOKENS[30:31]}
    contexts = [feed(drafter, tokens, seq_id) for seq_id, tokens in prompts.items()]
    contexts.append(context(feed(drafter, TOKENS[:4], 6).token_ids, seq_id=6, max_depth=0))  # type: ignore[arg-type]
    together = drafter.propose(contexts, DraftLimits(15))
    assert together.counts.tolist() == [15, 15, 15, 0]
    for row, one in enumerate(contexts[:3]):
        alone = drafter.propose([one], DraftLimits(15))
        assert paths(together, row) == paths(alone)
        assert together.log_probs[row] == pytest.approx(alone.log_probs[0], abs=1e-5)


def test_limits(model: Target, target: Target) -> None:
    drafter = AutoregressiveDrafter(model, target, num_passes=4)
    one = feed(drafter, TOKENS[:20])
    chain = paths(drafter.propose([one], DraftLimits(8, max_width=1)))
    assert [len(path) for path in chain] == [1, 2, 3, 4]
    for short, long in itertools.pairwise(chain):
        assert long[:-1] == short
    near = context(TOKENS[:20], max_depth=2)
    assert drafter.propose([near], DraftLimits(30)).depths.max() == 2
    assert drafter.propose([one], DraftLimits(3)).counts[0] == 3
    with pytest.raises(ValueError, match="num_passes"):
        AutoregressiveDrafter(model, target, num_passes=0)


def test_chain_is_greedy_decoding_of_the_draft_model(model: Target, target: Target) -> None:
    drafter = AutoregressiveDrafter(model, target, num_passes=5)
    chain = paths(drafter.propose([feed(drafter, TOKENS[:20])], DraftLimits(5, max_width=1)))[-1]
    (own,) = Engine(model).generate([TOKENS[:20]], SamplingParams(max_new_tokens=5))
    assert list(chain) == own.token_ids


def test_a_context_longer_than_the_draft_models_is_decoded_plainly(target: Target) -> None:
    small = Target(tiny_model("llama", max_position_embeddings=24), probe=False)
    drafter = AutoregressiveDrafter(small, target)
    engine = Engine(target, drafter, Fixed(6))
    settings = SamplingParams(max_new_tokens=20)
    (output,) = engine.generate([TOKENS[:12]], settings)
    assert output.token_ids == Engine(target).generate([TOKENS[:12]], settings)[0].token_ids
    assert output.cycles[0].num_drafted > 0
    assert output.cycles[-1].num_drafted == 0


def test_long_prompts_enter_in_chunks(
    model: Target, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = (AutoregressiveDrafter(model, target) for _ in range(2))
    want = whole.propose([feed(whole, TOKENS[:50])], DraftLimits(9))
    monkeypatch.setattr("draftwood.draft.autoregressive._CHUNK_LEN", 8)
    got = parts.propose([feed(parts, TOKENS[:50])], DraftLimits(9))
    assert paths(got) == paths(want)
    assert got.log_probs == pytest.approx(want.log_probs, abs=1e-5)


def test_truncate_release_and_holes(model: Target, target: Target) -> None:
    drafter = AutoregressiveDrafter(model, target)
    drafter.propose([feed(drafter, TOKENS[:30])], DraftLimits(9))
    drafter.truncate(0, 10)
    edited = [*TOKENS[:10], *TOKENS[40:50]]
    drafter.observe([Committed(0, 10, edited[10:-1], None, [], 0)])
    got = drafter.propose([context(edited)], DraftLimits(9))
    fresh = AutoregressiveDrafter(model, target)
    assert paths(got) == paths(fresh.propose([feed(fresh, edited)], DraftLimits(9)))
    with pytest.raises(AssertionError, match="never reported"):
        drafter.observe([Committed(0, 25, [1], None, [], 0)])
    drafter.release(0)
    drafter.release(0)
    assert not drafter._states


class Vocabulary:
    """As much of a tokenizer as is needed here."""

    def __init__(self, tokens: dict[str, int]) -> None:
        self._tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return dict(self._tokens)

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return " ".join(map(str, token_ids))


def test_vocabularies_must_agree(model: Target) -> None:
    wide = Target(tiny_model("llama", vocab=104), probe=False)
    with pytest.raises(ValueError, match="104 tokens, the target 97"):
        AutoregressiveDrafter(wide, model)
    with_tokens = Target(tiny_model("llama"), Vocabulary({"a": 1, "b": 2}), probe=False)
    swapped = Target(tiny_model("llama"), Vocabulary({"a": 2, "b": 1}), probe=False)
    with pytest.raises(ValueError, match="2 tokens: id 1 is 'b' there and 'a' here"):
        AutoregressiveDrafter(swapped, with_tokens)


@pytest.mark.parametrize("padded", ["draft", "target"])
def test_differently_padded_heads_are_fine(padded: str) -> None:
    """Fault 16: padding ids are neither proposed nor looked up out of range."""
    tokens = Vocabulary({"a": 1, "b": 2})
    wide = Target(tiny_model("llama", vocab=104), tokens, probe=False)
    narrow = Target(tiny_model("llama", seed=1), tokens, probe=False)
    draft, target = (wide, narrow) if padded == "draft" else (narrow, wide)
    drafter = AutoregressiveDrafter(draft, target)
    seen: set[int] = set()
    engine = Engine(
        target, drafter, Fixed(12), on_cycle=lambda record: seen.update(record.tree.token_ids)
    )
    settings = SamplingParams(max_new_tokens=30)
    (output,) = engine.generate([TOKENS[:9]], settings)
    assert output.token_ids == Engine(target).generate([TOKENS[:9]], settings)[0].token_ids
    assert max(seen) < target.vocab_size


def test_sampled_drafts_follow_the_requests_noise(model: Target) -> None:
    """A draft model close to the target, at T = 1: ranking by the noise is worth much."""
    near = tiny_model("llama", seed=1)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for weight in near.parameters():
            weight.add_(torch.randn_like(weight) * 0.01)
    settings = [SamplingParams(max_new_tokens=40, temperature=1.0, seed=seed) for seed in range(4)]
    tau = {}
    for use_noise in (True, False):
        drafter = AutoregressiveDrafter(
            Target(near, probe=False), model, num_passes=4, use_noise=use_noise
        )
        engine = Engine(model, drafter, Fixed(6))
        outputs = engine.generate([TOKENS[:9]] * 4, settings)
        tau[use_noise] = np.mean([output.acceptance_length for output in outputs])
    assert tau[True] > 1.3 * tau[False]
    assert math.isfinite(tau[True])
