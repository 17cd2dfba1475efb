"""Throughput of requests that are decoded together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from draftwood.bench.statistics import Interval, ratio
from draftwood.bench.store import Line
from draftwood.bench.summary import Results, unit_of


@dataclass(frozen=True)
class Throughput:
    """A method at a concurrency.

    Attributes:
        tokens_per_s: output tokens of all requests per second, their prompts' seconds included.
    """

    temperature: float
    method: str
    concurrency: int
    tokens_per_s: Interval


def throughputs(results: Results) -> list[Throughput]:
    """By temperature, method and concurrency, on what all methods there have decoded."""
    groups: dict[tuple[float, int], dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for record in results.records.values():
        if record["turn"] == 0 and not any(one["error"] for one in record["sequences"]):
            key = record["temperature"], record["concurrency"]
            groups[key][record["method"]].append(record)
    found = []
    for (temperature, concurrency), by_method in groups.items():
        shared = set.intersection(*({unit_of(r) for r in part} for part in by_method.values()))
        for method, part in by_method.items():
            tokens, seconds = _by_requests([r for r in part if unit_of(r) in shared])
            if tokens:
                rate = ratio(tokens, seconds)
                found.append(Throughput(temperature, method, concurrency, rate))
    return sorted(found, key=lambda one: (one.temperature, one.method, one.concurrency))


def _by_requests(records: Sequence[Line]) -> tuple[list[float], list[float]]:
    """Output tokens and seconds of each group of requests, its repetitions taken together."""
    sums: dict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for record in records:
        one = sums[record["set"], tuple(record["tasks"])]
        one[0] += sum(len(sequence["token_ids"]) for sequence in record["sequences"])
        one[1] += record["wall_s"]
    return [tokens for tokens, _ in sums.values()], [seconds for _, seconds in sums.values()]
