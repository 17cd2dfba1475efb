"""From a drafter's name and a place to run it to an ``AheadDrafter``."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from draftwood.ahead.channel import InProcess, InThread
from draftwood.ahead.drafter import AheadDrafter
from draftwood.ahead.planner import AheadOptions
from draftwood.ahead.refusal import check_taps
from draftwood.draft.base import Drafter
from draftwood.draft.load import load_drafter, named_taps
from draftwood.target.load import usable_device
from draftwood.target.model import Target

_CPU_HEAD_ROWS = 20  # a product of few rows takes as long as its weights take to read


@dataclass(frozen=True)
class TargetCard:
    """What a drafter that reads only tokens needs to know of its target, without the model."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_len: int
    dtype: torch.dtype
    device: torch.device
    tokenizer: Any
    tables: tuple[torch.Tensor, torch.Tensor]

    @staticmethod
    def of(target: Target, device: torch.device) -> TargetCard:
        """The card of ``target`` for a drafter on ``device``."""
        same = target.output_embeddings() is target.input_embeddings()
        table = target.input_embeddings().detach().to(device)
        head = table if same else target.output_embeddings().detach().to(device)
        return TargetCard(
            target.vocab_size, target.hidden_size, target.num_layers, target.max_len,
            target.dtype, device, target.tokenizer, (table, head),
        )  # fmt: skip

    def input_embeddings(self) -> torch.Tensor:
        """[V, hidden_size] embedding table."""
        return self.tables[0]

    def output_embeddings(self) -> torch.Tensor:
        """[V, hidden_size] weight of the head."""
        return self.tables[1]


def load_ahead(
    spec: str | Path | Drafter | None,
    target: Target,
    where: str = "thread",
    options: AheadOptions | None = None,
) -> AheadDrafter:
    """A drafter that drafts while ``target`` verifies, ready to be used.

    Args:
        spec: as for ``load_drafter``; it must not need target features.
        where: ``"thread"`` (the target's device), a device for that thread (``"cpu"``,
            ``"cuda:1"``, …), ``"process"``: a process of its own on the CPU, or
            ``"process:2,3"``: the same, pinned to these cores and with as many threads.
        options: what to draft ahead, and how long to wait. A worker that is not ready in time is
            not an error: a warning says so, and decoding begins without it.

    Raises:
        ValueError: a drafter that cannot be used so, or no such place.
        DraftwoodError: the worker failed while it started.
    """
    check_place(where)
    connect = _connect(spec, target, where)
    options = options or AheadOptions()
    on_cpu = isinstance(connect, InProcess) or connect.device == torch.device("cpu")
    if options.head_rows is None and on_cpu:
        options = replace(options, head_rows=_CPU_HEAD_ROWS)
    ahead = AheadDrafter(connect, options, vocab_size=target.vocab_size)
    try:
        is_ready = ahead.wait_ready(options.start_wait_s)
    except BaseException:
        ahead.close()
        raise
    if not is_ready:
        warnings.warn(
            f"the drafting worker is still starting after {options.start_wait_s:g} s; decoding "
            "begins without it, with prompt lookup",
            stacklevel=2,
        )
    return ahead


def check_place(where: str) -> None:
    """Refuse a place that there is not, before anything is loaded.

    Raises:
        ValueError: see ``load_ahead``.
    """
    if not isinstance(where, str):
        raise ValueError(f"ahead is a name: 'thread', 'process', 'cuda:1', …; got {where!r}")
    if where.split(":")[0] == "process":
        _cores(where)
    elif where != "thread":
        _device(where)


def _connect(spec: str | Path | Drafter | None, target: Target, where: str) -> InProcess | InThread:
    if where.split(":")[0] == "process":
        if not isinstance(spec, (str, Path)):
            raise ValueError(
                "a drafter that exists already cannot move to another process; give its name, "
                "or use ahead='thread'"
            )
        check_taps(named_taps(spec, target))  # before a process loads it
        card = TargetCard.of(target, torch.device("cpu"))
        return InProcess(partial(_load, spec, card), cores=_cores(where))
    device = target.device if where == "thread" else _device(where)
    if device == target.device or not isinstance(spec, (str, Path)):
        drafter = load_drafter(spec, target)
    else:
        drafter = _load(spec, TargetCard.of(target, device))
    check_taps(drafter.taps)
    return InThread.of(drafter, device)


def _load(spec: str | Path, card: TargetCard) -> Drafter:
    return load_drafter(spec, cast(Target, card))


def _cores(where: str) -> tuple[int, ...]:
    _, _, listed = where.partition(":")
    try:
        cores = tuple(int(core) for core in listed.split(",")) if listed else ()
    except ValueError as error:
        raise ValueError(f"cores are numbers, as in 'process:2,3', got {where!r}") from error
    last = (os.cpu_count() or 1) - 1
    if any(not 0 <= core <= last for core in cores):
        raise ValueError(f"cores are 0 to {last} on this machine, got {where!r}")
    if len(set(cores)) < len(cores):
        raise ValueError(f"{where!r} names a core twice; each gets one thread")
    return cores


def _device(where: str) -> torch.device:
    try:
        torch.device(where)
    except RuntimeError as error:
        raise ValueError(
            f"drafting ahead runs in a 'thread', a 'process' or on a device, not {where!r}"
        ) from error
    return usable_device(where)


def spare_core() -> tuple[int, ...]:
    """A core for a drafting process: this process gives up its last one, and a thread; () for none.

    Torch threads of two processes on one core stall each other, so they are kept apart.
    """
    if not hasattr(os, "sched_setaffinity"):
        return ()
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        return ()
    os.sched_setaffinity(0, mine[:-1])
    torch.set_num_threads(min(torch.get_num_threads(), len(mine) - 1))
    return (mine[-1],)
