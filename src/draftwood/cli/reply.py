"""Run one sequence to its end on the terminal, and say how it went."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isnan
from types import FrameType
from typing import TYPE_CHECKING

from draftwood.cli.console import note

if TYPE_CHECKING:
    from draftwood.engine import Engine
    from draftwood.records import Output


def run_reply(
    engine: Engine, seq_id: int, write: Callable[[str], None], stopped: Callable[[], bool]
) -> Output:
    """Step the engine until ``seq_id`` finishes, or ``stopped()`` says so between two cycles."""
    while True:
        for event in engine.step():
            if event.seq_id != seq_id:
                continue
            if event.text:
                write(event.text)
            if event.output is not None:
                return event.output
        if stopped():
            output = engine.abort(seq_id)
            assert output is not None
            return output


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C first asks to stop after the current cycle; the second time it interrupts at once."""
    asked = False

    def ask(_signum: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield lambda: False  # we may not handle signals, or were started to ignore this one
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def heeded() -> Iterator[None]:
    """Ctrl-C ends the block even where a library swallows it, or makes another error of it.

    Importing modules does both.
    """
    asked = False

    def note(_signum: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        raise KeyboardInterrupt

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception:
        if not asked:
            raise
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


def summary(output: Output) -> str:
    """One line: tokens, cycles, τ, speed, why it ended."""
    parts = [f"{len(output.token_ids)} tokens", f"{output.num_cycles} cycles"]
    if output.num_cycles:
        parts.append(f"τ {output.acceptance_length:.2f}")
    if not isnan(output.hit_rate):
        away = f" (drafter away: {100 * output.standby_rate:.0f} %)" if output.standby_rate else ""
        parts.append(f"{100 * output.hit_rate:.0f} % drafted ahead{away}")
    if output.decode_s > 0:
        parts.append(f"{len(output.token_ids) / output.decode_s:.1f} tok/s")
    parts.append(f"prefill {output.prefill_s:.2f} s")
    parts.append(output.finish_reason)
    if output.seed is not None:
        parts.append(f"seed {output.seed}")
    return " · ".join(parts)


def note_failures(engine: Engine) -> None:
    """Tell of drafting workers that failed, if any did."""
    drafter = engine.drafter
    error, counters = getattr(drafter, "last_error", None), getattr(drafter, "counters", {})
    if error is not None:
        told = ", ".join(f"{count} {kind}" for kind, count in counters.items())
        note(f"drafting worker: {told}; the last error was {error}")
