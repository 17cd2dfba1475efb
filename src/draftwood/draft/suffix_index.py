"""Where the end of a token sequence occurred before in it, kept up to date token by token."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

ORDERS = (1, 2, 4, 8)  # n-gram lengths that are indexed
PER_ORDER = 4  # most recent occurrences of each; more gained nothing in accepted tokens
MAX_MATCH_LEN = 16  # longer matches are not told apart


class Occurrence(NamedTuple):
    """An earlier place that looks like the end of the sequence.

    Attributes:
        match_len: tokens there that equal the end of the sequence, ≤ ``MAX_MATCH_LEN``.
        position: index of the token that followed them.
    """

    match_len: int
    position: int


class SuffixIndex:
    """The n-grams of a sequence, each linked to its previous occurrence.

    ``extend`` and ``truncate`` take O(1) per token, ``matches`` O(1) in the sequence length.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        # Per order: hash of an n-gram → its last end position, and end position → the one before
        # it or −1. Hashes need a fraction of the memory; ``_match_len`` sees through collisions.
        self._last: list[dict[int, int]] = [{} for _ in ORDERS]
        self._previous = [array("q") for _ in ORDERS]

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens."""
        for token_id in token_ids:
            self.token_ids.append(token_id)
            end = len(self.token_ids)
            for order, last, previous in zip(ORDERS, self._last, self._previous, strict=True):
                if end < order:
                    previous.append(-1)
                    continue
                key = hash(tuple(self.token_ids[end - order :]))
                previous.append(last.get(key, -1))
                last[key] = end - 1

    def truncate(self, length: int) -> None:
        """Drop all tokens at positions ≥ ``length``."""
        for end in range(len(self.token_ids), length, -1):
            for order, last, previous in zip(ORDERS, self._last, self._previous, strict=True):
                before = previous.pop()
                if end < order:
                    continue
                key = hash(tuple(self.token_ids[end - order :]))
                if before < 0:
                    del last[key]
                else:
                    last[key] = before
            self.token_ids.pop()

    def matches(self) -> list[Occurrence]:
        """Earlier occurrences of the end of the sequence: the most recent of each n-gram length.

        The longer lengths find the long matches that the short ones would reach too late.
        """
        end = len(self.token_ids)
        found: dict[int, Occurrence] = {}
        for previous in reversed(self._previous):
            at = previous[end - 1] if end else -1
            for _ in range(PER_ORDER):
                if at < 0:
                    break
                if at + 1 not in found and (size := self._match_len(at)):
                    found[at + 1] = Occurrence(size, at + 1)
                at = previous[at]
        return list(found.values())

    def _match_len(self, at: int) -> int:
        """How many tokens ending at ``at`` equal the end of the sequence."""
        tokens = self.token_ids
        shift = len(tokens) - 1 - at
        most = min(MAX_MATCH_LEN, at + 1)
        size = 0
        while size < most and tokens[at - size] == tokens[at - size + shift]:
            size += 1
        return size
