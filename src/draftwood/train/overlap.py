"""Keep evaluation prompts out of the training prompts."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from draftwood.train.prompts import Conversation, read_prompts

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Dropped:
    """A conversation that was left out, and the text it shares with evaluation."""

    conversation: Conversation
    shared: str


class OverlapCheck:
    """Finds text that is, or shares ``num_words`` consecutive words with, an evaluation prompt.

    The n-gram test of the GPT-3 report (arXiv 2005.14165, appendix C). Words are lower-case runs
    of letters and digits. A window that is mostly the *format* of a set (instructions that more
    than ``max_repeats`` evaluation prompts have in common) says nothing about the problem and
    does not count.

    Args:
        texts: the evaluation prompts, one entry per user turn.
        num_words: length of the windows compared.
        max_repeats: evaluation prompts that may share a window before it counts as format.
    """

    def __init__(self, texts: Iterable[str], *, num_words: int = 13, max_repeats: int = 10) -> None:
        if num_words < 4 or max_repeats < 1:
            raise ValueError(
                f"num_words must be ≥ 4 and max_repeats ≥ 1, got {num_words}, {max_repeats}"
            )
        self.num_words = num_words
        self._core = num_words - 3  # a window is format if all but 3 words are
        words = [tuple(_words(text)) for text in texts]
        counts = Counter(gram for w in words for gram in set(_grams(w, self._core)))
        self._format = {gram for gram, count in counts.items() if count > max_repeats}
        self._exact = {w for w in words if w}
        self._grams = {g for w in words for g in _grams(w, num_words) if not self._is_format(g)}

    @classmethod
    def from_files(
        cls, paths: Sequence[str | os.PathLike[str]], *, num_words: int = 13, max_repeats: int = 10
    ) -> OverlapCheck:
        """Against JSONL files of prompts, as ``read_prompts`` reads them."""
        texts = [t for path in paths for c in read_prompts(path) for t in c.turns]
        if not texts:
            raise ValueError(f"no evaluation prompts in {[os.fspath(p) for p in paths]}")
        return cls(texts, num_words=num_words, max_repeats=max_repeats)

    def shared(self, text: str) -> str | None:
        """The words that ``text`` shares with an evaluation prompt, or None."""
        words = tuple(_words(text))
        if words in self._exact:
            return " ".join(words)
        hit = next((g for g in _grams(words, self.num_words) if g in self._grams), None)
        return None if hit is None else " ".join(hit)

    def split(
        self, conversations: Iterable[Conversation]
    ) -> tuple[list[Conversation], list[Dropped]]:
        """(conversations to keep, conversations of which a user turn overlaps)."""
        kept: list[Conversation] = []
        dropped: list[Dropped] = []
        for conversation in conversations:
            hits = (self.shared(turn) for turn in conversation.turns)
            hit = next((h for h in hits if h is not None), None)
            if hit is None:
                kept.append(conversation)
            else:
                dropped.append(Dropped(conversation, hit))
        return kept, dropped

    def _is_format(self, gram: tuple[str, ...]) -> bool:
        return gram[: self._core] in self._format or gram[-self._core :] in self._format


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _grams(words: Sequence[str], n: int) -> Iterable[tuple[str, ...]]:
    return (tuple(words[i : i + n]) for i in range(len(words) - n + 1))
