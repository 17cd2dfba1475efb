"""The independent drafter: its network, its passes, its place in the loop, its branches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from test_enumerate import paths

from draftwood.draft.base import Committed, DraftContext, DraftLimits
from draftwood.draft.branches import BranchDraft
from draftwood.draft.independent import IndependentDrafter
from draftwood.draft.independent_checkpoint import network_from_model
from draftwood.draft.independent_network import IndependentNetwork
from draftwood.engine import Engine
from draftwood.sampling import Sampler, SamplingParams
from draftwood.target.model import Target
from draftwood.tree.budget import Fixed
from draftwood.tree.tree import DraftTree, ScoredPrefixes
from tiny import tiny_model
from tiny_drafter import tiny_independent_network

VOCAB = 61
TOKENS = np.random.default_rng(5).integers(3, VOCAB, size=64).tolist()
LIMITS = DraftLimits(24)
CLOSE = {"rtol": 0.0, "atol": 1e-9}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab=VOCAB), probe=False)


@pytest.fixture(scope="module", params=[0, 6], ids=["alone", "markov"])
def network(target: Target, request: pytest.FixtureRequest) -> IndependentNetwork:
    return tiny_independent_network(target, markov_rank=request.param)


def context(tokens: Sequence[int], *, seq_id: int = 0, max_depth: int = 100) -> DraftContext:
    sampler = Sampler(SamplingParams(), tokens[:1], vocab_size=VOCAB)
    return DraftContext(seq_id, tokens, 1, max_depth, sampler)


def tell(
    drafter: IndependentDrafter, tokens: Sequence[int], *, start: int, seq_id: int = 0
) -> None:
    drafter.observe([Committed(seq_id, start, list(tokens), None, [], 0)])


def fresh(network: IndependentNetwork, target: Target, tokens: Sequence[int]) -> ScoredPrefixes:
    """What a drafter that sees these tokens for the first time proposes."""
    drafter = IndependentDrafter(network, target)
    tell(drafter, tokens[:-1], start=0)
    return drafter.propose([context(tokens)], LIMITS)


def block_rows(network: IndependentNetwork, tokens: Sequence[int]) -> torch.Tensor:
    """[horizon, H] by the training forward: one block at the last token."""
    config = network.config
    block = torch.full((1, 1, config.block_size), config.mask_token_id)
    block[0, 0, 0] = tokens[-1]
    ids, anchor = torch.tensor([list(tokens)]), torch.tensor([[len(tokens) - 1]])
    return network(ids, anchor, block)[1][0, 0]


def block_logits(network: IndependentNetwork, tokens: Sequence[int]) -> torch.Tensor:
    """[horizon, V] of the rows alone."""
    return network.logits(block_rows(network, tokens))


def same(one: ScoredPrefixes, other: ScoredPrefixes) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.parents.tolist() == other.parents.tolist()
    np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-8)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_context_rows_are_the_bodys_own_language_model(family: str) -> None:
    body = tiny_model(family, vocab=VOCAB, use_sliding_window=False, layer_types=None)
    network = network_from_model(body, block_size=4, mask_token_id=0)
    ids = torch.tensor([TOKENS[:20]])
    anchors, blocks = torch.tensor([[3, 9]]), torch.tensor([[[5, 0, 0, 0], [7, 0, 0, 0]]])
    with torch.no_grad():
        context_rows, _ = network(ids, anchors, blocks)
        # transformers rotates and norms in float32 at best
        torch.testing.assert_close(
            network.logits(context_rows), body(ids).logits, rtol=0.0, atol=1e-4
        )


def test_kept_layers_are_copied_in_order(target: Target) -> None:
    body = tiny_model("llama", vocab=VOCAB)
    network = network_from_model(body, block_size=4, mask_token_id=0, layers=[0, -1])
    assert network.config.layers == (0, 3)
    last = body.model.layers[3].mlp.up_proj.weight
    torch.testing.assert_close(network.stack()[1].mlp.up_proj.weight, last, **CLOSE)
    with pytest.raises(ValueError, match="outside the body's 4 layers"):
        network_from_model(body, block_size=4, mask_token_id=0, layers=[4])


def test_many_blocks_at_once_equal_each_alone(network: IndependentNetwork) -> None:
    ids, anchors = torch.tensor([TOKENS[:30], TOKENS[30:60]]), torch.tensor([[2, 9, 28], [0, 5, 6]])
    blocks = torch.zeros(2, 3, network.config.block_size, dtype=torch.int64)
    blocks[..., 0] = ids.gather(1, anchors)
    with torch.no_grad():
        together, packed = network(ids, anchors, blocks)
        for g in range(2):
            for n in range(3):
                one = (slice(g, g + 1), slice(n, n + 1))
                cut = int(anchors[g, n]) + 1  # later tokens must not matter
                _, alone = network(ids[g : g + 1, :cut], anchors[one], blocks[one])
                torch.testing.assert_close(packed[one], alone, **CLOSE)
        without, _ = network(ids, anchors[:, :0], blocks[:, :0])
    torch.testing.assert_close(together, without, **CLOSE)


def test_context_rows_never_see_blocks(network: IndependentNetwork) -> None:
    ids, anchors = torch.tensor([TOKENS[:12]]), torch.tensor([[4]])
    blocks = torch.zeros(1, 1, network.config.block_size, dtype=torch.int64)
    with torch.no_grad():
        first, one = network(ids, anchors, blocks)
        second, other = network(ids, anchors, blocks + 7)
    assert torch.equal(first, second)
    assert not torch.allclose(one, other)


def test_a_block_sees_nothing_from_its_anchor_on(network: IndependentNetwork) -> None:
    ids, anchors = torch.tensor([TOKENS[:12]]), torch.tensor([[4]])
    blocks = torch.zeros(1, 1, network.config.block_size, dtype=torch.int64)
    changed, earlier = ids.clone(), ids.clone()
    changed[0, 4:] = 3
    earlier[0, 3] = (earlier[0, 3] + 1) % VOCAB
    with torch.no_grad():
        _, block = network(ids, anchors, blocks)
        torch.testing.assert_close(network(changed, anchors, blocks)[1], block, **CLOSE)
        assert not torch.allclose(network(earlier, anchors, blocks)[1], block)


def test_decoding_equals_the_training_forward(
    network: IndependentNetwork, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the committed tokens arrive: at once, in chunks, one by one."""
    monkeypatch.setattr("draftwood.draft.independent._CHUNK_LEN", 6)
    drafter = IndependentDrafter(network, target)
    tell(drafter, TOKENS[:19], start=0)
    for length in (20, 21, 24, 24, 40):
        known = drafter._states[0].known
        tell(drafter, TOKENS[known : length - 1], start=known)
        with torch.inference_mode():
            rows = drafter._blocks([context(TOKENS[:length])], drafter.horizon)
            expected = block_logits(network, TOKENS[:length])
        torch.testing.assert_close(network.logits(rows)[0], expected, **CLOSE)
        assert drafter._states[0].cache.length == length - 1


