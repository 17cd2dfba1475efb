"""``draftwood report``: results of a benchmark as a page, pictures and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftwood.cli.console import note


def report(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Results of 'draftwood bench'.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", file_okay=False, help="FOLDER/report by default."),
    ] = None,
    open_page: Annotated[
        bool, typer.Option("--open", help="Show the page in the web browser.")
    ] = False,
) -> None:
    """Write one self-contained page, and every chart and table as PNG, SVG and CSV."""
    from draftwood.bench.report.build import write_report
    from draftwood.bench.store import FILE, check_writable, cut_line_note, parse_lines

    check_writable(output or folder / "report")
    path = folder / FILE
    if path.is_file():
        _, cut_line = parse_lines(path.read_bytes(), path)
        if cut_line is not None:
            note(cut_line_note(cut_line, path))
    page = write_report(folder, output)
    typer.echo(str(page))
    if open_page:
        import webbrowser

        if not webbrowser.open(page.resolve().as_uri()):
            note("no web browser found; open the page yourself")
