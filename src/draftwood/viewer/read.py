"""Read a trace back, checked line by line; a last line that was cut short is left out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

FORMATS = (1,)
STAGES = ("draft_s", "verify_s", "walk_s", "commit_s", "other_s")
_HOW = "write one with 'draftwood generate --trace FILE' or draftwood.trace.tracing"

Line = dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """The lines of a trace, in order.

    Attributes:
        header: format, versions, target and what the writer added.
        prefills: ``"kind": "prefill"`` lines.
        cycles: ``"kind": "cycle"`` lines; never empty.
        cut_short: the last line was incomplete and is not in here.
    """

    header: Line
    prefills: list[Line]
    cycles: list[Line]
    cut_short: bool


def read_trace(path: str | Path) -> Trace:
    """Read a file written by ``draftwood.trace.TraceWriter``.

    Raises:
        ValueError: not a trace, a format this version does not know, a damaged line (named by its
            number), or no cycle at all.
        OSError: the file cannot be read.
    """
    path = Path(path)
    lines = _lines(path)
    header = next(lines, None)
    if header is None or not header.complete:
        what = "is empty" if header is None else "ends within its first line"
        raise ValueError(f"{path} {what}; {_HOW}")
    if header.fields.get("kind") != "header":
        raise ValueError(f"{path} is not a draftwood trace (no header line); {_HOW}")
    found = header.fields.get("format")
    if found not in FORMATS:
        raise ValueError(
            f"{path} has trace format {found!r}, this draftwood reads {FORMATS[-1]}; "
            "use the draftwood that wrote it, or trace again"
        )
    trace = Trace(header.fields, [], [], cut_short=False)
    for line in lines:
        if not line.complete:
            trace = Trace(trace.header, trace.prefills, trace.cycles, cut_short=True)
        elif line.fields.get("kind") == "cycle":
            trace.cycles.append(_checked_cycle(line))
        elif line.fields.get("kind") == "prefill":
            trace.prefills.append(_checked(line, ("seq", "seconds")))
        else:
            line.fail(f"of unknown kind {line.fields.get('kind')!r}")
    if not trace.cycles:
        raise ValueError(f"{path} holds no complete cycle; let the generation run longer")
    return trace


@dataclass(frozen=True)
class _Line:
    where: str
    fields: Line
    complete: bool = True

    def fail(self, problem: str) -> NoReturn:
        raise ValueError(f"{self.where} is {problem}; the trace is damaged, trace again")


def _lines(path: Path) -> Iterator[_Line]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"line {number} of {path}"
            try:
                fields = json.loads(raw.decode("utf-8"), parse_constant=_refuse)
            except (ValueError, RecursionError):
                if raw.endswith(b"\n"):
                    if number == 1:
                        raise ValueError(f"{path} is not a draftwood trace; {_HOW}") from None
                    _Line(where, {}).fail("not JSON")
                yield _Line(where, {}, complete=False)
                return
            if not isinstance(fields, dict):
                if number == 1:
                    raise ValueError(f"{path} is not a draftwood trace; {_HOW}")
                _Line(where, {}).fail("not an object")
            yield _Line(where, fields)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)  # NaN and infinities are no JSON


def _checked(line: _Line, needed: tuple[str, ...]) -> Line:
    fields = line.fields
    missing = [name for name in needed if name not in fields]
    if missing:
        line.fail(f"without {', '.join(missing)}")
    seconds = fields["seconds"]
    if not isinstance(seconds, dict) or not _numbers([seconds.get(stage) for stage in STAGES]):
        line.fail("without seconds for every stage")
    if not _indices([fields["seq"]]):
        line.fail(f"of no sequence (seq {fields['seq']!r})")
    return fields


def _checked_cycle(line: _Line) -> Line:
    needed = ("seq", "start", "tokens", "parents", "log_probs", "path", "picks", "num_committed",
              "phi", "budget", "seconds")  # fmt: skip
    fields = _checked(line, needed)
    tokens, parents, path = fields["tokens"], fields["parents"], fields["path"]
    if not (_indices(tokens) and _indices(fields["picks"]) and _indices(path)):
        line.fail("without whole numbers as tokens, picks and path")
    if not _indices([fields["start"], fields["num_committed"], fields["budget"]]):
        line.fail("without whole numbers as start, num_committed and budget")
    if not (_numbers(fields["log_probs"]) and _numbers(fields["phi"]) and fields["phi"]):
        line.fail("without finite log_probs and phi")
    if not (isinstance(parents, list) and parents[:1] == [-1] and _indices(parents[1:])):
        line.fail("without a parent for each node")
    num_nodes = len(tokens)
    if len(parents) != num_nodes or len(fields["log_probs"]) != num_nodes:
        line.fail("of tokens, parents and log_probs that differ in number")
    if any(parent >= node for node, parent in enumerate(parents)):
        line.fail("of a node before its parent")
    is_path = path[:1] == [0] and max(path) < num_nodes
    if not is_path or any(parents[after] != before for before, after in pairwise(path)):
        line.fail("of a path that is none in its tree")
    if fields["num_committed"] > len(fields["picks"]):
        line.fail("of more committed tokens than picks")
    _check_optional(line)
    return fields


def _check_optional(line: _Line) -> None:
    """Fields that are absent without a tokenizer or a latency model."""
    for name in ("texts", "pick_texts", "committed_texts"):
        texts = line.fields.get(name, [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            line.fail(f"without a list of strings as {name}")
    if not isinstance(line.fields.get("why", ""), str):
        line.fail("without text as why")
    predicted = line.fields.get("predicted")
    if predicted is not None:
        known = isinstance(predicted, dict) and {"verify_s", "other_s"} <= predicted.keys()
        if not known or not _numbers([s for s in predicted.values() if s is not None]):
            line.fail("of predicted seconds that are no numbers")


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, (int, float)) and math.isfinite(value) for value in values
    )


def _indices(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
