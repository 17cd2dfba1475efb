"""The ``draftwood`` command. One file per subcommand; torch is imported only when one runs."""

from __future__ import annotations

from draftwood.cli.app import app


def main() -> None:
    """Entry point of the console script."""
    app()


__all__ = ["app", "main"]
