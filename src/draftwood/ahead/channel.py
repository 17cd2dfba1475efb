"""The way to a drafting worker: a thread, or a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Protocol

import torch

from draftwood.ahead.messages import Failed, Reply, Request
from draftwood.ahead.worker import DrafterFactory, serve
from draftwood.draft.base import Drafter


class Channel(Protocol):
    """One worker, from its start to its end. Nothing here waits longer than it is told to."""

    def send(self, request: Request) -> None:
        """Queue a request; never blocks, never fails."""
        ...

    def receive(self, timeout_s: float) -> Reply | None:
        """The next reply; None if there is none in time. ``Failed`` when the worker is gone."""
        ...

    def close(self) -> None:
        """End the worker without waiting for it."""
        ...


Connect = Callable[[], Channel]

# What drafting workers load a drafter with.
_PRELOADED = ("draftwood.ahead.load", "draftwood.engine", "transformers")


@dataclass(frozen=True)
class InThread:
    """Starts workers as threads of this process.

    Args:
        factory: makes the drafter, in the worker.
        exclusive: whether only one worker may exist at a time, because the drafter is the same
            object every time.
        device: on CUDA the worker has its own stream, so that its kernels run beside the target's.
    """

    factory: DrafterFactory
    exclusive: threading.Lock | None = None
    device: torch.device | None = None

    @staticmethod
    def of(drafter: Drafter, device: torch.device | None = None) -> InThread:
        """Workers that all use this drafter."""
        return InThread(lambda: drafter, threading.Lock(), device)

    def __call__(self) -> Channel:
        return ThreadChannel(self)


class ThreadChannel:
    """A worker thread. It cannot be killed: a closed one ends with the call it is in."""

    def __init__(self, options: InThread) -> None:
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._closed = False
        self._options = options
        self._thread = threading.Thread(target=self._run, name="draftwood-ahead", daemon=True)
        self._thread.start()

    def send(self, request: Request) -> None:
        self._requests.put(request)

    def receive(self, timeout_s: float) -> Reply | None:
        try:
            return self._replies.get(timeout=timeout_s) if timeout_s > 0 else self._at_once()
        except queue.Empty:
            return None

    def close(self) -> None:
        self._closed = True
        self._requests.put(None)

    def wait(self, timeout_s: float) -> None:
        """After ``close``: until the thread has left torch, but no longer than that.

        An interpreter that ends while a thread of its is in torch aborts the process.
        """
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _at_once(self) -> Reply:
        return self._replies.get_nowait()

    def _run(self) -> None:
        with self._options.exclusive or nullcontext():
            if not self._closed:
                with _own_stream(self._options.device):
                    serve(self._options.factory, self._next, self._replies.put)

    def _next(self) -> Request | None:
        request = self._requests.get()
        return None if self._closed else request


def _own_stream(device: torch.device | None) -> AbstractContextManager[object]:
    if device is None or device.type != "cuda":
        return nullcontext()
    torch.cuda.synchronize(device)  # the weights were put there by another stream
    return torch.cuda.stream(torch.cuda.Stream(device))


def _best_method() -> str:
    """The quickest that this system has and that is safe beside torch's threads."""
    methods = multiprocessing.get_all_start_methods()
    return "forkserver" if "forkserver" in methods else "spawn"


@dataclass(frozen=True)
class InProcess:
    """Starts workers as processes.

    Args:
        factory: makes the drafter, in the worker; must survive pickling.
        cores: CPU cores it is pinned to; empty leaves that to the system.
        num_threads: torch threads of its own; None: as many as it has cores, at least one.
        method: how processes are started. From the second on ``"forkserver"`` takes a fraction of
            the seconds of ``"spawn"``, because the server has imported what they need.
    """

    factory: DrafterFactory
    cores: tuple[int, ...] = ()
    num_threads: int | None = None
    method: str = field(default_factory=_best_method)

    def __call__(self) -> Channel:
        return ProcessChannel(self)


class ProcessChannel:
    """A worker process at the other end of a pipe."""

    def __init__(self, options: InProcess) -> None:
        context = multiprocessing.get_context(options.method)
        if options.method == "forkserver":
            # takes effect where no server runs yet
            context.set_forkserver_preload(list(_PRELOADED))
        self._pipe, self._theirs = context.Pipe()
        self._process = context.Process(  # type: ignore[attr-defined]
            target=_run_process, args=(self._theirs, options, dict(os.environ)),
            name="draftwood-ahead", daemon=True,
        )  # fmt: skip
        self._closed = False
        # Starting takes seconds, and a full pipe or half a message would block the engine when the
        # worker hangs, so other threads start it, write and read.
        self._outgoing: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        for name, run in (("write", self._write), ("read", self._read)):
            threading.Thread(target=run, name=f"draftwood-ahead-{name}", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """Of the worker; None until it has begun."""
        return self._process.pid

    def send(self, request: Request) -> None:
        self._outgoing.put(request)

    def receive(self, timeout_s: float) -> Reply | None:
        try:
            return self._incoming.get(timeout_s > 0, timeout_s or None)
        except queue.Empty:
            return None

    def close(self) -> None:
        self._outgoing.put(None)
        self._closed = True  # before looking: ``_begin`` begins before it looks at this
        if self._process.pid is not None:
            self._process.kill()

    def _begin(self) -> None:
        self._process.start()
        self._theirs.close()
        if self._closed:
            self._process.kill()

    def _read(self) -> None:
        try:
            self._begin()
        except Exception as error:  # no memory for another process, a factory that is not picklable
            self._theirs.close()
            self._incoming.put(Failed(f"the worker process did not start ({error!r})"))
            return
        try:
            while True:
                self._incoming.put(self._pipe.recv())
        except Exception as error:  # closed, or bytes that are no message
            self._incoming.put(Failed(f"the worker process is gone ({type(error).__name__})"))

    def _write(self) -> None:
        try:
            while (request := self._outgoing.get()) is not None:
                self._pipe.send(request)
        except Exception:  # the worker is gone, or a request cannot be pickled
            self.close()  # ``receive`` notices at once


def _run_process(pipe: Connection, options: InProcess, environment: dict[str, str]) -> None:
    if os.environ != environment:  # a fork server has that of its own start
        os.environ.clear()
        os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's to handle
    if options.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, options.cores)
    torch.set_num_threads(options.num_threads or max(len(options.cores), 1))

    def receive() -> Request | None:
        try:
            request: Request | None = pipe.recv()
        except EOFError:
            return None
        return request

    with suppress(OSError):  # the engine is gone
        serve(options.factory, receive, pipe.send)
