"""``model.generate(custom_generate=…)`` against plain ``model.generate``, on a tiny fp64 Llama."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import generation as hf

from draftwood.engine import Engine
from draftwood.errors import DraftwoodError
from draftwood.hf import _KEPT, custom_generate
from draftwood.sampling import SamplingParams
from draftwood.target.model import Target
from oracle import NoisyOracleDrafter
from tiny import tiny_model
from tiny_folder import tiny_tokenizer

PAD = 0
EOS = [70, 71]
ROWS = [[5, 6, 7, 8, 5, 6, 7], [9, 8, 7], [20, 31, 4, 4, 60]]
NEW = 16


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return tiny_model("llama")


def inputs_of(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Left-padded batch."""
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[PAD] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows]),
    }


def drafter_for(sequences: torch.Tensor, rows: list[list[int]]) -> NoisyOracleDrafter:
    """Knows nearly every row's output."""
    width = max(map(len, rows))
    outputs = sequences[:, width:].tolist()
    future = {tuple(row): [*out, *out] for row, out in zip(rows, outputs, strict=True)}
    return NoisyOracleDrafter(future)


def both(
    model: transformers.PreTrainedModel, rows: list[list[int]], **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of plain and of accelerated greedy generation; the latter must save passes."""
    options = {"max_new_tokens": NEW, "pad_token_id": PAD, **options}
    plain = model.generate(**inputs_of(rows), **options)
    drafter = drafter_for(plain, rows)
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    method = custom_generate(drafter, budget=12)
    # the parity probe of a model that is new to the callable
    model.generate(torch.tensor(rows[:1]), max_new_tokens=1, custom_generate=method)
    handle = model.model.register_forward_hook(count)
    fast = model.generate(**inputs_of(rows), **options, custom_generate=method)
    handle.remove()
    num_new = plain.shape[1] - max(map(len, rows))
    assert passes < num_new or num_new < 4
    assert drafter._known == {}
    return plain, fast


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one row", "left-padded rows"])
def test_greedy_is_equal(model, rows):
    plain, fast = both(model, rows)
    assert torch.equal(plain, fast)


def test_rows_that_end_early_are_padded(model):
    width = max(map(len, ROWS))
    free = model.generate(**inputs_of(ROWS), max_new_tokens=NEW, pad_token_id=PAD)
    eos = [int(free[0, width + 3]), int(free[1, width + 9])]
    plain, fast = both(model, ROWS, eos_token_id=eos)
    assert (plain == PAD).sum() > (free == PAD).sum()
    assert torch.equal(plain, fast)


def keep_away_from_the_row_number(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Depends on the index of the row in the batch, and on the padding."""
    for row in range(len(scores)):
        scores[row, 10 * row : 40 + int((input_ids[row] == PAD).sum())] -= 5.0
    return scores


OPTIONS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram": {"no_repeat_ngram_size": 1},
    "bad_words": {"bad_words_ids": [[12], [23, 94], [44]]},
    "sequence_bias": {"sequence_bias": {(3,): 4.0, (4, 4): -9.0}},
    "suppress": {"suppress_tokens": list(range(40, 60)), "begin_suppress_tokens": [1, 2, 3]},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(48))},
    "min_length": {"min_length": 14, "eos_token_id": list(range(48))},
    "forced_eos": {"forced_eos_token_id": 70, "eos_token_id": EOS},
    "exponential_decay": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": EOS},
    "prefix": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(row, 97, 2 + len(ids) % 2))},
    "encoder_repetition": {"encoder_repetition_penalty": 3.0},
    "own processor": {"logits_processor": hf.LogitsProcessorList([keep_away_from_the_row_number])},
    "renormalize": {"renormalize_logits": True},
    "max_length": {"max_length": 15, "max_new_tokens": None},
    "prefill_chunk_size": {"prefill_chunk_size": 2},
}


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one row", "left-padded rows"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_are_honoured(model, rows, option):
    plain, fast = both(model, rows, **OPTIONS[option])
    assert torch.equal(plain, fast)


