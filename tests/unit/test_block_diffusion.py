"""The block-diffusion drafter: its pass, its context, and what it must never do."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from draftwood.draft.base import Committed, DraftContext, DraftLimits
from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.draft.config import FULL, SLIDING
from draftwood.draft.network import DraftNetwork
from draftwood.draft.products import few_rows
from draftwood.draft.rope import RopeConfig
from draftwood.engine import Engine
from draftwood.sampling import Sampler, SamplingParams
from draftwood.target.model import Target
from draftwood.tree.budget import Fixed
from draftwood.tree.tree import DraftTree, ScoredPrefixes
from tiny import tiny_model
from tiny_drafter import tiny_draft_network

TOKENS = torch.randint(2, 90, (60,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("qwen3"), probe=False)


def vary(network: DraftNetwork, **changes: Any) -> DraftNetwork:
    """The same weights under a changed configuration, as far as they exist there."""
    other = DraftNetwork(dataclasses.replace(network.config, **changes)).to(torch.float64).eval()
    torch.manual_seed(5)
    for weight in other.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    other.load_state_dict(network.state_dict(), strict=False)
    return other


def features(target: Target, tokens: Sequence[int], taps: tuple[int, ...]) -> torch.Tensor:
    cache = target.new_cache()
    out = target.forward(DraftTree.chain(tokens), [cache], taps)
    assert out.features is not None
    return out.features


def context(
    tokens: Sequence[int], target: Target, *, seq_id: int = 0, max_depth: int = 99, **params: Any
) -> DraftContext:
    sampler = Sampler(SamplingParams(**params), tokens, vocab_size=target.vocab_size)
    return DraftContext(seq_id, tokens, len(tokens), max_depth, sampler)


def feed(
    drafter: BlockDiffusionDrafter,
    target: Target,
    tokens: Sequence[int],
    *,
    seq_id: int = 0,
    chunks: Sequence[int] = (),
) -> DraftContext:
    """Report all but the last of ``tokens``, cut at ``chunks``; the context to draft from."""
    rows = features(target, tokens[:-1], drafter.taps) if len(tokens) > 1 else None
    cuts = [0, *chunks, len(tokens) - 1]
    for start, end in itertools.pairwise(cuts):
        if end > start and rows is not None:
            part = Committed(seq_id, start, tokens[start:end], rows[start:end], [], 0)
            drafter.observe([part])
    return context(tokens, target, seq_id=seq_id)


def reference(network: DraftNetwork, target: Target, tokens: Sequence[int]) -> torch.Tensor:
    """[B − 1, V] log-marginals by the training forward, all context computed at once."""
    network.borrow(target.input_embeddings(), target.output_embeddings())
    rows = features(target, tokens[:-1], network.config.target_layer_ids)
    positions = torch.arange(len(tokens) - 1)[None]
    kv = network.context_kv(rows[None], positions)
    anchor = torch.tensor(tokens[-1:]), torch.tensor([len(tokens) - 1])
    with torch.no_grad():
        return network.draft(*anchor, kv, positions)[0].log_softmax(-1)


def marginals(drafter: BlockDiffusionDrafter, one: DraftContext) -> torch.Tensor:
    """[horizon, V] log-probabilities, read off the drafter's full-width ranking."""
    drafter.propose([one], DraftLimits(500))
    (ranked,) = drafter._states[one.seq_id].ranked
    found = torch.full((len(ranked.depths), drafter.config.vocab_size), -torch.inf)
    return found.double().scatter(1, ranked.token_ids, ranked.log_probs)


def same(left: ScoredPrefixes, right: ScoredPrefixes) -> bool:
    """Equal up to the rounding of the probabilities."""
    return all(
        np.array_equal(getattr(left, name), getattr(right, name))
        for name in ("token_ids", "parents", "depths", "counts")
    ) and np.allclose(left.log_probs, right.log_probs, atol=1e-5)


