"""The k largest entries of each row, in the order of one pass over memory on a CPU.

``torch.topk`` on a CPU copies each row into value-index pairs and selects there, which for a
vocabulary of 50,000 costs several times the reading of the row.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
import torch
from numpy.typing import NDArray

from draftwood.tree.tree import IntArray

_BLOCK_ENTRIES = 1 << 20  # rows handled together: what fits the last-level cache
_FEW_ENTRIES = 100_000  # below, a dozen numpy calls cost as much as they save
_MIN_CHUNK = 4  # below this many entries per chunk the chunk maxima save nothing
_MAX_SURVIVORS = 8  # times k: more (many ties, or rows of −inf) and plain selection is faster


def top_k(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest entries of each row, largest first; NaN counts as −inf.

    Args:
        scores: [R, V] floats on any device.
        k: 1 ≤ k ≤ V.

    Returns:
        values [R, k] and column indices [R, k] (int64), on the device of ``scores``. Which of
        several equal entries are taken is unspecified.
    """
    num_rows, width = scores.shape
    assert 1 <= k <= width, (k, width)
    if scores.device.type != "cpu":
        return _plain(scores, k)
    scores = _readable(scores)
    if k == 1:
        return _argmax(scores)
    if scores.numel() < _FEW_ENTRIES or _split(width, k)[1] < _MIN_CHUNK:
        return _plain(scores, k)
    values = np.empty((num_rows, k), dtype=scores.numpy().dtype)
    ids = np.empty((num_rows, k), dtype=np.int64)
    step = max(1, _BLOCK_ENTRIES // width)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        found = _chunked(scores[rows].numpy(), k)
        if found is None:
            plain = _plain(scores[rows], k)
            found = plain[0].numpy(), plain[1].numpy()
        values[rows], ids[rows] = found
    return torch.from_numpy(values), torch.from_numpy(ids)


def at_least(scores: torch.Tensor, floors: torch.Tensor, k: int) -> tuple[NDArray, IntArray]:
    """The entries of each row that are ≥ its floor, largest first, at most the k largest.

    Args:
        scores: [R, V] floats on any device.
        floors: [R] of the same type and device.
        k: 1 ≤ k ≤ V.

    Returns:
        values and column indices [R, W] on the host, W the most any row has; where a row has
        fewer, smaller entries or −inf follow.
    """
    if scores.device.type == "cpu":
        array = _readable(scores).numpy()
        found = np.flatnonzero(array >= floors.to(_readable(scores)).numpy()[:, None])
        if len(found) <= _MAX_SURVIVORS * k * len(array):
            return _largest(array, found, k)
        most = k
    else:
        most = min(max(int((scores >= floors[:, None]).sum(dim=1).amax()), 1), k)
    values, ids = top_k(scores, most)
    return _readable(values).cpu().numpy(), ids.cpu().numpy()


def _readable(scores: torch.Tensor) -> torch.Tensor:
    """Contiguous and of a type that numpy has."""
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float()
    return scores.detach().contiguous()


def _plain(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = scores.topk(k, dim=1)
    if bool(values.isnan().any()):  # topk takes NaN for the largest value
        clean = torch.where(scores.isnan(), -torch.inf, scores)
        values, ids = clean.topk(k, dim=1)
    return values, ids


def _argmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids = scores.numpy().argmax(axis=1)[:, None]  # vectorised, unlike torch.max with indices
    values = np.take_along_axis(scores.numpy(), ids, axis=1)
    if np.isnan(values).any():
        return _plain(scores, 1)
    return torch.from_numpy(values), torch.from_numpy(ids)


def _chunked(scores: NDArray, k: int) -> tuple[NDArray, IntArray] | None:
    """Exact selection through chunk maxima, or None where plain selection is the better way.

    The k-th largest chunk maximum is at most the k-th largest entry (k chunks each hold one at
    least as large), so everything wanted lies in chunks whose maximum reaches it.
    """
    num_rows, width = scores.shape
    num_chunks, chunk = _split(width, k)
    body = num_chunks * chunk
    # Chunk c holds columns c, c + num_chunks, …: the maximum then runs over contiguous rows. The
    # last width − body columns are chunks of their own.
    maxima = scores[:, :body].reshape(num_rows, chunk, num_chunks).max(axis=1)
    maxima = np.concatenate([maxima, scores[:, body:]], axis=1)
    if np.isnan(maxima.max()):
        return None
    cut = maxima.shape[1] - k
    floor = np.partition(maxima, cut, axis=1)[:, cut]
    kept = np.flatnonzero(maxima[:, :num_chunks] >= floor[:, None])
    if np.isneginf(floor).any() or len(kept) > _MAX_SURVIVORS * k * num_rows:
        return None
    row = kept // num_chunks
    flat = (row * (width - num_chunks) + kept)[:, None] + np.arange(chunk) * num_chunks
    entries = scores.reshape(-1).take(flat)
    reaching = np.flatnonzero(entries >= floor[row][:, None])
    tail_row, tail = np.nonzero(scores[:, body:] >= floor[:, None])
    found = np.concatenate([flat.reshape(-1).take(reaching), tail_row * width + body + tail])
    return _largest(scores, found, k)


def _split(width: int, k: int) -> tuple[int, int]:
    """(num_chunks, chunk length): balances selecting among maxima and reading kept chunks."""
    chunk = max(1, isqrt(width // (2 * k)))
    return width // chunk, chunk


def _largest(scores: NDArray, flat: IntArray, k: int) -> tuple[NDArray, IntArray]:
    """The up to k largest per row of the entries at flat positions ``flat``, −inf for none."""
    num_rows, width = scores.shape
    entries = scores.reshape(-1).take(flat)
    rows = flat // width
    order = np.lexsort((-entries, rows))
    sizes = np.bincount(rows, minlength=num_rows)
    columns = np.arange(min(k, sizes.max(initial=0)))
    place = (np.cumsum(sizes) - sizes)[:, None] + columns
    if sizes.min(initial=k) >= len(columns):
        best = order[place]
        return entries[best], flat[best] - np.arange(num_rows)[:, None] * width
    inside = columns < sizes[:, None]
    best = order[np.where(inside, place, 0)]
    ids = flat[best] - rows[best] * width
    return np.where(inside, entries[best], -np.inf), np.where(inside, ids, 0)
