"""A row of a block, corrected for the token drafted before it.

One pass gives every position of a block a distribution of its own: a mixture over all the tokens
that could come before. A Markov head conditions it on one of them. DSpark (DeepSeek, 2026) adds a
low-rank bias W₂[v] · W₁[u] to the logit of v after u; Domino (arXiv 2605.29707) and Hydra
(2402.05109) compute it with a network. Here it goes through the hidden state, so it knows the
position and its context and needs no tables of its own:

    h' = h + O · y,    y = silu(S · h + s + T · ê) ∘ (1 + G · ê),    ê = rmsnorm(embedding of u),

and the logit of v after u is that of v plus (W O)[v] · y, W being the drafter's head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from draftwood.draft.layers import Linear, RMSNorm


class MarkovHead(nn.Module):
    """The correction of normed hidden rows; at first, with O = 0, it changes nothing.

    Args:
        hidden_size: H of the drafter.
        rank: r, width of the correction.
        eps: of the norm.
    """

    def __init__(self, hidden_size: int, rank: int, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden_size, eps)
        self.state = Linear(hidden_size, rank)
        self.token = Linear(hidden_size, rank, bias=False)
        self.gate = Linear(hidden_size, rank, bias=False)
        self.out = Linear(rank, hidden_size, bias=False)

    def reset(self) -> None:
        """Start as the identity; always the same."""
        generator = torch.Generator().manual_seed(0)
        for linear in (self.state, self.token, self.gate):
            noise = torch.empty_like(linear.weight, device="cpu").normal_(generator=generator)
            linear.weight.data.copy_(0.02 * noise)
        nn.init.zeros_(self.state.bias)
        nn.init.zeros_(self.out.weight)
        nn.init.ones_(self.norm.weight)

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """hidden [..., H] given the embeddings [..., H] of the tokens before."""
        token = self.norm(previous)
        mixed = F.silu(self.state(hidden) + self.token(token)) * (1 + self.gate(token))
        return hidden + self.out(mixed)

    def later(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Rows [..., B − 1, H] of blocks that know the token before them.

        Args:
            hidden: [..., B − 1, H] normed rows. The first has the anchor in its block and stays.
            before: [..., B − 2, H] embeddings of the tokens that all but the last stand for.
        """
        rows = self(hidden[..., 1:, :], before)
        return torch.cat([hidden[..., :1, :], rows.to(hidden.dtype)], dim=-2)


@dataclass(frozen=True)
class MarkovTables:
    """A Markov head as drafting runs it: what depends on a token only is computed once.

    Attributes:
        state, bias: [r, H] and [r].
        rows: [V, 3 r] of every column of the drafter's head: token, gate and out in one piece, as
            they are read together.
    """

    state: torch.Tensor
    bias: torch.Tensor
    rows: torch.Tensor

    @staticmethod
    @torch.no_grad()
    def of(
        markov: MarkovHead, embeddings: torch.Tensor, head: torch.Tensor, scale: float = 1.0
    ) -> MarkovTables:
        """
        Args:
            embeddings: [V, H] of the token that each column stands for.
            head: [V, H] weight.
            scale: of the logits.
        """
        like = markov.state.weight
        token = markov.norm(embeddings.to(like))
        return MarkovTables(
            like.detach(),
            markov.state.bias.detach(),
            torch.cat(
                [
                    markov.token(token),
                    1 + markov.gate(token),
                    (head.to(like) @ markov.out.weight) * scale,
                ],
                dim=1,
            ),
        )

    def shifts(self, hidden: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """What each candidate's logit gains by each candidate before it.

        Args:
            hidden: [..., L, H] normed rows of blocks.
            columns: [..., L, K] candidates of the rows.

        Returns:
            [..., L − 1, K, K] for the second row and on: candidate before, candidate.
        """
        token, gate, out = self.rows[columns].chunk(3, dim=-1)
        state = F.linear(hidden[..., 1:, :].to(self.state), self.state, self.bias)
        before = (..., slice(None, -1), slice(None), slice(None))
        mixed = F.silu(state[..., None, :] + token[before]) * gate[before]
        return mixed @ out[..., 1:, :, :].transpose(-1, -2)

    def shift(
        self, hidden: torch.Tensor, before: torch.Tensor, columns: torch.Tensor
    ) -> torch.Tensor:
        """[R, K] what each candidate's logit gains by the one token before its row.

        Args:
            hidden: [R, H] normed rows.
            before: [R] columns of the tokens before.
            columns: [R, K] candidates of the rows.
        """
        token, gate, _ = self.rows[before].chunk(3, dim=-1)
        state = F.linear(hidden.to(self.state), self.state, self.bias)
        mixed = F.silu(state + token) * gate
        out = self.rows[columns].chunk(3, dim=-1)[2]
        return (out @ mixed[..., None])[..., 0]


def conditional(log_probs: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """[R, K, K'] log-probabilities of the candidates after each token before.

    Tokens that are no candidates keep their share before normalisation.

    Args:
        log_probs: [R, K'] of the candidates by the row alone; float64.
        shifts: [R, K, K'].
    """
    raised = log_probs[:, None] + shifts.to(log_probs)
    others = (1 - log_probs.exp().sum(dim=-1)).clamp_min(1e-12).log()
    total = torch.logaddexp(raised.logsumexp(dim=-1), others[:, None])
    return (raised - total[..., None]).clamp_max(0.0)
