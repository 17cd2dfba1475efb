"""Throughput of requests that are decoded together."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from draftwood.bench.statistics import Interval, ratio
from draftwood.bench.summary import Results


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
    """By temperature, method and concurrency."""
    groups: dict[tuple[float, str, int], list[tuple[int, float]]] = defaultdict(list)
    for record in results.records.values():
        if record["turn"] == 0:
            tokens = sum(len(one["token_ids"]) for one in record["sequences"])
            key = record["temperature"], record["method"], record["concurrency"]
            groups[key].append((tokens, record["wall_s"]))
    return [
        Throughput(t, method, concurrency, ratio([n for n, _ in rows], [s for _, s in rows]))
        for (t, method, concurrency), rows in sorted(groups.items(), key=lambda item: item[0])
    ]
