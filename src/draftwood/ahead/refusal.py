"""Which drafters cannot draft ahead, and why."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.ahead.messages import Ready


def check_ready(ready: Ready) -> None:
    """Refuse workers that cannot draft ahead.

    Raises:
        ValueError: the drafter needs hidden states of the target, or never drafts.
    """
    check_taps(ready.taps)
    if ready.horizon == 0:
        raise ValueError("this drafter never drafts, so there is nothing to draft ahead")


def check_taps(taps: Sequence[int]) -> None:
    """Refuse drafters that cannot draft ahead.

    Raises:
        ValueError: the drafter needs hidden states of the target.
    """
    if taps:
        raise ValueError(
            f"this drafter reads the target's layers {list(taps)} at every token it builds on; of "
            "tokens that are not verified yet there are none. Draft synchronously, or use a "
            "drafter that needs only tokens: an independent one, a smaller language model, 'lookup'"
        )
