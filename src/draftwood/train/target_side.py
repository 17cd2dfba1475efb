"""Run the target over stored responses: raw layer outputs at the taps, and its own top-k."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn

from draftwood.train.anchors import Example, anchor_range
from draftwood.train.features import (
    FILES,
    INDEX,
    META,
    FeatureStore,
    Record,
    is_held_out,
    whole_lines,
)


@dataclass(frozen=True)
class ResponseRow:
    """A prompt with the target's response: the rows of the files ``draftwood data`` writes."""

    token_ids: tuple[int, ...]
    response_start: int
    domain: str

    @property
    def key(self) -> str:
        """Identity of the tokens."""
        return _digest(self.token_ids)

    @property
    def prompt_key(self) -> str:
        """Identity of the prompt; decides the held-out split."""
        return _digest(self.token_ids[: self.response_start])


def read_rows(paths: Iterable[str | os.PathLike[str]]) -> Iterator[ResponseRow]:
    """Rows of JSONL files with ``token_ids``, ``response_start`` and optionally ``domain``.

    A last line without its newline is still being written and is left out.

    Raises:
        ValueError: a line lacks a key, or its response does not start inside the row.
    """
    for path in paths:
        with open(path) as handle:
            for number, line in enumerate(handle, 1):
                if line.endswith("\n"):
                    yield _parse(line, f"{path}:{number}")


def _parse(line: str, where: str) -> ResponseRow:
    try:
        raw = json.loads(line)
        ids, start = tuple(map(int, raw["token_ids"])), int(raw["response_start"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where} is no reply: a line needs token_ids and response_start. 'draftwood data' "
            "makes them from prompts"
        ) from error
    if not 0 < start <= len(ids):
        raise ValueError(f"{where}: response_start {start} is outside its {len(ids)} tokens")
    return ResponseRow(ids, start, str(raw.get("domain", "")))


