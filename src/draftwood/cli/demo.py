"""``draftwood demo``: the same three answers, plainly and from draft trees, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from draftwood.cli import options
from draftwood.cli.options import open_engine
from draftwood.cli.reply import interruptible, run_reply, summary

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from draftwood.draft.base import Drafter
    from draftwood.engine import Engine
    from draftwood.records import Output

WARM_UP_TOKENS = 24


@dataclass(frozen=True)
class Task:
    """A named demo prompt."""

    name: str
    prompt: str


TASKS = (
    Task(
        "mathematics",
        "A bakery sells 24 muffins a day for $3 each and pays $20 a day for ingredients. "
        "How much money does it make in a week of 7 days? Explain step by step.",
    ),
    Task(
        "code",
        "Write a Python function `moving_average(values, window)` that returns the list of "
        "averages of each window, with a docstring and an example call.",
    ),
    Task(
        "editing",
        "Correct the spelling of this passage and change nothing else:\n\n"
        "The lighthouse keeper climed the stairs every evening at dusk. At the top of the tower "
        "he lit the lamp, cleaned the glass and wrote the wether in his book. When the fog came "
        "in from the sea he rang the bell every two minutes until the morning. The lighthouse "
        "keeper did this for forty years and never mised a single evening.",
    ),
)


@dataclass(frozen=True)
class Comparison:
    """One task decoded twice."""

    name: str
    plain: Output
    accelerated: Output

    @property
    def identical(self) -> bool:
        return self.plain.token_ids == self.accelerated.token_ids


def demo(
    target: options.Target = "demo",
    drafter: options.Drafter = "auto",
    budget: options.Budget = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Longest output per prompt.")
    ] = 128,
) -> None:
    """Decode three prompts autoregressively, then accelerated, and compare.

    Exit code 1 if an output differs.
    """
    from rich.console import Console

    from draftwood.cli.threads import choose_threads
    from draftwood.engine import Engine

    choose_threads()  # before loading, where the target's kernels are chosen for them
    console = Console(highlight=False)
    engine = open_engine(target, drafter, budget, dtype=dtype, device=device)
    plain = Engine(engine.target)
    console.print(describe(engine, target), markup=False)
    for each in (plain, engine):
        _decode(each, "Count from one to twenty in words.", WARM_UP_TOKENS, None)
    done = [_compare(console, plain, engine, task, max_new_tokens) for task in TASKS]
    console.print()
    console.print(table(done))
    console.print("tok/s and speedup count decoding, without the prompt.", style="dim")
    if not all(one.identical for one in done):
        console.print("The outputs differ.", style="bold red")
        raise typer.Exit(1)


def describe(engine: Engine, target: str) -> str:
    """What is about to run, and on how many threads."""
    import torch

    where = engine.target.device.type
    if where == "cpu":
        where = f"cpu, {torch.get_num_threads()} threads"
    precision = str(engine.target.dtype).removeprefix("torch.")
    return (
        f"target: {target}, {precision}, {where}, torch {torch.__version__}\n"
        f"drafter: {_drafter_name(engine.drafter)}"
    )


def _drafter_name(drafter: Drafter) -> str:
    from draftwood.draft.blend import BlendDrafter
    from draftwood.draft.block_diffusion import BlockDiffusionDrafter
    from draftwood.draft.lookup import LookupDrafter

    if isinstance(drafter, BlendDrafter):
        return f"{_drafter_name(drafter.model)}, merged with prompt lookup"
    if isinstance(drafter, LookupDrafter):
        return "prompt lookup (no trained drafter for this target)"
    if isinstance(drafter, BlockDiffusionDrafter):
        return f"trained, block diffusion, {drafter.horizon} tokens at once"
    return type(drafter).__name__


def _compare(
    console: Console, plain: Engine, engine: Engine, task: Task, max_new_tokens: int
) -> Comparison:
    console.rule(task.name)
    console.print(task.prompt, style="dim", markup=False)
    outputs = []
    for title, each in (("autoregressive", plain), ("accelerated", engine)):
        console.print(f"\n[bold]{title}[/]")
        output = _decode(each, task.prompt, max_new_tokens, console)
        console.print()
        console.print(summary(output), style="dim", markup=False)
        outputs.append(output)
    return Comparison(task.name, outputs[0], outputs[1])


def _decode(engine: Engine, prompt: str, max_new_tokens: int, console: Console | None) -> Output:
    from draftwood.sampling import SamplingParams

    def show(text: str) -> None:
        if console is not None:
            console.print(text, end="", markup=False, soft_wrap=True)
            console.file.flush()

    with interruptible() as stopped:
        seq_id = engine.add(prompt, SamplingParams(max_new_tokens=max_new_tokens))
        output = run_reply(engine, seq_id, show, stopped)
    if output.finish_reason == "abort":
        raise typer.Abort
    if output.error is not None:
        raise ValueError(output.error)
    return output


def table(done: list[Comparison]) -> Table:
    """The comparison, one row per task and one for all."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD)
    result.add_column("", no_wrap=True)
    for heading in ("tokens", "plain tok/s", "tok/s", "cycles", "τ", "speedup", "identical"):
        result.add_column(heading, justify="right", no_wrap=" " not in heading)
    for one in done:
        result.add_row(one.name, *_cells([one]))
    result.add_section()
    result.add_row("all", *_cells(done))
    return result


def _cells(done: list[Comparison]) -> list[str]:
    plain, fast = [one.plain for one in done], [one.accelerated for one in done]
    plain_rate, fast_rate = _tokens_per_s(plain), _tokens_per_s(fast)
    num_tokens = sum(len(output.token_ids) for output in fast)
    num_cycles = sum(output.num_cycles for output in fast)
    identical = all(one.identical for one in done)
    return [
        str(num_tokens),
        f"{plain_rate:.1f}",
        f"{fast_rate:.1f}",
        str(num_cycles),
        f"{num_tokens / num_cycles:.2f}",
        f"{fast_rate / plain_rate:.2f}×",
        "[green]yes[/]" if identical else "[bold red]no[/]",
    ]


def _tokens_per_s(outputs: list[Output]) -> float:
    seconds = sum(output.decode_s for output in outputs)
    return sum(len(output.token_ids) for output in outputs) / seconds
