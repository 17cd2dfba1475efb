"""How far a benchmark is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from draftwood.cli.console import note, stderr

SHARE = 0.05  # of all results between two lines
PAUSE_S = 60.0  # or so many seconds, whichever is sooner

Progress = Callable[[int, int, str], None]


@contextmanager
def showing() -> Iterator[Progress]:
    """What to tell of every step: (results there, results in all, what comes next)."""
    if not stderr().is_terminal:
        yield lines(note)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(), TextColumn("{task.description}"),
    )  # fmt: skip
    with Progress(*columns, console=stderr(), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total, what: progress.update(
            task, completed=done, total=total, description=what
        )


def lines(say: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> Progress:
    """A line at first, and whenever ``SHARE`` more is done or ``PAUSE_S`` have passed.

    Args:
        say: writes a line.
        now: the clock, in seconds.
    """
    first: tuple[int, float] | None = None
    last = (0, 0.0)

    def tell(done: int, total: int, what: str) -> None:
        nonlocal first, last
        at = now()
        if done == total:
            return  # the summary follows
        if first is None:
            first = done, at
        elif done - last[0] < SHARE * total and at - last[1] < PAUSE_S:
            return
        last = done, at
        say(" · ".join(filter(None, (f"{done}/{total}", what, _left(done, total, at, first)))))

    return tell


def _left(done: int, total: int, at: float, first: tuple[int, float]) -> str:
    """Time left at the rate so far; "" before there is one."""
    if done == first[0]:
        return ""
    seconds = round((at - first[1]) / (done - first[0]) * (total - done))
    hours, minutes = seconds // 3600, seconds // 60 % 60
    if hours:
        return f"about {hours} h {minutes} min left"
    return f"about {minutes} min left" if minutes else f"about {seconds} s left"
