"""``draftwood data``: the target's own replies to prompts, as training data for a drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftwood.cli import options
from draftwood.cli.console import note, stderr
from draftwood.cli.options import open_engine, sampling_params

if TYPE_CHECKING:
    from draftwood.engine import Engine
    from draftwood.train.progress import DataProgress
    from draftwood.train.prompts import Conversation

PROMPTS = "Prompts"


def data(
    out: Annotated[
        Path, typer.Option("--out", "-o", file_okay=False, help="Folder of the replies.")
    ],
    target: options.Target = "demo",
    jsonl: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            rich_help_panel=PROMPTS,
            help="File with 'turns' or 'messages' on every line. May be given repeatedly.",
        ),
    ] = None,
    hub: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=PROMPTS,
            help="Data set on the hub: NAME, NAME@SUBSET, with :SPLIT for another split than "
            "'train'. May be given repeatedly.",
        ),
    ] = None,
    synthesise: Annotated[
        int, typer.Option(min=0, rich_help_panel=PROMPTS, help="Prompts to sample from the target.")
    ] = 0,
    limit: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=PROMPTS, help="Most prompts per source.")
    ] = None,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            rich_help_panel=PROMPTS,
            help="Evaluation prompts (JSONL); prompts that share text with them are left out. "
            "May be given repeatedly.",
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, rich_help_panel=options.SAMPLING, help="Replies per prompt.")
    ] = 1,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: Annotated[
        int, typer.Option(rich_help_panel=options.SAMPLING, help="Of replies and prompts.")
    ] = 0,
    max_new_tokens: options.MaxNewTokens = 512,
    drafter: options.Drafter = "auto",
    budget: options.Budget = "auto",
    max_batch: Annotated[
        int, typer.Option(min=1, rich_help_panel=options.MODEL, help="Replies made together.")
    ] = 16,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
) -> None:
    """Let a target answer prompts; run again to continue or to add prompts and samples."""
    from draftwood.cli.threads import choose_threads
    from draftwood.train.data import DataConfig, generate_responses
    from draftwood.train.progress import bar

    if not (jsonl or hub or synthesise):
        raise typer.BadParameter("there are no prompts; give --jsonl, --hub or --synthesise")
    params = sampling_params(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, stop=None,
        repetition_penalty=repetition_penalty, max_new_tokens=max_new_tokens,
    )  # fmt: skip
    config = DataConfig((params,), samples_per_prompt=samples, seed=seed)
    given = [_read(path, limit) for path in jsonl or []] + [
        _fetch(name, limit) for name in hub or []
    ]
    choose_threads()
    engine = open_engine(target, drafter, budget, dtype=dtype, device=device)
    engine.max_batch = max_batch
    if synthesise:
        given.append(_synthesised(engine, out, target, synthesise, seed))
    prompts = _without_overlap(given, exclude or [])
    with bar() as show:
        done = generate_responses(engine, prompts, out, config, target=target, on_progress=show)
    note(summary(done))


def _read(path: Path, limit: int | None) -> list[Conversation]:
    from draftwood.train.prompts import read_prompts

    return read_prompts(path, domain=path.stem)[:limit]


def _fetch(spec: str, limit: int | None) -> list[Conversation]:
    from draftwood.train.prompts import hub_prompts

    name, subset, split = parse_hub(spec)
    try:
        return list(
            hub_prompts(name, subset=subset, split=split or "train", domain=name, limit=limit)
        )
    except (OSError, ValueError) as error:  # of the data set, or of the connection
        raise ValueError(f"cannot read the data set {spec!r}: {error}") from error


def parse_hub(spec: str) -> tuple[str, str | None, str | None]:
    """(name, subset, split) of ``NAME[@SUBSET][:SPLIT]``."""
    rest, colon, split = spec.partition(":")
    name, at, subset = rest.partition("@")
    if not name or (at and not subset) or (colon and not split):
        raise typer.BadParameter(
            f"expected NAME[@SUBSET][:SPLIT], got {spec!r}", param_hint="--hub"
        )
    return name, subset or None, split or None


def _synthesised(
    engine: Engine, out: Path, target: str, count: int, seed: int
) -> list[Conversation]:
    """Prompts of the target's own, kept in the folder so that a continued run starts at once."""
    from rich.progress import Progress

    from draftwood.train.prompts import read_prompts
    from draftwood.train.synthesis import SynthesisConfig, synthesise

    file = out / "prompts" / f"synthesised-{count}-{seed}.jsonl"
    if file.is_file():
        return read_prompts(file)
    with Progress(console=stderr()) as progress:
        task = progress.add_task("prompts", total=count)
        found = synthesise(
            engine,
            engine.target.tokenizer,
            SynthesisConfig(count, seed=seed, domain="synthesised"),
            on_prompt=lambda _: progress.advance(task),
        )
    if len(found) < count:
        note(f"{target} repeats itself: {len(found)} different prompts instead of {count}")
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    rows = ({"turns": c.turns, "domain": c.domain, "source": c.source} for c in found)
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    partial.replace(file)
    return found


def _without_overlap(given: list[list[Conversation]], exclude: list[Path]) -> list[Conversation]:
    from draftwood.train.overlap import OverlapCheck
    from draftwood.train.prompts import interleave

    prompts = interleave(given)
    if not exclude:
        return prompts
    kept, dropped = OverlapCheck.from_files(exclude).split(prompts)
    note(f"{len(dropped)} of {len(prompts)} prompts share text with evaluation, left out")
    for one in dropped[:3]:
        note(f"  “{one.shared}”")
    return kept


def summary(done: DataProgress) -> str:
    """One line: what this run added, and how fast."""
    parts = [f"{done.num_rows} replies, {done.num_response_tokens:,} tokens"]
    if done.num_rows:
        parts.append(f"{done.tokens_per_s:,.0f} tok/s")
    if done.num_resumed:
        parts.append(f"{done.num_resumed} were there already")
    if done.num_failed:
        parts.append(f"{done.num_failed} failed, the last: {done.last_error}")
    return " · ".join(parts)
