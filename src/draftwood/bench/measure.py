"""From a decoded batch to the figures that are kept, as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from draftwood.bench.engines.base import Batch, Generation
from draftwood.bench.repetition import is_repetitive
from draftwood.records import CycleStats

STAGES = ("draft_s", "verify_s", "walk_s", "commit_s", "other_s")
QUANTILES = (50, 95, 99)


def measured(batch: Batch) -> dict[str, Any]:
    """The fields of a record that come from decoding.

    ``sequences`` has one entry per request, see ``_sequence``. ``stages`` are seconds of the
    decoding passes by stage, each pass counted once however many sequences shared it.
    """
    cycles = [cycle for one in batch.generations for cycle in one.cycles]
    return {
        "wall_s": round(batch.wall_s, 6),
        "kv_bytes": batch.kv_bytes,
        "peak_bytes": batch.peak_bytes,
        "stages": _stages(cycles),
        "sequences": [_sequence(one) for one in batch.generations],
        **batch.details,
    }


def _stages(cycles: Sequence[CycleStats]) -> dict[str, float] | None:
    if not cycles:
        return None
    passes = {id(cycle.seconds): cycle.seconds for cycle in cycles}.values()
    return {stage: round(sum(getattr(s, stage) for s in passes), 6) for stage in STAGES}


def _sequence(one: Generation) -> dict[str, Any]:
    """One output.

    ``itl_ms``: quantiles of the waits between arrivals, as a client of a stream sees them (tokens
    of one cycle arrive together). ``bursts``: tokens of each arrival.
    """
    waits = np.diff([seconds for seconds, _ in one.arrivals]) * 1e3
    ttft_s = one.arrivals[0][0] if one.arrivals else None
    return {
        "token_ids": one.token_ids,
        "finish_reason": one.finish_reason,
        "error": one.error,
        "ttft_s": None if ttft_s is None else round(ttft_s, 6),
        "prefill_s": round(one.prefill_s, 6),
        "decode_s": round(one.decode_s, 6),
        "num_decoded": one.num_decoded,
        "itl_ms": {
            f"p{q}": round(float(np.percentile(waits, q)), 4) for q in QUANTILES
        } if len(waits) else None,
        "bursts": [count for _, count in one.arrivals],
        "repetitive": is_repetitive(one.token_ids),
        "cycles": _cycles(one.cycles) if one.cycles else None,
    }  # fmt: skip


def _cycles(cycles: Sequence[CycleStats]) -> dict[str, Any]:
    """Per decoding cycle.

    ``verify_ms`` is the target pass with its head and the walk; ``ahead`` says where the draft came
    from (see ``AheadStats``), where drafting and verifying overlap.
    """
    ahead = [getattr(cycle, "ahead", None) for cycle in cycles]
    sources = [None if stats is None else stats.source for stats in ahead]
    return {
        "drafted": [cycle.num_drafted for cycle in cycles],
        "accepted": [cycle.num_accepted for cycle in cycles],
        "committed": [cycle.num_committed for cycle in cycles],
        "phi": [round(cycle.phi, 3) for cycle in cycles],
        "verify_ms": [
            round((cycle.seconds.verify_s + cycle.seconds.walk_s) * 1e3, 3) for cycle in cycles
        ],
        "total_ms": [round(cycle.seconds.total_s * 1e3, 3) for cycle in cycles],
        "first_context_len": cycles[0].context_len,
        "ahead": sources if any(sources) else None,
    }


def committed(sequence: dict[str, Any]) -> list[int]:
    """Tokens of every decoding cycle of an output in a record; [] where they are not known.

    Engines without records of their cycles stream one cycle at a time. Where the pass over the
    prompt gave the first tokens, that is no cycle.
    """
    if sequence["cycles"]:
        return list(sequence["cycles"]["committed"])
    is_prefill = sequence["num_decoded"] < len(sequence["token_ids"])
    return list(sequence["bursts"][1 if is_prefill else 0 :])


def acceptance_length(sequence: dict[str, Any]) -> float | None:
    """τ of one output of a record: tokens per cycle; None if its cycles are not known."""
    counts = committed(sequence)
    return sum(counts) / len(counts) if counts else None


def acceptance_histogram(sequences: Sequence[dict[str, Any]]) -> Counter[int]:
    """How many cycles committed how many tokens."""
    return Counter(count for sequence in sequences for count in committed(sequence))


def acceptance_by_depth(sequences: Sequence[dict[str, Any]]) -> list[float]:
    """For depth 1, 2, …: share of drafted cycles that accepted that far, of those that could have.

    The d-th entry is P(accepted ≥ d | accepted ≥ d − 1), the acceptance rate at position d.
    """
    accepted = [
        count
        for sequence in sequences
        if sequence["cycles"]
        for count, drafted in zip(
            sequence["cycles"]["accepted"], sequence["cycles"]["drafted"], strict=True
        )
        if drafted
    ]
    reached = [sum(count >= d for count in accepted) for d in range(max(accepted, default=0) + 2)]
    return [now / before for before, now in pairwise(reached) if before]
