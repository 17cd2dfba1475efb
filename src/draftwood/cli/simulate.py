"""``draftwood simulate``: what recorded drafts would give on another machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from draftwood.replay.machines import Machine
    from draftwood.replay.recording import Recording
    from draftwood.replay.replay import Replay

SIMULATION = "SIMULATION"
OURS = "mine"


def simulate(
    recordings: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, help="From 'draftwood record'.")
    ],
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu",
            help="'A100', 'H100', 'H200', 'RTX 4090' or 'none'; all by default. Repeatable.",
        ),
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(help="Peak TFLOP/s of a machine of your own (16 bit, dense).")
    ] = None,
    gb_per_s: Annotated[float | None, typer.Option(help="Its memory bandwidth in GB/s.")] = None,
    overhead_us: Annotated[
        float, typer.Option(min=0, help="Microseconds added to every pass of a GPU.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay recordings under every budget, on the measured machine and on rooflines of GPUs.

    A replay is exact about tokens and cycles. Seconds are those of the machine's model: for GPUs
    its peaks, which no real pass reaches.
    """
    from rich.console import Console

    from draftwood.replay.compare import compare
    from draftwood.replay.recording import load_recording

    machines = _wanted(gpu, tflops, gb_per_s)
    done: list[tuple[Recording, Machine, dict[str, Replay]]] = []
    for path in recordings:
        recording = load_recording(path)
        for machine in _machines(recording, machines, overhead_us * 1e-6):
            done.append((recording, machine, compare(recording, machine)))
    if as_json:
        typer.echo(json.dumps({"kind": SIMULATION, "replays": [to_json(*one) for one in done]}))
        return
    console = Console(highlight=False)
    for one in done:
        console.print(table(*one))
    launches = f"{overhead_us:g} µs per pass" if overhead_us else "without launch costs"
    console.print(
        f"{SIMULATION}: recorded drafts replayed; seconds are modelled, not measured on these "
        "machines." + (f" GPU passes are at peak rates, {launches}." if machines else ""),
        style="bold yellow",
    )


def _wanted(gpu: list[str] | None, tflops: float | None, gb_per_s: float | None) -> dict[str, Any]:
    """Names and peaks of the GPUs to simulate."""
    from draftwood.replay.machines import GPUS, Peaks

    if (tflops is None) != (gb_per_s is None):
        raise typer.BadParameter("--tflops and --gb-per-s describe a machine only together")
    known = {name.lower(): name for name in GPUS}
    names = [name.lower() for name in (gpu or GPUS) if name.lower() != "none"]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(
            f"unknown GPU {unknown[0]!r}; choose {', '.join(GPUS)} or 'none', or give --tflops and "
            "--gb-per-s", param_hint="--gpu",
        )  # fmt: skip
    found = {known[name]: GPUS[known[name]] for name in names}
    if tflops is not None and gb_per_s is not None:
        found[OURS] = Peaks(tflops * 1e12, gb_per_s * 1e9)
    return found


def _machines(recording: Recording, wanted: dict[str, Any], overhead_s: float) -> list[Machine]:
    from draftwood.replay.machines import measured_machine, roofline_machine

    return [
        measured_machine(recording),
        *(
            roofline_machine(recording, name, peaks, overhead_s=overhead_s)
            for name, peaks in wanted.items()
        ),
    ]


def table(recording: Recording, machine: Machine, found: dict[str, Replay]) -> Table:
    """One row per policy."""
    from rich import box
    from rich.table import Table

    details = recording.details
    name = f"{details['name'] or 'recording'}, T={details['temperature']:g}, {details['drafter']}"
    result = Table(
        title=f"{SIMULATION} · {name} · {machine.name}", box=box.SIMPLE_HEAD,
        title_justify="left", padding=(0, 1, 0, 0),
    )  # fmt: skip
    result.add_column("budget")
    for heading in ("τ", "nodes", "tok/s", "speedup", "worst prompt"):
        result.add_column(heading, justify="right", no_wrap=True)
    for policy, one in found.items():
        result.add_row(
            policy,
            f"{one.acceptance_length:.2f}",
            f"{one.num_drafted / one.num_cycles:.1f}",
            f"{one.tokens_per_s:.1f}",
            f"{one.speedup:.2f}",
            f"{min(text.speedup for text in one.texts):.2f}",
        )
    return result


def to_json(recording: Recording, machine: Machine, found: dict[str, Replay]) -> dict[str, Any]:
    """The same as data."""
    keep = ("name", "target", "drafter", "temperature")
    return {
        **{key: recording.details[key] for key in keep},
        "kind": SIMULATION,
        "machine": machine.name,
        "num_tokens": recording.num_tokens,
        "policies": {
            policy: {
                "acceptance_length": one.acceptance_length,
                "mean_budget": one.num_drafted / one.num_cycles,
                "num_cycles": one.num_cycles,
                "tokens_per_s": one.tokens_per_s,
                "speedup": one.speedup,
                "worst_prompt_speedup": min(text.speedup for text in one.texts),
            }
            for policy, one in found.items()
        },
    }
