"""Is an output that of plain decoding? Differences are looked into, not forgiven."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from draftwood.bench.compare import MAX_DELTA, Divergence, explain, first_divergence
from draftwood.bench.engines.base import Runner
from draftwood.bench.runs import Request

Finding = Literal["same", "tie", "unproven", "different"]


def check(
    requests: Sequence[Request],
    reference: Sequence[list[int]],
    outputs: Sequence[list[int]],
    budgets: Sequence[Sequence[int] | None],
    runners: tuple[Runner, Runner],
    eos_token_ids: Sequence[int],
) -> list[dict[str, Any]]:
    """Compare the outputs of requests that were decoded together, one finding each.

    ``found`` is "same"; "tie": a difference that ``compare`` proves to be rounding, on the logits
    of both computations made again; "unproven": the two tokens are as close as rounding could
    explain, but the computation made again does not repeat the choice (its trees differ, where
    budgets follow the clock); or "different". All but the first say where and by how much.

    Args:
        requests: what was decoded.
        reference: outputs of plain decoding.
        outputs: of the method.
        budgets: nodes verified in each cycle of the method, where its engine says so.
        runners: of plain decoding and of the method.
        eos_token_ids: the target's.
    """
    findings: list[dict[str, Any]] = []
    for index, (left, right) in enumerate(zip(reference, outputs, strict=True)):
        position = first_divergence(left, right)
        if position is None:
            findings.append({"found": "same"})
            continue
        lone = len(requests) == 1
        rows = tuple(
            runner.row(requests, all_ids, index, position, budgets[index] if lone and own else None)
            for runner, all_ids, own in zip(
                runners, (reference, outputs), (False, True), strict=True
            )
        )
        request = requests[index]
        divergence = explain(
            left, right, position, (rows[0], rows[1]), request.params, request.prompt_ids,
            eos_token_ids,
        )  # fmt: skip
        findings.append(
            {
                "found": _verdict(divergence),
                "position": position,
                "tokens": list(divergence.tokens),
                "delta": _json(divergence.delta),
                "gap": _json(divergence.gap),
                "allowance": _json(divergence.allowance),
                "reproduced": divergence.reproduced,
            }
        )
    return findings


def _verdict(divergence: Divergence) -> Finding:
    if divergence.is_rounding:
        return "tie"
    is_close = divergence.delta <= MAX_DELTA and abs(divergence.gap) <= 2 * MAX_DELTA
    return "unproven" if is_close else "different"


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None
