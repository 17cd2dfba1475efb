"""The command line application: its subcommands, and errors as one clean line."""

from __future__ import annotations

import errno
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from draftwood.cli import (
    bench,
    calibrate,
    chat,
    data,
    demo,
    eval_drafter,
    generate,
    info,
    prune,
    record,
    report,
    simulate,
    train,
    view,
)
from draftwood.cli.console import fail
from draftwood.errors import DraftwoodError


class CleanErrors(TyperGroup):
    """Failures that have an explanation end in one line and exit code 1, without a traceback.

    Anything else is a fault of draftwood and keeps its traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UnicodeDecodeError as error:  # knows no file name
            fail(f"an input is not UTF-8 text ({error}); save it as UTF-8")
        except (ValueError, DraftwoodError, ImportError, MemoryError) as error:
            fail(str(error) or type(error).__name__)
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of our output left: typer ends quietly
                raise
            fail(str(error))
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            fail(str(error))


def version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        from draftwood import __version__

        typer.echo(f"draftwood {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="draftwood",
    cls=CleanErrors,
    help="Exact, faster language model decoding with block-diffusion draft trees.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Exact, faster language model decoding with block-diffusion draft trees."""


app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("demo")(demo.demo)
app.command("info")(info.info)
app.command("view")(view.view)
app.command("data")(data.data)
app.command("train")(train.train)
app.command("bench")(bench.bench)
app.command("report")(report.report)
app.command("prune")(prune.prune)
app.command("eval-drafter")(eval_drafter.eval_drafter)
app.command("calibrate")(calibrate.calibrate)
app.command("record")(record.record)
app.command("simulate")(simulate.simulate)
