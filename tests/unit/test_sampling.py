from __future__ import annotations

import math

import pytest
import torch

from draftwood.errors import DraftwoodError
from draftwood.noise import KeyedNoise
from draftwood.sampling import Sampler, SamplingParams

VOCAB = 1000


def logits_of(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sampler_of(*, prompt: tuple[int, ...] = (1, 2), **settings) -> Sampler:
    return Sampler(SamplingParams(**settings), prompt, vocab_size=VOCAB, eos_token_ids=(3,))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "1"),
        ("top_p", None),
        ("stop", None),
        ("stop", (5,)),
        ("stop_token_ids", 5),
        ("bad_words", (5,)),
        ("logit_bias", None),
        ("logit_bias", {1: "x"}),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-9),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("bad_words", ((),)),
        ("bad_words", ((1, -2),)),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 0.5),
        ("max_new_tokens", 0),
        ("max_new_tokens", -3),
        ("max_new_tokens", True),
        ("min_new_tokens", -1),
        ("min_new_tokens", 257),
        ("stop_token_ids", (-1,)),
        ("stop", ("a", "")),
        ("stop", "a"),
        ("logprobs", -1),
    ],
)
def test_bad_settings_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["logit_bias", "bad_words", "stop_token_ids"])
def test_tokens_outside_the_vocabulary_are_refused(name):
    value = {"logit_bias": {VOCAB: 1.0}, "bad_words": ((1, VOCAB),), "stop_token_ids": (VOCAB,)}
    with pytest.raises(ValueError, match=f"{VOCAB} in {name}"):
        sampler_of(**{name: value[name]})


def test_lists_are_accepted_for_tuples():
    params = SamplingParams(stop=["x"], stop_token_ids=[3], bad_words=[[1, 2]])
    assert (params.stop, params.stop_token_ids, params.bad_words) == (("x",), (3,), ((1, 2),))


def test_sampling_needs_a_seed():
    with pytest.raises(ValueError, match="seed"):
        sampler_of(temperature=1.0)


def test_greedy_takes_the_best_and_the_lowest_of_equals():
    logits = torch.zeros(VOCAB)
    logits[[700, 30, 999]] = 5.0
    assert sampler_of().pick(logits, []).token_id == 30
    assert sampler_of(repetition_penalty=1.1).pick(logits, []).token_id == 30


def test_draw_is_the_argmax_of_scores_plus_noise():
    """Also where noise is computed only for the tokens that can win."""
    for temperature in (0.05, 0.3, 1.0, 4.0):
        sampler = sampler_of(temperature=temperature, seed=11)
        sampler.commit([8, 9])
        noise = KeyedNoise(11).gumbel(2 + 1, torch.arange(VOCAB))
        for seed in range(20):
            logits = logits_of(seed)
            expected = (logits / temperature).double() + noise
            assert sampler.pick(logits, [4]).token_id == int(expected.argmax())


def test_truncated_draw_uses_the_same_noise():
    sampler = sampler_of(temperature=1.0, seed=5, top_k=7)
    for seed in range(20):
        logits = logits_of(seed)
        best = logits.topk(7).indices
        scores = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
        scores[best] = logits[best].double()
        expected = (scores + KeyedNoise(5).gumbel(0, torch.arange(VOCAB))).argmax()
        assert sampler.pick(logits, []).token_id == int(expected)


def test_position_counts_output_only():
    logits = torch.zeros(VOCAB)
    one, two = (
        sampler_of(prompt=prompt, temperature=1.0, seed=3) for prompt in ((1,), (1, 2, 3, 4))
    )
    assert one.pick(logits, []) == two.pick(logits, [])
    one.commit([7])
    assert one.num_output == 1
    assert one.pick(logits, []) == two.pick(logits, [7])
    assert one.pick(logits, []) != two.pick(logits, [])


def test_sample_index_selects_another_sample():
    params = SamplingParams(temperature=1.0, seed=3)
    picks = [
        Sampler(params, [1], vocab_size=VOCAB, sample_index=i).pick(torch.zeros(VOCAB), [])
        for i in range(5)
    ]
    assert len({pick.token_id for pick in picks}) == 5


