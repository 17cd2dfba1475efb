"""Where the command line writes: generated text to standard output, all else to standard error."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console


def stderr() -> Console:
    """A console on standard error as it is now (it may have been redirected)."""
    from rich.console import Console

    return Console(file=sys.stderr, highlight=False, soft_wrap=True, emoji=False)


def fail(message: str, exit_code: int = 1) -> NoReturn:
    """End the command with one line on standard error."""
    stderr().print("[bold red]error:[/] ", end="")
    stderr().print(" ".join(message.split()), markup=False)
    raise typer.Exit(exit_code)


def note(message: str) -> None:
    """A remark on standard error that a script can ignore."""
    stderr().print(message, style="dim", markup=False)


def write(text: str) -> None:
    """Generated text, shown at once."""
    if sys.stdout is None:
        fail("standard output is closed; leave it open, or send it to /dev/null")
    typer.echo(text, nl=False)
    sys.stdout.flush()
