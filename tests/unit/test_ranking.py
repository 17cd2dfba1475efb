"""Noise-ranked drafts: what is ranked, and what is learned from the target's picks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from draftwood import processing
from draftwood.draft.base import DraftContext
from draftwood.draft.noise_rows import NoiseRows
from draftwood.draft.online_fit import OnlineFit
from draftwood.draft.ranking import Ranked, Ranker
from draftwood.draft.steering import Columns, steered, truncation_edge
from draftwood.sampling import Sampler, SamplingParams

VOCAB = 300


def context(
    tokens: tuple[int, ...] = (1, 2), *, prompt_len: int = 1, **params: Any
) -> DraftContext:
    sampler = Sampler(SamplingParams(**params), tokens[:prompt_len], vocab_size=VOCAB)
    sampler.commit(tokens[prompt_len:])
    return DraftContext(0, tokens, prompt_len, 100, sampler)


def logits(num_rows: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCAB, generator=generator) * scale


def ranker(**options: Any) -> Ranker:
    return Ranker(Columns(VOCAB, VOCAB), **options)


def feed(rank: Ranker, num: int, error: float, **params: Any) -> list[tuple[Ranked, list[int]]]:
    """Draft 3 rows ``num`` times for a target that differs by noise of std ``error``; learn."""
    seen = []
    for index in range(num):
        target = logits(3, seed=2 * index)
        draft = target + logits(3, seed=2 * index + 1, scale=error)
        if params:
            params["seed"] = index
        one = context(**params)
        ranked = rank.rank(draft, [1, 2, 3], one, 8)
        picks: list[int] = []
        for row in range(3):
            picks.append(one.sampler.pick(target[row], picks).token_id)
            rank.learn(ranked, picks[-1:], row)
        seen.append((ranked, picks))
    return seen


def test_greedy_ranks_are_the_draft_distribution_until_something_is_learned() -> None:
    rows = logits(4)
    ranked = ranker().rank(rows, [1, 2, 3, 4], context(), 10)
    best = rows.log_softmax(-1).topk(10)
    assert torch.equal(ranked.token_ids, best.indices)
    assert torch.allclose(ranked.log_probs.float(), best.values, atol=1e-5)


def test_learned_probabilities_are_calibrated_and_keep_the_order_within_a_depth() -> None:
    rank = ranker()
    feed(rank, 150, error=1.0)
    seen = feed(rank, 100, error=1.0)
    predicted = np.mean([float(r.log_probs[:, 0].exp().mean()) for r, _ in seen])
    hits = np.mean([r.token_ids[row, 0] == p for r, picks in seen for row, p in enumerate(picks)])
    assert predicted == pytest.approx(float(hits), abs=0.08)
    rows = logits(1)
    ids = rank.rank(rows, [2], context(), 10).token_ids
    assert torch.equal(ids, rows.topk(10).indices)


@pytest.mark.parametrize(("error", "temperature"), [(0.3, 1.0), (1.0, 0.7), (2.5, 1.0)])
def test_knowing_the_noise_beats_the_marginals(error: float, temperature: float) -> None:
    hits = {}
    for use_noise in (True, False):
        rank = ranker(use_noise=use_noise)
        seen = feed(rank, 150, error, temperature=temperature)[50:]
        hits[use_noise] = np.mean(
            [token in r.token_ids[row, :4] for r, picks in seen for row, token in enumerate(picks)]
        )
        predicted = np.mean([float(r.log_probs[:, :4].exp().sum(1).mean()) for r, _ in seen])
        assert predicted == pytest.approx(float(hits[use_noise]), abs=0.1)
    assert hits[True] > 1.5 * hits[False]


def test_a_useless_drafter_learns_to_claim_little() -> None:
    rank = ranker()
    for index in range(200):
        one = context(temperature=1.0, seed=index)
        ranked = rank.rank(logits(1, seed=index), [1], one, 4)
        rank.learn(ranked, [one.sampler.pick(logits(1, seed=10_000 + index)[0], []).token_id])
    (weights,) = rank.weights(1.0, 2, [1])
    assert weights[0] < 0.2  # the scores say nothing …
    assert weights[1] > 0.2  # … but the noise still does


def test_noise_belongs_to_the_output_position_and_the_target_token() -> None:
    """An exact drafter's best candidate is the target's pick, at every depth and with a map."""
    rows = logits(3)
    one = context((1, 2, 3, 4), temperature=0.9, seed=5)
    picks: list[int] = []
    for row in rows:
        picks.append(one.sampler.pick(row, picks).token_id)
    ranked = ranker().rank(rows, [1, 2, 3], one, 5)
    assert ranked.token_ids[:, 0].tolist() == picks
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))
    mapped = Ranker(Columns(VOCAB, VOCAB, order))
    again = mapped.rank(rows[:, order], [1, 2, 3], one, 5)
    assert torch.equal(again.token_ids, ranked.token_ids)
    assert torch.allclose(again.log_probs, ranked.log_probs, atol=1e-5)


def test_candidates_are_chosen_after_the_noise_over_the_whole_vocabulary() -> None:
    flat = torch.zeros(1, VOCAB)
    one = context(temperature=1.0, seed=3)
    assert one.sampler.noise is not None
    noise = one.sampler.noise.gumbel(1, torch.arange(VOCAB))
    ranked = ranker().rank(flat, [1], one, 4)
    assert ranked.token_ids[0].tolist() == noise.topk(4).indices.tolist()


def test_truncation_is_a_soft_floor() -> None:
    rows = logits(1)
    one = context(temperature=1.0, seed=3, top_k=5)
    ranked = ranker().rank(rows, [1], one, VOCAB)
    assert torch.isfinite(ranked.log_probs).all()
    kept = set(rows[0].topk(5).indices.tolist())
    free = ranker().rank(rows, [1], context(temperature=1.0, seed=3), VOCAB)
    prob = dict(zip(ranked.token_ids[0].tolist(), ranked.log_probs[0].exp().tolist(), strict=True))
    free_prob = dict(zip(free.token_ids[0].tolist(), free.log_probs[0].exp().tolist(), strict=True))
    assert sum(prob[t] for t in kept) > sum(free_prob[t] for t in kept)


@pytest.mark.parametrize(
    "params",
    [{"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.8, "min_p": 0.05}],
)
def test_truncation_edge_is_where_the_sampler_cuts(params: dict[str, Any]) -> None:
    rows = logits(5)
    settings = SamplingParams(temperature=1.0, seed=0, **params)
    edge = truncation_edge(rows, settings)
    assert edge is not None
    for name, row, cut in zip(range(5), rows, edge, strict=True):
        singly = [
            processing.keep_top_k(row, settings.top_k or VOCAB),
            processing.keep_top_p(row, settings.top_p),
            processing.keep_min_p(row, settings.min_p) if settings.min_p else row,
        ]
        kept = torch.stack([torch.isfinite(scores) for scores in singly]).all(0)
        assert torch.equal(kept, row >= cut), name


def test_penalties_of_committed_tokens_reach_the_draft() -> None:
    rows = logits(2)
    tokens = (5, 6, 7, 7, 8)
    one = context(
        tokens, prompt_len=2, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.25,
        logit_bias={9: 3.0, 10: -torch.inf}, bad_words=((11,), (12, 13)),
    )  # fmt: skip
    found = steered(rows, one, Columns(VOCAB, VOCAB))
    for row, got in zip(rows, found, strict=True):
        want = row.clone()
        want[9] += 3.0
        want = processing.penalize_repetition(want, torch.tensor(tokens), 1.4)
        want = processing.penalize_presence(want, torch.tensor(tokens[2:]), 0.5, 0.25)
        want[10] = want[11] = -torch.inf
        assert torch.allclose(got, want)
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:100]
    mapped = steered(rows[:, order], one, Columns(100, VOCAB, order))
    assert torch.allclose(mapped, found[:, order])


def test_forbidden_and_unknown_tokens_do_no_harm() -> None:
    order = torch.arange(0, VOCAB, 2)
    rank = Ranker(Columns(len(order), VOCAB, order))
    one = context(temperature=1.0, seed=1, logit_bias={4: -torch.inf})
    ranked = rank.rank(logits(1)[:, order], [1], one, len(order))
    before = rank.weights(1.0, 2, [1])
    rank.learn(ranked, [7])  # not in the draft vocabulary
    rank.learn(ranked, [4])  # forbidden here
    assert np.array_equal(rank.weights(1.0, 2, [1]), before)
    rank.learn(ranked, [8])
    assert np.isfinite(rank.weights(1.0, 2, [1])).all()
    assert not np.array_equal(rank.weights(1.0, 2, [1]), before)
    assert ranked.log_probs[0, -1] == -torch.inf
    assert ranked.token_ids[0, -1] == 4


def test_padding_columns_are_never_proposed() -> None:
    rows = torch.zeros(1, VOCAB + 8)
    rows[:, VOCAB:] = 50.0
    ranked = Ranker(Columns(VOCAB + 8, VOCAB)).rank(rows, [1], context(), VOCAB + 8)
    assert ranked.token_ids.max() < VOCAB


def test_noise_rows_are_the_noise_and_few_are_kept() -> None:
    ids = torch.arange(0, VOCAB, 3)
    kept = NoiseRows(ids, max_bytes=4 * len(ids) * 5)
    noise = context(temperature=1.0, seed=9).sampler.noise
    assert noise is not None
    for start in (0, 3, 40):
        rows = kept.rows(noise, [start, start + 1, start + 2])
        for at, row in enumerate(rows):
            assert torch.equal(row, noise.gumbel(start + at, ids).float())
    assert len(kept._rows) == 5


def test_online_fit_finds_logistic_weights_and_forgets_slowly() -> None:
    rng = np.random.default_rng(0)
    fit = OnlineFit(np.zeros(2), np.ones(2))
    truth = np.array([1.5, -2.0])
    for step in range(6000):
        if step == 3000:
            truth = -truth
        x = rng.normal(size=2)
        y = rng.random() < 1 / (1 + np.exp(-truth @ x))
        prob = 1 / (1 + np.exp(-fit.mean @ x))
        fit.update((y - prob) * x, prob * (1 - prob) * np.outer(x, x))
        if step == 2999:
            assert fit.mean == pytest.approx(truth, abs=0.4)
    assert fit.mean == pytest.approx(truth, abs=0.6)
