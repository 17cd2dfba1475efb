"""A drafter that knows the answer and makes mistakes on purpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from draftwood.draft.base import Committed, DraftContext, DraftLimits
from draftwood.tree.enumerate import top_prefixes_from_candidates
from draftwood.tree.tree import ScoredPrefixes

# Probabilities of the candidates of one depth; the rest of the mass is "none of them".
PROFILES = ((0.85, 0.08, 0.03, 0.01), (0.55, 0.25, 0.1, 0.05))

Future = Mapping[tuple[int, ...], Sequence[int]] | Callable[[DraftContext], Sequence[int]]


class NoisyOracleDrafter:
    """Drafts the target's own continuation with injected errors.

    At every depth the true token takes a random rank among the candidates, or is missing, with
    exactly the probabilities that are reported: a calibrated drafter of known quality. The errors
    depend only on (``seed``, prompt, position), not on the batch or on earlier calls.

    Args:
        future: prompt → output tokens of plain decoding, or a function from a context to the
            tokens that follow its committed ones.
        horizon: deepest prefix.
        seed: of the errors.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, future: Future, *, horizon: int = 8, seed: int = 0) -> None:
        self.horizon = horizon
        self._future = future
        self._seed = seed
        self._known: dict[int, int] = {}

    def propose(self, contexts: Sequence[DraftContext], limits: DraftLimits) -> ScoredPrefixes:
        rows = [self._propose(context, limits) for context in contexts]
        return ScoredPrefixes.stack(rows)

    def observe(self, committed: Sequence[Committed]) -> None:
        """Checks that every committed token is reported once and in order."""
        for record in committed:
            assert record.start == self._known.get(record.seq_id, 0)
            self._known[record.seq_id] = record.start + len(record.token_ids)

    def truncate(self, seq_id: int, length: int) -> None:
        self._known[seq_id] = min(length, self._known.get(seq_id, 0))

    def release(self, seq_id: int) -> None:
        self._known.pop(seq_id, None)

    def _propose(self, context: DraftContext, limits: DraftLimits) -> ScoredPrefixes:
        prompt = tuple(context.token_ids[: context.prompt_len])
        if callable(self._future):
            truth = list(self._future(context))
        else:
            truth = list(self._future[prompt][len(context.token_ids) - len(prompt) :])
        rng = np.random.default_rng([self._seed, len(context.token_ids), *prompt])
        others = sorted({*prompt, *truth, *range(2, 8)})
        depth = min(self.horizon, context.max_depth, len(truth))
        if depth <= 0:
            return ScoredPrefixes.empty(1)
        drawn = [_candidates(token, others, rng) for token in truth[:depth]]
        ids = np.array([[tokens for tokens, _ in drawn]])
        log_probs = np.log([[probs for _, probs in drawn]])
        width = slice(limits.max_width)
        return top_prefixes_from_candidates(
            log_probs[..., width], ids[..., width], limits.max_nodes
        )


def _candidates(
    true_token: int, others: Sequence[int], rng: np.random.Generator
) -> tuple[list[int], Sequence[float]]:
    """Four distinct candidate tokens, best first, and their probabilities."""
    probs = PROFILES[rng.integers(len(PROFILES))]
    wrong = [token for token in rng.permutation(others).tolist() if token != true_token]
    tokens = wrong[: len(probs)]
    rank = int(np.searchsorted(np.cumsum(probs), rng.random()))
    if rank < len(probs):
        tokens[rank] = true_token
    return tokens, probs
