"""Progress of downloads and conversions on standard error, and silence from libraries."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from transformers.utils import logging

POLL_S = 0.2


@contextmanager
def spinning(title: str) -> Iterator[None]:
    """A pulsing bar with the time elapsed."""
    with _progress() as progress:
        task = progress.add_task(title, total=None)
        yield
        progress.update(task, total=1, completed=1)


@contextmanager
def polling(title: str, total_bytes: int, done_bytes: Callable[[], int]) -> Iterator[None]:
    """A bar that follows ``done_bytes`` while something else does the work."""
    finished = threading.Event()
    with _progress(DownloadColumn()) as progress:
        task = progress.add_task(title, total=total_bytes)

        def follow() -> None:
            while not finished.wait(POLL_S):
                progress.update(task, completed=min(done_bytes(), total_bytes))

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
            progress.update(task, completed=total_bytes)
        finally:
            finished.set()
            thread.join()


def _progress(*columns: ProgressColumn) -> Progress:
    # The stream of now: libraries are silenced by redirecting standard error meanwhile.
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        redirect_stdout=False,
        redirect_stderr=False,
    )


@contextmanager
def silent() -> Iterator[None]:
    """No progress bars or hints from the libraries while we show our own progress."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
