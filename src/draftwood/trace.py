"""Write what every cycle did as JSON lines: the input of the viewer and of replays."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import numpy as np

import draftwood
from draftwood.records import CycleRecord
from draftwood.target.model import Target
from draftwood.text import TextStream
from draftwood.trace_parts import Foresight, TokenTexts

if TYPE_CHECKING:
    from draftwood.engine import Engine

FORMAT = 1  # a reader ignores fields it does not know; a changed meaning needs a new number


class TraceWriter:
    """An ``Engine(on_cycle=…)`` listener that writes one JSON object a line.

    The first line has ``"kind": "header"``. Every decoding sequence of every cycle then gives a
    ``"kind": "cycle"`` line: ``seq``, ``pass`` (number of the engine cycle), ``start`` (position
    of the anchor), ``tokens``, ``parents``, ``log_probs`` (node 0 is the anchor), ``texts`` of
    the tokens, ``path`` (accepted nodes), ``picks`` (the target's own tokens, bonus last),
    ``num_committed``, ``committed_texts`` (text that each committed token completed), ``phi``
    (Φ(n), n = 0…), ``budget``, ``why`` (what decided it, "" if the policy does not say),
    ``drafted`` (whether the drafter was asked), ``seconds`` of the pass by stage and
    ``predicted`` (see ``Foresight``) or null, ``ahead`` (see ``AheadStats``) or null; prefill gives
    ``"kind": "prefill"`` lines with the ``text`` taken in. Passes are shared by all sequences.

    Args:
        path: file to write; replaced if it exists.
        target: for token texts.
        foresight: where predicted seconds come from; ``tracing`` puts one on an engine.
        details: anything worth keeping in the header (prompt, settings).
    """

    def __init__(
        self,
        path: str | Path,
        target: Target,
        *,
        foresight: Foresight | None = None,
        **details: Any,
    ) -> None:
        self._file: IO[str] = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
        self._tokenizer = target.tokenizer
        self._texts = TokenTexts(target.tokenizer)
        self._streams: dict[int, TextStream] = {}
        self._foresight = foresight
        self._num_passes = 0
        self._write(
            kind="header",
            format=FORMAT,
            draftwood=draftwood.__version__,
            target=target.name,
            **details,
        )

    def __call__(self, record: CycleRecord) -> None:
        rows = {index: row for row, index in enumerate(record.decoding)}
        seconds = dataclasses.asdict(record.seconds)
        predicted = self._foresight.take() if self._foresight is not None else None
        phi = record.scored.phi()
        for index, seq_id in enumerate(record.seq_ids):
            common = {
                "seq": seq_id,
                "pass": self._num_passes,
                "start": record.context_lens[index],
                "seconds": seconds,
            }
            if index in rows:
                fields = self._cycle(record, index, rows[index], phi[rows[index]])
                drafted = record.drafted
                self._write(kind="cycle", **common, **fields, drafted=drafted, predicted=predicted)
            else:
                start, end = record.tree.span(index)
                tokens = record.tree.token_ids[start:end].tolist()
                text = self._texts.joined(tokens)
                self._write(kind="prefill", num_tokens=len(tokens), text=text, **common)
        self._num_passes += 1

    def _cycle(self, record: CycleRecord, index: int, row: int, phi: np.ndarray) -> dict[str, Any]:
        start, end = record.tree.span(index)
        verdict, budget = record.verdicts[index], int(record.budgets[row])
        ahead = record.ahead[row] if record.ahead else None
        tokens = record.tree.token_ids[start:end].tolist()
        picks = [pick.token_id for pick in verdict.picks]
        num_committed = record.num_committed[index]
        return {
            "tokens": tokens,
            "parents": [max(-1, p - start) for p in record.tree.parents[start:end].tolist()],
            "log_probs": [0.0, *np.round(record.scored.log_probs[row, :budget], 4).tolist()],
            "texts": self._texts.each(tokens),
            "path": (np.asarray(verdict.path) - start).tolist(),
            "picks": picks,
            "pick_texts": self._texts.each(picks),
            "num_committed": num_committed,
            "committed_texts": self._committed(record.seq_ids[index], picks[:num_committed]),
            "phi": np.round(phi[: int(record.scored.counts[row]) + 1], 4).tolist(),
            "budget": budget,
            "why": record.why,
            "ahead": dataclasses.asdict(ahead) if ahead is not None else None,
            "error": verdict.error,
        }

    def _committed(self, seq_id: int, token_ids: list[int]) -> list[str]:
        """The text each token completed: "" while a character is still missing bytes."""
        if self._tokenizer is None:
            return []
        stream = self._streams.setdefault(seq_id, TextStream(self._tokenizer))
        pieces = []
        for token_id in token_ids:
            stream.push(token_id)
            pieces.append(stream.take())
        return pieces

    def _write(self, **fields: Any) -> None:
        self._file.write(json.dumps(fields, ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def tracing(engine: Engine, path: str | Path, **details: Any) -> Iterator[TraceWriter]:
    """Trace all that ``engine`` does inside the ``with`` block, predicted seconds included.

    Args:
        engine: its ``on_cycle`` and ``latency`` are replaced for the time being.
        path: file to write; replaced if it exists.
        details: as for ``TraceWriter``.
    """
    before = engine.latency, engine.on_cycle
    foresight = Foresight(engine.latency)
    settings = {
        "drafter": type(engine.drafter).__name__,
        "policy": type(engine.policy).__name__,
        "device": str(engine.target.device),
        "dtype": str(engine.target.dtype).removeprefix("torch."),
    }
    with TraceWriter(path, engine.target, foresight=foresight, **{**settings, **details}) as writer:
        engine.latency, engine.on_cycle = foresight, writer
        try:
            yield writer
        finally:
            engine.latency, engine.on_cycle = before
