"""Saving and restoring a run: one file per checkpoint, whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftwood.errors import DraftwoodError
from draftwood.train.kept import damaged

LOG = "log.jsonl"
_PATTERN = "step-*.pt"
_KEPT = 2


@dataclass
class Progress:
    """Where a run stands.

    Attributes:
        step: optimizer steps done.
        epoch: current epoch.
        cursor: micro-batches of this epoch already used, over all processes.
        num_records: responses that the current epoch was planned with.
        elapsed_s: training time over all resumed parts.
        positions: response tokens asked for so far.
    """

    step: int = 0
    epoch: int = 0
    cursor: int = 0
    num_records: int = 0
    elapsed_s: float = 0.0
    positions: int = 0


def save_checkpoint(folder: Path, state: dict[str, Any], step: int) -> Path:
    """Write ``step-N.pt`` atomically and delete all but the newest few."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"step-{step:08d}.pt"
    temporary = target.with_suffix(".tmp")
    try:
        with temporary.open("wb") as handle:
            torch.save(state, handle)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    for old in sorted(folder.glob(_PATTERN))[:-_KEPT]:
        old.unlink()
    return target


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    found = sorted(folder.glob(_PATTERN))
    return found[-1] if found else None


def load_checkpoint(file: Path) -> dict[str, Any]:
    """Read a checkpoint; tensors land on the CPU."""
    try:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DraftwoodError(
            f"checkpoint {file} cannot be read ({error}); delete it to resume from the one before"
        ) from error
    return state


def _forget_after(log: Path, step: int) -> None:
    """Drop the records of later steps, and a last line that was cut."""
    if not log.is_file():
        return
    lines = log.read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    try:
        kept = [line for line in whole if json.loads(line)["step"] <= step]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(log, repr(error)) from error
    if len(kept) < len(lines):
        partial = log.with_suffix(".partial")
        partial.write_text("".join(kept))
        partial.replace(log)


class RunLog:
    """Plain JSON lines, and TensorBoard where it is installed."""

    def __init__(self, folder: Path, *, step: int | None = None, tensorboard: bool = True) -> None:
        """Go on with a log at ``step``: what it says of later steps was lost with them.

        Args:
            step: None: nothing is left of what an old log says.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if step is None:
            (folder / LOG).unlink(missing_ok=True)
        else:
            _forget_after(folder / LOG, step)
        self._file = (folder / LOG).open("a")
        self._board: Any = None
        if tensorboard:
            with contextlib.suppress(ImportError):
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=(step or 0) + 1)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """One record of ``kind`` (``train``, ``eval``, ``start``, …)."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


class HeardLog:
    """A run log that also tells someone."""

    def __init__(self, log: RunLog, on_record: Callable[[str, int, dict[str, Any]], None]) -> None:
        self._log, self._on_record = log, on_record

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        self._log.write(kind, step, values)
        self._on_record(kind, step, values)

    def close(self) -> None:
        self._log.close()
