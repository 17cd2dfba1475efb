"""``draftwood view``: a trace as a page to look through."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftwood.cli.console import note


def view(
    trace: Annotated[
        Path,
        typer.Argument(
            exists=True, dir_okay=False, help="A trace, from 'draftwood generate --trace'."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", dir_okay=False, help="Page to write; TRACE with .html by default."
        ),
    ] = None,
    open_page: Annotated[
        bool, typer.Option("--open", help="Show the page in the web browser.")
    ] = False,
) -> None:
    """Turn a trace into one self-contained HTML page and print its path."""
    from draftwood.viewer.view import render

    page = output if output is not None else trace.with_suffix(".html")
    if page.resolve() == trace.resolve():
        raise typer.BadParameter(f"the page would replace the trace {trace}; name another with -o")
    page.write_text(render(trace), encoding="utf-8")
    typer.echo(str(page))
    if open_page:
        import webbrowser

        if not webbrowser.open(page.resolve().as_uri()):
            note("no web browser found; open the page yourself")
