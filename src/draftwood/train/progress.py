"""Counts of a data run, and the bar that shows them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@dataclass(frozen=True)
class DataProgress:
    """Counts of a run so far. A thread is one conversation under one setting and sample.

    Attributes:
        num_threads: threads wanted in all.
        num_resumed: threads that earlier runs had finished.
        num_finished: threads finished in this run, failed ones included.
        num_failed: threads cut short because a prompt does not fit or the target failed.
        num_rows: rows written in this run.
        num_prompt_tokens: tokens before the replies of those rows.
        num_response_tokens: tokens of those replies.
        last_error: why the last failed thread failed.
        seconds: time of this run.
    """

    num_threads: int
    num_resumed: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_rows: int = 0
    num_prompt_tokens: int = 0
    num_response_tokens: int = 0
    last_error: str = ""
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Response tokens per second of this run."""
        return self.num_response_tokens / self.seconds if self.seconds else 0.0


@contextmanager
def bar(title: str = "responses") -> Iterator[Callable[[DataProgress], None]]:
    """A progress bar on standard error, shown from the first count that what it yields is given."""
    shown = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
    )
    task = shown.add_task(title, total=None, rate="")

    def show(now: DataProgress) -> None:
        rate = f"{now.num_response_tokens:,} tokens, {now.tokens_per_s:,.0f}/s"
        if now.num_failed:
            rate += f", {now.num_failed} failed"
        done = now.num_resumed + now.num_finished
        shown.update(task, total=now.num_threads, completed=done, rate=rate)
        shown.start()

    try:
        yield show
    finally:
        shown.stop()
