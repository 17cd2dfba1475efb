"""The rule for rounding errors, on made-up logits."""

from __future__ import annotations

import math

import pytest
import torch

from draftwood.bench.compare import (
    MAX_DELTA,
    Divergence,
    Tally,
    explain,
    first_divergence,
    judge,
)
from draftwood.bench.runs import Request, Run, compare_runs, engine_run, generate_run
from draftwood.draft.lookup import LookupDrafter
from draftwood.engine import Engine
from draftwood.sampling import Sampler, SamplingParams
from draftwood.target.model import Target
from draftwood.tree.budget import Fixed
from tiny import tiny_model

GREEDY = SamplingParams()
ROW = torch.tensor([0.0, 1.0, 5.0, 5.0, -2.0, 3.0])


def moved(row: torch.Tensor, **changes: float) -> torch.Tensor:
    """``row`` with ``t3=0.1`` added to token 3, and so on."""
    row = row.clone()
    for name, change in changes.items():
        row[int(name[1:])] += change
    return row


@pytest.mark.parametrize(
    ("left", "right", "position"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([], [], None), ([1, 2], [1], 1), ([], [4], 0)],
)
def test_first_divergence(left: list[int], right: list[int], position: int | None) -> None:
    assert first_divergence(left, right) == position


def test_a_greedy_near_tie_within_the_measured_error_is_rounding() -> None:
    rows = moved(ROW, t2=2e-5), moved(ROW, t3=2e-5)
    found = judge((2, 3), rows, GREEDY, [1], [4, 4])
    assert found.position == 2
    assert found.delta == pytest.approx(2e-5, rel=0.1)
    assert found.gap <= found.allowance == pytest.approx(2 * found.delta)
    assert found.is_rounding


def test_a_large_error_is_no_rounding_even_if_it_explains_the_tokens() -> None:
    rows = moved(ROW, t2=2 * MAX_DELTA), moved(ROW, t3=2 * MAX_DELTA)
    found = judge((2, 3), rows, GREEDY, [1], [])
    assert found.gap <= found.allowance
    assert not found.is_rounding


def test_a_gap_larger_than_the_error_is_no_rounding() -> None:
    """Nearly equal rows, but something drew the third best token."""
    rows = moved(ROW, t2=1e-5), moved(ROW, t3=1e-5)
    found = judge((2, 5), rows, GREEDY, [1], [])
    assert found.gap > found.allowance
    assert not found.is_rounding


def test_equal_rows_explain_nothing() -> None:
    assert not judge((2, 3), (ROW, ROW), GREEDY, [1], []).is_rounding


def test_nan_is_never_rounding() -> None:
    rows = moved(ROW, t2=1e-5), moved(ROW, t0=math.nan)
    assert not judge((2, 3), rows, GREEDY, [1], []).is_rounding


