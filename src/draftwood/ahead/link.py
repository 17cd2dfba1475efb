"""Keeps a drafting worker alive: starts it, waits for it only so long, starts it again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from draftwood.ahead.channel import Channel, Connect, ThreadChannel
from draftwood.ahead.messages import Draft, Drafted, Failed, Ready, Request
from draftwood.errors import DraftwoodError

_LEAVE_S = 5.0  # for a thread to end the call it is in
_LONGEST_WAIT_S = 60.0
_GOOD_REPLIES = 20  # after so many the next failure is again a first one


class Link:
    """One worker after the other.

    Args:
        connect: starts a worker.
        start_timeout_s: a worker that is not ready by then is given up.
        backoff_s: wait before the first restart; doubles with every failure in a row.
        clock: seconds.

    Attributes:
        counters: ``starts``, ``stale`` replies, and failures by kind: ``crash``, ``timeout``,
            ``garbage``, ``slow_start``, ``refused``.
        generation: number of workers that became ready.
        ready: what the present worker said of itself.
        last_error: why the last worker was given up.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        start_timeout_s: float = 300.0,
        backoff_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.generation = 0
        self.ready: Ready | None = None
        self.last_error: str | None = None
        self._connect = connect
        self._start_timeout_s = start_timeout_s
        self._backoff_s = backoff_s
        self._clock = clock
        self._channel: Channel | None = None
        self._is_closed = False
        self._started_at = self._retry_at = clock()
        self._num_failures = 0
        self._num_good = 0
        self._start()

    def is_up(self) -> bool:
        """Whether a worker is ready; starts one if it is time to. Does not wait."""
        if self._channel is None and not self._is_closed and self._clock() >= self._retry_at:
            self._start()
        if self._channel is not None and self.ready is None:
            self._look_for_ready(0.0)
        return self.ready is not None

    def wait_ready(self, at_most_s: float | None = None) -> Ready | None:
        """Wait for the first worker.

        Args:
            at_most_s: seconds; None: until it would be given up.

        Returns:
            What it said of itself; None if it is still starting.

        Raises:
            DraftwoodError: it failed, or was given up.
        """
        limit = self._start_timeout_s
        if self.ready is None and self._channel is not None:
            self._look_for_ready(limit if at_most_s is None else min(at_most_s, limit))
        if self.ready is None and (self._channel is None or at_most_s is None):
            why = self.last_error or f"it was not ready within {self._start_timeout_s:g} s"
            raise DraftwoodError(f"the drafting worker did not start: {why}")
        return self.ready

    def tell(self, request: Request) -> None:
        """Send something that is not answered; lost if the worker is down."""
        if self.ready is not None and self._channel is not None:
            self._channel.send(request)

    def ask(self, request: Draft, timeout_s: float) -> Drafted | None:
        """The answer; None if the worker failed, which ends it."""
        self.tell(request)
        until = self._clock() + timeout_s
        while self.ready is not None and self._channel is not None:
            reply = self._channel.receive(max(until - self._clock(), 0.0))
            if isinstance(reply, Drafted):
                if reply.serial == request.serial:
                    self._count_good()
                    return reply
                self.counters["stale"] += 1
            elif isinstance(reply, Failed):
                self.fail("crash", reply.error)
            elif reply is None:
                self.fail("timeout", f"no answer within {timeout_s:g} s")
            else:
                self.fail("garbage", f"{type(reply).__name__} is no answer")
        return None

    def fail(self, kind: str, error: str) -> None:
        """Give the present worker up; the next starts after a while."""
        self.counters[kind] += 1
        self.last_error = error
        if self._channel is not None:
            self._channel.close()
        self._channel, self.ready = None, None
        wait = min(self._backoff_s * 2.0**self._num_failures, _LONGEST_WAIT_S)
        self._retry_at = self._clock() + wait
        self._num_failures += 1
        self._num_good = 0

    def close(self) -> None:
        """End the worker for good."""
        self._is_closed = True
        channel, self._channel, self.ready = self._channel, None, None
        if channel is not None:
            channel.close()
        if isinstance(channel, ThreadChannel):
            channel.wait(_LEAVE_S)

    def _start(self) -> None:
        self.counters["starts"] += 1
        self._started_at = self._clock()
        try:
            self._channel = self._connect()
        except Exception as error:  # no memory, no process: as if it had crashed
            self.fail("crash", f"{type(error).__name__}: {error}")

    def _look_for_ready(self, timeout_s: float) -> None:
        assert self._channel is not None
        reply = self._channel.receive(timeout_s)
        if isinstance(reply, Ready):
            self.ready = reply
            self.generation += 1
        elif isinstance(reply, Failed):
            self.fail("crash", reply.error)
        elif reply is not None:
            self.fail("garbage", f"{type(reply).__name__} is no greeting")
        elif self._clock() - self._started_at > self._start_timeout_s:
            self.fail("slow_start", f"not ready within {self._start_timeout_s:g} s")

    def _count_good(self) -> None:
        self._num_good += 1
        if self._num_good >= _GOOD_REPLIES:
            self._num_failures = 0
