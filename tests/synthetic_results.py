"""Benchmark results as ``draftwood bench`` writes them, made up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftwood.bench.store import FILE, FORMAT

# tokens per cycle, seconds per cycle
METHODS = {"ar": (1, 0.05), "chain": (2, 0.06), "tree:8": (3, 0.07), "tree:32": (4, 0.1),
           "auto": (3, 0.065)}  # fmt: skip


def run_line(**settings: Any) -> dict[str, Any]:
    """The header of a run."""
    known = {"target": "tiny", "drafter": "auto", "dtype": "float32", "device": "cpu"}
    return {
        "kind": "run", "format": FORMAT, "run": 0, "settings": {**known, **settings},
        "command": "draftwood bench", "versions": {"draftwood": "0"}, "commit": None,
        "hardware": {"processor": "a processor"},
    }  # fmt: skip


def record(
    name: str, task: int, temperature: float, method: str, *, noise: float = 1.0,
    repetitive: bool = False, concurrency: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """A result of 24 tokens per request."""
    per_cycle, seconds = METHODS[method]
    num_cycles = 24 // per_cycle
    budget = {"ar": 0, "chain": 7}.get(method, 8 if method != "tree:32" else 32)
    cycles = {
        "drafted": [budget] * num_cycles,
        "accepted": [per_cycle - 1] * num_cycles,
        "committed": [per_cycle] * num_cycles,
        "phi": [1.5] * num_cycles,
        "verify_ms": [1e3 * seconds * 0.8] * num_cycles,
        "total_ms": [1e3 * seconds] * num_cycles,
        "first_context_len": 10,
        "ahead": None,
    }
    decode_s = num_cycles * seconds * noise
    sequence = {
        "token_ids": list(range(24)), "finish_reason": "length", "error": None, "ttft_s": 0.2,
        "prefill_s": 0.1, "decode_s": decode_s, "num_decoded": 24,
        "itl_ms": {"p50": 50.0, "p95": 60.0, "p99": 70.0}, "bursts": [per_cycle] * num_cycles,
        "repetitive": repetitive, "cycles": cycles,
    }  # fmt: skip
    stages = {"draft_s": 0.1, "verify_s": 0.7, "walk_s": 0.1, "commit_s": 0.05, "other_s": 0.05}
    bins = {"num": [40, 40], "promised": [8.0, 30.0], "accepted": [6, 33]}
    return {
        "kind": "record", "run": 0, "set": name, "tasks": [task] * concurrency, "turn": 0,
        "key": f"{name}/{task}/turn0/T{temperature:g}/c{concurrency}/r0/{method}",
        "temperature": temperature, "concurrency": concurrency, "repeat": 0, "method": method,
        "num_prompt_tokens": [10] * concurrency, "wall_s": decode_s + 0.1, "kv_bytes": 10**6,
        "peak_bytes": 5 * 10**8, "stages": {k: v * decode_s for k, v in stages.items()},
        "sequences": [sequence] * concurrency, "reliability": bins,
    }  # fmt: skip


def result_lines(
    sets: Sequence[str] = ("gsm8k", "alpaca"), num_prompts: int = 4, seed: int = 0
) -> list[dict[str, Any]]:
    """Every method on every set at temperatures 0 and 1; the last prompt falls into repetition.

    A prompt has the same noise for all methods, and they have a little of their own.
    """
    rng = np.random.default_rng(seed)
    lines: list[dict[str, Any]] = [run_line()]
    for name in sets:
        for temperature in (0.0, 1.0):
            for task in range(num_prompts):
                shared = rng.uniform(0.5, 2.0)
                for method in METHODS:
                    noise = shared * rng.uniform(0.98, 1.02)
                    loops = task == num_prompts - 1
                    one = record(name, task, temperature, method, noise=noise, repetitive=loops)
                    lines.append(one)
                    if method != "ar":
                        lines.append(check(one["key"]))
    return lines


def check(key: str, found: str = "same", **details: Any) -> dict[str, Any]:
    """The finding of an identity check."""
    if found != "same":
        details = {"position": 3, "tokens": [1, 2], "delta": 1e-5, "gap": 1e-6,
                   "allowance": 2e-5, "reproduced": True, **details}  # fmt: skip
    return {"kind": "check", "run": 0, "key": key, "findings": [{"found": found, **details}]}


def write_results(folder: Path, lines: Sequence[dict[str, Any]]) -> Path:
    """Put lines into a results folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / FILE).write_text(text, encoding="utf-8")
    return folder
