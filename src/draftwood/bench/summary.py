"""From records to tables: what a report shows, with intervals over prompts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftwood.bench.measure import acceptance_length
from draftwood.bench.methods import REFERENCE
from draftwood.bench.statistics import Interval, mean_of_groups, ratio_of_groups
from draftwood.bench.store import FILE, Line, read_lines

ALL_SETS = "all sets"


@dataclass(frozen=True)
class Turn:
    """One method's output for one request that was decoded alone.

    Attributes:
        prompt: (set, task): what intervals are over.
        record: the line it comes from.
        sequence: its only sequence.
        token_s: decoding seconds per token, the prompt not counted.
        tau: tokens per cycle; None if unknown.
        repetitive: whether plain decoding's output falls into repetition.
        found: finding of the identity check; None where identity is not promised.
    """

    set_name: str
    task: int
    temperature: float
    method: str
    record: Line
    sequence: dict[str, Any]
    token_s: float
    tau: float | None
    repetitive: bool
    found: str | None

    @property
    def unit(self) -> str:
        """What was decoded, whichever the method."""
        return unit_of(self.record)


@dataclass(frozen=True)
class Results:
    """Everything in a folder of results.

    Attributes:
        runs: headers, one per command.
        records: by key.
        checks: by key of the record.
        turns: requests decoded alone.
    """

    runs: list[Line]
    records: dict[str, Line]
    checks: dict[str, Line]
    turns: list[Turn]

    @property
    def methods(self) -> list[str]:
        """In order of first appearance, plain decoding first."""
        names = dict.fromkeys(record["method"] for record in self.records.values())
        return sorted(names, key=lambda name: name != REFERENCE)

    @property
    def sets(self) -> list[str]:
        return list(dict.fromkeys(record["set"] for record in self.records.values()))

    @property
    def temperatures(self) -> list[float]:
        return sorted({record["temperature"] for record in self.records.values()})


@dataclass(frozen=True)
class Cell:
    """A method on a set at a temperature, one request at a time.

    Attributes:
        speedup: plain decoding's mean seconds per token over the method's.
        tau: mean over prompts of tokens per cycle.
        tokens_per_s: 1 / mean seconds per token.
        ttft_s: median seconds to the first token.
        itl_ms: medians over requests of the waits' p50, p95 and p99; None without streaming.
        findings: outputs by finding of the identity check.
        num_prompts: behind the intervals.
    """

    set_name: str
    temperature: float
    method: str
    speedup: Interval | None
    tau: Interval | None
    tokens_per_s: float
    ttft_s: float | None
    itl_ms: dict[str, float] | None
    findings: Mapping[str, int]
    num_prompts: int


def load_results(folder: str | Path) -> Results:
    """Read the results in a folder.

    Raises:
        ValueError: there are none, or they are damaged.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {FILE}; make one with 'draftwood bench --out {folder}'")
    lines = read_lines(path)
    records = {line["key"]: line for line in lines if line["kind"] == "record"}
    checks = {line["key"]: line for line in lines if line["kind"] == "check"}
    if not records:
        raise ValueError(f"{path} holds no result yet; let 'draftwood bench' run longer")
    runs = [line for line in lines if line["kind"] == "run"]
    return Results(runs, records, checks, list(_turns(records, checks)))


def _turns(records: Mapping[str, Line], checks: Mapping[str, Line]) -> Iterable[Turn]:
    for key, record in records.items():
        reference = records.get(key.rsplit("/", 1)[0] + "/" + REFERENCE)
        if record["concurrency"] != 1 or reference is None:
            continue
        (sequence,), (plain,) = record["sequences"], reference["sequences"]
        if sequence["error"] or not sequence["num_decoded"]:
            continue
        findings = checks[key]["findings"] if key in checks else [None]
        yield Turn(
            record["set"], record["tasks"][0], record["temperature"], record["method"], record,
            sequence, sequence["decode_s"] / sequence["num_decoded"], acceptance_length(sequence),
            plain["repetitive"], findings[0]["found"] if findings[0] else None,
        )  # fmt: skip


def unit_of(record: Line) -> str:
    """Key of a record without its method: the same for all that decoded the same."""
    unit: str = record["key"].rsplit("/", 1)[0]
    return unit


def cells(results: Results, *, repetitive: bool = False) -> list[Cell]:
    """Every set × temperature × method, then the mean over sets of each temperature and method.

    Args:
        results: what was measured.
        repetitive: show the outputs that fall into repetition instead of those that do not.
    """
    groups: dict[tuple[float, str, str], list[Turn]] = defaultdict(list)
    for turn in results.turns:
        if turn.repetitive == repetitive:
            groups[turn.temperature, turn.set_name, turn.method].append(turn)
    found = []
    for temperature in results.temperatures:
        for method in results.methods:
            parts = {name: groups.get((temperature, name, method), []) for name in results.sets}
            plain = {name: groups.get((temperature, name, REFERENCE), []) for name in parts}
            pairs = [(plain[name], turns) for name, turns in parts.items() if turns]
            found += [
                _cell(turns[0].set_name, temperature, method, [(base, turns)])
                for base, turns in pairs
            ]
            if len(pairs) > 1:
                found.append(_cell(ALL_SETS, temperature, method, pairs))
    return found


def _cell(
    name: str,
    temperature: float,
    method: str,
    pairs: Sequence[tuple[list[Turn], list[Turn]]],
) -> Cell:
    turns = [turn for _, part in pairs for turn in part]
    speeds = [paired(base, part, "token_s") for base, part in pairs]
    speeds = [(above, below) for above, below in speeds if above]
    is_reference = method == REFERENCE
    taus = [list(by_prompt(part, "tau").values()) for _, part in pairs]
    taus = [part for part in taus if part]
    rates = [np.mean(list(by_prompt(part, "token_s").values())) for _, part in pairs]
    return Cell(
        name, temperature, method,
        None if is_reference or not speeds else ratio_of_groups(speeds),
        mean_of_groups(taus) if taus and not is_reference else None,
        float(np.mean([1 / rate for rate in rates])),
        _median([turn.sequence["ttft_s"] for turn in turns]),
        _waits(turns),
        Counter(turn.found for turn in turns if turn.found is not None),
        len({(turn.set_name, turn.task) for turn in turns}),
    )  # fmt: skip


def by_prompt(turns: Sequence[Turn], field: str) -> dict[tuple[str, int], float]:
    """Mean over a prompt's turns and repetitions."""
    values: dict[tuple[str, int], list[float]] = defaultdict(list)
    for turn in turns:
        value = getattr(turn, field)
        if value is not None:
            values[turn.set_name, turn.task].append(value)
    return {prompt: float(np.mean(found)) for prompt, found in values.items()}


def paired(
    left: Sequence[Turn], right: Sequence[Turn], field: str
) -> tuple[list[float], list[float]]:
    """The values of prompts that both have, over the turns and repetitions that both have."""
    has = [{turn.unit for turn in part if getattr(turn, field) is not None}
           for part in (left, right)]  # fmt: skip
    first, second = (
        by_prompt([turn for turn in part if turn.unit in has[0] & has[1]], field)
        for part in (left, right)
    )
    return list(first.values()), [second[prompt] for prompt in first]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _waits(turns: Sequence[Turn]) -> dict[str, float] | None:
    known = [turn.sequence["itl_ms"] for turn in turns if turn.sequence["itl_ms"]]
    if not known:
        return None
    return {name: float(np.median([one[name] for one in known])) for name in known[0]}
