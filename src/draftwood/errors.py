"""The one exception type of draftwood that is not a ``ValueError``."""

from __future__ import annotations


class DraftwoodError(RuntimeError):
    """Something failed at run time that no argument could have prevented."""
