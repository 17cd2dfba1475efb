"""Write what every cycle did as JSON lines: the input of the viewer and of replays."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

import draftwood
from draftwood.records import CycleRecord
from draftwood.target.model import Target

FORMAT = 1


class TraceWriter:
    """An ``Engine(on_cycle=…)`` listener that writes one JSON object a line.

    The first line has ``"kind": "header"``. Every decoding sequence of every cycle then gives a
    ``"kind": "cycle"`` line: ``seq``, ``start`` (position of the anchor), ``tokens``, ``parents``,
    ``log_probs`` (node 0 is the anchor), ``texts`` of the tokens, ``path`` (accepted nodes),
    ``picks`` (the target's own tokens, bonus last), ``num_committed``, ``phi`` (Φ(n), n = 0…),
    ``budget`` and ``seconds`` of the pass by stage; prefill gives ``"kind": "prefill"`` lines.

    Args:
        path: file to write; replaced if it exists.
        target: for token texts.
        details: anything worth keeping in the header (prompt, settings).
    """

    def __init__(self, path: str | Path, target: Target, **details: Any) -> None:
        self._file: IO[str] = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 (closed by us)
        self._tokenizer = target.tokenizer
        self._write(
            kind="header",
            format=FORMAT,
            draftwood=draftwood.__version__,
            target=getattr(target.model.config, "name_or_path", ""),
            **details,
        )

    def __call__(self, record: CycleRecord) -> None:
        rows = {index: row for row, index in enumerate(record.decoding)}
        seconds = dataclasses.asdict(record.seconds)
        phi = record.scored.phi()
        for index, seq_id in enumerate(record.seq_ids):
            start, end = record.tree.span(index)
            common = {"seq": seq_id, "start": record.context_lens[index], "seconds": seconds}
            if index not in rows:
                self._write(kind="prefill", num_tokens=end - start, **common)
                continue
            row, verdict = rows[index], record.verdicts[index]
            budget = int(record.budgets[row])
            tokens = record.tree.token_ids[start:end].tolist()
            picks = [pick.token_id for pick in verdict.picks]
            self._write(
                kind="cycle",
                **common,
                tokens=tokens,
                parents=[max(-1, p - start) for p in record.tree.parents[start:end].tolist()],
                log_probs=[0.0, *np.round(record.scored.log_probs[row, :budget], 4).tolist()],
                texts=self._texts(tokens),
                path=(np.asarray(verdict.path) - start).tolist(),
                picks=picks,
                pick_texts=self._texts(picks),
                num_committed=record.num_committed[index],
                phi=np.round(phi[row, : int(record.scored.counts[row]) + 1], 4).tolist(),
                budget=budget,
                error=verdict.error,
            )

    def _texts(self, token_ids: list[int]) -> list[str]:
        if self._tokenizer is None:
            return []
        return [self._tokenizer.decode([token]) for token in token_ids]

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