@contextmanager
def tapped(model: nn.Module, taps: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """While open, every forward of ``model`` puts its raw layer outputs [1, N, H] in the dict.

    Raises:
        ValueError: the model has no such layer.
    """
    layers = model.get_decoder().layers  # type: ignore[operator]
    outputs: dict[int, torch.Tensor] = {}

    def keep(tap: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            outputs[tap] = output[0] if isinstance(output, tuple) else output

        return hook

    with ExitStack() as stack:
        for tap in taps:
            if not 0 <= tap < len(layers):
                raise ValueError(f"tap {tap} is outside the target's layers 0…{len(layers) - 1}")
            stack.callback(layers[tap].register_forward_hook(keep(tap)).remove)
        yield outputs


def as_example(row: ResponseRow) -> Example:
    """A row for drafters that read tokens only: without features."""
    tokens = np.asarray(row.token_ids, dtype=np.int64)
    return Example(tokens, row.response_start, torch.zeros(len(tokens), 0), domain=row.domain)


@torch.no_grad()
def run_target(model: nn.Module, row: ResponseRow, taps: Sequence[int], top_k: int) -> Example:
    """Features and top-k of one row.

    The head runs only where its output is a label: from the last prompt token on. Prompt
    positions before have log-probabilities of −inf.
    """
    device = next(model.parameters()).device
    ids = torch.tensor(row.token_ids, device=device)[None]
    with tapped(model, taps) as outputs:
        decoded = model.get_decoder()(input_ids=ids, use_cache=False)  # type: ignore[operator]
    features = torch.cat([outputs[tap][0] for tap in taps], dim=-1).cpu()
    tokens = np.asarray(row.token_ids, dtype=np.int64)
    if top_k == 0:
        return Example(tokens, row.response_start, features, domain=row.domain)
    first, _ = anchor_range(row.response_start, len(tokens))
    head = model.get_output_embeddings()  # type: ignore[operator]
    scores = head(decoded.last_hidden_state[0, first:]).float()
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap:
        scores = torch.tanh(scores / cap) * cap
    best = scores.log_softmax(dim=-1).topk(top_k, dim=-1)
    top_ids = torch.zeros(len(tokens), top_k, dtype=torch.int64)
    top_log_probs = torch.full((len(tokens), top_k), float("-inf"))
    top_ids[first:], top_log_probs[first:] = best.indices.cpu(), best.values.cpu()
    return Example(tokens, row.response_start, features, top_ids, top_log_probs, row.domain)


class LiveSource:
    """Training responses whose features are computed each time they are used."""

    def __init__(
        self,
        rows: Sequence[ResponseRow],
        model: nn.Module,
        taps: Sequence[int],
        top_k: int,
    ) -> None:
        self._rows, self._model, self._how = list(rows), model, (tuple(taps), top_k)

    def refresh(self) -> None:
        """Nothing to take in: the rows are given."""

    def __len__(self) -> int:
        return len(self._rows)

    def num_anchors(self, index: int) -> int:
        row = self._rows[index]
        return anchor_range(row.response_start, len(row.token_ids))[1]

    def name(self, index: int) -> str:
        return self._rows[index].key

    def example(self, index: int) -> Example:
        return run_target(self._model, self._rows[index], *self._how)


def split_rows(
    rows: Iterable[ResponseRow], percent: float = 3.0
) -> tuple[list[ResponseRow], list[ResponseRow]]:
    """(training, held-out) rows, split by prompt; repeated rows are dropped."""
    sides: tuple[list[ResponseRow], list[ResponseRow]] = ([], [])
    seen = set()
    for row in rows:
        if row.key not in seen:
            seen.add(row.key)
            sides[is_held_out(row.prompt_key, percent)].append(row)
    return sides


def build_store(
    folder: str | os.PathLike[str],
    rows: Iterable[ResponseRow],
    model: nn.Module,
    taps: Sequence[int],
    *,
    top_k: int = 16,
    max_len: int = 2048,
) -> int:
    """Append the rows that a store does not have yet; safe to interrupt and to run again.

    Args:
        taps, top_k: must be those of an existing store.
        max_len: longer rows are skipped.

    Returns:
        Number of responses added.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    hidden = model.get_output_embeddings().weight.shape[1]  # type: ignore[operator]
    meta = {"taps": list(taps), "hidden_size": hidden, "top_k": top_k}
    if not (path / META).exists():
        (path / META).write_text(json.dumps(meta))
    store = FeatureStore(path, taps)
    if store.meta != meta:
        raise ValueError(f"{path} was built with {store.meta}, not {meta}; use another folder")
    known = {record.key for record in store.records}
    position = max((r.start + r.length for r in store.records), default=0)
    added = 0
    with ExitStack() as stack:
        files = _appendable(path, position, meta, stack)
        index = stack.enter_context((path / INDEX).open("ab"))
        index.truncate(whole_lines(path))
        for row in rows:
            if row.key in known or len(row.token_ids) > max_len:
                continue
            known.add(row.key)
            _append(files, run_target(model, row, taps, top_k))
            length = len(row.token_ids)
            entry = Record(
                row.key, position, length, row.response_start, row.domain, row.prompt_key
            )
            index.write((json.dumps(asdict(entry)) + "\n").encode())
            index.flush()
            position, added = position + length, added + 1
    return added


def _appendable(
    path: Path, position: int, meta: dict[str, Any], stack: ExitStack
) -> dict[str, BinaryIO]:
    """Open the data files for appending, cut to what the index knows."""
    widths = {
        "features": len(meta["taps"]) * meta["hidden_size"] * 2,
        "tokens": 4,
        "top_ids": meta["top_k"] * 4,
        "top_log_probs": meta["top_k"] * 2,
    }
    files: dict[str, BinaryIO] = {}
    for name, width in widths.items():
        handle = stack.enter_context((path / FILES[name]).open("ab"))
        handle.truncate(position * width)
        files[name] = handle
    return files


def _append(files: dict[str, BinaryIO], example: Example) -> None:
    parts = {
        "features": example.features.to(torch.float16).numpy(),
        "tokens": example.token_ids.astype(np.int32),
    }
    if example.top_ids is not None and example.top_log_probs is not None:
        parts["top_ids"] = example.top_ids.to(torch.int32).numpy()
        parts["top_log_probs"] = example.top_log_probs.to(torch.float16).numpy()
    for name, values in parts.items():
        files[name].write(np.ascontiguousarray(values).tobytes())
        files[name].flush()


def _digest(token_ids: Sequence[int]) -> str:
    return hashlib.md5(np.asarray(token_ids, dtype=np.int32).tobytes()).hexdigest()
