"""Replays of trees whose depths are conditioned on the token before, by a Markov head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftwood.draft.independent_network import IndependentNetwork
from draftwood.draft.markov import MarkovTables, conditional
from draftwood.train.loss import UNKNOWN
from draftwood.train.networks import Network, device_of

_TIE = 1e-9  # the same sum in another order


@dataclass(frozen=True)
class Conditionals:
    """Log-probabilities of A blocks over K candidates a depth; float64.

    Attributes:
        ids: [A, L, K] draft ids of the candidates, the most probable by the marginals first.
        first: [A, K] of depth 1.
        later: [A, L − 1, K, K] of depths 2 … L after each candidate of the depth before.
    """

    ids: torch.Tensor
    first: torch.Tensor
    later: torch.Tensor

    def chain(self, labels: torch.Tensor) -> torch.Tensor:
        """[A] tokens accepted of the chain that takes the best next token at every depth."""
        rows = torch.arange(len(labels), device=labels.device)
        best = self.first.argmax(-1)
        right = []
        for depth in range(labels.shape[1]):
            if depth:
                best = self.later[rows, depth - 1, best].argmax(-1)
            right.append(self.ids[rows, depth, best] == labels[:, depth])
        return torch.stack(right, dim=1).long().cumprod(dim=1).sum(dim=1)

    def tree(self, labels: torch.Tensor, budget: int) -> torch.Tensor:
        """[A] tokens accepted of the tree of the ``budget`` most probable prefixes."""
        edge, path = self._edge(budget), self._path(labels)
        inside = (path >= edge[:, None] - _TIE) & torch.isfinite(path)
        return inside.long().cumprod(dim=1).sum(dim=1)

    def _path(self, labels: torch.Tensor) -> torch.Tensor:
        """[A, L] log-probability of the labels' prefixes; −inf where one is no candidate."""
        rows = torch.arange(len(labels), device=labels.device)
        match = self.ids == labels[..., None]
        known = match.any(-1) & (labels != UNKNOWN)
        at = match.long().argmax(-1)
        steps = [self.first[rows, at[:, 0]]]
        for depth in range(1, labels.shape[1]):
            steps.append(self.later[rows, depth - 1, at[:, depth - 1], at[:, depth]])
        scores = torch.stack(steps, dim=1).masked_fill(~known, float("-inf"))
        return scores.cumsum(dim=1)

    def _edge(self, budget: int) -> torch.Tensor:
        """[A] log-probability of the ``budget``-th most probable prefix.

        The n best of a depth follow on the n best of the depth before.
        """
        width = self.ids.shape[-1]
        beam, last = self.first.sort(dim=-1, descending=True)
        beam, last = beam[:, :budget], last[:, :budget]
        found = [beam]
        for depth in range(1, self.ids.shape[1]):
            table = self.later[:, depth - 1]
            after = table.gather(1, last[..., None].expand(-1, -1, width))
            scores = (beam[..., None] + after).flatten(1)
            beam, at = scores.topk(min(budget, scores.shape[1]), dim=-1)
            last = at % width
            found.append(beam)
        every = torch.cat(found, dim=-1)
        return every.topk(min(budget, every.shape[1]), dim=-1).values[:, -1]


@torch.no_grad()
def markov_tables(network: Network) -> MarkovTables | None:
    """Of a network with a Markov head, None for any other."""
    if network.markov is None:
        return None
    ids = network.target_ids()
    if ids is None:
        ids = torch.arange(network.config.head_size, device=device_of(network))
    scale = 1.0 if isinstance(network, IndependentNetwork) else network.config.logit_scale
    return MarkovTables.of(network.markov, network.embed(ids), network.head_weight(), scale)


@torch.no_grad()
def conditionals(
    log_probs: torch.Tensor, hidden: torch.Tensor, tables: MarkovTables, width: int
) -> Conditionals:
    """Of the ``width`` best candidates of each depth.

    Args:
        log_probs: [A, L, V] marginals.
        hidden: [A, L, H] the normed rows they come from.
    """
    best = log_probs.topk(width, dim=-1)
    values, ids = best.values.double(), best.indices
    shifts = tables.shifts(hidden, ids).flatten(0, 1)
    later = conditional(values[:, 1:].flatten(0, 1), shifts)
    return Conditionals(ids, values[:, 0], later.view(*ids[:, 1:].shape[:2], width, width))