def test_committed_and_path_tokens_are_the_same_to_every_processor():
    settings = {
        "temperature": 0.8,
        "seed": 1,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "bad_words": ((5, 6, 7), (9,)),
        "min_new_tokens": 4,
    }
    tokens = [5, 6, 7, 5, 6, 3, 5]
    reference = sampler_of(**settings)
    expected = [reference.process(logits_of(0), tokens[:n]) for n in range(8)]
    for split in range(8):
        sampler = sampler_of(**settings)
        for token in tokens[:split]:
            sampler.commit([token])
            sampler.process(logits_of(1), [4, 4])  # a walk that came to nothing leaves no trace
        for n in range(split, 8):
            assert torch.equal(sampler.process(logits_of(0), tokens[split:n]), expected[n])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("extra", [{}, {"repetition_penalty": 1.1}, {"top_p": 0.9}, {"top_k": 5}])
def test_nan_is_an_error(temperature, extra):
    logits = logits_of(0)
    logits[17] = torch.nan
    with pytest.raises(DraftwoodError, match="NaN"):
        sampler_of(temperature=temperature, seed=0, **extra).pick(logits, [])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_allowed_is_an_error(temperature):
    everything = dict.fromkeys(range(VOCAB), -math.inf)
    sampler = sampler_of(temperature=temperature, seed=0, logit_bias=everything)
    with pytest.raises(DraftwoodError, match="forbidden"):
        sampler.pick(logits_of(0), [])


def test_failing_processor_is_named():
    def broken(input_ids, scores):
        raise KeyError("gone")

    sampler = Sampler(SamplingParams(), [1], vocab_size=VOCAB, processors=[broken])
    with pytest.raises(DraftwoodError, match=r"broken.*gone"):
        sampler.pick(logits_of(0), [])


@pytest.mark.parametrize("result", [lambda scores: scores[0], lambda _: None, lambda _: [1.0]])
def test_processor_with_a_wrong_result_is_named(result):
    def odd(input_ids, scores):
        return result(scores)

    sampler = Sampler(SamplingParams(), [1], vocab_size=VOCAB, processors=[odd])
    with pytest.raises(DraftwoodError, match="odd"):
        sampler.pick(logits_of(0), [])


def test_logprobs_are_of_the_raw_distribution():
    logits = logits_of(0)
    plain = sampler_of(logprobs=3).pick(logits, [])
    expected = logits.double().log_softmax(-1)
    values, ids = expected.topk(3)
    assert plain.logprob == pytest.approx(float(expected.max()))
    assert [token for token, _ in plain.top_logprobs] == ids.tolist()
    assert [value for _, value in plain.top_logprobs] == pytest.approx(values.tolist())
    steered = sampler_of(logprobs=0, temperature=2.0, seed=1, logit_bias={9: 99.0})
    pick = steered.pick(logits, [])
    assert pick.token_id == 9
    assert pick.logprob == pytest.approx(float(expected[9]))
    assert pick.top_logprobs == ()


def test_more_logprobs_than_tokens():
    sampler = Sampler(SamplingParams(logprobs=50), [1], vocab_size=4)
    assert len(sampler.pick(torch.zeros(4), []).top_logprobs) == 4


@pytest.mark.parametrize(
    ("settings", "plain"),
    [
        ({}, True),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, True),  # without effect at temperature 0
        ({"seed": 4, "stop": ("x",), "stop_token_ids": (4,)}, True),
        ({"temperature": 1.0, "seed": 1}, False),
        ({"logprobs": 0}, False),
        ({"logit_bias": {1: 1.0}}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"bad_words": ((1,),)}, False),
        ({"min_new_tokens": 2}, False),
    ],
)
def test_plain_greedy_is_recognised(settings, plain):
    assert sampler_of(**settings).is_plain_greedy == plain


def test_min_new_tokens_ends():
    sampler = sampler_of(min_new_tokens=2)
    sampler.commit([1, 1])
    assert sampler.is_plain_greedy
