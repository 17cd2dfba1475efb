"""``draftwood.load``: from names to a ready engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwood.ahead.drafter import AheadDrafter
from draftwood.ahead.load import check_place, load_ahead
from draftwood.ahead.planner import AheadOptions
from draftwood.ahead.policy import AheadBudget
from draftwood.draft.base import Drafter
from draftwood.draft.load import check_spec, load_drafter
from draftwood.draft.surrogate import Surrogate
from draftwood.draft.surrogate_store import keep_at_end, stored_surrogate
from draftwood.engine import Engine
from draftwood.target.load import load_target
from draftwood.target.measure import calibrated, is_reliable
from draftwood.target.model import Target
from draftwood.target.shape import model_shape
from draftwood.tree.budget import BudgetPolicy, Online, is_constant, parse_budget
from draftwood.tree.latency import OnlineLatency
from draftwood.tree.roofline import Roofline, fit_roofline


def load(
    target: str | Path | Target = "demo",
    drafter: str | Path | Drafter | None = "auto",
    budget: str | int | BudgetPolicy = "auto",
    *,
    dtype: str = "auto",
    device: str = "auto",
    calibrate: bool = True,
    ahead: str | None = None,
    ahead_options: AheadOptions | None = None,
    **engine_options: Any,
) -> Engine:
    """Load a target and a drafter and put an engine on them.

    Args:
        target: hub id, local folder, GGUF file, ``"demo"`` (SmolLM2-135M-Instruct), or a Target.
        drafter: ``"auto"`` (the drafter shipped for this target, else prompt lookup), ``"lookup"``,
            ``"none"``/None, a DFlash checkpoint or a smaller causal LM (folder or hub id), or a
            Drafter.
        budget: drafted nodes per cycle: ``"auto"``, ``"chain"``, ``"off"``, a number, ``"convex"``
            and ``"roofline"`` (CaDDTree's and BASTION's rules), or a policy.
        dtype: ``"auto"`` (the checkpoint's; float32 on CPU), ``"float32"``, ``"bfloat16"``, …
        device: ``"auto"`` (CUDA if there is one), ``"cpu"``, ``"cuda:1"``, …
        calibrate: with a budget that adapts, measure the target for up to a few seconds unless
            that was done before on this machine, and use and keep what is learned about the
            drafter's probabilities. False: start from nothing and leave nothing behind.
        ahead: draft for what may come of a verification while it runs: in a ``"thread"``, on
            another device (``"cuda:1"``) or in a ``"process"``; None drafts when it is needed.
            The drafter must need nothing but tokens. See docs/async.md.
        ahead_options: which branches, how many, and how long to wait for the worker.
        engine_options: passed to ``Engine`` (``max_batch``, ``prefill_chunk_len``, ``on_cycle``;
            ``latency`` and ``surrogate`` replace what is measured and learned).

    Raises:
        ValueError: a name that cannot be loaded, or a target and drafter that do not fit.
    """
    constant = is_constant(budget)  # what is malformed fails before anything is loaded
    check_spec(drafter)
    if ahead is None and ahead_options is not None:
        raise ValueError("ahead_options say how to draft ahead; say where: ahead='process', …")
    if ahead is not None:
        check_place(ahead)
        if not isinstance(ahead_options, AheadOptions | None):
            raise ValueError(f"ahead_options must be AheadOptions(…), got {ahead_options!r}")
        if isinstance(budget, (str, int)) and str(budget) in ("off", "0"):
            raise ValueError(
                f"nothing is drafted ahead ({ahead!r}) with a budget of {budget!r}; leave one out"
            )
    if isinstance(target, (str, Path)):
        model = load_target(str(target), dtype=dtype, device=device)
    elif isinstance(target, Target):
        model = target
    else:
        raise ValueError(
            "a target is a hub id, a local folder, a GGUF file, 'demo' or a draftwood Target, got "
            f"{type(target).__name__}; for a model already loaded: Target(model, tokenizer) from "
            "draftwood.target.model, or draftwood.custom_generate"
        )
    if ahead is None:
        proposer = load_drafter(drafter, model)
    else:
        proposer = load_ahead(drafter, model, ahead, ahead_options)
    adapts = proposer.horizon > 0 and not constant
    options: dict[str, Any] = {}
    is_measured = False
    by_name = isinstance(drafter, (str, Path)) and calibrate
    if adapts:
        options["surrogate"] = stored_surrogate(str(drafter), model) if by_name else Surrogate()
        if calibrate:
            curve = calibrated(model, proposer.taps)
            options["latency"], is_measured = OnlineLatency(curve), is_reliable(curve)
    if isinstance(proposer, AheadDrafter) and by_name:
        if adapts:  # the engine's is the one that is kept
            proposer.planner.surrogate.restore(options["surrogate"].state())
        else:
            proposer.planner.surrogate = stored_surrogate(str(drafter), model)
            keep_at_end(proposer, proposer.planner.surrogate)
    policy = parse_budget(
        budget,
        {
            "auto": lambda: Online(is_calibrated=is_measured),
            "roofline": lambda: fitted_roofline(model, proposer.taps),
        },
    )
    if isinstance(proposer, AheadDrafter) and budget == "auto":
        policy = AheadBudget(proposer.planner)
    engine = Engine(model, proposer, policy, **{**options, **engine_options})
    if engine.surrogate is not None:
        keep_at_end(engine, engine.surrogate)
    return engine


def fitted_roofline(target: Target, taps: Sequence[int] = ()) -> Roofline:
    """BASTION's policy for a target, fitted to its measured passes.

    Raises:
        ValueError: the target's configuration does not say what a roofline needs.
    """
    shape, curve = model_shape(target), calibrated(target, taps)
    contexts = [float(curve.context_len)] * len(curve.widths)
    return Roofline(fit_roofline(shape, curve.widths, contexts, curve.seconds))
