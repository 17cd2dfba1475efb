"""The ``draftwood`` command. One file per subcommand; torch is imported only when one runs."""

from __future__ import annotations

_INTERRUPTED = 130


def main() -> None:
    """Entry point of the console script."""
    try:
        from draftwood.cli.app import app  # here, so that Ctrl-C is heeded while it loads

        app()
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None


__all__ = ["main"]
