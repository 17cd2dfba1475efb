"""All budget policies on one recording and one machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftwood.draft.surrogate import Surrogate
from draftwood.replay.machines import Machine
from draftwood.replay.recording import Recording
from draftwood.replay.replay import BUDGETS, Replay, replay
from draftwood.tree.budget import Chain, Fixed, Off
from draftwood.tree.convex_greedy import ConvexGreedy
from draftwood.tree.online import Online
from draftwood.tree.policy import BudgetPolicy
from draftwood.tree.roofline import ModelShape, Roofline, fit_roofline

ORACLE = "oracle"


def adaptive_policies(
    recording: Recording, machine: Machine
) -> dict[str, Callable[[], BudgetPolicy]]:
    """The policies that choose a budget each cycle, made as ``draftwood.load`` makes them."""
    shape = ModelShape(**recording.details["target_shape"])
    curve = machine.curve
    contexts = [float(curve.context_len)] * len(curve.widths)
    return {
        "auto": lambda: Online(is_calibrated=True),
        "convex": ConvexGreedy,
        "roofline": lambda: Roofline(fit_roofline(shape, curve.widths, contexts, curve.seconds)),
    }


def compare(
    recording: Recording, machine: Machine, budgets: Sequence[int] = BUDGETS
) -> dict[str, Replay]:
    """Replays by policy: the adaptive ones, ``oracle``, every fixed budget, ``chain``, ``off``.

    The adaptive ones see scores calibrated from nothing in this very recording, as in a first run.
    The oracle is the best of ``budgets`` in hindsight.
    """
    found = {
        name: replay(recording, new(), machine, surrogate=Surrogate())
        for name, new in adaptive_policies(recording, machine).items()
    }
    fixed = {budget: replay(recording, Fixed(budget), machine) for budget in budgets}
    found[ORACLE] = min(fixed.values(), key=lambda one: one.seconds)
    found.update({str(budget): one for budget, one in fixed.items()})
    found["chain"] = replay(recording, Chain(), machine)
    found["off"] = replay(recording, Off(), machine)
    return found
