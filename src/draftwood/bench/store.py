"""Results on disk: one JSON line per finished measurement, appended whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

FILE = "records.jsonl"
FORMAT = 1

Line = dict[str, Any]


class Store:
    """Appends to ``FOLDER/records.jsonl`` and knows what is there.

    Lines have a ``kind``: ``run`` (one per started command: how, with what, on what), ``record``
    (one method on one unit of work) and ``check`` (its output against plain decoding). Records and
    checks are found by ``key``. A last line that a killed run left incomplete is removed.

    Args:
        folder: created if it is not there.

    Raises:
        ValueError: a damaged file, or one of another format.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        self.lines = read_lines(self.path) if self.path.exists() else []
        self._cut_torn_line()
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.records = {line["key"]: line for line in self.lines if line["kind"] == "record"}
        self.checks = {line["key"]: line for line in self.lines if line["kind"] == "check"}

    def begin(self, run: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
        """Note the start of a command; returns its number.

        Raises:
            ValueError: the records were made with other settings.
        """
        runs = [line for line in self.lines if line["kind"] == "run"]
        if runs:
            _require_same(runs[0]["settings"], settings, self.path)
        number = len(runs)
        self._append(
            {"kind": "run", "format": FORMAT, "run": number, "settings": dict(settings), **run}
        )
        return number

    def add(self, record: Line) -> None:
        """Keep a record."""
        self._append({"kind": "record", **record})
        self.records[record["key"]] = record

    def add_check(self, check: Line) -> None:
        """Keep the check of a record's output."""
        self._append({"kind": "check", **check})
        self.checks[check["key"]] = check

    def _append(self, line: Line) -> None:
        data = json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        written = os.write(
            self._file, data
        )  # one call, so that a kill leaves at most one torn line
        assert written == len(data), "the disk is full"
        os.fsync(self._file)
        self.lines.append(line)

    def _cut_torn_line(self) -> None:
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        if data and not data.endswith(b"\n"):
            with self.path.open("r+b") as file:
                file.truncate(data.rfind(b"\n") + 1)

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()


def read_lines(path: Path) -> list[Line]:
    """All complete lines of a results file.

    Raises:
        ValueError: no results file, another format, or a damaged line (named by its number).
    """
    lines: list[Line] = []
    *complete, _torn = path.read_bytes().split(b"\n")
    for number, raw in enumerate(complete, start=1):
        try:
            line = json.loads(raw)
        except ValueError as error:
            raise ValueError(f"line {number} of {path} is damaged: {error}") from error
        if not isinstance(line, dict) or line.get("kind") not in ("run", "record", "check"):
            raise ValueError(f"{path} does not hold results of 'draftwood bench' (line {number})")
        if line["kind"] == "run" and line.get("format") != FORMAT:
            raise ValueError(
                f"{path} has format {line.get('format')!r}, this draftwood reads {FORMAT}; "
                "use the draftwood that wrote it"
            )
        lines.append(line)
    return lines


def _require_same(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            raise ValueError(
                f"{path} was made with {name} {old.get(name)!r}, now it is {new.get(name)!r}; "
                "results that cannot be compared go to different folders (--out)"
            )
