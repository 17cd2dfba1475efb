"""What a trace needs beside the cycle records: texts of single tokens, and predicted seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from draftwood.tree.latency import LatencyModel
from draftwood.tree.tree import FloatArray


class TokenTexts:
    """Text of tokens as they read in the middle of a text (a leading space is kept).

    Args:
        tokenizer: a transformers tokenizer; without one there are no texts.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        # Some tokenizers drop the space that begins a text, so tokens are decoded after another.
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:] if tokenizer else []

    def each(self, token_ids: Sequence[int]) -> list[str]:
        """One text per token; [] without a tokenizer."""
        if self._tokenizer is None:
            return []
        return [self._text(token_id) for token_id in token_ids]

    def joined(self, token_ids: Sequence[int]) -> str:
        """The text of a run of tokens; "" without a tokenizer."""
        return self._tokenizer.decode(list(token_ids)) if self._tokenizer is not None else ""

    def _text(self, token_id: int) -> str:
        if token_id not in self._known:
            before = self._tokenizer.decode(self._before)
            both = self._tokenizer.decode([*self._before, token_id])
            alone = self._tokenizer.decode([token_id])
            self._known[token_id] = (
                both[len(before) :]
                if both.startswith(before) and len(both) > len(before)
                else alone
            )
        return self._known[token_id]


class Foresight:
    """A latency model that remembers what it predicted for each cycle before it learns from it.

    The prediction is in seconds: ``draft_s`` (None when nothing was drafted), ``verify_s`` of the
    target pass with head and walk (for as many tokens as were drawn), ``other_s`` of the rest, KV
    commit included.

    Args:
        model: the model that predicts and learns.
    """

    def __init__(self, model: LatencyModel) -> None:
        self._model = model
        self._predicted: dict[str, float | None] | None = None

    def take(self) -> dict[str, float | None] | None:
        """The prediction for the cycle observed last, once; None if it was not observed."""
        predicted, self._predicted = self._predicted, None
        return predicted

    def verify_s(self, widths: np.ndarray, context_len: float, num_seqs: int) -> FloatArray:
        return self._model.verify_s(widths, context_len, num_seqs)

    def draft_s(self, context_len: float, num_seqs: int) -> float:
        return self._model.draft_s(context_len, num_seqs)

    def other_s(self) -> float:
        return self._model.other_s()

    def walk_s(self, num_tokens: int) -> float:
        return self._model.walk_s(num_tokens)

    def observe(
        self,
        *,
        width: int,
        context_len: float,
        num_seqs: int,
        verify_s: float,
        draft_s: float | None,
        other_s: float,
        walk_s: float = 0.0,
        num_tokens: int = 1,
    ) -> None:
        drafted = draft_s is not None
        predicted = self.verify_s(np.array([width]), context_len, num_seqs)
        self._predicted = {
            "draft_s": self.draft_s(context_len, num_seqs) if drafted else None,
            "verify_s": float(predicted[0]) + self.walk_s(num_tokens),
            "other_s": self.other_s(),
        }
        self._model.observe(
            width=width, context_len=context_len, num_seqs=num_seqs, verify_s=verify_s,
            draft_s=draft_s, other_s=other_s, walk_s=walk_s, num_tokens=num_tokens,
        )  # fmt: skip
