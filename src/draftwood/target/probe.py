"""The parity probe: small packed trees against the model's own forward along each path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from draftwood.errors import DraftwoodError
from draftwood.tree.tree import NO_PARENT, DraftTree

if TYPE_CHECKING:
    from draftwood.target.cache import KVCache
    from draftwood.target.model import Target

# Largest accepted ‖ours − own‖ / ‖own − mean‖ of a row of logits. A wrong mask, position or cached
# row gives 0.1 to 1, rounding much less.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 2e-3}
LOW_PRECISION_TOLERANCE = 0.2

PROMPT_LENS = (6, 3)
# Parents of the drafted nodes below the anchor (node 0): branches of uneven depth, one late.
PARENTS = (NO_PARENT, 0, 0, 1, 1, 4, 5, 2)
# The branch that is kept, as window rows: it leaves gaps behind.
PATH = (0, 1, 4, 5)


def check_parity(target: Target) -> None:
    """Raise ValueError if packed trees do not reproduce the model.

    Two sequences are prefilled, verified as trees in one pass, cut back to a path with gaps and
    verified once more. Every row's logits are compared with the model's own forward over that
    row's tokens alone; low precision compares the typical row, full precision the worst.
    """
    name = type(target.model).__name__
    try:
        errors = parity_errors(target)
    except (DraftwoodError, TypeError) as error:
        raise ValueError(f"{name} cannot be a target: {error}") from error
    tolerance = TOLERANCES.get(target.dtype)
    if tolerance is None:
        # Not the worst row: rounding may send a token to another expert.
        by_tree = errors.view(2, -1).median(dim=1).values
        worst, tolerance = float(by_tree.max()), LOW_PRECISION_TOLERANCE
    else:
        worst = float(errors.max())
    if not worst <= tolerance:
        raise ValueError(
            f"{name} cannot be a target: on random draft trees its logits "
            f"differ from its own forward by {worst:.2g} of their size "
            f"(limit {tolerance:.2g} for {target.dtype})"
        )


@torch.no_grad()
def parity_errors(target: Target) -> torch.Tensor:
    """[R] relative logit error of every row of the trees that ``check_parity`` describes."""
    rng = np.random.default_rng(0)
    caches = [target.new_cache() for _ in PROMPT_LENS]
    prompts = [_random_ids(rng, target, length) for length in PROMPT_LENS]
    target.forward(DraftTree.pack([DraftTree.chain(ids) for ids in prompts]), caches)
    for cache, ids in zip(caches, prompts, strict=True):
        cache.commit(np.arange(len(ids)))
    first = _random_trees(rng, target)
    ours = [_run(target, first, caches)]
    paths = _paths(first, prompts)
    for index, cache in enumerate(caches):
        cache.commit(np.asarray(PATH))
        start, _ = first.span(index)
        prompts[index] = prompts[index] + first.token_ids[start + np.asarray(PATH)].tolist()
    second = _random_trees(rng, target)
    ours.append(_run(target, second, caches))
    own = _own_logits(target, paths + _paths(second, prompts))
    # The spread, not the common offset, is what decides; a constant shift would hide an error.
    size = (own - own.mean(dim=-1, keepdim=True)).norm(dim=-1)
    return (torch.cat(ours) - own).norm(dim=-1) / size


def _random_ids(rng: np.random.Generator, target: Target, count: int) -> list[int]:
    # Low ids only: multi-modal models keep their placeholder tokens at the end.
    return rng.integers(
        min(10, target.vocab_size - 1), min(target.vocab_size, 5000), count
    ).tolist()


def _random_trees(rng: np.random.Generator, target: Target) -> DraftTree:
    parents = np.array(PARENTS)
    depths = np.zeros(len(parents), dtype=np.int64)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    size = len(parents)
    return DraftTree.pack(
        [
            DraftTree(
                np.array(_random_ids(rng, target, size)),
                parents,
                depths,
                np.zeros(size, dtype=np.int64),
                np.array([0, size]),
            )
            for _ in PROMPT_LENS
        ]
    )


def _run(target: Target, tree: DraftTree, caches: Sequence[KVCache]) -> torch.Tensor:
    return target.logits(target.forward(tree, caches).hidden).double()


def _paths(tree: DraftTree, contexts: Sequence[list[int]]) -> list[list[int]]:
    """All tokens of each row's own sequence up to the row: context, ancestors, itself."""
    paths: list[list[int]] = []
    for node in range(len(tree)):
        parent = int(tree.parents[node])
        before = contexts[tree.seq[node]] if parent == NO_PARENT else paths[parent]
        paths.append([*before, int(tree.token_ids[node])])
    return paths


def _own_logits(target: Target, paths: Sequence[list[int]]) -> torch.Tensor:
    """[R, V] the last logits of the model's own forward over each path.

    Only the longest paths run, in one batch: every other path is the beginning of one of them,
    and what stands to the right of a token (here also the padding) does not concern it.
    """
    leaves = [
        path
        for path in paths
        if not any(len(o) > len(path) and o[: len(path)] == path for o in paths)
    ]
    longest = max(map(len, leaves))
    padded = [path + path[:1] * (longest - len(path)) for path in leaves]
    ids = torch.tensor(padded, device=target.device)
    logits = target.model(input_ids=ids, use_cache=False).logits.double()
    rows = []
    for path in paths:
        leaf = next(i for i, other in enumerate(leaves) if other[: len(path)] == path)
        rows.append(logits[leaf, len(path) - 1])
    return torch.stack(rows)
