"""``draftwood train``: a drafter of either kind for a target, from the target's own replies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwood.cli import options
from draftwood.cli.accelerator import open_accelerator
from draftwood.cli.console import note
from draftwood.cli.train_output import data_line, show_plan, show_record

if TYPE_CHECKING:
    from draftwood.target.model import Target
    from draftwood.train.run import Start
    from draftwood.train.target_side import ResponseRow

DRAFTER = "Drafter"
RUN = "Run"
LOSS = "Objective"

# Options that a drafter which is trained already has decided.
_SHAPE = (
    "kind", "body", "layers", "taps", "block_size", "mask_token", "warm", "borrow",
)  # fmt: skip
# Options that say nothing about a drafter of the other kind.
_OF_DFLASH = ("taps", "distill", "draft_vocab", "cache", "add_layers")
_OF_INDEPENDENT = ("body", "borrow", "ar_weight")


def train(
    context: typer.Context,
    data: Annotated[
        list[Path],
        typer.Option(exists=True, help="Folder from 'draftwood data'. May be given repeatedly."),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", file_okay=False, help="Folder of the run; its 'draft' is it."),
    ],
    target: options.Target = "demo",
    init: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            rich_help_panel=DRAFTER,
            help="Go on with a trained drafter of either kind, or 'shipped'; its shape stays, but "
            "for --add-layers, --draft-vocab and --markov-rank.",
        ),
    ] = None,
    add_layers: Annotated[
        int,
        typer.Option(
            min=0,
            rich_help_panel=DRAFTER,
            help="Layers that the drafter of --init gets; at first they change nothing.",
        ),
    ] = 0,
    kind: Annotated[
        str,
        typer.Option(
            rich_help_panel=DRAFTER,
            help="'dflash' reads the target's hidden states; 'independent' is a language model of "
            "its own that needs only tokens.",
        ),
    ] = "dflash",
    body: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=DRAFTER,
            help="Language model that an independent drafter is made of; the target if left.",
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=DRAFTER,
            help="Target layers that the drafter's start from, as many as it gets; 0,-1 by "
            "default. Layers of the body that an independent drafter keeps; all by default.",
        ),
    ] = None,
    taps: Annotated[
        str | None,
        typer.Option(rich_help_panel=DRAFTER, help="Target layers to read; three by default."),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            min=2,
            rich_help_panel=DRAFTER,
            help="Block rows, anchor included; 8 by default, 16 for an independent drafter.",
        ),
    ] = None,
    draft_vocab: Annotated[
        int,
        typer.Option(
            min=0, rich_help_panel=DRAFTER, help="Most frequent tokens to draft; 0 drafts all."
        ),
    ] = 8192,
    markov_rank: Annotated[
        int,
        typer.Option(
            min=0,
            rich_help_panel=DRAFTER,
            help="Width of a head that conditions each position on the token before; 0 for none.",
        ),
    ] = 0,
    mask_token: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=DRAFTER, help="Token or id that the target never writes; found if left."
        ),
    ] = None,
    warm: Annotated[
        bool,
        typer.Option(rich_help_panel=DRAFTER, help="Start from the target's (the body's) weights."),
    ] = True,
    borrow: Annotated[
        bool,
        typer.Option(
            rich_help_panel=DRAFTER,
            help="An independent drafter leaves embeddings and head to the target.",
        ),
    ] = False,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", "--lr", rich_help_panel=LOSS, help="Its peak.")
    ] = 1e-3,
    warmup_steps: Annotated[int, typer.Option(min=0, rich_help_panel=LOSS)] = 30,
    gamma: Annotated[
        float,
        typer.Option(rich_help_panel=LOSS, help="Position j has weight exp(−(j − 1) / gamma)."),
    ] = 4.0,
    distill: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=LOSS,
            help="Share of the target's own distribution in labels; 0.5 for dflash.",
        ),
    ] = None,
    ar_weight: Annotated[
        float,
        typer.Option(
            min=0,
            rich_help_panel=LOSS,
            help="Weight λ of an independent drafter's language-model loss.",
        ),
    ] = 1.0,
    anchors: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=LOSS,
            help="Most blocks of one reply at a time; 64 by default, 128 for an independent "
            "drafter.",
        ),
    ] = None,
    blocks: Annotated[
        int, typer.Option(min=1, rich_help_panel=LOSS, help="Blocks of a micro-batch.")
    ] = 256,
    accumulate: Annotated[
        int, typer.Option(min=1, rich_help_panel=LOSS, help="Micro-batches of a step.")
    ] = 1,
    head_negatives: Annotated[
        int, typer.Option(min=0, rich_help_panel=LOSS, help="Sampled head columns; 0 uses all.")
    ] = 1024,
    train_head: Annotated[
        bool | None,
        typer.Option(
            rich_help_panel=LOSS,
            help="Train the drafter's own head and embeddings; only independent ones by default.",
        ),
    ] = None,
    ema: Annotated[
        float, typer.Option(min=0, max=1, rich_help_panel=LOSS, help="Decay of averaged weights.")
    ] = 0.0,
    max_minutes: Annotated[
        float | None, typer.Option(rich_help_panel=RUN, help="Training time over all parts.")
    ] = None,
    max_steps: Annotated[int | None, typer.Option(rich_help_panel=RUN)] = None,
    eval_minutes: Annotated[float, typer.Option(rich_help_panel=RUN)] = 10.0,
    save_minutes: Annotated[float, typer.Option(rich_help_panel=RUN)] = 5.0,
    log_steps: Annotated[int, typer.Option(min=1, rich_help_panel=RUN)] = 10,
    held_out: Annotated[
        float, typer.Option(min=0, max=90, rich_help_panel=RUN, help="Percent for validation.")
    ] = 3.0,
    max_len: Annotated[
        int, typer.Option(min=2, rich_help_panel=RUN, help="Longer rows are left out.")
    ] = 2048,
    cache: Annotated[
        bool, typer.Option(rich_help_panel=RUN, help="Keep the target's features on disk.")
    ] = True,
    seed: Annotated[int, typer.Option(rich_help_panel=RUN)] = 0,
    precision: Annotated[
        str,
        typer.Option(
            rich_help_panel=RUN,
            help="Of the products of a step: 'auto', 'float32' or 'bfloat16'; 'auto' is bfloat16 "
            "where that is clearly faster.",
        ),
    ] = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Try a few steps, show sizes and speed, and leave.")
    ] = False,
) -> None:
    """Train a drafter; the same command continues a run that was interrupted."""
    from dataclasses import replace

    from draftwood.cli.options import quiet_libraries
    from draftwood.cli.threads import choose_threads
    from draftwood.draft.independent_checkpoint import fingerprint
    from draftwood.train.allocator import keep_freed_memory
    from draftwood.train.independent import IndependentRecipe
    from draftwood.train.loss import LossConfig
    from draftwood.train.measure import dry_run as try_steps
    from draftwood.train.recipe import Recipe
    from draftwood.train.run import DataUse, train_drafter
    from draftwood.train.shards import load_rows
    from draftwood.train.start import trained_start
    from draftwood.train.train_config import TrainConfig

    if max_minutes is None and max_steps is None and not dry_run:
        raise typer.BadParameter("a run needs an end: give --max-minutes or --max-steps")
    if kind not in ("dflash", "independent"):
        raise typer.BadParameter(
            f"expected 'dflash' or 'independent', got {kind!r}", param_hint="--kind"
        )
    if init is not None:
        _refuse_given(context, _SHAPE, "the drafter of --init has decided it")
        kind = _kind(init)
    elif add_layers:
        raise typer.BadParameter("--add-layers is for --init; a new drafter has --layers")
    alone = kind == "independent"
    _refuse_given(context, _OF_DFLASH if alone else _OF_INDEPENDENT, f"not for {kind} drafters")
    if init is not None and _is_given(context, "draft_vocab") and draft_vocab < 1:
        raise typer.BadParameter(
            f"with --init at least 1 token, got {draft_vocab}; leave it out to keep the vocabulary",
            param_hint="--draft-vocab",
        )
    if init is not None and _is_given(context, "markov_rank") and markov_rank < 1:
        raise typer.BadParameter(
            "with --init at least 1; leave it out to keep what the drafter has",
            param_hint="--markov-rank",
        )
    if borrow and body not in (None, target):
        raise typer.BadParameter("--borrow needs the target itself as the body; leave out --body")
    own_taps = taps and integers(taps, "--taps")
    own_layers = integers(layers, "--layers") if layers is not None else None
    config = TrainConfig(
        learning_rate=learning_rate, warmup_steps=warmup_steps, max_steps=max_steps,
        max_minutes=max_minutes, blocks=blocks,
        blocks_per_response=min(anchors or (128 if alone else 64), blocks),
        accumulate=accumulate, head_negatives=head_negatives,
        train_head=alone if train_head is None else train_head, ema_decay=ema,
        eval_minutes=eval_minutes, save_minutes=save_minutes, log_steps=log_steps, seed=seed,
        loss=LossConfig(
            gamma=gamma, distill=0.0 if alone else 0.5 if distill is None else distill,
            autoregressive=ar_weight if alone else 0.0,
        ),
    )  # fmt: skip
    if not dry_run:
        config.schedule()
    use = DataUse(held_out_percent=held_out, max_len=max_len, cache_features=cache)
    quiet_libraries()
    keep_freed_memory()
    choose_threads()
    rows = [row for path in data for row in load_rows(path)]
    accelerator = open_accelerator(device, precision)
    if dry_run and accelerator is not None and accelerator.num_processes > 1:
        raise typer.BadParameter("--dry-run is for one process; run it without accelerate launch")
    device = device if accelerator is None else str(accelerator.device)
    model = _load(body or target, dtype, device)
    recipe: Start
    if init is not None:
        recipe = trained_start(
            init, model, add_layers=add_layers,
            draft_vocab_size=draft_vocab if _is_given(context, "draft_vocab") else None,
            markov_rank=markov_rank,
        )  # fmt: skip
    elif alone:
        mask = _mask_token(model, mask_token, rows)
        recipe = IndependentRecipe(
            mask_token_id=mask, layers=own_layers, block_size=block_size or 16, borrows=borrow,
            pretrained=warm, tokenizer=fingerprint(model.tokenizer), seed=seed,
            markov_rank=markov_rank,
        )  # fmt: skip
    else:
        mask = _mask_token(model, mask_token, rows)
        recipe = Recipe(
            mask_token_id=mask, layers=own_layers or (0, -1), taps=own_taps or None,
            block_size=block_size or 8, warm=warm, seed=seed, markov_rank=markov_rank,
            draft_vocab_size=draft_vocab if 0 < draft_vocab < model.vocab_size else None,
        )  # fmt: skip
    if not recipe.can_sample_head:  # it is the target's, all of it
        config = replace(config, head_negatives=0)
    if accelerator is None or accelerator.is_main_process:
        note(data_line(rows, model, recipe))
    where: dict[str, Any] = {"use": use, "device": model.device, "accelerator": accelerator}
    if dry_run:
        show_plan(*try_steps(model.model, rows, recipe, config, **where))
        return
    found = train_drafter(model.model, rows, out, recipe, config, **where, on_record=show_record)
    if accelerator is None or accelerator.is_main_process:
        from rich.console import Console

        from draftwood.cli.eval_drafter import tau_table

        if found:
            Console(highlight=False).print(tau_table(found))
        else:
            note("no reply is held out, so there is no τ to show; give more replies or --held-out")
        typer.echo(str(out / "draft"))


def integers(text: str, option: str) -> tuple[int, ...]:
    """Comma-separated numbers; anything else is a usage error."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"expected numbers like 0,-1, got {text!r}", param_hint=option
        ) from None


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether an option was on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _refuse_given(context: typer.Context, names: tuple[str, ...], why: str) -> None:
    """A usage error if one of these was on the command line."""
    for parameter in context.command.params:
        if parameter.name in names and _is_given(context, parameter.name):
            raise typer.BadParameter(f"{why}; leave this out", param_hint=parameter.opts[0])


def _kind(drafter: str) -> str:
    """Of a trained drafter; what is neither is refused when it is loaded."""
    from draftwood.draft.independent_config import is_independent
    from draftwood.draft.load import read_config

    alone = drafter != "shipped" and is_independent(
        read_config(drafter, None, or_one_of=("shipped",))
    )
    return "independent" if alone else "dflash"


def _load(name: str, dtype: str, device: str) -> Target:
    from draftwood.target.load import load_target

    return load_target(name, dtype=dtype, device=device)


def _mask_token(target: Target, given: str | None, rows: list[ResponseRow]) -> int:
    """The id of a token given by id or text, or one that is never used."""
    from draftwood.train.run import unused_token

    tokenizer = target.tokenizer
    if given is None:
        if tokenizer is None:
            raise ValueError("the target has no tokenizer; name the mask token with --mask-token")
        return unused_token(tokenizer, target.vocab_size, rows)
    if given.isdecimal() and int(given) < target.vocab_size:
        return int(given)
    ids = tokenizer.get_vocab() if tokenizer is not None else {}
    if given not in ids:
        raise typer.BadParameter(f"{given!r} is no token of the target", param_hint="--mask-token")
    return int(ids[given])