def perturbed(row: torch.Tensor, params: SamplingParams, position: int) -> torch.Tensor:
    sampler = Sampler(params, [1], vocab_size=len(row))
    assert sampler.noise is not None
    return row.double() / params.temperature + sampler.noise.gumbel(
        position, torch.arange(len(row))
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_at_a_temperature_the_noise_counts_and_the_error_is_divided(temperature: float) -> None:
    """Make the noisy scores of tokens 0 and 5 tie: their logits are then far apart."""
    params = SamplingParams(temperature=temperature, seed=5)
    row = torch.full((6,), -100.0).double()
    row[0] = 0.0
    noisy = perturbed(row, params, 0)
    row[5] += (noisy[0] - noisy[5]) * temperature
    assert abs(float(row[5] - row[0])) > 0.01
    rows = moved(row, t0=1e-6), moved(row, t5=1e-6)
    found = judge((0, 5), rows, params, [1], [])
    assert found.allowance == pytest.approx(2e-6 / temperature, rel=1e-3)
    assert found.is_rounding
    wide = moved(row, t0=3e-6), moved(row, t0=2.5e-6)
    assert not judge((0, 5), wide, params, [1], []).is_rounding


def test_the_position_selects_the_noise() -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    row = torch.full((6,), -100.0).double()
    row[0] = 0.0
    noisy = perturbed(row, params, 3)
    row[5] += noisy[0] - noisy[5]
    rows = moved(row, t0=1e-6), moved(row, t5=1e-6)
    assert judge((0, 5), rows, params, [1], [4, 4, 4]).is_rounding
    assert not judge((0, 5), rows, params, [1], [4, 4]).is_rounding


EDGES = {
    # Of 6 tokens with these probabilities, token 3 sits at the edge and loses to token 0 if cut.
    "top_k": SamplingParams(temperature=1.0, top_k=3, seed=0),
    "top_p": SamplingParams(temperature=1.0, top_p=0.75, seed=0),
    "min_p": SamplingParams(temperature=1.0, min_p=0.5, seed=0),
}
PROBS = {
    "top_k": [0.3, 0.25, 0.15, 0.15, 0.1, 0.05],
    "top_p": [0.3, 0.25, 0.2, 0.15, 0.07, 0.03],  # 0.75 without token 3: kept only by an error
    "min_p": [0.3, 0.29, 0.16, 0.15, 0.07, 0.03],
}


def seed_that_draws(token: int, probs: list[float]) -> int:
    row = torch.tensor(probs).double().log()
    for seed in range(1000):
        params = SamplingParams(temperature=1.0, seed=seed)
        if int(perturbed(row, params, 0).argmax()) == token:
            return seed
    raise AssertionError


@pytest.mark.parametrize("kind", EDGES)
def test_a_token_at_a_truncation_edge_may_fall_off(kind: str) -> None:
    row = torch.tensor(PROBS[kind]).double().log()
    params = SamplingParams(
        temperature=1.0,
        top_k=EDGES[kind].top_k,
        top_p=EDGES[kind].top_p,
        min_p=EDGES[kind].min_p,
        seed=seed_that_draws(3, PROBS[kind]),
    )
    error = 1e-5
    # In the left row token 3 is just inside, in the right one just outside.
    left, right = moved(row, t3=error, t2=-error), moved(row, t3=-error, t2=error)

    def drawn(row: torch.Tensor, params: SamplingParams) -> int:
        return Sampler(params, [1], vocab_size=6).pick(row, ()).token_id

    picks = drawn(left, params), drawn(right, params)
    assert picks[0] == 3 != picks[1]
    found = judge(picks, (left, right), params, [1], [])
    assert found.at_edge
    assert found.gap > found.allowance or math.isinf(found.gap)
    assert found.is_rounding
    # The same flip where the token is well inside the kept set cannot be explained.
    generous = SamplingParams(temperature=1.0, top_k=5, top_p=0.95, min_p=0.1, seed=params.seed)
    assert not judge(picks, (left, right), generous, [1], []).is_rounding


def test_an_early_end_is_unexplained() -> None:
    found = explain([1, 2, 3], [1, 2], 2, (ROW, ROW), GREEDY, [1])
    assert found.tokens == (3, None)
    assert not found.is_rounding


def test_tally_wants_few_and_explained_divergences() -> None:
    rounding = Divergence(0, (2, 3), 1e-6, 1e-6, 2e-6, reproduced=True)
    bug = Divergence(0, (2, 3), 1e-6, 1.0, 2e-6, reproduced=True)
    tally = Tally()
    for _ in range(20):
        tally.add("same", range(100), range(100), lambda _: bug)
    assert tally.num_tokens == 2000
    assert tally.is_exact
    tally.add("near", [2] * 50, [3] * 50, lambda _: rounding)
    assert tally.num_tokens == 2001  # what follows a divergence says nothing
    assert tally.is_exact
    for _ in range(2):
        tally.add("near", [2], [3], lambda _: rounding)
    assert not tally.is_exact  # explained, but too many
    for _ in range(30):
        tally.add("same", range(100), range(100), lambda _: bug)
    assert tally.is_exact
    tally.add("bug", [2], [3], lambda _: bug)
    assert not tally.is_exact
    assert tally.unexplained == [("bug", bug)]


PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 8, 7]]


def requests_for(temperature: float = 0.0) -> list[Request]:
    return [
        Request(prompt, SamplingParams(temperature=temperature, seed=seed, max_new_tokens=20))
        for seed, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama"), probe=False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_run_shows_the_logits_behind_its_tokens(target: Target, temperature: float) -> None:
    requests = requests_for(temperature)
    run = engine_run(lambda: Engine(target, LookupDrafter(), Fixed(4)), requests)
    row = run.row_of(1, 6)
    assert row is not None
    path = torch.tensor([[*PROMPTS[1], *run.token_ids[1][:6]]])
    torch.testing.assert_close(row, target.model(path).logits[0, -1])
    sampler = Sampler(requests[1].params, PROMPTS[1], vocab_size=97)
    sampler.commit(run.token_ids[1][:6])
    assert sampler.pick(row, ()).token_id == run.token_ids[1][6]
    assert run.row_of(1, 20) is None
    assert run.acceptance_length == 40 / sum(output.num_cycles for output in run.outputs)


def test_generate_is_a_run_too(target: Target) -> None:
    requests = requests_for()
    ours, theirs = engine_run(lambda: Engine(target), requests), generate_run(target, requests)
    assert ours.token_ids == theirs.token_ids
    for index, position in ((0, 0), (1, 9)):
        mine, other = ours.row_of(index, position), theirs.row_of(index, position)
        torch.testing.assert_close(mine, other, check_dtype=False, rtol=1e-6, atol=1e-6)
    assert theirs.row_of(0, 20) is None


def test_comparing_runs_finds_a_wrong_one(target: Target) -> None:
    requests = requests_for(1.0)
    run = engine_run(lambda: Engine(target), requests)
    tally = Tally()
    compare_runs(tally, "same", run, run, requests)
    assert tally.is_exact
    assert tally.num_tokens == 40
    wrong = [list(ids) for ids in run.token_ids]
    wrong[1][7] = (wrong[1][7] + 1) % 97
    compare_runs(tally, "wrong", run, Run(wrong, run.row_of), requests)
    ((name, found),) = tally.unexplained
    assert (name, found.position) == ("wrong, prompt 1", 7)
    assert not found.reproduced
