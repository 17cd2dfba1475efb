"""Where the time of nested calls goes: every second is counted once, for the innermost stage."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any


class Stages:
    """Wraps functions in place and adds up the time spent in them and in no wrapped callee.

    Args:
        clock: ``time.perf_counter``, or ``time.thread_time`` where other processes compete.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: Counter[str] = Counter()
        self._clock = clock
        self._stack: list[str] = []
        self._last = 0.0
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        """Count calls of ``owner.name`` (a class, an object or a module) for ``stage``."""
        inner = getattr(owner, name)
        own = vars(owner).get(name) if hasattr(owner, "__dict__") else None

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch(push=stage)
            try:
                return inner(*args, **kwargs)
            finally:
                self._switch()

        setattr(owner, name, staticmethod(timed) if isinstance(own, staticmethod) else timed)
        if own is None:
            self._undo.append(lambda: delattr(owner, name))
        else:
            self._undo.append(lambda: setattr(owner, name, own))

    def unwrap(self) -> None:
        """Put the original functions back."""
        while self._undo:
            self._undo.pop()()

    def _switch(self, push: str | None = None) -> None:
        now = self._clock()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._last
        if push is not None:
            self._stack.append(push)
        else:
            self._stack.pop()
        self._last = self._clock()
