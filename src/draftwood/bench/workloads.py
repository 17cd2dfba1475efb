"""What is decoded: the papers' evaluation sets by name, or prompts from local files.

Data sets and prompt templates are those of the DFlash and DDTree benchmarks
(github.com/z-lab/dflash, github.com/liranringel/ddtree), so that figures can be set side by side.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """A conversation to have: what the user says, turn by turn.

    Attributes:
        index: place in its set as published, which identifies it.
        turns: user turns.
        system: system message, None for the chat template's own.
    """

    index: int
    turns: tuple[str, ...]
    system: str | None = None


@dataclass(frozen=True)
class Workload:
    """A named set of tasks, in published order."""

    name: str
    tasks: tuple[Task, ...]

    def pick(self, count: int | None, seed: int) -> list[Task]:
        """``count`` tasks in an order that only the name and the seed decide.

        A larger count gives the same tasks and more behind them.
        """
        order = list(self.tasks)
        random.Random(f"{seed}/{self.name}").shuffle(order)
        return order[:count]


@dataclass(frozen=True)
class Source:
    """Where a set is on the hub, and how a row becomes user turns."""

    turns: Callable[[Row], Sequence[str]]
    split: str = "test"
    path: str = "json"
    subset: str | None = None
    data_files: tuple[str, ...] = ()
    category: str | None = None
    keep: frozenset[str] = field(default_factory=frozenset)


def _math(column: str) -> Callable[[Row], Sequence[str]]:
    ask = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    return lambda row: [row[column] + ask]


def _livecodebench(row: Row) -> Sequence[str]:
    code = row.get("starter_code")
    form = "Use the following code structure" if code else "Write your code in the following format"
    return [
        "You are an expert Python programmer. You will be given a question (problem specification) "
        "and will generate a correct Python program that matches the specification and passes all "
        "tests. You will NOT return anything except for the program\n\n"
        f"### Question:\n{row['question_content']}\n\n### Format: {form}:\n"
        f"```python\n{code or '# YOUR CODE HERE'}\n```\n\n"
        "### Answer: (use the provided format with backticks)"
    ]


def _alpaca(row: Row) -> Sequence[str]:
    more = f"\n\nInput:\n{row['input']}" if row["input"] else ""
    return [row["instruction"] + more]


_HUB = "https://huggingface.co/datasets"
_LCB = f"{_HUB}/livecodebench/code_generation_lite/resolve/main"
_SPEC_BENCH = (
    "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
)
_CHAT = "writing roleplay reasoning math coding extraction stem humanities"
SPEC_BENCH = {
    "spec-bench": frozenset[str](),
    "spec-bench:chat": frozenset(_CHAT.split()),
    **{f"spec-bench:{name}": frozenset({name}) for name in
       ("translation", "summarization", "qa", "math_reasoning", "rag")},
}  # fmt: skip

SETS: dict[str, Source] = {
    "math500": Source(_math("problem"), path="HuggingFaceH4/MATH-500"),
    "gsm8k": Source(_math("question"), path="openai/gsm8k", subset="main"),
    "aime24": Source(_math("problem"), path="HuggingFaceH4/aime_2024", split="train"),
    "aime25": Source(_math("problem"), path="MathArena/aime_2025", split="train"),
    "humaneval": Source(
        lambda row: [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            f"```python\n{row['prompt']}\n```"
        ],
        path="openai/openai_humaneval",
    ),
    "mbpp": Source(
        lambda row: [row["prompt"]], path="google-research-datasets/mbpp", subset="sanitized"
    ),
    "lbpp": Source(
        lambda row: [row["instruction"]],
        path="parquet",
        data_files=(f"{_HUB}/CohereLabs/lbpp/resolve/main/python/test.parquet",),
    ),
    "livecodebench": Source(
        _livecodebench,
        data_files=tuple(f"{_LCB}/test{n}.jsonl" for n in ("", 2, 3, 4, 5, 6)),
    ),
    "swe-bench": Source(
        lambda row: [
            f"Problem Statement:\n{row['problem_statement']}\nPlease fix the issue described above."
        ],
        path="princeton-nlp/SWE-bench_Lite",
    ),
    "mt-bench": Source(
        lambda row: row["prompt"], path="HuggingFaceH4/mt_bench_prompts", split="train"
    ),
    "alpaca": Source(_alpaca, path="tatsu-lab/alpaca", split="train"),
    **{
        name: Source(
            lambda row: row["turns"], data_files=(_SPEC_BENCH,), category="category", keep=keep
        )
        for name, keep in SPEC_BENCH.items()
    },
}
PAPER_SETS = ("math500", "gsm8k", "aime24", "aime25", "humaneval", "mbpp", "livecodebench",
              "swe-bench", "mt-bench", "alpaca")  # fmt: skip


def hub_workload(name: str) -> Workload:
    """One of ``SETS`` from the hub, kept in the cache of ``datasets``.

    Raises:
        ValueError: no such set, or it could not be fetched.
        ImportError: ``datasets`` is missing.
    """
    if name not in SETS:
        raise ValueError(f"there is no set {name!r}; choose from {', '.join(sorted(SETS))}")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            'sets from the hub need the "datasets" package: pip install "draftwood[bench]"'
        ) from error
    source = SETS[name]
    files = {"data_files": {source.split: list(source.data_files)}} if source.data_files else {}
    try:
        rows = load_dataset(source.path, source.subset, split=source.split, **files)
    except Exception as error:  # of the connection, the hub, or a changed file format
        raise ValueError(
            f"the set {name!r} could not be fetched: {error}; without a connection, give prompts "
            "from a file or folder (--data)"
        ) from error
    return Workload(name, tuple(_tasks(rows, source)))


def _tasks(rows: Any, source: Source) -> list[Task]:
    return [
        Task(index, tuple(source.turns(row)))
        for index, row in enumerate(rows)
        if not source.keep or row[source.category] in source.keep
    ]


def local_workloads(path: str | Path) -> list[Workload]:
    """A JSONL file of prompts, or every one in a folder; a set is called like its file.

    A line has ``turns`` (user turns) or ``messages`` (role and content; assistant messages are left
    out, the target writes its own).

    Raises:
        ValueError: no such file, no JSONL file in the folder, or a line that is no conversation.
    """
    path = Path(path)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(f"{path} is no JSONL file and no folder with any; give one with prompts")
    return [_read(file) for file in files]


def _read(file: Path) -> Workload:
    tasks = []
    for index, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
        if not line.strip():
            continue
        try:
            tasks.append(_conversation(index, json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"line {index + 1} of {file} is no conversation with 'turns' or 'messages': {error}"
            ) from error
    if not tasks:
        raise ValueError(f"{file} holds no prompt")
    return Workload(file.stem, tuple(tasks))


def _conversation(index: int, row: Row) -> Task:
    messages = row.get("messages") or [{"role": "user", "content": turn} for turn in row["turns"]]
    turns = tuple(m["content"] for m in messages if m["role"] == "user")
    system = [m["content"] for m in messages if m["role"] == "system"]
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"needs user turns with text, got {turns!r:.80}")
    return Task(index, turns, system[0] if system else None)
