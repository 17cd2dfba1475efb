"""Anchors, packed batches, losses and data order: nothing leaks, nothing is off by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_network import HIDDEN, TAPS, tiny_network

from draftwood.draft.network import NO_POSITION
from draftwood.train.accepted import accepted_lengths
from draftwood.train.anchors import (
    BlockBatch,
    Example,
    anchor_range,
    choose_anchors,
    make_batch,
)
from draftwood.train.loss import UNKNOWN, LossConfig, block_loss, inverse_map
from draftwood.train.objective import BlockObjective, HeadSample, sample_head
from draftwood.train.order import plan_epoch
from draftwood.train.schedule import Schedule

MASK = 7
BLOCK = 5


def example(length: int, start: int, seed: int = 0, top_k: int = 3) -> Example:
    rng = np.random.default_rng([seed, length])
    tokens = rng.integers(10, 90, length)
    scores = torch.from_numpy(rng.normal(size=(length, top_k)))
    ids = np.stack([rng.permutation(90)[:top_k] for _ in range(length)])
    values = torch.from_numpy(rng.normal(size=(length, TAPS * HIDDEN)))
    return Example(tokens, start, values, torch.from_numpy(ids), scores.log_softmax(-1) - 0.1)


def batch_of(*pairs: tuple[Example, list[int]], block_size: int = BLOCK) -> BlockBatch:
    return make_batch(
        [e for e, _ in pairs],
        [np.array(a) for _, a in pairs],
        block_size=block_size,
        mask_token_id=MASK,
    )


@given(st.integers(0, 12), st.integers(2, 30), st.integers(0, 99))
def test_anchors_are_distinct_and_can_predict_something(start: int, length: int, seed: int) -> None:
    first, count = anchor_range(start, length)
    if count == 0:
        return
    rng = np.random.default_rng(seed)
    chosen = choose_anchors(rng, start, length, min(count, 5))
    assert len(set(chosen.tolist())) == min(count, 5)
    # the label of an anchor is a response token that exists
    assert chosen.min() + 1 >= start
    assert chosen.max() + 1 < length
    assert set(choose_anchors(rng, start, length, count)) == set(range(first, first + count))


def test_batch_contents() -> None:
    long, short = example(20, 6), example(9, 4, seed=1)
    batch = batch_of((long, [5, 17]), (short, [3, 6]))
    assert batch.block_ids.tolist() == [
        [[long.token_ids[5], *[MASK] * 4], [long.token_ids[17], *[MASK] * 4]],
        [[short.token_ids[3], *[MASK] * 4], [short.token_ids[6], *[MASK] * 4]],
    ]
    # row j asks for the token j after the anchor
    assert batch.labels[0, 0].tolist() == long.token_ids[6:10].tolist()
    assert batch.labels[0, 1].tolist() == [long.token_ids[18], long.token_ids[19], 0, 0]
    assert batch.valid[0, 1].tolist() == [True, True, False, False]
    assert batch.valid[1, 1].tolist() == [True, True, False, False]
    # context ends before the last anchor and is padded to the longest group
    assert batch.key_positions[0].tolist() == list(range(17))
    assert batch.key_positions[1].tolist() == [*range(6), *[NO_POSITION] * 11]
    assert torch.equal(batch.features[0], long.features[:17])
    assert not batch.features[1, 6:].any()
    # the target's distribution for a label was computed at the position before it
    assert long.top_ids is not None
    assert batch.top_ids is not None
    assert torch.equal(batch.top_ids[0, 0], long.top_ids[5:9])


def test_a_context_filled_up_changes_nothing() -> None:
    items, anchors = [example(20, 6), example(9, 4, seed=1)], [np.array([5, 17]), np.array([3, 6])]
    objective = BlockObjective(tiny_network(), LossConfig(distill=0.5))
    exact, filled = (
        make_batch(items, anchors, block_size=BLOCK, mask_token_id=MASK, fill_up=up)
        for up in (False, True)
    )
    assert (exact.features.shape[1], filled.features.shape[1]) == (17, 32)
    for got, want in zip(objective(filled, None), objective(exact, None), strict=True):
        torch.testing.assert_close(got, want)


def test_rows_of_a_sampled_head_are_filled_up_with_ruled_out_ones() -> None:
    head = HeadSample(torch.tensor([3, 1]), torch.tensor([0.0, 0.5]), torch.zeros(5))
    table = torch.arange(10.0).view(5, 2)
    rows, offsets = head.rows(table)
    assert rows.shape == (32, 2)
    assert torch.equal(rows[:2], table[[3, 1]])
    assert offsets[:2].tolist() == [0.0, 0.5]
    assert (offsets[2:] == float("-inf")).all()


def test_prompt_and_padding_are_never_in_the_loss() -> None:
    # an anchor deep inside the prompt would ask for prompt tokens: those rows must not count
    batch = batch_of((example(20, 10), [4, 7]))
    assert batch.valid[0].tolist() == [[False] * 4, [False, False, True, True]]
    network = tiny_network()
    objective = BlockObjective(network, LossConfig())
    total, *_ = objective(batch, None)
    row = torch.randn(1, 2, 4, 40, dtype=torch.float64)
    before = block_loss(row, batch, objective.to_draft, LossConfig()).total
    row[~batch.valid] = float("nan")
    after = block_loss(row, batch, objective.to_draft, LossConfig()).total
    assert torch.isfinite(total)
    assert torch.equal(before, after)


def block_logits(item: Example, anchors: list[int]) -> torch.Tensor:
    network = tiny_network()
    batch = batch_of((item, anchors))
    kv = network.context_kv(batch.features, batch.key_positions)
    hidden = network(
        network.embed(batch.block_ids), batch.anchor_positions, kv, batch.key_positions
    )
    return network.logits(hidden)[0]


def test_overlapping_blocks_do_not_leak() -> None:
    item = example(24, 5)
    anchors = [6, 8, 9, 15]
    before = block_logits(item, anchors)
    for change in range(7, 24):
        tokens, values = item.token_ids.copy(), item.features.clone()
        tokens[change] = 11 if tokens[change] != 11 else 12
        values[change] += 1.0
        after = block_logits(Example(tokens, 5, values), anchors)
        for i, anchor in enumerate(anchors):
            same = torch.equal(before[i], after[i])
            assert same == (change > anchor), (change, anchor)


def test_loss_is_the_weighted_cross_entropy() -> None:
    batch = batch_of((example(20, 6), [6, 17]))
    logits = torch.randn(1, 2, 4, 90, dtype=torch.float64)
    terms = block_loss(logits, batch, None, LossConfig(gamma=2.0))
    log_probs = logits.log_softmax(-1)
    total = weight = 0.0
    for b in range(2):
        for j in range(4):
            if batch.valid[0, b, j]:
                w = float(np.exp(-j / 2.0))
                total -= w * float(log_probs[0, b, j, batch.labels[0, b, j]])
                weight += w
    assert float(terms.total) == pytest.approx(total)
    assert float(terms.weight) == pytest.approx(weight)
    assert terms.counted.tolist() == [2, 2, 1, 1]


def test_distillation_mixes_in_the_targets_distribution() -> None:
    batch = batch_of((example(20, 6), [6]))
    logits = torch.randn(1, 1, 4, 90, dtype=torch.float64)
    assert batch.top_ids is not None
    assert batch.top_log_probs is not None
    probs = batch.top_log_probs.double().softmax(-1)
    want = torch.zeros_like(logits).scatter_(-1, batch.top_ids, probs)
    hard = torch.nn.functional.one_hot(batch.labels, 90).double()
    soft = 0.3 * hard + 0.7 * want
    config = LossConfig(gamma=3.0, distill=0.7)
    decay = torch.exp(-torch.arange(4) / 3.0)
    expected = -((soft * logits.log_softmax(-1)).sum(-1)[0, 0] * decay).sum()
    assert float(block_loss(logits, batch, None, config).total) == pytest.approx(float(expected))


def test_tree_term_counts_the_prefixes_left_out() -> None:
    batch = batch_of((example(20, 6), [6, 17]))
    logits = (2 * torch.randn(1, 2, 4, 90, dtype=torch.float64)).requires_grad_()
    sharp = LossConfig(tree=1.0, tree_budget=30, tree_softness=1e-6)
    plain = block_loss(logits, batch, None, LossConfig()).total
    term = block_loss(logits, batch, None, sharp).total - plain
    labels = batch.labels.masked_fill(~batch.valid, -1)[0]
    found = accepted_lengths(logits[0].detach().log_softmax(-1), labels, [30])[30]
    assert float(term.detach()) == pytest.approx(6 - found.sum(), abs=1e-6)
    soft = LossConfig(tree=1.0, tree_budget=30, tree_softness=2.0)
    block_loss(logits, batch, None, soft).total.backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[~batch.valid].any()


def test_labels_outside_the_draft_vocabulary_carry_no_loss_but_count_as_wrong() -> None:
    item = example(12, 3)
    batch = batch_of((item, [4]))
    kept = torch.tensor(sorted(set(range(90)) - {int(item.token_ids[5])}))
    table = inverse_map(kept, 90)
    logits = torch.randn(1, 1, 4, 89, dtype=torch.float64)
    terms = block_loss(logits, batch, table, LossConfig(gamma=2.0))
    assert float(terms.weight) == pytest.approx(sum(np.exp(-j / 2.0) for j in (1, 2, 3)))
    assert terms.counted.tolist() == [1, 1, 1, 1]
    assert terms.correct[0] == 0
    logits[..., 0, :] = 0.0
    assert float(terms.total) == pytest.approx(
        float(block_loss(logits, batch, table, LossConfig(gamma=2.0)).total)
    )
    assert table is not None
    assert table[int(item.token_ids[5])] == UNKNOWN


@pytest.mark.parametrize("distill", [0.0, 0.6])
def test_sampled_head_is_exact_with_all_columns_and_close_with_some(distill: float) -> None:
    network = tiny_network()
    assert network.d2t is not None
    network.d2t.copy_(torch.arange(40) + 10)  # draft id i is target id 2i + 10
    objective = BlockObjective(network, LossConfig(distill=distill))
    batch = batch_of((example(30, 3), [5, 9, 20]), (example(25, 3, seed=2), [4, 8, 12]))
    exact = objective(batch, None)
    rng = np.random.default_rng(0)
    every = sample_head(batch, objective.to_draft, 40, 40, rng)
    for got, want in zip(objective(batch, every), exact, strict=True):
        torch.testing.assert_close(got, want)
    losses = []
    for _ in range(200):
        some = sample_head(batch, objective.to_draft, 40, 4, rng)
        assert len(some.columns) < 40
        losses.append(float(objective(batch, some)[0].detach()))
    assert np.mean(losses) == pytest.approx(float(exact[0].detach()), rel=0.05)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=80),
    st.integers(1, 30),
    st.integers(1, 16),
    st.integers(0, 5),
)
def test_epoch_plan_uses_every_response_once(
    anchors: list[int], blocks: int, limit: int, epoch: int
) -> None:
    plan = plan_epoch(anchors, blocks=blocks, blocks_per_response=limit, seed=3, epoch=epoch)
    used = [i for planned in plan for i in planned.responses]
    assert sorted(used) == [i for i, count in enumerate(anchors) if count > 0]
    for planned in plan:
        assert 1 <= planned.num_anchors <= limit
        assert all(anchors[i] >= planned.num_anchors for i in planned.responses)
        assert (len(planned.responses) - 1) * planned.num_anchors < blocks
    again = plan_epoch(anchors, blocks=blocks, blocks_per_response=limit, seed=3, epoch=epoch)
    assert again == plan


def test_epochs_differ() -> None:
    def order(epoch: int) -> list[int]:
        plan = plan_epoch([9] * 50, blocks=8, blocks_per_response=4, seed=0, epoch=epoch)
        return [i for planned in plan for i in planned.responses]

    assert order(0) != order(1)


def test_schedule_warms_up_and_ends_at_its_end() -> None:
    steps = Schedule(1.0, warmup_steps=4, max_steps=100, max_minutes=None)
    rates = [steps.rate(i, 0.0) for i in range(100)]
    assert rates[0] < rates[1] < rates[3]
    assert max(rates) > 0.9
    assert rates[-1] < 0.03
    timed = Schedule(1.0, warmup_steps=4, max_steps=None, max_minutes=2.0)
    assert timed.progress(10, 60.0) == pytest.approx(0.5)
    assert timed.rate(10**6, 120.0) == pytest.approx(0.02)
    nearer = Schedule(1.0, warmup_steps=1, max_steps=10, max_minutes=2.0)
    assert nearer.progress(9, 1.0) == pytest.approx(0.9)
    with pytest.raises(ValueError, match="max_minutes"):
        Schedule(1.0, 4, None, None)
    with pytest.raises(ValueError, match="max_steps"):
        Schedule(1.0, 4, 0, None)