def networks(target: Target) -> dict[str, DraftNetwork]:
    base = tiny_draft_network(target, num_layers=3)
    yarn = RopeConfig(777.0, "yarn", {"factor": 4.0, "original_max_position_embeddings": 16.0})
    return {
        "plain": base,
        "causal": vary(base, is_causal=(True, False, True)),
        "sliding": vary(
            base, layer_types=(FULL, SLIDING, SLIDING), sliding_window=6,
            is_causal=(False, True, False),
        ),
        "bias": vary(base, attention_bias=True),
        "rope": vary(base, rope=yarn),
        "scaled": vary(base, embedding_scale=5.6, logit_scale=0.3, logit_softcap=2.0),
        "own": vary(base, own_embeddings=True, own_head=True),
    }  # fmt: skip


KINDS = ("plain", "causal", "sliding", "bias", "rope", "scaled", "own")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [2, 5, 40])
def test_decoding_equals_the_training_forward(target: Target, kind: str, length: int) -> None:
    network = networks(target)[kind]
    drafter = BlockDiffusionDrafter(network, target)
    got = marginals(drafter, feed(drafter, target, TOKENS[:length]))
    assert torch.allclose(got, reference(network, target, TOKENS[:length]), atol=1e-5)


def test_single_precision_stays_within_the_bound(target: Target) -> None:
    small = Target(tiny_model("qwen3", dtype=torch.float32), probe=False)
    network = tiny_draft_network(small, num_layers=3)
    drafter = BlockDiffusionDrafter(network, small)
    got = marginals(drafter, feed(drafter, small, TOKENS[:30]))
    assert torch.allclose(got.float(), reference(network, small, TOKENS[:30]), atol=1e-4)


@pytest.mark.parametrize("kind", ["plain", "sliding"])
@pytest.mark.parametrize("chunks", [(1,), (7, 8, 9), tuple(range(1, 39))])
def test_chunked_prefill_and_plain_cycles_leave_no_holes(
    target: Target, kind: str, chunks: tuple[int, ...]
) -> None:
    drafter = BlockDiffusionDrafter(networks(target)[kind], target)
    whole = feed(drafter, target, TOKENS[:40], seq_id=0)
    parts = feed(drafter, target, TOKENS[:40], seq_id=1, chunks=chunks)
    assert torch.allclose(marginals(drafter, whole), marginals(drafter, parts), atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "sliding"])
def test_drafting_between_commits_changes_nothing(target: Target, kind: str) -> None:
    """The block's own keys and values behind the context never become context."""
    network = networks(target)[kind]
    drafter = BlockDiffusionDrafter(network, target)
    rows = features(target, TOKENS, drafter.taps)
    for end in range(1, 50, 3):
        start = max(0, end - 3)
        drafter.observe([Committed(0, start, TOKENS[start:end], rows[start:end], [], 0)])
        got = marginals(drafter, context(TOKENS[: end + 1], target))
        want = reference(network, target, TOKENS[: end + 1])
        assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "sliding"])
def test_sequences_of_a_batch_draft_as_alone(target: Target, kind: str) -> None:
    drafter = BlockDiffusionDrafter(networks(target)[kind], target)
    prompts = {3: TOKENS[:20], 4: TOKENS[20:23], 5: TOKENS[30:31], 9: TOKENS[25:59]}
    contexts = [feed(drafter, target, p, seq_id=s) for s, p in prompts.items()]
    together = drafter.propose(contexts, DraftLimits(20))
    for row, one in enumerate(contexts):
        assert same(together.row(row), drafter.propose([one], DraftLimits(20)))


def test_features_of_several_sequences_arrive_together(target: Target) -> None:
    drafter = BlockDiffusionDrafter(networks(target)["plain"], target)
    rows = (
        features(target, TOKENS[:12], drafter.taps),
        features(target, TOKENS[20:25], drafter.taps),
    )
    drafter.observe([
        Committed(0, 0, TOKENS[:12], rows[0], [], 0), Committed(1, 0, TOKENS[20:25], rows[1], [], 0)
    ])  # fmt: skip
    alone = BlockDiffusionDrafter(networks(target)["plain"], target)
    one = feed(alone, target, TOKENS[20:26], seq_id=1)
    assert torch.allclose(marginals(drafter, one), marginals(alone, one), atol=1e-5)


