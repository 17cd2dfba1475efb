"""Do stated probabilities come true? Reliability curves from recordings, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from draftwood.draft.surrogate import KINDS, Surrogate, stated, visited_children
from draftwood.replay.recording import Recording
from draftwood.tree.tree import FloatArray, ScoredPrefixes

EDGES = tuple(round(0.1 * i, 1) for i in range(11))


@dataclass(frozen=True)
class Bin:
    """Nodes whose stated probability given their parent lies in one bin.

    Attributes:
        low, high: of the bin.
        count: nodes in it whose parent the target took.
        stated: their mean stated probability.
        observed: share of them that the target took.
    """

    low: float
    high: float
    count: int
    stated: float
    observed: float


@dataclass(frozen=True)
class Reliability:
    """The curve of one kind of node.

    Attributes:
        kind: "spine" or "sibling".
        is_calibrated: by the surrogate's probabilities, else by the drafter's own.
        bins: those that hold a node.
        log_loss: mean over nodes, in nats.
    """

    kind: str
    is_calibrated: bool
    bins: tuple[Bin, ...]
    log_loss: float

    @property
    def error(self) -> float:
        """Expected calibration error: mean |stated − observed| over nodes."""
        total = sum(one.count for one in self.bins)
        return sum(one.count * abs(one.stated - one.observed) for one in self.bins) / max(total, 1)


@dataclass(frozen=True)
class Promise:
    """Φ(n) against accepted nodes, means over positions, at one budget."""

    budget: int
    is_calibrated: bool
    phi: float
    accepted: float


class _Observed(NamedTuple):
    probs: FloatArray
    hits: FloatArray
    is_spine: FloatArray


def reliability(
    recordings: Sequence[Recording], edges: Sequence[float] = EDGES
) -> list[Reliability]:
    """Curves before and after calibration, spine and siblings, over every recorded position.

    The surrogate is new at first and learns from a position after it was judged there, so that
    "after" holds no hindsight.
    """
    before, after = [], []
    surrogate = Surrogate()
    for recording in recordings:
        for scored, picks in _positions(recording):
            found = surrogate.calibrated(scored, [recording.sampled])
            _, spine = stated(scored)
            before.append(_observed(scored, picks, spine))
            # The token of a node is its column in the drafter's own order, plus one.
            after.append(_observed(found, picks, spine[found.token_ids[0] - 1]))
            surrogate.learn([picks])
    return [
        _curve(_joined(parts), kind, is_calibrated, edges)
        for kind in KINDS
        for is_calibrated, parts in ((False, before), (True, after))
    ]


def promises(
    recordings: Sequence[Recording], budgets: Sequence[int] = (4, 8, 16, 32, 64)
) -> list[Promise]:
    """Φ and accepted nodes at fixed budgets, by the drafter's order and by the surrogate's."""
    surrogate = Surrogate()
    rows: dict[tuple[int, bool], list[tuple[float, int]]] = {}
    for recording in recordings:
        for scored, picks in _positions(recording):
            for is_calibrated in (False, True):
                one = surrogate.calibrated(scored, [recording.sampled]) if is_calibrated else scored
                phi, place = one.phi()[0], one.token_ids[0].argsort()
                columns = [int(place[token - 1]) for token in picks if token > 0]
                for budget in budgets:
                    accepted = sum(column < budget for column in columns)
                    value = float(phi[min(budget, len(phi) - 1)])
                    rows.setdefault((budget, is_calibrated), []).append((value, accepted))
            surrogate.learn([picks])
    return [
        Promise(budget, is_calibrated, *np.mean(values, axis=0).tolist())
        for (budget, is_calibrated), values in sorted(rows.items())
    ]


def _positions(recording: Recording) -> list[tuple[ScoredPrefixes, list[int]]]:
    width = int(recording.details["max_nodes"])
    return [
        (text.prefixes(at, width), text.picks(at, width))
        for text in recording.texts
        for at in range(len(text))
    ]


def _observed(scored: ScoredPrefixes, picks: list[int], is_spine: np.ndarray) -> _Observed:
    columns, hits = visited_children(scored, picks)
    features, _ = stated(scored) if int(scored.counts[0]) else (np.zeros((0, 4)), None)
    probs = 1.0 / (1.0 + np.exp(-features[columns, 0]))
    return _Observed(probs, hits.astype(np.float64), is_spine[columns].astype(np.float64))


def _joined(parts: list[_Observed]) -> _Observed:
    return _Observed(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _curve(
    observed: _Observed, kind: str, is_calibrated: bool, edges: Sequence[float]
) -> Reliability:
    chosen = observed.is_spine == (1.0 if kind == KINDS[0] else 0.0)
    probs, hits = observed.probs[chosen], observed.hits[chosen]
    at = np.clip(np.searchsorted(edges, probs, side="right") - 1, 0, len(edges) - 2)
    bins = [
        Bin(edges[i], edges[i + 1], int(inside.sum()), float(probs[inside].mean()),
            float(hits[inside].mean()))
        for i in range(len(edges) - 1)
        if (inside := at == i).any()
    ]  # fmt: skip
    sure = np.clip(np.where(hits > 0, probs, 1.0 - probs), 1e-12, 1.0)
    loss = float(-np.log(sure).mean()) if len(sure) else 0.0
    return Reliability(kind, is_calibrated, tuple(bins), loss)
