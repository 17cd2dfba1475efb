"""Which work is done in which order, and under which key its result is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from draftwood.bench.methods import Method
from draftwood.bench.workloads import Task, Workload


@dataclass(frozen=True)
class Unit:
    """Requests that every method decodes, one after the other, before the next unit.

    Attributes:
        set_name: the workload's.
        tasks: decoded together; one unless requests are concurrent.
        turn: of the conversation; the replies before it are those of plain decoding.
        temperature: of the draws.
        repeat: number of the repetition of the same work.
    """

    set_name: str
    tasks: tuple[Task, ...]
    turn: int
    temperature: float
    repeat: int

    @property
    def concurrency(self) -> int:
        return len(self.tasks)

    def key(self, method: Method | str, turn: int | None = None) -> str:
        """Identity of one method's result."""
        name = method if isinstance(method, str) else method.name
        tasks = "+".join(str(task.index) for task in self.tasks)
        return (
            f"{self.set_name}/{tasks}/turn{self.turn if turn is None else turn}/"
            f"T{self.temperature:g}/c{self.concurrency}/r{self.repeat}/{name}"
        )

    def seed(self, place: int, seed: int) -> int:
        """Of the draws for one request, the same for all methods and repetitions."""
        text = f"{seed}/{self.set_name}/{self.tasks[place].index}/{self.turn}/{place}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


@dataclass(frozen=True)
class Plan:
    """All work of a benchmark.

    Attributes:
        chosen: the tasks of each set, in order.
        temperatures: each for all of them.
        concurrencies: requests decoded together, each for all of them.
        repeats: how often all of it is measured.
        max_turns: most turns of a conversation.
    """

    chosen: dict[str, list[Task]]
    temperatures: Sequence[float]
    concurrencies: Sequence[int] = (1,)
    repeats: int = 1
    max_turns: int | None = None

    def units(self) -> Iterator[Unit]:
        """Sets and temperatures take turns, so that an interrupted run has some of everything."""
        longest = max((len(tasks) for tasks in self.chosen.values()), default=0)
        for repeat in range(self.repeats):
            for concurrency in self.concurrencies:
                for number in range(-(-longest // concurrency)):
                    for name, tasks in self.chosen.items():
                        group = _group(tasks, number, concurrency)
                        for temperature in self.temperatures if group else ():
                            for turn in range(self._num_turns(group)):
                                yield Unit(name, group, turn, temperature, repeat)

    def _num_turns(self, group: Sequence[Task]) -> int:
        if len(group) > 1:
            return 1
        return min(len(group[0].turns), self.max_turns or len(group[0].turns))


def _group(tasks: Sequence[Task], number: int, size: int) -> tuple[Task, ...]:
    """The ``number``-th group; the last one is filled up from the beginning."""
    first = number * size
    if first >= len(tasks):
        return ()
    return tuple(tasks[place % len(tasks)] for place in range(first, first + size))


def choose(
    workloads: Sequence[Workload], count: int | None, seed: int, fits: Callable[[Task], bool]
) -> dict[str, list[Task]]:
    """``count`` tasks of every set, in the order of the seed, without those that do not fit.

    Raises:
        ValueError: two sets of the same name, or one of which nothing fits.
    """
    chosen: dict[str, list[Task]] = {}
    for workload in workloads:
        if workload.name in chosen:
            raise ValueError(f"there are two sets called {workload.name!r}; rename one")
        tasks: list[Task] = []
        for task in workload.pick(None, seed):
            if count is not None and len(tasks) == count:
                break
            if fits(task):
                tasks.append(task)
        if not tasks:
            raise ValueError(f"no prompt of {workload.name!r} leaves room for the output")
        chosen[workload.name] = tasks
    return chosen


def order_numbers(units: Sequence[Unit]) -> list[int]:
    """For every unit, the number by which ``in_turn`` orders its methods.

    Counted within each set, temperature and turn, so that in each of them every method takes every
    place equally often (over twice as many prompts as methods). Were all units counted together,
    with two temperatures that take turns a method could always be last at one of them. Sets begin
    at different orders.
    """
    nexts: dict[tuple[str, float, int, int], int] = {}
    numbers = []
    for unit in units:
        cell = unit.set_name, unit.temperature, unit.turn, unit.concurrency
        number = nexts.get(cell, sum(other[1:] == cell[1:] for other in nexts))
        numbers.append(number)
        nexts[cell] = number + 1
    return numbers


def in_turn(methods: Sequence[Method], number: int) -> list[Method]:
    """The methods in the order of a unit with this number.

    Rotated, and backwards every other time, so that none is always first, last, or after the same.
    """
    shift = number % len(methods)
    order = [*methods[shift:], *methods[:shift]]
    return order[::-1] if (number // len(methods)) % 2 else order