def test_little_room_and_small_budgets_do_not_resize_the_block(target: Target) -> None:
    """Near the length limit, depth 1 is still what the first mask row predicts."""
    network = networks(target)["plain"]
    drafter = BlockDiffusionDrafter(network, target)
    one = feed(drafter, target, TOKENS[:20])
    want = reference(network, target, TOKENS[:20])[0].topk(9)
    for max_depth, max_nodes in ((1, 4), (99, 4), (2, 9)):
        near = dataclasses.replace(one, max_depth=max_depth)
        scored = drafter.propose([near], DraftLimits(max_nodes))
        first = scored.depths[0] == 1
        count = int(first.sum())
        assert scored.token_ids[0][first].tolist() == want.indices[:count].tolist()
        assert scored.log_probs[0][first] == pytest.approx(want.values[:count].numpy())
        assert scored.depths.max() <= max_depth
    nothing = drafter.propose([dataclasses.replace(one, max_depth=0)], DraftLimits(4))
    assert nothing.counts.tolist() == [0]


def test_mixed_room_in_one_batch(target: Target) -> None:
    drafter = BlockDiffusionDrafter(networks(target)["plain"], target)
    roomy = feed(drafter, target, TOKENS[:20], seq_id=0)
    tight = dataclasses.replace(feed(drafter, target, TOKENS[:9], seq_id=1), max_depth=1)
    full = dataclasses.replace(feed(drafter, target, TOKENS[:5], seq_id=2), max_depth=0)
    scored = drafter.propose([roomy, tight, full], DraftLimits(12))
    assert scored.depths[1].max() == 1
    assert scored.counts[2] == 0
    assert same(scored.row(0), drafter.propose([roomy], DraftLimits(12)))


def test_the_anchor_matters(target: Target) -> None:
    """Fault 5: its embedding is in slot 0."""
    drafter = BlockDiffusionDrafter(networks(target)["plain"], target)
    one = feed(drafter, target, TOKENS[:20])
    other = dataclasses.replace(one, token_ids=[*TOKENS[:19], (TOKENS[19] + 1) % 90])
    assert not torch.allclose(marginals(drafter, one), marginals(drafter, other), atol=1e-2)


def test_chain_is_the_best_token_of_every_depth(target: Target) -> None:
    network = networks(target)["plain"]
    drafter = BlockDiffusionDrafter(network, target)
    one = feed(drafter, target, TOKENS[:20])
    scored = drafter.propose([one], DraftLimits(7, max_width=1))
    best = reference(network, target, TOKENS[:20]).argmax(-1)
    assert scored.token_ids[0].tolist() == best.tolist()
    assert scored.parents[0].tolist() == list(range(-1, 6))


def test_reduced_draft_vocabulary(target: Target) -> None:
    """Fault 16: columns are draft ids, ``d2t`` turns them into target ids."""
    base = networks(target)["plain"]
    ids = torch.arange(40) * 2 + 5
    network = vary(base, own_head=True, draft_vocab_size=40)
    network.d2t = ids - torch.arange(40)
    drafter = BlockDiffusionDrafter(network, target)
    one = feed(drafter, target, TOKENS[:20])
    scored = drafter.propose([one], DraftLimits(30))
    assert set(scored.token_ids[0].tolist()) <= set(ids.tolist())
    want = reference(network, target, TOKENS[:20])[0].argmax()
    assert scored.token_ids[0, 0] == ids[want]


def test_holes_are_refused(target: Target) -> None:
    drafter = BlockDiffusionDrafter(networks(target)["plain"], target)
    rows = features(target, TOKENS[:9], drafter.taps)
    with pytest.raises(AssertionError, match="never reported"):
        drafter.observe([Committed(0, 3, TOKENS[3:9], rows[3:], [], 0)])
    with pytest.raises(AssertionError, match="committed tokens are known"):
        drafter.propose([context(TOKENS[:5], target)], DraftLimits(4))
    with pytest.raises(AssertionError, match="taps"):
        drafter.observe([Committed(0, 0, TOKENS[:3], None, [], 0)])


def test_nothing_survives_into_the_next_request(target: Target) -> None:
    """Fault 10."""
    drafter = BlockDiffusionDrafter(networks(target)["plain"], target)
    feed(drafter, target, TOKENS[:30])
    drafter.release(0)
    drafter.release(1)
    got = marginals(drafter, feed(drafter, target, TOKENS[30:45]))
    fresh = BlockDiffusionDrafter(networks(target)["plain"], target)
    assert torch.equal(got, marginals(fresh, feed(fresh, target, TOKENS[30:45])))


