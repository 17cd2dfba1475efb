"""Response rows on disk: append-only JSONL shards that survive a kill at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from draftwood.errors import DraftwoodError
from draftwood.train.kept import damaged, read_kept, require_same, write_kept
from draftwood.train.target_side import ResponseRow, read_rows

PATTERN = "responses-*.jsonl"
SETTINGS = "settings.json"
_LOCK = ".lock"


def load_rows(path: str | os.PathLike[str]) -> list[ResponseRow]:
    """All rows of a folder of shards (any ``*.jsonl``), or of one file, in order.

    A half-written last line is left out, so a folder may be read while it grows.

    Raises:
        ValueError: nothing there, or a line that is no response row.
    """
    folder = Path(path)
    files = sorted(folder.glob("*.jsonl")) if folder.is_dir() else [folder]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(f"no response rows at {folder}; make them with 'draftwood data'")
    return list(read_rows(files))


class ShardWriter:
    """The only writer of a folder; use as a context manager.

    Opening repairs what a killed writer left (an incomplete last line) and checks that the
    folder was made with the same settings. Rows are appended whole and flushed.

    Args:
        folder: created if missing.
        settings: everything the rows depend on, JSON values only.
        rows_per_shard: rows after which the next file begins; full shards are never touched.

    Raises:
        ValueError: the folder holds rows made with other settings.
        DraftwoodError: another process is writing there.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        settings: Mapping[str, Any],
        *,
        rows_per_shard: int = 2000,
    ) -> None:
        if rows_per_shard < 1:
            raise ValueError(f"rows_per_shard must be ≥ 1, got {rows_per_shard}")
        self.folder = Path(folder)
        self.rows_per_shard = rows_per_shard
        self._settings = json.loads(json.dumps(settings))
        self._lock = FileLock(self.folder / _LOCK)
        self._shard = 0
        self._rows_in_shard = 0

    def __enter__(self) -> ShardWriter:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise DraftwoodError(
                f"another process is writing to {self.folder}; wait for it or use another folder"
            ) from error
        try:
            self._check_settings()
            self._repair()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row written so far, as its JSON object."""
        for file in sorted(self.folder.glob(PATTERN)):
            with open(file, encoding="utf-8") as handle:
                yield from map(json.loads, handle)

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows; a kill in between loses the last line at most, never an earlier one."""
        for row in rows:
            if self._rows_in_shard >= self.rows_per_shard:
                self._shard, self._rows_in_shard = self._shard + 1, 0
            line = json.dumps(row, separators=(",", ":")) + "\n"
            with open(self._file(self._shard), "ab", buffering=0) as handle:
                _write_whole(handle.fileno(), line.encode())
            self._rows_in_shard += 1

    def _file(self, shard: int) -> Path:
        return self.folder / f"responses-{shard:05d}.jsonl"

    def _check_settings(self) -> None:
        file = self.folder / SETTINGS
        if file.is_file():
            stored = read_kept(file)
            if not isinstance(stored, Mapping):
                raise damaged(file, "no JSON object")
            require_same(stored, self._settings, self.folder, "replies")
            return
        if any(self.folder.glob(PATTERN)):
            raise ValueError(f"{self.folder} has shards but no {SETTINGS}; choose another folder")
        write_kept(file, self._settings)

    def _repair(self) -> None:
        """Cut an incomplete last line and find the place to continue."""
        files = sorted(self.folder.glob(PATTERN))
        if not files:
            return
        content = files[-1].read_bytes()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            os.truncate(files[-1], end)
        self._shard = int(files[-1].stem.rsplit("-", 1)[1])
        self._rows_in_shard = content.count(b"\n", 0, end)


def _write_whole(descriptor: int, data: bytes) -> None:
    """All of ``data`` or none of it, as far as the process lives: no half line on a full disk."""
    start = os.fstat(descriptor).st_size
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        os.ftruncate(descriptor, start)
        raise
