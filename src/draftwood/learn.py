"""What a cycle leaves behind: statistics, times for the latency model, lessons for the drafter."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.draft.surrogate import Surrogate
from draftwood.records import CycleRecord, CycleStats
from draftwood.sequence import SequenceState
from draftwood.tree.budget import BudgetPolicy
from draftwood.tree.latency import LatencyModel


def file_cycle(seqs: Sequence[SequenceState], record: CycleRecord) -> None:
    """Append the cycle's statistics to its decoding sequences; the others prefilled."""
    phis = record.scored.phi()
    rows = {i: row for row, i in enumerate(record.decoding)}
    for i, seq in enumerate(seqs):
        if i not in rows:
            seq.prefill_s += record.seconds.total_s
            continue
        row, verdict = rows[i], record.verdicts[i]
        budget = int(record.budgets[row])
        stats = CycleStats(
            num_drafted=budget,
            num_accepted=len(verdict.path) - 1,
            num_committed=record.num_committed[i],
            phi=float(phis[row, budget]),
            context_len=record.context_lens[i],
            num_seqs=len(seqs),
            seconds=record.seconds,
            ahead=record.ahead[row],
        )
        seq.cycles.append(stats)


def refit(latency: LatencyModel, record: CycleRecord, *, on_cpu: bool) -> None:
    """Show the latency model a cycle in which all sequences decoded.

    Args:
        on_cpu: the head ran once per token drawn, not with the pass on all rows.
    """
    seconds, num_seqs = record.seconds, len(record.decoding)
    per_token_s = seconds.walk_s if on_cpu else 0.0
    latency.observe(
        width=len(record.tree),
        context_len=sum(record.context_lens) / num_seqs,
        num_seqs=num_seqs,
        verify_s=seconds.verify_s + seconds.walk_s - per_token_s,
        draft_s=seconds.draft_s if record.drafted else None,
        other_s=seconds.commit_s + seconds.other_s,
        walk_s=per_token_s,
        num_tokens=sum(len(verdict.picks) for verdict in record.verdicts),
    )


def teach(surrogate: Surrogate | None, policy: BudgetPolicy, record: CycleRecord) -> None:
    """Show the surrogate what the target drew, and the policy which nodes it accepted."""
    verdicts = [record.verdicts[i] for i in record.decoding]
    if surrogate is not None:
        surrogate.learn([[pick.token_id for pick in verdict.picks] for verdict in verdicts])
    accepted = [
        (verdict.path[1:] - record.tree.span(i)[0] - 1).tolist()
        for i, verdict in zip(record.decoding, verdicts, strict=True)
    ]
    policy.observe(record.scored, record.budgets, accepted)