@pytest.mark.parametrize("option", sorted(set(OPTIONS) - {"prefill_chunk_size", "renormalize"}))
def test_options_have_an_effect(model, option):
    """Otherwise the test above would compare nothing."""
    free = model.generate(**inputs_of(ROWS), max_new_tokens=NEW, pad_token_id=PAD)
    options = {"max_new_tokens": NEW, "pad_token_id": PAD, **OPTIONS[option]}
    assert not torch.equal(free, model.generate(**inputs_of(ROWS), **options))


def test_processors_see_every_position_once_and_in_order(model):
    seen: list[list[int]] = []

    def record(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids[0].tolist())
        return scores

    plain, _ = both(model, ROWS[:1], logits_processor=hf.LogitsProcessorList([record]))
    per_position = [plain[0, :n].tolist() for n in range(len(ROWS[0]), plain.shape[1])]
    assert seen[:NEW] == per_position  # plain
    assert seen[NEW : 2 * NEW] == per_position  # accelerated; then perhaps a few beyond the limit


def test_processors_may_keep_change_and_derive_tensors(model):
    """As in ``generate``: what they are given are no inference tensors."""
    kept: list[torch.Tensor] = []

    def climb(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        kept.append(scores)
        with torch.enable_grad():
            moved = scores.clone().requires_grad_(True)
            (gradient,) = torch.autograd.grad(moved.softmax(-1).square().sum(), moved)
        return scores - 20 * gradient

    plain, fast = both(model, ROWS[:1], logits_processor=hf.LogitsProcessorList([climb]))
    assert torch.equal(plain, fast)
    kept[-1].add_(1)


# ---- stopping -----------------------------------------------------------------------------


class EndsOn(hf.StoppingCriteria):
    """Stops a row after a token; a row's token depends on its index."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.tokens[: len(input_ids)]


def test_stopping_criteria_are_honoured(model):
    width = max(map(len, ROWS))
    free = model.generate(**inputs_of(ROWS), max_new_tokens=NEW, pad_token_id=PAD)
    criteria = EndsOn([int(free[row, width + 4 + row]) for row in range(3)])
    never = 96 if not (free == 96).any() else 95
    plain, fast = both(
        model, ROWS, stopping_criteria=hf.StoppingCriteriaList([criteria]), eos_token_id=never
    )
    assert plain.shape[1] < free.shape[1]
    assert torch.equal(plain, fast)


@pytest.mark.parametrize("eos", [-1, [500], [-1, 500]])
def test_end_tokens_outside_the_vocabulary_never_occur(model, eos):
    plain, fast = both(model, ROWS, eos_token_id=eos)
    assert torch.equal(plain, fast)


def test_a_length_criterion_that_is_met_from_the_start_leaves_one_token(model):
    criteria = hf.StoppingCriteriaList([hf.MaxLengthCriteria(2)])
    plain, fast = both(model, ROWS, stopping_criteria=criteria)
    assert plain.shape[1] == max(map(len, ROWS)) + 1
    assert torch.equal(plain, fast)


def test_max_time_stops(model):
    sequences = model.generate(
        **inputs_of(ROWS), max_new_tokens=400, max_time=0.0, pad_token_id=PAD,
        custom_generate=custom_generate(None),
    )  # fmt: skip
    assert sequences.shape[1] == max(map(len, ROWS)) + 1


def test_stop_strings_work_although_generate_keeps_the_tokenizer():
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", vocab=len(tokenizer))
    readable = [t for t in range(len(tokenizer)) if tokenizer.decode([t]).isalpha()]
    unreadable = sorted(set(range(len(tokenizer))) - set(readable))
    options: dict[str, Any] = {"max_new_tokens": NEW, "suppress_tokens": unreadable}
    free = model.generate(torch.tensor(ROWS[:1]), **options)
    start = len(ROWS[0]) + 5
    options["stop_strings"] = tokenizer.decode(free[0, start : start + 2])
    plain = model.generate(torch.tensor(ROWS[:1]), tokenizer=tokenizer, **options)
    method = custom_generate(drafter_for(free, ROWS[:1]), budget=8, tokenizer=tokenizer)
    fast = model.generate(torch.tensor(ROWS[:1]), custom_generate=method, **options)
    assert plain.shape[1] < free.shape[1]
    assert torch.equal(plain, fast)


# ---- sampling -----------------------------------------------------------------------------


def sample(model, rows=ROWS, seed=3, **options) -> torch.Tensor:
    torch.manual_seed(seed)
    options = {"max_new_tokens": NEW, "pad_token_id": PAD, "do_sample": True, **options}
    options.setdefault("custom_generate", custom_generate(None))
    return model.generate(**inputs_of(rows), **options)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0, "top_k": 0},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.8},
        {"temperature": 0.9, "top_k": 0, "min_p": 0.05},
    ],
)
def test_samples_are_those_of_the_engine(model, settings):
    sequences = sample(model, **settings)
    torch.manual_seed(3)
    seed = int(torch.randint(2**63 - 1, (1,)))
    engine = Engine(Target(model, probe=False))
    params = SamplingParams(seed=seed, max_new_tokens=NEW, **settings)
    width = max(map(len, ROWS))
    for row, prompt in enumerate(ROWS):
        engine.add(prompt, params, sample_index=row)
    outputs = {}
    while engine.num_active:
        outputs |= {e.seq_id: e.output for e in engine.step() if e.output is not None}
    assert [outputs[i].token_ids for i in range(3)] == sequences[:, width:].tolist()


@pytest.mark.parametrize("unlifted", [{}, {"typical_p": 0.9}, {"renormalize_logits": True}])
def test_samples_do_not_depend_on_the_drafter(model, unlifted):
    settings = {"temperature": 0.8, "top_p": 0.9, **unlifted}
    plain = sample(model, **settings)
    method = custom_generate(drafter_for(plain, ROWS), budget=12)
    assert torch.equal(plain, sample(model, custom_generate=method, **settings))


def test_the_seed_is_drawn_once_from_the_global_generator(model):
    first = sample(model, seed=1)
    after = torch.rand(1)
    assert torch.equal(first, sample(model, seed=1))
    assert not torch.equal(first, sample(model, seed=2))
    torch.manual_seed(1)
    torch.randint(2**63 - 1, (1,))
    assert torch.equal(after, torch.rand(1))


def test_greedy_leaves_the_global_generator_alone(model):
    torch.manual_seed(1)
    model.generate(torch.tensor([[5]]), max_new_tokens=2, custom_generate=custom_generate(None))
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))


def test_returned_sequences_are_independent_samples(model):
    sequences = sample(model, rows=ROWS[:2], num_return_sequences=3, top_k=0)
    assert sequences.shape[0] == 6
    assert len({tuple(row) for row in sequences.tolist()}) == 6
    width = max(map(len, ROWS[:2]))
    assert torch.equal(sequences[0, :width], sequences[2, :width])


def test_greedy_warpers_are_lifted_not_lost(model):
    """A tiny temperature makes sampling greedy, whichever way it is applied."""
    greedy = model.generate(**inputs_of(ROWS), max_new_tokens=NEW, pad_token_id=PAD)
    assert torch.equal(greedy, sample(model, temperature=1e-3))
    assert torch.equal(greedy, sample(model, top_k=1))
    assert torch.equal(greedy, sample(model, temperature=1e-3, typical_p=0.9))


# ---- outputs ------------------------------------------------------------------------------


class Recorder:
    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        assert not self.ended
        self.values.append(value)

    def end(self) -> None:
        self.ended = True


def test_streamer_receives_what_generate_would_send(model):
    ours, theirs = Recorder(), Recorder()
    options = {"max_new_tokens": NEW}
    plain = model.generate(torch.tensor(ROWS[:1]), streamer=theirs, **options)
    method = custom_generate(drafter_for(plain, ROWS[:1]), budget=8, streamer=ours)
    model.generate(torch.tensor(ROWS[:1]), custom_generate=method, **options)
    assert [value.tolist() for value in ours.values] == [value.tolist() for value in theirs.values]
    assert ours.ended


def test_streamer_of_a_batch_receives_whole_columns(model):
    width = max(map(len, ROWS))
    free = model.generate(**inputs_of(ROWS), max_new_tokens=NEW, pad_token_id=PAD)
    recorder = Recorder()
    method = custom_generate(drafter_for(free, ROWS), budget=8, streamer=recorder)
    eos = int(free[1, width + 2])
    sequences = model.generate(
        **inputs_of(ROWS), max_new_tokens=NEW, pad_token_id=PAD, eos_token_id=eos,
        custom_generate=method,
    )  # fmt: skip
    assert torch.equal(torch.stack(recorder.values[1:], dim=1), sequences[:, width:])


def test_return_dict(model):
    options = {"max_new_tokens": 4, "custom_generate": custom_generate(None)}
    result = model.generate(torch.tensor(ROWS[:1]), return_dict_in_generate=True, **options)
    plain = model.generate(torch.tensor(ROWS[:1]), **options)
    assert torch.equal(result.sequences, plain)


# ---- what cannot be honoured --------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 2},
    "guidance_scale": {"guidance_scale": 1.5},
    "assist": {"prompt_lookup_num_tokens": 3},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "output_logits": {"output_logits": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "attention_mask": {"attention_mask": torch.tensor([[1, 0, 1]])},
    "zeros and ones": {"attention_mask": torch.tensor([[0.5, 1, 1]])},
    "position_ids": {"position_ids": torch.tensor([[3, 4, 5]])},
    "tokenizer": {"stop_strings": "x"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(model, reason):
    options = {"max_new_tokens": 3, **REFUSED[reason]}
    with pytest.raises(ValueError, match=reason):
        model.generate(torch.tensor([[5, 6, 7]]), custom_generate=custom_generate(None), **options)


def test_embeddings_are_refused(model):
    embeddings = model.get_input_embeddings()(torch.tensor([[5, 6]]))
    with pytest.raises(ValueError, match="inputs_embeds"):
        model.generate(
            inputs_embeds=embeddings, max_new_tokens=3, custom_generate=custom_generate(None)
        )


def test_a_cache_is_refused(model):
    cache = transformers.DynamicCache()
    name = "cache" if transformers.__version__ >= "5.24" else "past_key_values"
    model(torch.tensor([[5, 6]]), use_cache=True, **{name: cache})
    with pytest.raises(ValueError, match="as input"):
        model.generate(
            torch.tensor([[5, 6, 7]]), max_new_tokens=3, custom_generate=custom_generate(None),
            **{name: cache},
        )  # fmt: skip


def test_wrong_budget_is_refused_at_once():
    with pytest.raises(ValueError, match="budget"):
        custom_generate(None, budget="many")


def test_a_drafter_is_named_as_for_load(model):
    ids = torch.tensor([[5, 6, 5, 6, 5, 6]])
    plain = model.generate(ids, max_new_tokens=6, do_sample=False)
    named = custom_generate("lookup", budget=4)
    got = model.generate(ids, max_new_tokens=6, do_sample=False, custom_generate=named)
    assert torch.equal(plain, got)
    unknown = custom_generate("no such drafter")
    with pytest.raises(ValueError, match="no drafter 'no such drafter'"):
        model.generate(ids, max_new_tokens=6, custom_generate=unknown)


def test_missing_padding_token_is_refused(model):
    options = {"max_new_tokens": 3, "custom_generate": custom_generate(None)}
    criteria = hf.StoppingCriteriaList([EndsOn([1, 2])])
    saved, model.generation_config.pad_token_id = model.generation_config.pad_token_id, None
    try:
        with pytest.raises(ValueError, match="pad_token_id"):
            model.generate(torch.tensor([[5], [6]]), stopping_criteria=criteria, **options)
    finally:
        model.generation_config.pad_token_id = saved


# ---- failures and memory ------------------------------------------------------------------


@pytest.fixture
def failing(model) -> Iterator[tuple[NoisyOracleDrafter, Any]]:
    free = model.generate(**inputs_of(ROWS), max_new_tokens=NEW, pad_token_id=PAD)
    drafter = drafter_for(free, ROWS)
    method = custom_generate(drafter, budget=8)
    yield drafter, method
    assert drafter._known == {}
    again = model.generate(
        **inputs_of(ROWS), max_new_tokens=NEW, pad_token_id=PAD, custom_generate=method
    )
    assert torch.equal(free, again)


def test_a_failing_processor_raises_its_own_error(model, failing):
    _, method = failing

    def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 12:
            raise LookupError("broken")
        return scores

    with pytest.raises(LookupError, match="broken"):
        model.generate(
            **inputs_of(ROWS), max_new_tokens=NEW, pad_token_id=PAD, custom_generate=method,
            logits_processor=hf.LogitsProcessorList([broken]),
        )  # fmt: skip


def test_a_failing_criterion_raises_its_own_error(model, failing):
    _, method = failing

    def broken(input_ids: torch.Tensor, scores: Any) -> bool:
        if input_ids.shape[1] > 12:
            raise LookupError("broken")
        return False

    with pytest.raises(LookupError, match="broken"):
        model.generate(
            **inputs_of(ROWS), max_new_tokens=NEW, pad_token_id=PAD, custom_generate=method,
            stopping_criteria=hf.StoppingCriteriaList([broken]),
        )  # fmt: skip


def test_a_call_inside_its_own_call_is_refused(model, failing):
    _, method = failing

    def again(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        model.generate(input_ids, max_new_tokens=1, custom_generate=method)
        return scores

    errors: list[Exception] = []

    def call() -> None:
        try:
            model.generate(
                torch.tensor(ROWS[:1]), max_new_tokens=3, custom_generate=method,
                logits_processor=hf.LogitsProcessorList([again]),
            )  # fmt: skip
        except ValueError as error:
            errors.append(error)

    # daemon: a call that waits for itself must not hold up the end of the tests
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert "inside a call" in str(errors[0])


def test_forbidding_everything_is_an_error(model, failing):
    _, method = failing

    def nothing(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf)

    with pytest.raises(DraftwoodError, match="forbidden"):
        model.generate(
            **inputs_of(ROWS), max_new_tokens=NEW, pad_token_id=PAD, custom_generate=method,
            logits_processor=hf.LogitsProcessorList([nothing]),
        )  # fmt: skip


@pytest.mark.parametrize("drafter", [None, "lookup"])
def test_the_model_is_not_kept_alive(drafter):
    model = tiny_model("llama")
    method = custom_generate(drafter)
    model.generate(torch.tensor([[5]]), max_new_tokens=2, custom_generate=method)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_a_changed_model_is_read_again():
    model = tiny_model("llama", dtype=torch.float32)
    decode = custom_generate("lookup", budget=4)
    prompt = torch.tensor([[5, 9, 11, 3, 5, 9]])
    for _ in range(2):
        plain = model.generate(prompt, max_new_tokens=12, do_sample=False)
        fast = model.generate(prompt, max_new_tokens=12, do_sample=False, custom_generate=decode)
        assert torch.equal(plain, fast)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.down_proj.weight.neg_()
    target = model.__dict__[_KEPT].target
    model.generate(prompt, max_new_tokens=2, do_sample=False, custom_generate=decode)
    again = model.__dict__[_KEPT].target
    model.generate(prompt, max_new_tokens=2, do_sample=False, custom_generate=decode)
    assert again is model.__dict__[_KEPT].target
    assert target is not None


def test_copies_of_a_model_keep_nothing_of_it(tmp_path):
    model = tiny_model("llama")
    prompt = torch.tensor([[5, 9, 11]])
    decode = custom_generate("lookup")
    expected = model.generate(prompt, max_new_tokens=4, custom_generate=decode)
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert other.__dict__[_KEPT].target is None
        assert torch.equal(
            other.generate(prompt, max_new_tokens=4, custom_generate=decode), expected
        )
