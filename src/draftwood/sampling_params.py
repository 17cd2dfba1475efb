"""What a request asks for: how to choose tokens and when to stop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, isnan
from numbers import Integral, Real

from draftwood.noise import MAX_SEED

_MIN_TEMPERATURE = 1e-4  # below, float32 scores overflow; the result would be greedy anyway


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. Greedy decoding by default.

    Scores change in this order: logit bias, repetition penalty, presence and frequency penalty,
    bad words, ``min_new_tokens``; then, at temperature > 0, temperature, top-k, top-p, min-p.

    Attributes:
        temperature: 0 takes the most probable token; else scores are divided by it.
        top_k: sample among the k most probable tokens (ties included); 0 is off.
        top_p: sample among the fewest tokens of this total probability; 1 is off.
        min_p: drop tokens less probable than this times the most probable one; 0 is off.
        repetition_penalty: transformers' (CTRL's), over prompt and output; 1 is off.
        presence_penalty: OpenAI's, subtracted once for tokens in the output; 0 is off.
        frequency_penalty: OpenAI's, subtracted per occurrence in the output; 0 is off.
        logit_bias: token id → value added to its logit; −inf forbids it.
        bad_words: token sequences that the output must not complete.
        seed: of the draws at temperature > 0; None lets the engine choose one.
        max_new_tokens: most tokens to emit.
        min_new_tokens: no end of sequence, stop token or stop string before this many tokens.
        stop_token_ids: end the output, besides the model's own end-of-sequence tokens.
        stop: strings that end the text; they are not part of it.
        ignore_eos: treat end-of-sequence tokens like any other.
        logprobs: report the log-probability of each emitted token and of this many best ones,
            under the model's own distribution (log-softmax of the unprocessed logits).

    Raises:
        ValueError: a value out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, items in (
            ("stop_token_ids", "token ids"),
            ("stop", "strings"),
            ("bad_words", "sequences of token ids"),
        ):
            given = getattr(self, name)
            _require(_is_listing(given), name, given, f"a tuple of {items}")
            object.__setattr__(self, name, tuple(given))
        for word in self.bad_words:
            _require(_is_listing(word), "each of bad_words", word, "a sequence of token ids")
        object.__setattr__(self, "bad_words", tuple(tuple(word) for word in self.bad_words))
        _check_types(self)
        _check_numbers(self)
        _check_tokens(self)

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p may forbid tokens."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if a token id named here is not below ``vocab_size``."""
        words = [token for word in self.bad_words for token in word]
        for name, ids in (
            ("logit_bias", list(self.logit_bias)),
            ("bad_words", words),
            ("stop_token_ids", list(self.stop_token_ids)),
        ):
            bad = [token for token in ids if token >= vocab_size]
            if bad:
                raise ValueError(
                    f"token id {bad[0]} in {name} is outside the vocabulary 0..{vocab_size - 1}"
                )


def _require(ok: bool, name: str, value: object, remedy: str) -> None:
    if not ok:
        raise ValueError(f"{name} must be {remedy}, got {value!r}")


def _check_types(p: SamplingParams) -> None:
    for name in ("top_k", "max_new_tokens", "min_new_tokens", "seed", "logprobs"):
        value = getattr(p, name)
        optional = name in ("seed", "logprobs")
        ok = _is_int(value) or (optional and value is None)
        _require(ok, name, value, "an int or None" if optional else "an int")
    for name in (
        "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty",
    ):  # fmt: skip
        _require(_is_number(getattr(p, name)), name, getattr(p, name), "a number")
    _require(isinstance(p.logit_bias, Mapping), "logit_bias", p.logit_bias, "a dictionary")
    for token, value in p.logit_bias.items():
        _require(_is_number(value), f"logit_bias[{token}]", value, "a number")
    words = [token for word in p.bad_words for token in word]
    groups = {"logit_bias": p.logit_bias, "stop_token_ids": p.stop_token_ids, "bad_words": words}
    for name, tokens in groups.items():
        for token in tokens:
            _require(_is_int(token), f"each token id in {name}", token, "an int")


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_listing(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes))


def _check_numbers(p: SamplingParams) -> None:
    _require(
        isfinite(p.temperature) and (p.temperature == 0 or p.temperature >= _MIN_TEMPERATURE),
        "temperature",
        p.temperature,
        f"0 (greedy) or a finite number ≥ {_MIN_TEMPERATURE}",
    )
    _require(p.top_k >= 0, "top_k", p.top_k, "≥ 0 (0 is off)")
    _require(0 < p.top_p <= 1, "top_p", p.top_p, "in (0, 1] (1 is off)")
    _require(0 <= p.min_p <= 1, "min_p", p.min_p, "in [0, 1] (0 is off)")
    _require(
        isfinite(p.repetition_penalty) and p.repetition_penalty > 0,
        "repetition_penalty",
        p.repetition_penalty,
        "finite and > 0 (1 is off)",
    )
    for name in ("presence_penalty", "frequency_penalty"):
        _require(isfinite(getattr(p, name)), name, getattr(p, name), "finite (0 is off)")
    _require(p.max_new_tokens > 0, "max_new_tokens", p.max_new_tokens, "≥ 1")
    _require(
        0 <= p.min_new_tokens <= p.max_new_tokens,
        "min_new_tokens",
        p.min_new_tokens,
        f"between 0 and max_new_tokens ({p.max_new_tokens})",
    )
    _require(p.seed is None or 0 <= p.seed <= MAX_SEED, "seed", p.seed, "in 0 … 2**64 − 1")
    _require(p.logprobs is None or p.logprobs >= 0, "logprobs", p.logprobs, "None or ≥ 0")


def _check_tokens(p: SamplingParams) -> None:
    for token, value in p.logit_bias.items():
        _require(token >= 0, "a token id in logit_bias", token, "≥ 0")
        ok = not isnan(value) and value != inf
        _require(ok, f"logit_bias[{token}]", value, "a number or −inf (forbids the token)")
    for word in p.bad_words:
        ok = len(word) > 0 and min(word) >= 0
        _require(ok, "each of bad_words", word, "a non-empty sequence of token ids ≥ 0")
    for token in p.stop_token_ids:
        _require(token >= 0, "each of stop_token_ids", token, "≥ 0")
    for text in p.stop:
        ok = isinstance(text, str) and text != ""
        _require(ok, "each of stop", text, "a non-empty string")
