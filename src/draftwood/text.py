"""Turn token ids into text while they arrive: no broken characters, stop strings found at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_CHARACTER_TOKENS = 8  # more undecodable tokens in a row are garbage, not a character


class Decodes(Protocol):
    """The one tokenizer method needed here."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class TextStream:
    """Incremental detokenizer of one output.

    ``push`` one token at a time. Text is *held back* while it may still change (an incomplete
    UTF-8 character, a cleaned-up space) or may turn out to be the start of a stop string;
    ``take`` hands out what is safe.

    Args:
        tokenizer: anything with transformers' ``decode``.
        stop: stop strings; the text ends before the first one that appears.
    """

    def __init__(self, tokenizer: Decodes, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest_stop = max((len(s) for s in self._stop), default=0)
        self._token_ids: list[int] = []
        self._window_start = 0  # tokens before are settled and only give no more text
        self._window_read = 0  # tokens before are already in the text
        self._text = ""
        self._taken_len = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All settled text so far, cut before a stop string."""
        return self._text

    @property
    def taken(self) -> str:
        """All text handed out so far by ``take`` and ``finish``."""
        return self._text[: self._taken_len]

    def push(self, token_id: int, *, may_stop: bool = True) -> bool:
        """Add one output token.

        Args:
            token_id: the token.
            may_stop: look for stop strings that this token completes.

        Returns:
            Whether a stop string is now complete; the text then ends before it for good.
        """
        assert not self.stopped
        self._token_ids.append(token_id)
        self._append(self._new_text(final=False), may_stop=may_stop)
        return self.stopped

    def take(self) -> str:
        """Text that is certain and has not been taken before."""
        return self._take_until(len(self._text) - self._possible_stop_len())

    def finish(self) -> str:
        """The rest, when no more tokens will come (incomplete characters become U+FFFD)."""
        if not self.stopped:
            self._append(self._new_text(final=True), may_stop=False)
        return self._take_until(len(self._text))

    def _new_text(self, *, final: bool) -> str:
        before = self._decode(self._token_ids[self._window_start : self._window_read])
        now = self._decode(self._token_ids[self._window_start :])
        pending = len(self._token_ids) - self._window_read
        incomplete = now.endswith(REPLACEMENT) and pending < MAX_CHARACTER_TOKENS
        if len(now) <= len(before) or (incomplete and not final):
            return ""
        self._window_start = self._window_read
        self._window_read = len(self._token_ids)
        return now[len(before) :]

    def _append(self, piece: str, *, may_stop: bool) -> None:
        search_from = max(0, len(self._text) - self._longest_stop + 1)
        self._text += piece
        if not piece or not may_stop:
            return
        hits = [at for s in self._stop if (at := self._text.find(s, search_from)) >= 0]
        if hits:
            self._text = self._text[: min(hits)]
            self.stopped = True

    def _possible_stop_len(self) -> int:
        if self.stopped:
            return 0
        for size in range(min(self._longest_stop - 1, len(self._text)), 0, -1):
            tail = self._text[-size:]
            if any(s.startswith(tail) for s in self._stop):
                return size
        return 0

    def _take_until(self, end: int) -> str:
        piece = self._text[self._taken_len : end]
        self._taken_len = max(self._taken_len, end)
        return piece

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
