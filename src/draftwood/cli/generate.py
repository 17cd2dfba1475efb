"""``draftwood generate``: one prompt in, its text out."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwood.cli import options
from draftwood.cli.console import fail, note, write
from draftwood.cli.options import how_ahead, open_engine, sampling_params
from draftwood.cli.reply import interruptible, note_failures, run_reply, summary

if TYPE_CHECKING:
    from draftwood.records import Output

INTERRUPTED = 130


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; '-' or nothing reads standard input.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", exists=True, dir_okay=False, help="Read the prompt from it."),
    ] = None,
    target: options.Target = "demo",
    drafter: options.Drafter = "auto",
    budget: options.Budget = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    ahead: options.Ahead = None,
    ahead_branches: options.AheadBranches = None,
    ahead_grid: options.AheadGrid = None,
    ahead_timeout: options.AheadTimeout = None,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    max_new_tokens: options.MaxNewTokens = 256,
    stop: options.Stop = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Take the prompt as it is, without the chat template.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with per-cycle statistics.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            dir_okay=False,
            callback=options.writable,
            help="Write every cycle's tree to this file, as JSON lines.",
        ),
    ] = None,
) -> None:
    """Generate from one prompt: text to standard output, statistics to standard error."""
    text = read_prompt(prompt, file)
    params = sampling_params(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, stop=stop,
        repetition_penalty=repetition_penalty, max_new_tokens=max_new_tokens,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        engine = open_engine(
            target, drafter, budget, dtype=dtype, device=device, ahead=ahead,
            ahead_options=how_ahead(ahead, ahead_branches, ahead_grid, ahead_timeout),
        )  # fmt: skip
        if trace is not None:
            from draftwood.trace import tracing

            stack.enter_context(tracing(engine, trace, prompt=text))
        stopped = stack.enter_context(interruptible())
        seq_id = engine.add(text, params, raw=raw)
        output = run_reply(engine, seq_id, (lambda _text: None) if as_json else write, stopped)
    if as_json:
        typer.echo(json.dumps(to_json(output), ensure_ascii=False))
    else:
        write("\n")
        note(summary(output))
    note_failures(engine)
    if output.finish_reason == "error":
        fail(output.error or "generation failed")
    if output.finish_reason == "abort":
        raise typer.Exit(INTERRUPTED)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt's text; one final line break of a file or of standard input is not part of it."""
    if prompt is not None and file is not None:
        raise typer.BadParameter("give the prompt as an argument or with --file, not both")
    if file is not None:
        text = _decoded(file.read_bytes(), str(file)).removesuffix("\n")
    elif prompt is not None and prompt != "-":
        text = prompt
    elif sys.stdin is None or (prompt is None and sys.stdin.isatty()):
        raise typer.BadParameter(
            "no prompt; give one as an argument, with --file or through a pipe"
        )
    else:
        text = _decoded(sys.stdin.buffer.read(), "standard input").removesuffix("\n")
    if not text:
        raise typer.BadParameter("the prompt is empty")
    return text


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{source} is not UTF-8 text (byte {error.start})") from None


def to_json(output: Output) -> dict[str, Any]:
    """An output as plain data: the schema of ``--json``."""
    num_tokens = len(output.token_ids)
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "finish_reason": output.finish_reason,
        "error": output.error,
        "seed": output.seed,
        "num_cycles": output.num_cycles,
        "acceptance_length": output.acceptance_length if output.cycles else None,
        "tokens_per_s": num_tokens / output.decode_s if output.decode_s > 0 else None,
        "prefill_s": output.prefill_s,
        "decode_s": output.decode_s,
        "hit_rate": None if isnan(output.hit_rate) else output.hit_rate,
        "cycles": [
            {
                "num_drafted": cycle.num_drafted,
                "num_accepted": cycle.num_accepted,
                "num_committed": cycle.num_committed,
                "phi": cycle.phi,
                "context_len": cycle.context_len,
                "num_seqs": cycle.num_seqs,
                "draft_s": cycle.seconds.draft_s,
                "verify_s": cycle.seconds.verify_s,
                "walk_s": cycle.seconds.walk_s,
                "commit_s": cycle.seconds.commit_s,
                "other_s": cycle.seconds.other_s,
                "ahead": None if cycle.ahead is None else asdict(cycle.ahead),
            }
            for cycle in output.cycles
        ],
    }
