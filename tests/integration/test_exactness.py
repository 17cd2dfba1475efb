"""The crown: every drafter, policy and family gives the target's own output, in float64.

Greedy output equals the engine's autoregressive output and transformers' ``generate``; seeded
output equals the engine's autoregressive output. The suite proves that it is not vacuous: the
oracle reaches deep and non-contiguous paths, and breaking a mask, a position, a window or a commit
on purpose makes it fail.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from draftwood.ahead.channel import InThread
from draftwood.ahead.drafter import AheadDrafter
from draftwood.ahead.planner import AheadOptions
from draftwood.draft.autoregressive import AutoregressiveDrafter
from draftwood.draft.base import Drafter, NullDrafter
from draftwood.draft.blend import BlendDrafter
from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.draft.independent import IndependentDrafter
from draftwood.draft.lookup import LookupDrafter
from draftwood.engine import Engine
from draftwood.records import CycleRecord, Output
from draftwood.sampling import SamplingParams
from draftwood.target import attention, cache
from draftwood.target.model import Target
from draftwood.train.grow import with_markov
from draftwood.tree.budget import BudgetPolicy, Chain, Fixed, Off, parse_budget
from draftwood.tree.tree import DraftTree
from oracle import NoisyOracleDrafter
from tiny import FAMILIES, tiny_model
from tiny_drafter import tiny_draft_network, tiny_independent_network

VOCAB = 97
NUM_NEW = 28
MIN_MARGIN = 1e-4  # between the two best scores of any greedy reference step
PROMPTS = [
    [5, 6, 7, 8, 5, 6, 7, 9, 5, 6],
    [9, 8, 7, 20, 31, 4, 4, 4, 4, 60, 61, 62, 63],
    [3],
]

POLICIES: dict[str, Callable[[], BudgetPolicy]] = {
    "off": Off,
    "chain": Chain,
    "3": lambda: Fixed(3),
    "32": lambda: Fixed(32),
    "auto": lambda: parse_budget("auto"),
}
SETTINGS = {
    "greedy": SamplingParams(max_new_tokens=NUM_NEW),
    "penalised": SamplingParams(
        max_new_tokens=NUM_NEW, repetition_penalty=1.3, frequency_penalty=0.3, min_new_tokens=5
    ),
    "sampled": SamplingParams(max_new_tokens=NUM_NEW, temperature=1.0, seed=3),
    "truncated": SamplingParams(
        max_new_tokens=NUM_NEW, temperature=2.0, top_p=0.9, top_k=20, presence_penalty=0.5, seed=4
    ),
}


@functools.cache
def target_of(family: str) -> Target:
    return Target(tiny_model(family, vocab=VOCAB), probe=False)


@functools.cache
def reference(family: str, setting: str) -> list[list[int]]:
    """The engine's autoregressive output, one prompt at a time."""
    outputs = [Engine(target_of(family)).generate([p], SETTINGS[setting])[0] for p in PROMPTS]
    return [output.token_ids for output in outputs]


def drafter_of(name: str, family: str, setting: str) -> Drafter:
    target = target_of(family)
    if name.startswith("ahead "):
        inner = InThread.of(drafter_of(name.removeprefix("ahead "), family, setting))
        ahead = AheadDrafter(inner, AheadOptions(num_branches=6), vocab_size=VOCAB)
        ahead.wait_ready()
        return ahead
    if name == "oracle":
        future = dict(zip(map(tuple, PROMPTS), reference(family, setting), strict=True))
        return NoisyOracleDrafter(future)
    if name == "block_diffusion":
        return BlockDiffusionDrafter(tiny_draft_network(target), target)
    if name == "markov":
        network = with_markov(tiny_draft_network(target), 6).to(target.dtype)
        assert network.markov is not None
        torch.nn.init.normal_(network.markov.out.weight, generator=torch.Generator().manual_seed(1))
        return BlockDiffusionDrafter(network, target)
    if name == "blend":
        model = BlockDiffusionDrafter(tiny_draft_network(target), target)
        return BlendDrafter(model, LookupDrafter())
    if name in ("independent", "markov independent"):
        rank = 6 if name == "markov independent" else 0
        return IndependentDrafter(tiny_independent_network(target, markov_rank=rank), target)
    if name == "autoregressive":
        small = Target(tiny_model("llama", vocab=VOCAB, seed=1), probe=False)
        return AutoregressiveDrafter(small, target)
    return LookupDrafter() if name == "lookup" else NullDrafter()


def run(
    family: str,
    drafter: str,
    policy: str,
    setting: str,
    *,
    on_cycle: Callable[[CycleRecord], None] | None = None,
) -> list[Output]:
    """All prompts in one batch, entering it in prefill chunks of different numbers of cycles."""
    engine = Engine(
        target_of(family),
        drafter_of(drafter, family, setting),
        POLICIES[policy](),
        prefill_chunk_len=5,
        on_cycle=on_cycle,
    )
    return engine.generate(PROMPTS, SETTINGS[setting])