def test_sequences_of_a_batch_do_not_touch_each_other(
    network: IndependentNetwork, target: Target
) -> None:
    drafter = IndependentDrafter(network, target)
    sequences = [TOKENS[:9], TOKENS[20:23], TOKENS[40:41]]
    for seq_id, tokens in enumerate(sequences):
        tell(drafter, tokens[:-1], start=0, seq_id=seq_id)
    batch = drafter.propose([context(t, seq_id=i) for i, t in enumerate(sequences)], LIMITS)
    for row, tokens in enumerate(sequences):
        same(batch.row(row), fresh(network, target, tokens))


def test_truncate_and_release(network: IndependentNetwork, target: Target) -> None:
    drafter = IndependentDrafter(network, target)
    tell(drafter, TOKENS[:20], start=0)
    drafter.propose([context(TOKENS[:21])], LIMITS)
    drafter.truncate(0, 7)
    tell(drafter, TOKENS[30:34], start=7)
    edited = TOKENS[:7] + TOKENS[30:35]
    same(drafter.propose([context(edited)], LIMITS), fresh(network, target, edited))
    drafter.release(0)
    assert not drafter._states


def outcome_tree() -> tuple[DraftTree, np.ndarray]:
    """Two sequences; anchors at roots, inner nodes, siblings and leaves."""
    first = ScoredPrefixes(
        np.array([[11, 12, 13, 14, 15]]), np.array([[-1, 0, -1, 1, 2]]),
        np.array([[1, 2, 1, 3, 2]]), np.zeros((1, 5)), np.array([5]),
    )  # fmt: skip
    second = ScoredPrefixes(
        np.array([[21, 22]]), np.array([[-1, 0]]), np.array([[1, 2]]), np.zeros((1, 2)),
        np.array([2]),
    )  # fmt: skip
    tree = DraftTree.grow([TOKENS[9], TOKENS[25]], ScoredPrefixes.stack([first, second]), [5, 2])
    return tree, np.array([8, 4, 5, 0, 1, 6, 3])


