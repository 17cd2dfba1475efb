"""``draftwood record``: drafts at every position of texts, for ``draftwood simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftwood.cli import options
from draftwood.cli.console import note


def record(
    prompts: Annotated[
        Path,
        typer.Argument(exists=True, dir_okay=False, help='JSONL file, {"turns": ["…"]} a line.'),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", dir_okay=False, callback=options.writable, help="File to write."
        ),
    ],
    target: options.Target = "demo",
    drafter: options.Drafter = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    temperature: options.Temperature = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the first text; the next has the next.")] = 0,
    max_new_tokens: options.MaxNewTokens = 128,
    limit: Annotated[int, typer.Option(min=1, help="Most prompts, in order.")] = 8,
) -> None:
    """Decode prompts plainly and record what the drafter proposes at every position.

    The first turn of each prompt is used.
    """
    from draftwood.cli.options import quiet_libraries, sampling_params
    from draftwood.cli.threads import choose_threads
    from draftwood.draft.load import load_drafter
    from draftwood.replay.record import record as make
    from draftwood.replay.recording import save_recording
    from draftwood.target.load import load_target
    from draftwood.train.prompts import read_prompts

    params = sampling_params(
        stop=None, temperature=temperature, max_new_tokens=max_new_tokens,
        seed=seed if temperature > 0 else None,
    )  # fmt: skip
    texts = [one.turns[0] for one in read_prompts(prompts)][:limit]
    quiet_libraries()
    choose_threads()
    model = load_target(target, dtype=dtype, device=device)
    recording = make(
        model, load_drafter(drafter, model), texts, params, name=prompts.stem,
        drafter_name=drafter,
    )  # fmt: skip
    save_recording(output, recording)
    note(f"{len(recording.texts)} texts, {recording.num_tokens} positions → {output}")
