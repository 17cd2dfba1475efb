"""Results on disk: one JSON line per finished measurement, appended whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from draftwood.bench.places import last_name

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

    Attributes:
        cut_line: number of the incomplete line that was removed; None if there was none.

    Raises:
        ValueError: a damaged file, one of another format, or one that another process writes.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            _lock(self._file, self.path)
            # Not by the path: closing another file on it would end the lock.
            data = os.read(self._file, os.fstat(self._file).st_size)
            self.lines, self.cut_line = parse_lines(data, self.path)
            os.ftruncate(self._file, data.rfind(b"\n") + 1)
        except BaseException:
            os.close(self._file)
            raise
        self.records = {line["key"]: line for line in self.lines if line["kind"] == "record"}
        self.checks = {line["key"]: line for line in self.lines if line["kind"] == "check"}

    @property
    def runs(self) -> list[Line]:
        """Headers, one per command."""
        return [line for line in self.lines if line["kind"] == "run"]

    def begin(self, run: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
        """Note the start of a command; returns its number.

        Raises:
            ValueError: the records were made with other settings.
        """
        runs = self.runs
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
        # One call, so that a kill leaves at most one torn line.
        if os.write(self._file, data) != len(data):
            raise OSError(errno.ENOSPC, "the disk is full; free some of it", str(self.path))
        os.fsync(self._file)
        self.lines.append(line)

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


def check_writable(folder: Path) -> None:
    """Try whether results can be written to a folder that need not be there; leaves nothing.

    Raises:
        ValueError: they cannot; the message says why.
    """
    place = folder
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
        if (folder / FILE).exists():
            os.close(os.open(folder / FILE, os.O_WRONLY | os.O_APPEND))
    except OSError as error:
        where = error.filename if error.filename == str(folder / FILE) else place
        raise ValueError(
            f"{folder} cannot be written ({where}: {error.strerror}); choose another folder"
        ) from error


def _lock(file: int, path: Path) -> None:
    """Two commands at once would measure the same twice, and slow each other down."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however it ends
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise ValueError(
                f"another 'draftwood bench' writes to {path}; wait for it, or use another --out"
            ) from error


def read_lines(path: Path) -> list[Line]:
    """All complete lines of a results file; raises as ``parse_lines``."""
    return parse_lines(path.read_bytes(), path)[0]


def parse_lines(data: bytes, path: Path) -> tuple[list[Line], int | None]:
    """All complete lines, and the number of an incomplete last one, if there is one.

    Args:
        data: what is in the file.
        path: the file's name, for messages.

    Raises:
        ValueError: no results file, another format, or a damaged line (named by its number).
    """
    lines: list[Line] = []
    *complete, torn = data.split(b"\n")
    for number, raw in enumerate(complete, start=1):
        try:
            line = json.loads(raw)
        except ValueError as error:
            raise ValueError(
                f"line {number} of {path} is damaged: {error}; remove the line, and 'draftwood "
                "bench' measures again what it held"
            ) from error
        if not isinstance(line, dict) or line.get("kind") not in ("run", "record", "check"):
            raise ValueError(f"{path} does not hold results of 'draftwood bench' (line {number})")
        if line["kind"] == "run" and line.get("format") != FORMAT:
            raise ValueError(
                f"{path} has format {line.get('format')!r}, this draftwood reads {FORMAT}; "
                "use the draftwood that wrote it"
            )
        lines.append(line)
    return lines, len(complete) + 1 if torn else None


def cut_line_note(number: int, path: Path) -> str:
    """What to tell the user about an incomplete last line."""
    return f"line {number} of {path} was cut while it was written, and is left out"


def _require_same(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    for name in sorted({*old, *new}):
        # Names of models: weights are told apart by their checksums, wherever they are.
        before, now = (
            last_name(value) if isinstance(value := one.get(name), str) else value
            for one in (old, new)
        )
        if before != now:
            raise ValueError(
                f"{path} was made with {name} {before!r}, now it is {now!r}; "
                "results that cannot be compared go to different folders (--out)"
            )