def drafted(network: IndependentNetwork, target: Target) -> tuple[IndependentDrafter, list]:
    drafter = IndependentDrafter(network, target)
    tell(drafter, TOKENS[:9], start=0)
    tell(drafter, TOKENS[20:25], start=0, seq_id=1)
    contexts = [context(TOKENS[:10]), context(TOKENS[20:26], seq_id=1)]
    drafter.propose(contexts[:1], LIMITS)  # the second sequence still has tokens to encode
    tree, anchors = outcome_tree()
    return drafter, drafter.draft_branches(contexts, tree, anchors, num_rows=3)


def test_branches_equal_what_would_be_drafted_after_the_fact(
    network: IndependentNetwork, target: Target
) -> None:
    _, drafts = drafted(network, target)
    assert [draft.token_ids[-1] for draft in drafts] == [22, 14, 15, TOKENS[9], 11, TOKENS[25], 13]
    for draft in drafts:
        before = TOKENS[:9] if draft.seq_id == 0 else TOKENS[20:25]
        expected = block_logits(network, [*before, *draft.token_ids])
        torch.testing.assert_close(network.logits(draft.hidden), expected, **CLOSE)
        torch.testing.assert_close(draft.logits, expected[:3], **CLOSE)


def test_all_branches_are_one_pass_over_what_they_share_and_their_blocks(target: Target) -> None:
    network = tiny_independent_network(target)
    sizes: list[int] = []
    network.stack()[0].register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    drafted(network, target)
    # five tokens that were not encoded yet, six nodes above the seven anchors, the blocks
    assert sizes[1:] == [5 + 6 + 7 * network.config.block_size]


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_a_short_block_is_a_pass_over_fewer_masks(target: Target, depth: int) -> None:
    network = tiny_independent_network(target)
    sizes: list[int] = []
    network.stack()[0].register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    drafter = IndependentDrafter(network, target)
    tell(drafter, TOKENS[:9], start=0)
    scored = drafter.propose([context(TOKENS[:10])], DraftLimits(24, 1, max_depth=depth))
    assert sizes == [9 + depth + 1]
    assert scored.depths[0, : scored.counts[0]].max() == depth
    tell(drafter, [TOKENS[9]], start=9)
    same(drafter.propose([context(TOKENS[:11])], LIMITS), fresh(network, target, TOKENS[:11]))


