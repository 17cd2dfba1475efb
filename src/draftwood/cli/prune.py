"""``draftwood prune``: fewer layers of an independent drafter, chosen by acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftwood.cli import options
from draftwood.cli.console import note

if TYPE_CHECKING:
    from draftwood.train.prune_table import Stage, Table

STOP = "Where to stop"
CHOICE = "Choice of layers"
RECOVERY = "Recovery"


def prune(
    drafter: Annotated[str, typer.Option("--drafter", "-d", help="Folder of a trained drafter.")],
    data: Annotated[
        list[Path],
        typer.Option(exists=True, help="Folder from 'draftwood data'. May be given repeatedly."),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", file_okay=False, help="Gets the table, the plot and every depth."
        ),
    ],
    target: options.Target = "demo",
    depth: Annotated[
        int, typer.Option(min=1, rich_help_panel=STOP, help="At this many layers.")
    ] = 1,
    keep: Annotated[
        float,
        typer.Option(
            min=0, max=1, rich_help_panel=STOP, help="Below this share of the unpruned τ."
        ),
    ] = 0.0,
    speedup: Annotated[
        float | None,
        typer.Option(rich_help_panel=STOP, help="Once the estimated speedup reaches this."),
    ] = None,
    order: Annotated[
        str,
        typer.Option(
            rich_help_panel=CHOICE,
            help="'acceptance', or for comparison 'cosine', 'last' or 'random'.",
        ),
    ] = "acceptance",
    per_round: Annotated[
        int, typer.Option(min=1, rich_help_panel=CHOICE, help="Layers removed per recovery.")
    ] = 1,
    budget: Annotated[
        int, typer.Option(min=0, rich_help_panel=CHOICE, help="Nodes of the tree; 0: the chain.")
    ] = 0,
    num_ranking: Annotated[
        int, typer.Option(min=1, rich_help_panel=CHOICE, help="Most replies to choose by.")
    ] = 48,
    ranking_block: Annotated[
        int,
        typer.Option(
            min=0,
            rich_help_panel=CHOICE,
            help="Rows of the blocks to choose by, fewer are faster; 0: those of the drafter.",
        ),
    ] = 0,
    num_validation: Annotated[
        int, typer.Option(min=1, rich_help_panel=CHOICE, help="Most replies to measure τ on.")
    ] = 96,
    steps: Annotated[
        int | None,
        typer.Option(min=0, rich_help_panel=RECOVERY, help="Per round; 0: none."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(rich_help_panel=RECOVERY, help="Per round.")
    ] = None,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", "--lr", rich_help_panel=RECOVERY)
    ] = 3e-4,
    warmup_steps: Annotated[int, typer.Option(min=0, rich_help_panel=RECOVERY)] = 10,
    margin: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            rich_help_panel=RECOVERY,
            help="By how much the true token must lead in the teacher's corrected distribution.",
        ),
    ] = 0.1,
    gamma: Annotated[float, typer.Option(rich_help_panel=RECOVERY)] = 4.0,
    ar_weight: Annotated[
        float, typer.Option(min=0, rich_help_panel=RECOVERY, help="λ of the language-model loss.")
    ] = 1.0,
    blocks: Annotated[int, typer.Option(min=1, rich_help_panel=RECOVERY)] = 256,
    anchors: Annotated[int, typer.Option(min=1, rich_help_panel=RECOVERY)] = 128,
    head_negatives: Annotated[int, typer.Option(min=0, rich_help_panel=RECOVERY)] = 1024,
    train_head: Annotated[bool, typer.Option(rich_help_panel=RECOVERY)] = True,
    held_out: Annotated[
        float, typer.Option(min=0, max=90, help="Percent for validation, as in 'train'.")
    ] = 3.0,
    max_len: Annotated[int, typer.Option(min=2, help="Longer replies are left out.")] = 2048,
    seed: Annotated[int, typer.Option()] = 0,
    precision: Annotated[
        str,
        typer.Option(
            help="Of the products: 'auto', 'float32' or 'bfloat16'; 'auto' is that of the run in "
            "the folder, else bfloat16 where that is clearly faster.",
        ),
    ] = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Remove layers and recover, round by round; the same command continues a run.

    Prints the folder of the depth that is fastest by estimate among those that --keep allows.
    """
    from draftwood.cli.accelerator import open_accelerator
    from draftwood.cli.options import quiet_libraries
    from draftwood.cli.threads import choose_threads
    from draftwood.target.load import load_target
    from draftwood.train.allocator import keep_freed_memory
    from draftwood.train.loss import LossConfig
    from draftwood.train.prune import PruneConfig, prune_drafter
    from draftwood.train.prune_report import write_csv, write_plot
    from draftwood.train.prune_settings import begun_precision
    from draftwood.train.prune_table import best_stage
    from draftwood.train.shards import load_rows
    from draftwood.train.train_config import TrainConfig

    if steps is None and minutes is None:
        raise typer.BadParameter(
            "recovery needs an end: give --steps or --minutes, --steps 0: none"
        )
    if steps == 0 and minutes is not None:
        raise typer.BadParameter("--steps 0 is no recovery; leave --minutes out")
    recovery = None
    if steps != 0:
        recovery = TrainConfig(
            learning_rate=learning_rate, warmup_steps=warmup_steps, max_steps=steps,
            max_minutes=minutes, blocks=blocks, blocks_per_response=min(anchors, blocks),
            head_negatives=head_negatives, train_head=train_head, seed=seed,
            eval_minutes=1e9, loss=LossConfig(gamma=gamma, autoregressive=ar_weight),
        )  # fmt: skip
    config = PruneConfig(
        recovery, order=order, per_round=per_round, min_depth=depth, keep_tau=keep,
        speedup=speedup, budget=budget, margin=margin, num_ranking=num_ranking,
        ranking_block=ranking_block, num_validation=num_validation,
        held_out_percent=held_out, max_len=max_len, seed=seed,
    )  # fmt: skip
    quiet_libraries()
    keep_freed_memory()
    choose_threads()
    rows = [row for path in data for row in load_rows(path)]
    begun = begun_precision(out) if precision == "auto" else None
    accelerator = open_accelerator(device, begun or precision)
    if accelerator is not None and accelerator.num_processes > 1:
        raise typer.BadParameter("prune is for one process; run it without accelerate launch")
    model = load_target(
        target, dtype=dtype, device=device if accelerator is None else str(accelerator.device)
    )
    table = prune_drafter(
        drafter, model, rows, out, config, on_stage=_show, accelerator=accelerator
    )
    write_csv(table, out)
    try:
        write_plot({order: table}, out / "prune.png")
    except ImportError:
        note("no plot: matplotlib is not installed (pip install 'draftwood[bench]')")
    _print(table)
    best = best_stage(table, keep)
    if not best.removed:
        note("by estimate no pruned depth is faster than the drafter as it was")
    typer.echo(best.folder)


def _show(stage: Stage) -> None:
    removed = f" without {', '.join(map(str, stage.removed))}" if stage.removed else ""
    note(
        f"{stage.depth} layer{'s' * (stage.depth > 1)}{removed} · τ {stage.tau:.3f} · "
        f"draft {1e3 * stage.draft_s:.1f} ms, {stage.draft_passes:.2f} target passes"
    )


def _print(table: Table) -> None:
    from rich.console import Console
    from rich.table import Table as Grid

    grid = Grid(box=None, padding=(0, 2, 0, 0))
    headings = (
        "layers", "removed", "τ before recovery", "τ", "draft ms", "in target passes",
        "speedup (est.)",
    )  # fmt: skip
    for heading in headings:
        grid.add_column(heading, justify="right")
    for one in table.stages:
        grid.add_row(
            str(one.depth),
            ", ".join(map(str, one.removed)),
            "" if one.tau_without is None else f"{one.tau_without:.3f}",
            f"{one.tau:.3f}",
            f"{1e3 * one.draft_s:.1f}",
            f"{one.draft_passes:.2f}",
            f"{one.speedup:.2f}",
        )
    Console(highlight=False).print(grid)
