"""What a drafter proposed at every position of texts the target wrote, and where each text went on.

The text of a request is the same under every budget. So the cycle that would begin at a position
is known before any policy is chosen: its proposal depends on the text before, its outcome on the
text after. A recording holds both for every position, which is what makes replays exact; cycles of
one live run would not, since another budget begins its next cycle elsewhere.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftwood.tree.tree import NO_PARENT, IntArray, ScoredPrefixes

FORMAT = 1
_HOW = "make one with 'draftwood record'"


@dataclass(frozen=True)
class RecordedText:
    """One response of T tokens; position p is the cycle after p emitted tokens.

    Attributes:
        prompt_len: tokens of the prompt.
        log_probs: [T, N] scores of the proposed prefixes in the drafter's order, best first; −inf
            where there were fewer.
        parents: [T, N] column of the parent, −1 for a child of the anchor.
        path: [T, H] columns of the nodes on the target's text, in order of depth, then −1.
        chain_log_probs: [T, H] scores of the best chain, −inf past its end.
        chain_accepted: [T] nodes of that chain on the text.
        draft_s: [T] seconds the proposal of N prefixes took.
    """

    prompt_len: int
    log_probs: NDArray[np.float32]
    parents: NDArray[np.int16]
    path: NDArray[np.int16]
    chain_log_probs: NDArray[np.float32]
    chain_accepted: NDArray[np.int16]
    draft_s: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.path)

    def prefixes(self, position: int, max_nodes: int) -> ScoredPrefixes:
        """What the drafter would give at a position; the token of column c is called c + 1."""
        scores = self.log_probs[position, :max_nodes]
        count = int(np.isfinite(scores).sum())
        parents = self.parents[position, :count].astype(np.int64)
        return ScoredPrefixes(
            np.arange(1, count + 1, dtype=np.int64)[None],
            parents[None],
            _depths(parents)[None],
            scores[:count].astype(np.float64)[None],
            np.array([count], dtype=np.int64),
        )

    def chain(self, position: int) -> ScoredPrefixes:
        """The best chain at a position; its token at depth d is called d."""
        scores = self.chain_log_probs[position]
        count = int(np.isfinite(scores).sum())
        depths = np.arange(1, count + 1, dtype=np.int64)[None]
        return ScoredPrefixes(
            depths, depths - 2, depths, scores[:count].astype(np.float64)[None],
            np.array([count], dtype=np.int64),
        )  # fmt: skip

    def picks(self, position: int, max_nodes: int) -> list[int]:
        """The target's tokens, by the names of ``prefixes``, as far as those go; 0 is any other."""
        known = [int(c) + 1 for c in self.path[position] if 0 <= c < max_nodes]
        return known if position + len(known) >= len(self) else [*known, 0]

    def chain_picks(self, position: int) -> list[int]:
        """The same by the names of ``chain``."""
        known = list(range(1, int(self.chain_accepted[position]) + 1))
        return known if position + len(known) >= len(self) else [*known, 0]


@dataclass(frozen=True)
class Recording:
    """Texts of one drafter and target at one temperature.

    Attributes:
        texts: in the order they were decoded.
        details: ``target``, ``drafter``, ``drafter_type`` (class), ``name`` of the prompts,
            ``temperature``, ``max_nodes``, ``horizon``, ``target_shape`` and ``draft_shape`` (or
            None), ``block_size``, ``device``, ``curve`` (the measured calibration), ``other_s``
            and ``walk_s`` per token.
    """

    texts: Sequence[RecordedText]
    details: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        return sum(len(text) for text in self.texts)

    @property
    def sampled(self) -> bool:
        return bool(self.details["temperature"] > 0)

    @property
    def horizon(self) -> int:
        return int(self.details["horizon"])


_ARRAYS = ("log_probs", "parents", "path", "chain_log_probs", "chain_accepted", "draft_s")
_DETAILS = ("target", "drafter", "drafter_type", "name", "temperature", "max_nodes", "horizon",
            "target_shape", "draft_shape", "block_size", "device", "curve", "other_s",
            "walk_s")  # fmt: skip


def save_recording(path: str | Path, recording: Recording) -> None:
    """Write a recording: compressed numpy arrays, about 1 KB per position at 256 nodes."""
    texts = recording.texts
    header = json.dumps({"format": FORMAT, **recording.details}).encode()
    arrays: dict[str, Any] = {
        "header": np.frombuffer(header, np.uint8),
        "lengths": np.array([[text.prompt_len, len(text)] for text in texts], dtype=np.int64),
        **{name: np.concatenate([getattr(text, name) for text in texts]) for name in _ARRAYS},
    }
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    Path(path).write_bytes(buffer.getvalue())


def load_recording(path: str | Path) -> Recording:
    """Read a file of ``save_recording``.

    Raises:
        ValueError: no recording, a damaged one, or a format this version does not know.
        OSError: the file cannot be read.
    """
    data = Path(path).read_bytes()
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            found = {name: archive[name] for name in ("header", "lengths", *_ARRAYS)}
        header = json.loads(found["header"].tobytes())
        version = header.pop("format")
    except (ValueError, KeyError, TypeError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no recording or damaged ({error}); {_HOW}") from error
    if version != FORMAT:
        raise ValueError(f"{path} has recording format {version!r}, this reads {FORMAT}; {_HOW}")
    missing = [name for name in _DETAILS if name not in header]
    lengths = found["lengths"]
    if missing or lengths.ndim != 2 or lengths.shape[1] != 2 or not _fits(found, lengths):
        raise ValueError(f"{path} is damaged (missing {missing or 'positions'}); {_HOW}")
    return Recording(_texts(found, lengths), header)


def _fits(found: dict[str, NDArray], lengths: IntArray) -> bool:
    total = int(lengths[:, 1].sum())
    flat = all(len(found[name]) == total for name in _ARRAYS)
    nodes, path = found["parents"], found["path"]
    if not flat or nodes.ndim != 2 or nodes.shape != found["log_probs"].shape or path.ndim != 2:
        return False
    in_order = (nodes < np.arange(nodes.shape[1])) & (nodes >= NO_PARENT)
    return bool(in_order.all() and (path < nodes.shape[1]).all() and (lengths >= 0).all())


def _texts(found: dict[str, NDArray], lengths: IntArray) -> list[RecordedText]:
    texts, start = [], 0
    for prompt_len, length in lengths.tolist():
        part = slice(start, start + length)
        texts.append(RecordedText(prompt_len, *(found[name][part] for name in _ARRAYS)))
        start += length
    return texts


def _depths(parents: IntArray) -> IntArray:
    depths = np.zeros(len(parents) + 1, dtype=np.int64)  # the last one stands for the anchor
    for node, parent in enumerate(parents.tolist()):
        depths[node] = depths[parent] + 1
    return depths[:-1]
