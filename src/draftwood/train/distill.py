"""Recovery after pruning (D3D): distillation from the unpruned drafter, corrected by the text.

The teacher's distribution q is moved towards the true token y just far enough that y leads:
q̃ = (1 − η) q + η e_y with the smallest η ∈ [0, 1] for which q̃(y) ≥ q̃(v) + margin for all v ≠ y.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from draftwood.draft.independent_network import IndependentNetwork
from draftwood.train.anchors import BlockBatch
from draftwood.train.joint import JointObjective, next_tokens
from draftwood.train.loss import LossConfig
from draftwood.train.objective import HeadSample


def smallest_share(
    label_prob: torch.Tensor, best_other: torch.Tensor, margin: float
) -> torch.Tensor:
    """η, in closed form.

    (1 − η) q_y + η ≥ (1 − η) m + margin with m the largest other probability is linear in η:
    η ≥ (m + margin − q_y) / (1 + m − q_y); margin ≤ 1 keeps it at most 1.

    Args:
        label_prob: q(y), any shape.
        best_other: m, same shape.
        margin: in [0, 1].
    """
    wanted = best_other - label_prob
    return ((wanted + margin) / (1.0 + wanted).clamp_min(1e-12)).clamp(0.0, 1.0)


def distillation_loss(
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor,
    margin: float,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross-entropy of the student against q̃ in every row.

    Args:
        student, teacher: [..., c] scores of the same columns.
        labels: [...] column of the true token.
        offsets: [c] log of how many columns each stands for, where they are a sample.
    """
    weight = torch.zeros(student.shape[-1], device=student.device) if offsets is None else offsets
    label = labels[..., None]
    with torch.no_grad():
        log_q = teacher - (teacher + weight).logsumexp(-1, keepdim=True)
        label_prob = log_q.gather(-1, label).exp()
        best_other = log_q.scatter(-1, label, float("-inf")).amax(-1, keepdim=True).exp()
        share = smallest_share(label_prob, best_other, margin)
        mass = (log_q + weight).exp()
    log_p = student - (student + weight).logsumexp(-1, keepdim=True)
    mixed = (1 - share) * (mass * log_p).sum(-1, keepdim=True) + share * log_p.gather(-1, label)
    return -mixed[..., 0]


class DistillObjective(JointObjective):
    """L_diff + λ · L_AR with the fixed teacher's corrected distribution as the label of every row.

    Args:
        network: the student.
        teacher: the unpruned drafter; never trained.
        config: position weights and λ.
        margin: by how much the true token must lead.

    Raises:
        ValueError: a margin outside [0, 1].
    """

    def __init__(
        self,
        network: IndependentNetwork,
        teacher: IndependentNetwork,
        config: LossConfig,
        margin: float = 0.1,
    ) -> None:
        if not 0 <= margin <= 1:
            raise ValueError(f"margin must be in [0, 1], got {margin}; 0.1 is a good start")
        super().__init__(network, config)
        self.teacher = teacher.requires_grad_(False).eval()
        self.margin = margin

    def forward(
        self, batch: BlockBatch, head: HeadSample | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(L, 1, correct, counted), see ``LossTerms``."""
        given = (batch.context_ids, batch.anchor_positions, batch.block_ids)
        context, hidden = self.network(*given)
        with torch.no_grad():
            teacher_context, teacher_hidden = self.teacher(*given)
        to_column = self.to_draft if head is None else head.to_column
        horizon = hidden.shape[2]
        decay = torch.exp(-torch.arange(horizon, device=hidden.device) / self.config.gamma)
        weights = decay.expand(batch.valid.shape)[batch.valid]
        labels = to_column[batch.labels[batch.valid]]
        losses, right = self._losses(hidden[batch.valid], teacher_hidden[batch.valid], labels, head)
        if self.network.markov is not None:
            after = self.network.after(hidden, batch.labels)
            with torch.no_grad():
                teacher_after = self.teacher.after(teacher_hidden, batch.labels)
            rows = after[batch.valid], teacher_after[batch.valid]
            losses = (losses + self._losses(*rows, labels, head)[0]) / 2
        total = (losses * weights).sum() / weights.sum().clamp_min(1e-6)
        if self.config.autoregressive > 0:
            next_ids, known = next_tokens(batch)
            ar, _ = self._losses(
                context[:, :-1][known], teacher_context[:, :-1][known],
                to_column[next_ids[known]], head,
            )  # fmt: skip
            total = total + self.config.autoregressive * ar.mean()
        depths = batch.valid.nonzero()[:, 2]
        correct = torch.zeros(horizon, dtype=torch.int64, device=hidden.device)
        correct.index_add_(0, depths, right.long())
        return total, torch.ones_like(total), correct, batch.valid.sum(dim=(0, 1))

    def _losses(
        self,
        hidden: torch.Tensor,
        teacher_hidden: torch.Tensor,
        labels: torch.Tensor,
        head: HeadSample | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[R] losses, and whether the student's best column is the label; hidden rows [R, H]."""
        student = _raw(self.network, hidden, head)
        with torch.no_grad():
            teacher = _raw(self.teacher, teacher_hidden, head)
        offsets = None if head is None else head.offsets
        losses = distillation_loss(student, teacher, labels, self.margin, offsets)
        return losses, student.detach().argmax(-1) == labels


def _raw(
    network: IndependentNetwork, hidden: torch.Tensor, head: HeadSample | None
) -> torch.Tensor:
    """[R, c] scores, in float32 at least, without the weights of sampled columns."""
    if head is None:
        scores = network.logits(hidden)
    else:
        weight = network.head_weight()[head.columns]
        scores = F.linear(hidden, weight.to(hidden.device, hidden.dtype))
    return scores if scores.dtype == torch.float64 else scores.float()
