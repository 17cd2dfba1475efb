"""``python -m draftwood``: the same as the ``draftwood`` command."""

from draftwood.cli import main

main()
