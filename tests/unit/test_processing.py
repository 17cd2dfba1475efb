"""Every change to the scores equals transformers' own processor along prompt, output and path."""

from __future__ import annotations

import pytest
import torch
from transformers import generation as hf

from draftwood.processing import keep_top_p
from draftwood.sampling import Sampler, SamplingParams

VOCAB = 211
PROMPT = [5, 9, 9, 3]
OUTPUT = [7, 7, 100]
PATH = [7, 12]
EOS = (2, 4)


def peaked(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab, generator=generator) * (0.5 + seed % 5)


def processed(logits: torch.Tensor, params: SamplingParams, **sampler) -> torch.Tensor:
    made = Sampler(params, PROMPT, vocab_size=len(logits), eos_token_ids=EOS, **sampler)
    made.commit(OUTPUT)
    return made.process(logits, PATH)


def by_transformers(logits: torch.Tensor, *processors: hf.LogitsProcessor) -> torch.Tensor:
    ids = torch.tensor([PROMPT + OUTPUT + PATH])
    return hf.LogitsProcessorList(processors)(ids, logits[None].clone())[0]


SAMPLED = {"temperature": 1.0, "seed": 0}
CASES = {
    "temperature": (
        {"temperature": 0.7, "seed": 0},
        lambda: [hf.TemperatureLogitsWarper(0.7)],
    ),
    "top_k": ({**SAMPLED, "top_k": 5}, lambda: [hf.TopKLogitsWarper(5)]),
    "top_k 1": ({**SAMPLED, "top_k": 1}, lambda: [hf.TopKLogitsWarper(1)]),
    "top_k > vocabulary": ({**SAMPLED, "top_k": 999}, lambda: [hf.TopKLogitsWarper(999)]),
    "top_p": ({**SAMPLED, "top_p": 0.83}, lambda: [hf.TopPLogitsWarper(0.83)]),
    "tiny top_p": ({**SAMPLED, "top_p": 1e-9}, lambda: [hf.TopPLogitsWarper(1e-9)]),
    "min_p": ({**SAMPLED, "min_p": 0.07}, lambda: [hf.MinPLogitsWarper(0.07)]),
    "min_p 1": ({**SAMPLED, "min_p": 1.0}, lambda: [hf.MinPLogitsWarper(1.0)]),
    "all truncations": (
        {"temperature": 1.3, "seed": 0, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        lambda: [
            hf.TemperatureLogitsWarper(1.3),
            hf.TopKLogitsWarper(40),
            hf.TopPLogitsWarper(0.9),
            hf.MinPLogitsWarper(0.02),
        ],
    ),
    "repetition": (
        {"repetition_penalty": 1.3},
        lambda: [hf.RepetitionPenaltyLogitsProcessor(1.3)],
    ),
    "repetition rewarded": (
        {"repetition_penalty": 0.8},
        lambda: [hf.RepetitionPenaltyLogitsProcessor(0.8)],
    ),
    "bias": (
        {"logit_bias": {3: 2.5, 8: -torch.inf}},
        lambda: [hf.SequenceBiasLogitsProcessor({(3,): 2.5, (8,): -torch.inf})],
    ),
    "bad words": (
        {"bad_words": ((12, 1), (100, 7, 12, 2), (7, 12, 6), (9, 12, 5), (8,), (1,) * 20)},
        lambda: [
            hf.NoBadWordsLogitsProcessor(
                [[12, 1], [100, 7, 12, 2], [7, 12, 6], [9, 12, 5], [8], [1] * 20]
            )
        ],
    ),
    "min_new_tokens not reached": (
        {"min_new_tokens": 6},
        lambda: [hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 6, list(EOS))],
    ),
    "min_new_tokens reached": (
        {"min_new_tokens": 5},
        lambda: [hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, list(EOS))],
    ),
    "order": (
        {
            "logit_bias": {7: 1.0},
            "repetition_penalty": 1.5,
            "bad_words": ((12, 9),),
            "temperature": 0.6,
            "top_p": 0.8,
            "seed": 0,
        },
        lambda: [
            hf.SequenceBiasLogitsProcessor({(7,): 1.0}),
            hf.RepetitionPenaltyLogitsProcessor(1.5),
            hf.NoBadWordsLogitsProcessor([[12, 9]]),
            hf.TemperatureLogitsWarper(0.6),
            hf.TopPLogitsWarper(0.8),
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(8))
def test_equals_transformers(case, seed):
    settings, processors = CASES[case]
    logits = peaked(seed)
    ours = processed(logits, SamplingParams(**settings))
    assert torch.equal(ours, by_transformers(logits, *processors()))


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("seed", range(5))
def test_top_p_of_a_large_vocabulary(top_p, seed):
    logits = peaked(seed, vocab=30_000)
    # transformers adds up in the dtype of the scores; only float64 is exact at the edge
    theirs = by_transformers(logits.double(), hf.TopPLogitsWarper(top_p))
    assert torch.equal(keep_top_p(logits, top_p).isneginf(), theirs.isneginf())


def test_top_p_on_already_truncated_scores():
    logits = peaked(1)
    logits[logits < 1] = -torch.inf
    theirs = by_transformers(logits, hf.TopPLogitsWarper(0.7))
    assert torch.equal(keep_top_p(logits, 0.7), theirs)


def test_presence_and_frequency_follow_openai():
    """mu[j] − count[j] · frequency − (count[j] > 0) · presence, over output only."""
    logits = peaked(0)
    ours = processed(logits, SamplingParams(presence_penalty=0.5, frequency_penalty=0.25))
    expected = logits.clone()
    for token, count in {7: 3, 100: 1, 12: 1}.items():
        expected[token] -= count * 0.25 + 0.5
    assert torch.equal(ours, expected)


def test_penalties_before_any_output():
    sampler = Sampler(
        SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), PROMPT, vocab_size=VOCAB
    )
    logits = peaked(0)
    assert torch.equal(sampler.process(logits, []), logits)


def test_stop_tokens_wait_for_min_new_tokens_too():
    params = SamplingParams(min_new_tokens=6, stop_token_ids=(50,))
    forbidden = processed(peaked(0), params).isneginf().nonzero().flatten().tolist()
    assert forbidden == [2, 4, 50]


def test_ignored_eos_is_an_ordinary_token():
    params = SamplingParams(min_new_tokens=6, ignore_eos=True)
    assert processed(peaked(0), params).isfinite().all()


def test_own_processors_come_first_and_see_path():
    seen = []

    def halve_best(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids.clone())
        scores[0, int(scores.argmax())] /= 2  # in place: must not reach the raw logits
        return scores

    logits = peaked(3)
    before = logits.clone()
    ours = processed(logits, SamplingParams(logit_bias={0: 99.0}), processors=[halve_best])
    expected = logits.clone()
    expected[int(logits.argmax())] /= 2
    expected[0] += 99.0
    assert torch.equal(ours, expected)
    assert torch.equal(logits, before)
    assert [ids.tolist() for ids in seen] == [[PROMPT + OUTPUT + PATH]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_scores_are_wide(dtype):
    logits = peaked(2).to(dtype)
    scores = processed(logits, SamplingParams(temperature=0.5, seed=1))
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(scores, logits.to(scores.dtype) / 0.5)
