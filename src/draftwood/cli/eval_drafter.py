"""``draftwood eval-drafter``: what a drafter achieves, replayed on stored replies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwood.cli import options
from draftwood.cli.console import stderr

if TYPE_CHECKING:
    from rich.table import Table

    from draftwood.train.evaluate import Acceptance


def eval_drafter(
    drafter: Annotated[
        str,
        typer.Option(
            "--drafter", "-d", help="Folder or hub id of a trained drafter, or 'shipped'."
        ),
    ],
    data: Annotated[
        list[Path],
        typer.Option(
            exists=True,
            help="Folder from 'draftwood data' (greedy replies), or a JSONL file of it.",
        ),
    ],
    target: options.Target = "demo",
    budget: Annotated[
        list[int] | None,
        typer.Option("--budget", "-b", min=1, help="Tree budget; 8, 16, … 512 by default."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most replies per domain, in order.")
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option(min=0, max=100, help="Only what 'train --held-out PERCENT' did not train on."),
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Accuracy by position, and tokens per cycle (τ) of the chain and of trees, by domain."""
    from rich.console import Console
    from rich.progress import track

    from draftwood.cli.options import quiet_libraries
    from draftwood.cli.threads import choose_threads
    from draftwood.target.load import load_target
    from draftwood.train.accepted import CHAIN
    from draftwood.train.evaluate import BUDGETS
    from draftwood.train.features import is_held_out
    from draftwood.train.measure import evaluate_drafter
    from draftwood.train.shards import load_rows

    quiet_libraries()
    choose_threads()
    rows = [row for path in data for row in load_rows(path)]
    if held_out is not None:
        rows = [row for row in rows if is_held_out(row.prompt_key, held_out)]
    rows = _at_most(rows, limit)
    if not rows:
        held = "" if held_out is None else f" among the {held_out:g} % held out"
        raise ValueError(f"there is no reply{held} in {', '.join(map(str, data))}; make more")
    found = evaluate_drafter(
        drafter,
        load_target(target, dtype=dtype, device=device),
        track(rows, description="replies", console=stderr(), transient=True),
        budgets=(CHAIN, *sorted(set(budget))) if budget else BUDGETS,
    )
    if as_json:
        typer.echo(json.dumps({name: to_json(one) for name, one in found.items()}))
        return
    console = Console(highlight=False)
    console.print(tau_table(found))
    console.print(accuracy_table(found))


def _at_most(rows: list[Any], limit: int | None) -> list[Any]:
    """The first ``limit`` rows of every domain."""
    if limit is None:
        return rows
    counts: dict[str, int] = {}
    kept = []
    for row in rows:
        counts[row.domain] = counts.get(row.domain, 0) + 1
        if counts[row.domain] <= limit:
            kept.append(row)
    return kept


def to_json(one: Acceptance) -> dict[str, Any]:
    """All figures of one domain; the chain has the key ``chain`` among the budgets."""
    return {
        "num_responses": one.num_responses,
        "num_tokens": one.num_tokens,
        "accuracy": list(one.accuracy),
        "tau": {_budget_name(budget): one.tau(budget) for budget in one.num_cycles},
        "accepted": {_budget_name(budget): one.tau(budget) - 1 for budget in one.num_cycles},
    }


def _budget_name(budget: int) -> str:
    return str(budget) if budget else "chain"


def _in_order(found: Mapping[str, Acceptance]) -> list[tuple[str, Acceptance]]:
    """Domains by name, the total last."""
    names = sorted(name for name in found if name != "all")
    return [(name, found[name]) for name in ([*names, "all"] if len(names) > 1 else names)]


def tau_table(found: Mapping[str, Acceptance]) -> Table:
    """Tokens per cycle, bonus token included."""
    budgets = list(found["all"].num_cycles)
    columns = ["replies", "tokens", *(_budget_name(budget) for budget in budgets)]
    table = _table("tokens per cycle (τ)", columns)
    for name, one in _in_order(found):
        taus = (f"{one.tau(budget):.2f}" for budget in budgets)
        table.add_row(name, str(one.num_responses), f"{one.num_tokens:,}", *taus)
    return table


def accuracy_table(found: Mapping[str, Acceptance]) -> Table:
    """How often the most probable token of each drafted position is the right one."""
    positions = range(1, len(found["all"].accuracy) + 1)
    table = _table("accuracy by position", [str(position) for position in positions])
    for name, one in _in_order(found):
        shares = (f"{share:.2f}" for share in one.accuracy)
        table.add_row(name, *shares)
    return table


def _table(title: str, columns: list[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("domain")
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