def test_truncate_then_other_tokens(target: Target) -> None:
    network = networks(target)["plain"]
    drafter = BlockDiffusionDrafter(network, target)
    feed(drafter, target, TOKENS[:30])
    drafter.truncate(0, 10)
    edited = [*TOKENS[:10], *TOKENS[40:55]]
    rows = features(target, edited[:-1], drafter.taps)
    drafter.observe([Committed(0, 10, edited[10:-1], rows[10:], [], 0)])
    got = marginals(drafter, context(edited, target))
    assert torch.allclose(got, reference(network, target, edited), atol=1e-5)


def test_drafter_of_another_target_is_refused(target: Target) -> None:
    network = networks(target)["plain"]
    for wrong in ({"vocab": 120}, {"hidden_size": 48}, {"num_hidden_layers": 3}):
        other = Target(tiny_model("qwen3", **wrong), probe=False)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="drafter trained for this target"):
            BlockDiffusionDrafter(network, other)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 2}])
def test_ranking_learns_while_the_engine_decodes(target: Target, params: dict[str, Any]) -> None:
    drafter = BlockDiffusionDrafter(networks(target)["plain"], target)
    engine = Engine(target, drafter, Fixed(12), prefill_chunk_len=5)
    num_features = 2 if params else 1
    before = drafter._ranking._ranker.weights(params.get("temperature", 0.0), num_features, [1])
    settings = SamplingParams(max_new_tokens=30, **params)
    outputs = engine.generate([TOKENS[:12], TOKENS[20:23]], settings)
    plain = Engine(target).generate([TOKENS[:12], TOKENS[20:23]], settings)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    after = drafter._ranking._ranker.weights(params.get("temperature", 0.0), num_features, [1])
    assert not np.array_equal(before, after)
    assert not drafter._states


def test_context_grows_without_a_copy_per_cycle(target: Target) -> None:
    drafter = BlockDiffusionDrafter(networks(target)["plain"], target)
    rows = features(target, TOKENS, drafter.taps)
    pointers = set()
    for start in range(400):
        at = start % 50
        drafter.observe([Committed(0, start, TOKENS[at : at + 1], rows[at : at + 1], [], 0)])
        tokens = [5] * (start + 2)
        drafter.propose([context(tokens, target)], DraftLimits(4))
        pointers.add(drafter._states[0].cache._buffer.data_ptr())
    assert len(pointers) <= 5
    assert drafter._states[0].cache.capacity <= 2 * (400 + drafter.config.block_size)


@pytest.mark.parametrize("max_nodes", [3, 12, 60])
@pytest.mark.parametrize("sharpness", [0.1, 20.0])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 2}])
def test_deep_rows_are_left_out_only_where_they_cannot_matter(
    target: Target, monkeypatch: pytest.MonkeyPatch, max_nodes: int, sharpness: float, params: Any
) -> None:
    base = tiny_draft_network(target, block_size=12, num_layers=1)
    network = vary(base, logit_scale=sharpness)
    drafter = BlockDiffusionDrafter(network, target)
    feed(drafter, target, TOKENS[:20], seq_id=0)
    feed(drafter, target, TOKENS[5:50], seq_id=1)
    contexts = [
        context(TOKENS[:20], target, seq_id=0, **params),
        context(TOKENS[5:50], target, seq_id=1, max_depth=10, **params),
    ]
    scored = drafter.propose(contexts, DraftLimits(max_nodes))
    num_parts = len(drafter._states[0].ranked)
    monkeypatch.setattr("draftwood.draft.block_ranking._FIRST_DEPTHS", 99)
    assert same(scored, drafter.propose(contexts, DraftLimits(max_nodes)))
    if max_nodes == 12 and not params:
        assert num_parts == (1 if sharpness < 1 else 2)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 15, 16, 31, 33, 70])
def test_few_rows_equals_a_linear_layer(num_rows: int) -> None:
    x, weight = torch.randn(num_rows, 24).double(), torch.randn(50, 24).double()
    assert torch.allclose(few_rows(x, weight), x @ weight.t(), atol=1e-12)
