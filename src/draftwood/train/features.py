"""The target's side of training: features at the taps and its own top-k, kept on disk once.

A store is a folder of flat binary files that only grow, one record per response, and an index
written after the data, so that an interrupted append leaves nothing half visible.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftwood.train.anchors import Example, anchor_range

INDEX = "index.jsonl"
META = "meta.json"
FILES = {
    "features": "features.f16",
    "tokens": "tokens.i32",
    "top_ids": "topk_ids.i32",
    "top_log_probs": "topk_logp.f16",
}


@dataclass(frozen=True)
class Record:
    """Index entry of one response: where its rows start, and what it is."""

    key: str
    start: int
    length: int
    response_start: int
    domain: str
    prompt_key: str


class FeatureStore:
    """Read access; the arrays are memory maps, so opening is instant and RAM is page cache."""

    def __init__(self, folder: str | os.PathLike[str], taps: Sequence[int]) -> None:
        """Open a store for a drafter with ``taps``, all of which it must hold.

        Raises:
            ValueError: no store there, or a tap it lacks.
        """
        self.folder = Path(folder)
        self.meta = _read_meta(self.folder)
        missing = [tap for tap in taps if tap not in self.meta["taps"]]
        if missing:
            raise ValueError(
                f"the feature store {self.folder} has taps {self.meta['taps']}, not {missing}; "
                "use those or build a new store"
            )
        self._columns = [self.meta["taps"].index(tap) for tap in taps]
        self.records = _read_index(self.folder)
        count = max((r.start + r.length for r in self.records), default=0)
        self._features = self._map("features", np.float16, count, self.meta["taps"])
        self._tokens = self._read_tokens(count)
        k = self.meta["top_k"]
        self._top_ids = self._map("top_ids", np.int32, count, k)
        self._top_log_probs = self._map("top_log_probs", np.float16, count, k)

    def _map(self, name: str, dtype: Any, count: int, parts: Any) -> np.ndarray | None:
        shape: tuple[int, ...]
        if isinstance(parts, int):
            shape = (count, parts)
        else:
            shape = (count, len(parts), self.meta["hidden_size"])
        if 0 in shape:
            return None
        return np.memmap(self.folder / FILES[name], dtype, "r", shape=shape)

    def _read_tokens(self, count: int) -> np.ndarray:
        if count == 0:
            return np.zeros(0, np.int32)
        return np.fromfile(self.folder / FILES["tokens"], np.int32, count)

    def __len__(self) -> int:
        return len(self.records)

    def tokens(self, index: int) -> tuple[np.ndarray, int]:
        """Token ids of a response with its prompt, and where the response starts."""
        record = self.records[index]
        part = self._tokens[record.start : record.start + record.length]
        return part.astype(np.int64), record.response_start

    def token_weights(self, vocab_size: int, prompt_share: float = 0.3) -> np.ndarray:
        """[vocab_size] how much each token matters for a draft vocabulary.

        Response count, plus the probability mass the target put on it (smoother than counts
        where responses are few), plus a share of its count in prompts, which responses echo.
        """
        weights = np.zeros(vocab_size)
        for index in range(len(self)):
            tokens, start = self.tokens(index)
            weights += np.bincount(tokens[start:], minlength=vocab_size)
            weights += prompt_share * np.bincount(tokens[:start], minlength=vocab_size)
        if self._top_ids is not None and self._top_log_probs is not None:
            mass = np.exp(self._top_log_probs.astype(np.float32)).ravel()
            weights += np.bincount(self._top_ids.ravel(), mass, minlength=vocab_size)
        return weights

    def example(self, index: int) -> Example:
        """Everything about one response, copied into memory."""
        record = self.records[index]
        rows = slice(record.start, record.start + record.length)
        tokens, start = self.tokens(index)
        assert self._features is not None
        features = np.array(self._features[rows])[:, self._columns].reshape(len(tokens), -1)
        top_ids = top_log_probs = None
        if self._top_ids is not None and self._top_log_probs is not None:
            top_ids = torch.from_numpy(np.array(self._top_ids[rows]))
            top_log_probs = torch.from_numpy(np.array(self._top_log_probs[rows]))
        return Example(
            tokens, start, torch.from_numpy(features), top_ids, top_log_probs, record.domain
        )


def is_held_out(prompt_key: str, percent: float) -> bool:
    """Whether a response belongs to validation: decided by its prompt alone, for ever."""
    return int(prompt_key[:8], 16) % 10_000 < percent * 100


def _read_meta(folder: Path) -> dict[str, Any]:
    file = folder / META
    if not file.is_file():
        raise ValueError(f"{folder} is no feature store (no {META}); build one first")
    meta: dict[str, Any] = json.loads(file.read_text())
    return meta


def whole_lines(folder: Path) -> int:
    """Length in bytes of the index up to its last newline; what follows is half written."""
    file = folder / INDEX
    return file.read_bytes().rfind(b"\n") + 1 if file.is_file() else 0


def _read_index(folder: Path) -> list[Record]:
    size = whole_lines(folder)
    if size == 0:
        return []
    lines = (folder / INDEX).read_bytes()[:size].decode().splitlines()
    return [Record(**json.loads(line)) for line in lines]


class StoreSource:
    """One side of the split of a store, as the trainer reads it."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        taps: Sequence[int],
        *,
        held_out: bool,
        percent: float = 3.0,
    ) -> None:
        self._open = (folder, tuple(taps))
        self._side = (held_out, percent)
        self.refresh()

    def refresh(self) -> None:
        """Take in responses appended since; indices of known ones stay."""
        self.store = FeatureStore(*self._open)
        held_out, percent = self._side
        self._indices = [
            i
            for i, record in enumerate(self.store.records)
            if is_held_out(record.prompt_key, percent) == held_out
        ]

    def __len__(self) -> int:
        return len(self._indices)

    def num_anchors(self, index: int) -> int:
        record = self.store.records[self._indices[index]]
        return anchor_range(record.response_start, record.length)[1]

    def name(self, index: int) -> str:
        return self.store.records[self._indices[index]].key

    def example(self, index: int) -> Example:
        return self.store.example(self._indices[index])

    def responses(self) -> list[np.ndarray]:
        """Response tokens of every record."""
        pairs = [self.store.tokens(i) for i in self._indices]
        return [tokens[start:] for tokens, start in pairs]
