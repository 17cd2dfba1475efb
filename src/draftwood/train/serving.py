"""Keep an engine busy with a stream of jobs: what training needs of the engine, and no more."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Protocol, TypeAlias, TypeVar

from draftwood.sampling import SamplingParams

Key = TypeVar("Key")
Prompt: TypeAlias = str | Sequence[Mapping[str, str]] | Sequence[int]


class Finished(Protocol):
    """The parts of ``draftwood.Output`` used here."""

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def error(self) -> str | None: ...


class Event(Protocol):
    """The parts of ``draftwood.StepEvent`` used here."""

    @property
    def seq_id(self) -> int: ...
    @property
    def output(self) -> Finished | None: ...


class Serves(Protocol):
    """The parts of ``draftwood.Engine`` used here; ``add`` raises ValueError on a bad prompt."""

    max_batch: int

    def add(self, prompt: Prompt, params: SamplingParams | None = None) -> int: ...
    def step(self) -> Sequence[Event]: ...
    def abort(self, seq_id: int) -> object: ...


def run(
    engine: Serves, next_job: Callable[[], tuple[Key, Prompt, SamplingParams] | None]
) -> Generator[tuple[Key, Finished | ValueError], None, None]:
    """Run jobs to the end, at most ``engine.max_batch`` at once; results as they finish.

    Abandoning the iterator, or an error in it, aborts what is running and leaves the engine
    usable.

    Args:
        engine: serves the target.
        next_job: gives a job when there is room for one, None while there is none; asked again
            after every result, so jobs may follow from results.

    Yields:
        (key of the job, its output, or why the engine refused it).
    """
    running: dict[int, Key] = {}
    try:
        while True:
            while len(running) < engine.max_batch and (job := next_job()) is not None:
                key, prompt, params = job
                try:
                    running[engine.add(prompt, params)] = key
                except ValueError as error:
                    yield key, error
            if not running:
                return
            for event in engine.step():
                if event.output is not None and event.seq_id in running:
                    yield running.pop(event.seq_id), event.output
    finally:
        for seq_id in running:
            engine.abort(seq_id)