def tokens(outputs: Sequence[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_autoregressive_decoding_equals_transformers(family: str) -> None:
    model = target_of(family).model
    for prompt, ours in zip(PROMPTS, reference(family, "greedy"), strict=True):
        theirs = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        assert theirs.sequences[0, len(prompt) :].tolist() == ours
        best = torch.cat(theirs.logits).topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > MIN_MARGIN


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "drafter",
    [
        "none",
        "lookup",
        "oracle",
        "block_diffusion",
        "markov",
        "autoregressive",
        "independent",
        "markov independent",
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_the_targets_own(family: str, drafter: str, policy: str, setting: str) -> None:
    check(family, drafter, policy, setting)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("policy", POLICIES)
def test_merged_drafters_change_nothing(policy: str, setting: str) -> None:
    check("mistral", "blend", policy, setting)


# Deep accepted paths on a family with sliding windows; a packed pass over branches on all.
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("drafter", "family"),
    [
        ("ahead oracle", "mistral"),
        *(("ahead independent", family) for family in FAMILIES),
        ("ahead markov independent", "qwen3"),
    ],
)
def test_drafting_ahead_changes_nothing(
    drafter: str, family: str, policy: str, setting: str
) -> None:
    outputs = check(family, drafter, policy, setting)
    cycles = [cycle.ahead for output in outputs for cycle in output.cycles if cycle.ahead]
    assert (len(cycles) > 0) == (policy != "off")
    assert all(cycle.source != "standby" for cycle in cycles)


def check(family: str, drafter: str, policy: str, setting: str) -> list[Output]:
    """The output is the reference, and the counts of the cycles are possible."""
    outputs = run(family, drafter, policy, setting)
    assert tokens(outputs) == reference(family, setting)
    for output in outputs:
        assert sum(cycle.num_committed for cycle in output.cycles) == NUM_NEW
        assert all(1 <= c.num_committed <= c.num_accepted + 1 for c in output.cycles)
        assert all(c.num_accepted <= c.num_drafted for c in output.cycles)
    return outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_the_suite_is_not_vacuous(family: str) -> None:
    """The oracle gets deep, and its accepted paths have holes, in ≥ 30 % of the cycles."""
    depths: list[int] = []
    scattered: list[bool] = []

    def watch(record: CycleRecord) -> None:
        for index in record.decoding:
            path = record.verdicts[index].path
            depths.append(len(path) - 1)
            scattered.append(bool(np.any(np.diff(path) != 1)))

    for setting in SETTINGS:
        run(family, "oracle", "32", setting, on_cycle=watch)
    assert np.mean(np.array(depths) >= 4) >= 0.3
    assert np.mean(scattered) >= 0.3


def _everything_visible(tree: DraftTree, index: int) -> np.ndarray:
    start, end = tree.span(index)
    return np.tri(end - start, dtype=np.bool_)


def _break_mask(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DraftTree, "ancestor_mask", _everything_visible)


def _break_positions(patch: pytest.MonkeyPatch) -> None:
    real = attention.PackedPass.__init__

    def by_index(self: attention.PackedPass, tree: DraftTree, caches: Sequence) -> None:
        real(self, tree, caches)
        lengths = np.array([c.length for c in caches])
        self.positions = lengths[tree.seq] + np.arange(len(tree)) - tree.starts[:-1][tree.seq]

    patch.setattr(attention.PackedPass, "__init__", by_index)


def _break_window(patch: pytest.MonkeyPatch) -> None:
    """Fault 12: windows measured in rows of the tree instead of positions."""
    real = attention.PackedPass.visible

    def by_row(
        self: attention.PackedPass, index: int, window: int | None, first: int
    ) -> np.ndarray:
        seen = real(self, index, None, first)
        if window is not None:
            rows = self.caches[index].length + np.arange(seen.shape[0])
            seen = seen & (rows[:, None] - np.arange(first, first + seen.shape[1]) < window)
        return seen

    patch.setattr(attention.PackedPass, "visible", by_row)


def _break_commit(patch: pytest.MonkeyPatch) -> None:
    real = cache.KVCache.commit
    patch.setattr(cache.KVCache, "commit", lambda self, rows: real(self, np.arange(len(rows))))


def _break_rows_of_a_batch(patch: pytest.MonkeyPatch) -> None:
    """Fault 11: the verdicts of two sequences share one axis."""
    real = Target.logits
    patch.setattr(Target, "logits", lambda self, hidden: real(self, hidden.flip(0)))


BREAKS = {
    "mask": _break_mask,
    "positions": _break_positions,
    "window": _break_window,
    "commit": _break_commit,
    "rows": _break_rows_of_a_batch,
}


@pytest.fixture
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    reference("mistral", "greedy")  # made before anything is broken
    BREAKS[request.param](monkeypatch)


@pytest.mark.parametrize("broken", BREAKS, indirect=True)
def test_breaking_the_machinery_on_purpose_is_noticed(broken: None) -> None:
    assert tokens(run("mistral", "oracle", "32", "greedy")) != reference("mistral", "greedy")
