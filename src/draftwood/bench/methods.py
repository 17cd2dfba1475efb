"""The ways to decode that can be compared, as data, and how to make one ready."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from draftwood.api import load
from draftwood.bench.engines.base import Runner
from draftwood.bench.engines.own import OwnRunner
from draftwood.bench.engines.worker import SCRIPTS, WorkerRunner
from draftwood.draft.base import Drafter
from draftwood.draft.load import load_drafter, shipped_folder
from draftwood.draft.surrogate import Surrogate
from draftwood.target.model import Target
from draftwood.tree.budget import is_constant, parse_budget

REFERENCE = "ar"
WITH_LOOKUP = "+lookup"
_OUTSIDE_LEN = 8192  # outside engines reserve memory for their longest context


@dataclass(frozen=True)
class Method:
    """A way to decode.

    Attributes:
        name: as the user wrote it; identifies its results.
        engine: ``own`` (this package), ``transformers``, or a key of ``SCRIPTS``.
        drafter: ``none``, ``given`` (the benchmark's drafter) or ``lookup``.
        budget: of the own engine.
        ahead: where to draft while the target verifies; "" drafts when it is needed.
    """

    name: str
    engine: str = "own"
    drafter: str = "given"
    budget: str = "auto"
    ahead: str = ""


_NAMED = {
    method.name: method
    for method in (
        Method("ar", drafter="none", budget="off"),
        Method("chain", budget="chain"),
        Method("auto"),
        Method("convex", budget="convex"),
        Method("roofline", budget="roofline"),
        Method("lookup", drafter="lookup"),
        Method("async", ahead="thread"),
        Method("async-process", ahead="process"),
        Method("hf-ar", engine="transformers", drafter="none"),
        Method("hf-dflash", engine="transformers"),
        *(Method(name, engine=name, drafter="none") for name in SCRIPTS),
    )
}
_WITH_BUDGET = ("tree", "lookup", "async", "async-process")


def parse_method(text: str) -> Method:
    """The method a user means: a name, or one with a budget (``tree:32``, ``lookup:8``).

    Raises:
        ValueError: no such method or budget.
    """
    name, colon, budget = text.strip().partition(":")
    if not colon and name in _NAMED:
        return _NAMED[name]
    if not colon or name not in _WITH_BUDGET:
        known = ", ".join([*_NAMED, *(f"{name}:N" for name in _WITH_BUDGET)])
        raise ValueError(f"there is no method {text!r}; choose from {known}")
    is_constant(budget)  # raises for a malformed one
    base = _NAMED.get(name, Method("tree"))
    return Method(text.strip(), base.engine, base.drafter, budget, base.ahead)


@dataclass(frozen=True)
class Outside:
    """Where an outside engine is: the Python of its environment, and the model it loads."""

    python: str
    model: str


@dataclass(frozen=True)
class Bench:
    """What all methods share.

    Attributes:
        target: the model.
        target_name: as the user named it.
        drafter: name of the drafter, as for ``draftwood.load``.
        outside: environments of outside engines.
        max_concurrency: most requests at once.
    """

    target: Target
    target_name: str
    drafter: str = "auto"
    outside: Mapping[str, Outside] = field(default_factory=dict)
    max_concurrency: int = 1

    @property
    def max_len(self) -> int:
        """Longest prompt with its output."""
        most = _OUTSIDE_LEN if self.outside else sys.maxsize
        return min(self.target.max_len or most, most)

    @cached_property
    def given(self) -> Drafter:
        """The benchmark's drafter, never used itself."""
        return load_drafter(self.drafter, self.target)

    @property
    def drafter_folder(self) -> str | None:
        """Where the weights of the benchmark's drafter are (a folder or hub id), if it has any."""
        name = self.drafter.removesuffix(WITH_LOOKUP)
        if name in ("none", "lookup"):
            return None
        if name in ("auto", "shipped"):
            folder = shipped_folder(self.target)
            return None if folder is None else str(folder)
        return name


def open_runner(method: Method, bench: Bench, temperature: float) -> Runner:
    """Make a method ready.

    Raises:
        ValueError, DraftwoodError: it cannot run here; the message says why.
    """
    if method.engine == "own":
        return _own(method, bench)
    if method.engine == "transformers":
        return _transformers(method, bench, temperature)
    if method.engine not in bench.outside:
        raise ValueError(
            f"{method.name} runs in an environment of its own; name its Python and model: "
            f"--engine {method.name}=/path/to/python:/path/to/model"
        )
    import torch

    place = bench.outside[method.engine]
    return WorkerRunner(
        method.engine, place.python, place.model, sorted(bench.target.eos_token_ids),
        threads=torch.get_num_threads(), max_concurrency=bench.max_concurrency,
        context_len=bench.max_len, dtype=str(bench.target.dtype).removeprefix("torch."),
    )  # fmt: skip


def _own(method: Method, bench: Bench) -> Runner:
    drafter: str | Drafter = bench.given if method.drafter == "given" else method.drafter
    ahead = method.ahead or None
    constant = parse_budget(method.budget) if is_constant(method.budget) else None
    if ahead == "process":
        drafter = bench.drafter  # a drafter that exists cannot move there
    options: dict[str, Any] = {}
    if constant is None and isinstance(drafter, str):
        options["surrogate"] = Surrogate()  # not the one that other commands have taught
    template = load(bench.target, drafter, method.budget, ahead=ahead, **options)
    return OwnRunner(template, constant)


def _transformers(method: Method, bench: Bench, temperature: float) -> Runner:
    from draftwood.bench.engines.transformers import TransformersRunner

    if method.drafter == "none":
        return TransformersRunner(bench.target, temperature)
    from draftwood.draft.hf_adapter import DFlashAssistant

    folder = bench.drafter_folder
    if folder is None:
        raise ValueError(
            f"{method.name} needs a DFlash drafter and {bench.drafter!r} is none for this target; "
            "give one with --drafter"
        )
    options: dict[str, Any] = {"dtype": bench.target.dtype, "device": bench.target.device}
    assistant = DFlashAssistant.from_pretrained(folder, **options)
    return TransformersRunner(bench.target, temperature, assistant)
