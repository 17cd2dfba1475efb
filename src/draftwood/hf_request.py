"""From what transformers' ``generate`` hands to a decoding method to a request of ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers import generation as hf
from transformers.generation import GenerationMode

from draftwood.sampling import SamplingParams

_IGNORED_INPUTS = {"use_cache", "logits_to_keep"}  # how the model is run, which is our business
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_LOSSY_CACHES = ("quantized",)


@dataclass(frozen=True)
class Request:
    """One call of ``generate``.

    Attributes:
        input_ids: [B, L] prompts, left-padded, already expanded by ``num_return_sequences``.
        prompts: the B prompts without padding.
        params: of every row.
        processors: transformers' processors that ``params`` does not cover.
        criteria: stopping criteria other than length and end of sequence, which are in ``params``.
        pad_token_id: fills finished rows.
    """

    input_ids: torch.Tensor
    prompts: list[list[int]]
    params: SamplingParams
    processors: list[Any]
    criteria: list[Any]
    pad_token_id: int


def read_request(
    input_ids: torch.Tensor,
    processors: Sequence[Any],
    criteria: Sequence[Any],
    config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
    *,
    vocab_size: int,
) -> Request:
    """Translate, or refuse with the reason.

    End-of-sequence tokens outside the vocabulary (−1 is in use for "none") never occur and go.

    Raises:
        ValueError: something that could not be honoured.
    """
    _check_config(config)
    _check_inputs(input_ids, model_kwargs)
    mask = model_kwargs.get("attention_mask")
    prompts = _strip_padding(input_ids, mask, model_kwargs.get("position_ids"))
    lengths = [c.max_length for c in criteria if isinstance(c, hf.MaxLengthCriteria)]
    if not lengths:
        raise ValueError("no length limit; set max_new_tokens or max_length")
    given = [c.eos_token_id for c in criteria if isinstance(c, hf.EosTokenCriteria)]
    eos = {t for ids in given for t in ids.flatten().tolist() if 0 <= t < vocab_size}
    others = [c for c in criteria if not isinstance(c, (hf.MaxLengthCriteria, hf.EosTokenCriteria))]
    lifted, rest = _lift(list(processors)) if config.do_sample else ({}, list(processors))
    _check_processors(rest, len(prompts))
    params = SamplingParams(
        # A criterion of the user's may be met from the start; it is asked after the first token.
        max_new_tokens=max(1, min(lengths) - input_ids.shape[1]),
        stop_token_ids=tuple(sorted(eos)),
        ignore_eos=True,  # the model's own list may differ from this call's
        seed=_draw_seed() if config.do_sample else None,
        **({"temperature": 1.0, **lifted} if config.do_sample else {}),
    )
    pad = _pad_token_id(config, len(prompts), can_finish_early=bool(eos or others))
    return Request(input_ids, prompts, params, rest, others, pad)


def _draw_seed() -> int:
    return int(torch.randint(2**63 - 1, (1,)))


def _lift(processors: list[Any]) -> tuple[dict[str, Any], list[Any]]:
    """Split trailing temperature, top-k, top-p and min-p warpers off, as sampling settings.

    Ours compute the same, faster, and the drafter can take them into account.
    """
    settings: dict[str, Any] = {}
    rest = list(processors)
    for kind, name, least in (
        (hf.MinPLogitsWarper, "min_p", 0.0),
        (hf.TopPLogitsWarper, "top_p", 1e-9),
        (hf.TopKLogitsWarper, "top_k", 1),
        (hf.TemperatureLogitsWarper, "temperature", 1e-4),
    ):
        last = rest[-1] if rest else None
        if type(last) is not kind or getattr(last, "min_tokens_to_keep", 1) != 1:
            continue
        fill = getattr(last, "filter_value", -math.inf)
        value = getattr(last, name)
        if fill == -math.inf and value >= least:
            settings[name] = value
            rest.pop()
    return settings, rest


def _strip_padding(
    input_ids: torch.Tensor, mask: torch.Tensor | None, position_ids: torch.Tensor | None
) -> list[list[int]]:
    rows = input_ids.tolist()
    pads = [0] * len(rows)
    if mask is not None:
        if mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)} and input_ids "
                f"{tuple(input_ids.shape)}; only a mask of the prompt tokens is supported"
            )
        kept = mask != 0
        if not torch.equal(kept.to(mask.dtype), mask):
            raise ValueError("attention_mask must hold only zeros and ones")
        if not bool((kept.int().diff(dim=1) >= 0).all() & kept[:, -1].all()):
            raise ValueError(
                "attention_mask must be zeros followed by ones; use padding_side='left' and no gaps"
            )
        pads = (~kept).sum(dim=1).tolist()
    if position_ids is not None:
        for row, pad in enumerate(pads):
            positions = position_ids[row if len(position_ids) > 1 else 0, pad:]
            if not torch.equal(positions.cpu(), torch.arange(len(rows[row]) - pad)):
                raise ValueError("position_ids must count from 0 at the first unpadded token")
    return [row[pad:] for row, pad in zip(rows, pads, strict=True)]


def _pad_token_id(config: GenerationConfig, num_rows: int, *, can_finish_early: bool) -> int:
    pad = config._pad_token_tensor
    if pad is not None:
        return int(pad)
    if num_rows > 1 and can_finish_early:
        raise ValueError("rows may end at different lengths; set pad_token_id to fill them up")
    return 0  # never used


def _check_config(config: GenerationConfig) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"generation mode {mode.value} is not supported; only greedy search and sampling are "
            "(num_beams=1, no penalty_alpha, prompt_lookup_num_tokens or assistant)"
        )
    if config.return_dict_in_generate:
        asked = [name for name in _OUTPUTS if getattr(config, name, None)]
        if asked:
            raise ValueError(f"{asked[0]}=True is not supported; leave it out")
    if config.cache_implementation in _LOSSY_CACHES:
        raise ValueError(
            f"cache_implementation={config.cache_implementation!r} changes the output and is not "
            "supported; leave it out"
        )


def _check_inputs(input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]) -> None:
    known = {*_IGNORED_INPUTS, "attention_mask", "position_ids", "cache", "past_key_values"}
    extra = [k for k, value in model_kwargs.items() if k not in known and value is not None]
    if extra:
        raise ValueError(f"model input {extra[0]} is not supported; only token ids are")
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError(f"input_ids must be [batch ≥ 1, length ≥ 1], got {tuple(input_ids.shape)}")
    for name in ("cache", "past_key_values"):
        cache = model_kwargs.get(name)
        if cache is None:
            continue
        if getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0:
            raise ValueError(f"a {name} as input is not supported; leave it out")


def _check_processors(processors: Sequence[Any], num_rows: int) -> None:
    for processor in processors:
        name = type(processor).__name__
        if "ClassifierFreeGuidance" in name:
            raise ValueError("guidance_scale is not supported; it needs a second model pass")
        if isinstance(processor, hf.SynthIDTextWatermarkLogitsProcessor) and num_rows > 1:
            raise ValueError(
                f"{name} keeps state about the whole batch; generate one sequence at a time"
            )