@pytest.mark.parametrize("which", range(7))
def test_a_hit_is_the_synchronous_draft(
    network: IndependentNetwork, target: Target, which: int
) -> None:
    drafter, drafts = drafted(network, target)
    draft: BranchDraft = drafts[which]
    start = len(TOKENS[:9]) if draft.seq_id == 0 else 5
    tokens = [*(TOKENS[:9] if draft.seq_id == 0 else TOKENS[20:25]), *draft.token_ids]
    tell(drafter, draft.token_ids[:-1], start=start, seq_id=draft.seq_id)
    now = context(tokens, seq_id=draft.seq_id)
    assert draft.serves(now) == 0
    same(drafter.adopt([now], [draft], LIMITS), fresh(network, target, tokens))
    state = drafter._states[draft.seq_id]
    assert state.cache.length == len(tokens) - 1  # the path was not encoded again
    tell(drafter, [tokens[-1]], start=len(tokens) - 1, seq_id=draft.seq_id)
    longer = [*tokens, 33]
    again = drafter.propose([context(longer, seq_id=draft.seq_id)], LIMITS)
    same(again, fresh(network, target, longer))


def test_a_miss_keeps_what_was_encoded(network: IndependentNetwork, target: Target) -> None:
    drafter, drafts = drafted(network, target)
    tell(drafter, [TOKENS[9], 11, 50], start=9)
    tokens = [*TOKENS[:10], 11, 50, 51]
    assert drafter._states[0].cache.length == 11
    assert all(
        draft.serves(context(tokens)) is None for draft in drafts if draft.token_ids[-1] > 11
    )
    same(drafter.propose([context(tokens)], LIMITS), fresh(network, target, tokens))


def test_a_soft_hit_drops_the_rows_that_came_true(
    network: IndependentNetwork, target: Target
) -> None:
    drafter, drafts = drafted(network, target)
    draft = drafts[4]  # anchored at the accepted node 11, the bonus token 50 unknown to it
    tell(drafter, [TOKENS[9], 11], start=9)
    now = context([*TOKENS[:10], 11, 50])
    assert draft.serves(now) == 1
    rows = block_rows(network, [*TOKENS[:10], 11])
    alone = network.logits(rows).log_softmax(-1)
    if network.markov is None:
        scored = drafter.adopt([now], [draft], DraftLimits(7, 1))
        expected = alone[1:].argmax(-1)
        assert scored.token_ids[0, : scored.counts[0]].tolist() == expected.tolist()
    scored = drafter.adopt([now], [draft], DraftLimits(64))  # 64 ≥ VOCAB: all are candidates
    changed = 0
    for path, log_prob in zip(paths(scored, 0), scored.log_probs[0], strict=True):
        known = torch.tensor([50, *path, *[0] * (len(rows) - 1 - len(path))])
        right = alone
        if network.markov is not None:  # the bonus token is known by now, if not to the block
            right = network.logits(network.after(rows, known)).log_softmax(-1)
        want, other = (
            sum(float(table[1 + d, token]) for d, token in enumerate(path))
            for table in (right, alone)
        )
        assert log_prob == pytest.approx(want, abs=1e-6)
        changed += abs(want - other) > 0.05
    assert (changed > 20) == (network.markov is not None)


def test_output_is_the_targets_own_and_ranking_learns(
    network: IndependentNetwork, target: Target
) -> None:
    params = SamplingParams(max_new_tokens=30, temperature=1.0, seed=2)
    prompts = [TOKENS[:12], TOKENS[20:23]]
    drafter = IndependentDrafter(network, target)
    before = drafter._ranking._ranker.weights(1.0, 2, [1])
    outputs = Engine(target, drafter, Fixed(12), prefill_chunk_len=5).generate(prompts, params)
    plain = Engine(target).generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert not np.array_equal(before, drafter._ranking._ranker.weights(1.0, 2, [1]))
    assert not drafter._states


def test_borrowed_tables_are_the_targets(target: Target) -> None:
    network = tiny_independent_network(target, borrows=True)
    assert not any("embed" in name or "head" in name for name in network.state_dict())
    with pytest.raises(ValueError, match="call borrow"):
        block_logits(network, TOKENS[:5])
    drafter = IndependentDrafter(network, target)
    tell(drafter, TOKENS[:4], start=0)
    scored = drafter.propose([context(TOKENS[:5])], LIMITS)
    best = block_logits(network, TOKENS[:5])[0].argmax()
    assert scored.token_ids[0, 0] == int(best)
