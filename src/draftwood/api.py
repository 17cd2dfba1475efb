"""``draftwood.load``: from names to a ready engine."""

from __future__ import annotations

from typing import Any

from draftwood.draft.base import Drafter
from draftwood.draft.load import load_drafter
from draftwood.engine import Engine
from draftwood.target.load import load_target
from draftwood.target.model import Target
from draftwood.tree.budget import BudgetPolicy, parse_budget


def load(
    target: str | Target = "demo",
    drafter: str | Drafter | None = "auto",
    budget: str | int | BudgetPolicy = "auto",
    *,
    dtype: str = "auto",
    device: str = "auto",
    **engine_options: Any,
) -> Engine:
    """Load a target and a drafter and put an engine on them.

    Args:
        target: hub id, local folder, GGUF file, ``"demo"`` (SmolLM2-135M-Instruct), or a Target.
        drafter: ``"auto"`` (the drafter shipped for this target, else prompt lookup), ``"lookup"``,
            ``"none"``/None, a DFlash checkpoint or a smaller causal LM (folder or hub id), or a
            Drafter.
        budget: drafted nodes per cycle: ``"auto"``, ``"chain"``, ``"off"``, a number, or a policy.
        dtype: ``"auto"`` (the checkpoint's; float32 on CPU), ``"float32"``, ``"bfloat16"``, …
        device: ``"auto"`` (CUDA if there is one), ``"cpu"``, ``"cuda:1"``, …
        engine_options: passed to ``Engine`` (``max_batch``, ``prefill_chunk_len``, ``on_cycle``).

    Raises:
        ValueError: a name that cannot be loaded, or a target and drafter that do not fit.
    """
    policy = parse_budget(budget)
    model = load_target(target, dtype=dtype, device=device) if isinstance(target, str) else target
    return Engine(model, load_drafter(drafter, model), policy, **engine_options)
