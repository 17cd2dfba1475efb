"""``model.generate(**inputs, custom_generate=draftwood.custom_generate(drafter))``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, StopStringCriteria

from draftwood.draft.base import Drafter
from draftwood.draft.load import load_drafter
from draftwood.engine import Engine
from draftwood.errors import DraftwoodError
from draftwood.hf_request import Request, read_request
from draftwood.hf_rows import ColumnStream, RowCriteria, RowProcessor
from draftwood.records import Output
from draftwood.target.model import Target
from draftwood.tree.budget import BudgetPolicy, parse_budget
from draftwood.tree.latency import LatencyModel

DEFAULT_CHUNK_LEN = 512
_KEPT = "_draftwood_target"  # attribute of a model


class Streamer(Protocol):
    """transformers' ``BaseStreamer``."""

    def put(self, value: torch.Tensor) -> None: ...

    def end(self) -> None: ...


@dataclass
class _Learned:
    """What one call leaves to the next on the same model."""

    drafter: Drafter
    policy: BudgetPolicy
    latency: LatencyModel


class _Turn:
    """A lock that refuses the thread that holds it, which would wait for itself for ever."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    def __enter__(self) -> None:
        if self._holder == threading.get_ident():
            raise ValueError(
                "generate was called from inside a call with the same custom_generate (by a logits "
                "processor, a stopping criterion or a streamer); give the inner call its own"
            )
        self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *_error: object) -> None:
        self._holder = None
        self._lock.release()


def custom_generate(
    drafter: str | Drafter | None = "auto",
    *,
    budget: str | int | BudgetPolicy = "auto",
    streamer: Streamer | None = None,
    tokenizer: Any = None,
) -> Callable[..., torch.Tensor | GenerateDecoderOnlyOutput]:
    """A decoding method for transformers' ``generate``: same output, fewer target passes.

    Greedy output is that of ``generate``. With ``do_sample=True`` the law is the same, the draws
    are not: they come from ``seed = torch.randint(2**63 - 1, (1,))``, drawn once per call from
    torch's global generator, and row i of the (expanded) batch is sample i of that seed, equal to
    ``Engine.add(..., SamplingParams(seed=seed, ...), sample_index=i)``.

    Everything in ``generation_config`` that changes greedy or sampled output is honoured, as are
    ``logits_processor``, ``stopping_criteria``, ``prefix_allowed_tokens_fn``, ``stop_strings`` as a
    keyword of ``generate``, left padding, ``num_return_sequences`` and ``return_dict_in_generate``.
    Rows advance independently, so processors and criteria see one row at a time (repeated to the
    size of the batch where they may look at a certain row of it), each visited position once and in
    order. A finished row is filled with the padding token (``generate`` lets a row that a criterion
    ended run on with the others where no token ends a sequence), and a row ends at the latest where
    the model's context does (``generate`` runs on, with a warning).

    ``generate`` itself drops ``streamer``, ``tokenizer``, ``assistant_model`` and ``synced_gpus``
    when it is given a callable: pass the first two here.

    Args:
        drafter: what proposes: a name as for ``draftwood.load``, resolved at the first call with a
            model, or a drafter; None decodes plainly. One callable serves one call at a time.
        budget: drafted nodes per cycle: ``"auto"``, ``"chain"``, ``"off"``, a number, or a policy.
        streamer: receives the prompt and then every token, as from ``generate``.
        tokenizer: needed for ``stop_strings`` only.

    Raises:
        ValueError: a wrong budget; in the call: an unknown drafter, a model that cannot be decoded
            exactly, and options of ``generate`` that cannot be honoured (beams, guidance,
            assistants, scores and other extra outputs, a cache or embeddings as input, padding
            that is not on the left).
        DraftwoodError: in the call: NaN logits, or every token forbidden.
    """
    parse_budget(budget)
    learned: WeakKeyDictionary[PreTrainedModel, _Learned] = WeakKeyDictionary()
    turn = _Turn()

    def decode(
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: GenerationConfig,
        stop_strings: str | Sequence[str] | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        criteria = [*stopping_criteria, *_stop_string_criteria(stop_strings, tokenizer)]
        request = read_request(
            input_ids, logits_processor, criteria, generation_config, model_kwargs,
            vocab_size=model.config.get_text_config(decoder=True).vocab_size,
        )  # fmt: skip
        with turn:
            known = learned.get(model)
            target = _target_of(model, probe=known is None)
            engine = Engine(
                target,
                known.drafter if known is not None else load_drafter(drafter, target),
                known.policy if known is not None else parse_budget(budget),
                latency=known.latency if known is not None else None,
                max_batch=len(request.prompts),
                prefill_chunk_len=generation_config.prefill_chunk_size or DEFAULT_CHUNK_LEN,
            )
            learned[model] = _Learned(engine.drafter, engine.policy, engine.latency)
            columns = _run(engine, request, streamer)
        sequences = torch.cat([input_ids, columns.to(input_ids.device)], dim=1)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    return decode


class _Kept:
    """A model's target, kept with the model: gone when it is, and in no copy of it."""

    def __init__(self, target: Target | None = None) -> None:
        self.target = target

    def __deepcopy__(self, memo: object) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def _target_of(model: PreTrainedModel, *, probe: bool) -> Target:
    """The target that an earlier call made of this model, or a new one if the model changed."""
    kept = model.__dict__.setdefault(_KEPT, _Kept())
    if kept.target is None or kept.target.model is not model or not kept.target.is_current():
        kept.target = None  # its copies of the weights make room
        kept.target = Target(model, probe=probe)
    target: Target = kept.target
    return target


def _run(engine: Engine, request: Request, streamer: Streamer | None) -> torch.Tensor:
    """Decode all rows; [rows, longest output] new tokens."""
    columns = ColumnStream(len(request.prompts), request.pad_token_id, streamer)
    processors = [RowProcessor(request, row) for row in range(len(request.prompts))]
    criteria = [RowCriteria(request, row) for row in range(len(request.prompts))]
    ids: list[int] = []
    if streamer is not None:
        streamer.put(request.input_ids.cpu())
    try:
        for row, prompt in enumerate(request.prompts):
            seq_id = engine.add(
                prompt,
                request.params,
                processors=[processors[row]] if request.processors else (),
                stop_when=criteria[row] if request.criteria else None,
                sample_index=row,
            )
            ids.append(seq_id)
        while engine.num_active:
            for event in engine.step():
                row = ids.index(event.seq_id)
                if event.output is not None and event.output.finish_reason == "error":
                    _fail(event.output, processors[row].failure or criteria[row].failure)
                columns.add(row, event.token_ids, finished=event.output is not None)
    finally:
        for seq_id in ids:
            engine.abort(seq_id)
        if streamer is not None:
            streamer.end()
    return columns.tokens()


def _fail(output: Output, failure: Exception | None) -> None:
    if failure is not None:
        raise failure
    raise DraftwoodError(output.error)


def _stop_string_criteria(
    stop_strings: str | Sequence[str] | None, tokenizer: Any
) -> list[StopStringCriteria]:
    if not stop_strings:
        return []
    if tokenizer is None:
        raise ValueError(
            f"stop_strings={stop_strings!r} need the tokenizer; pass it to custom_generate("
            "drafter, tokenizer=...), because generate hands it to no callable"
        )
    strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    return [StopStringCriteria(tokenizer, strings)]
