"""The Markov head: rows of a block that know the token drafted before them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_block_diffusion import TOKENS, features, feed, same
from test_enumerate import paths

from draftwood.bench.provenance import weights_checksums
from draftwood.draft import block_ranking
from draftwood.draft.base import DraftLimits
from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.draft.checkpoint import load_draft, save_draft
from draftwood.draft.markov import conditional
from draftwood.draft.network import DraftNetwork
from draftwood.engine import Engine
from draftwood.sampling import SamplingParams
from draftwood.target.model import Target
from draftwood.train.accepted import CHAIN
from draftwood.train.evaluate import evaluate
from draftwood.train.grow import with_markov
from draftwood.train.start import checksum
from draftwood.train.target_side import ResponseRow, run_target
from draftwood.tree.budget import Chain, Fixed
from draftwood.tree.markov_first import markov_prefixes
from tiny import tiny_model
from tiny_drafter import tiny_draft_network

Logits = Callable[[torch.Tensor], torch.Tensor]

VOCAB = 61
TEXT = [token % VOCAB for token in TOKENS]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("qwen3", vocab=VOCAB), probe=False)


def plain(target: Target) -> DraftNetwork:
    network = tiny_draft_network(target)
    network.borrow(target.input_embeddings(), target.output_embeddings())
    return network


def markov(target: Target, *, std: float = 0.5) -> DraftNetwork:
    """A drafter whose Markov head matters."""
    network = with_markov(plain(target), 6).to(target.dtype).eval()
    network.borrow(target.input_embeddings(), target.output_embeddings())
    generator = torch.Generator().manual_seed(4)
    assert network.markov is not None
    with torch.no_grad():
        for weight in network.markov.parameters():
            noise = torch.empty_like(weight).normal_(generator=generator)
            weight.add_(noise * std)
    return network


def block_rows(network: DraftNetwork, target: Target, tokens: list[int]) -> torch.Tensor:
    """[L, H] by the training forward."""
    config = network.config
    rows = features(target, tokens[:-1], config.target_layer_ids)
    positions = torch.arange(len(tokens) - 1)[None]
    block = torch.full((1, 1, config.block_size), config.mask_token_id)
    block[0, 0, 0] = tokens[-1]
    kv = network.context_kv(rows[None], positions)
    at = torch.tensor([[len(tokens) - 1]])
    with torch.no_grad():
        return network(network.embed(block), at, kv, positions)[0, 0]


@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 30), st.integers(0, 10_000),
    st.sampled_from([None, 1, 2]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_prefixes_equal_brute_force(
    horizon: int, width: int, max_nodes: int, seed: int, max_width: int | None
) -> None:
    rng = np.random.default_rng(seed)
    first = np.log(rng.dirichlet(np.ones(width) * 0.5))
    later = np.log(rng.dirichlet(np.ones(width) * 0.5, size=(horizon - 1, width)))
    ids = rng.permuted(np.tile(np.arange(50), (horizon, 1)), axis=1)[:, :width]
    want = []
    for depth in range(1, horizon + 1):
        for at in itertools.product(range(width), repeat=depth):
            steps = [first, *(later[d - 1, at[d - 1]] for d in range(1, depth))]
            score = float(sum(row[i] for row, i in zip(steps, at, strict=True)))
            ranks = [int((row > row[i]).sum()) for row, i in zip(steps, at, strict=True)]
            if max_width is None or max(ranks) < max_width:
                want.append((score, tuple(int(ids[d, i]) for d, i in enumerate(at))))
    want = sorted(want, key=lambda one: -one[0])[:max_nodes]
    got = markov_prefixes(first, later, ids, max_nodes, max_width=max_width)
    found = paths(got, 0)
    assert len(found) == len(want)
    assert np.allclose(got.log_probs[0], [score for score, _ in want])
    assert set(found) == {tokens for _, tokens in want}


def test_shallow_and_impossible_prefixes() -> None:
    first, later = np.log([0.7, 0.3]), np.full((2, 2, 2), -np.inf)
    later[0, 0, 1] = 0.0
    later[0, 1, 0] = np.nan
    ids = np.array([[5, 6], [7, 8], [9, 10]])
    found = markov_prefixes(first, later, ids, 9)
    assert paths(found, 0) == [(5,), (5, 8), (6,)]
    assert paths(markov_prefixes(first, later, ids, 9, max_depth=1), 0) == [(5,), (6,)]
    assert markov_prefixes(first, later, ids, 0).counts.tolist() == [0]
    assert markov_prefixes(first, later, ids, 9, max_depth=0).counts.tolist() == [0]


def test_what_is_no_candidate_keeps_its_share() -> None:
    probs = torch.tensor([[0.5, 0.2]], dtype=torch.float64)
    shifts = torch.tensor([[[0.0, 0.0], [np.log(3.0), 0.0]]], dtype=torch.float64)
    got = conditional(probs.log(), shifts).exp()
    assert torch.allclose(got[0, 0], probs[0])
    assert torch.allclose(got[0, 1], torch.tensor([1.5, 0.2]).double() / 2.0)


def test_a_new_head_changes_nothing(target: Target) -> None:
    """Fault: a drafter that gets a head must start from what it was."""
    one, two = plain(target), with_markov(plain(target), 6).to(target.dtype)
    drafters = [BlockDiffusionDrafter(network, target) for network in (one, two)]
    scored = [
        drafter.propose([feed(drafter, target, TEXT[:20])], DraftLimits(40)) for drafter in drafters
    ]
    assert same(*scored)


def test_drafts_are_those_of_the_training_forward(target: Target) -> None:
    """Every prefix has the probability that the network gives it, token after token."""
    network = markov(target)
    drafter = BlockDiffusionDrafter(network, target)
    tokens = TEXT[:20]
    scored = drafter.propose([feed(drafter, target, tokens)], DraftLimits(64))  # 64 ≥ VOCAB
    rows = block_rows(network, target, tokens)
    changed = 0
    for path, log_prob in zip(paths(scored, 0), scored.log_probs[0], strict=True):
        known = torch.tensor([*path, *[0] * (len(rows) - len(path))])
        with torch.no_grad():
            right = network.logits(network.after(rows, known)).log_softmax(-1)
            alone = network.logits(rows).log_softmax(-1)
        want = sum(float(right[d, token]) for d, token in enumerate(path))
        assert log_prob == pytest.approx(want, abs=1e-6)
        changed += abs(want - sum(float(alone[d, t]) for d, t in enumerate(path))) > 0.05
    assert changed > 20  # the head of this test does matter


def test_the_chain_takes_the_best_next_token(target: Target) -> None:
    network = markov(target)
    drafter = BlockDiffusionDrafter(network, target)
    tokens = TEXT[:20]
    scored = drafter.propose([feed(drafter, target, tokens)], DraftLimits(7, max_width=1))
    rows = block_rows(network, target, tokens)
    path: list[int] = []
    for depth in range(7):
        known = torch.tensor([*path, *[0] * (7 - depth)])
        path.append(int(network.logits(network.after(rows, known))[depth].argmax()))
    assert scored.parents[0].tolist() == list(range(-1, 6))
    # candidates are the 16 best by the rows alone, so a surprising token ends the agreement
    best = network.logits(rows).topk(16, dim=-1).indices
    inside = [token in best[d] for d, token in enumerate(path)]
    agree = inside.index(False) if False in inside else 7
    assert agree >= 2
    assert scored.token_ids[0, :agree].tolist() == path[:agree]


@pytest.mark.parametrize("max_nodes", [1, 4, 6, 12, 60])
def test_deeper_rows_go_through_the_head_only_where_they_can_matter(
    target: Target, monkeypatch: pytest.MonkeyPatch, max_nodes: int
) -> None:
    tokens = TEXT[:20]
    found, sizes = [], []
    for first in (99, 3):
        monkeypatch.setattr(block_ranking, "_FIRST_DEPTHS", first)
        drafter = BlockDiffusionDrafter(markov(target, std=0.1), target)
        rows: list[int] = []
        logits = drafter._ranking.logits

        def watched(
            hidden: torch.Tensor, rows: list[int] = rows, logits: Logits = logits
        ) -> torch.Tensor:
            rows.append(hidden.shape[1])
            return logits(hidden)

        monkeypatch.setattr(drafter._ranking, "logits", watched)
        found.append(drafter.propose([feed(drafter, target, tokens)], DraftLimits(max_nodes)))
        sizes.append(rows)
    assert same(*found)
    depths = min(max_nodes, 7)
    assert sizes[0] == [depths]
    deep = int(found[0].depths.max()) >= 3
    assert sizes[1] == ([3, depths - 3] if deep else [min(depths, 3)])
    assert deep == (max_nodes > 6)  # both happen


def test_sequences_of_a_batch_draft_as_alone(target: Target) -> None:
    drafter = BlockDiffusionDrafter(markov(target), target)
    texts = [TEXT[start : 12 + 2 * start] for start in (0, 9)]
    contexts = [feed(drafter, target, text, seq_id=i) for i, text in enumerate(texts)]
    contexts[1] = dataclasses.replace(contexts[1], max_depth=3)
    both = drafter.propose(contexts, DraftLimits(20))
    for i, one in enumerate(contexts):
        assert same(both.row(i), drafter.propose([one], DraftLimits(20)))
    assert both.depths[1].max() == 3


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 3, "top_p": 0.9}])
@pytest.mark.parametrize("policy", [Chain(), Fixed(12)])
def test_text_is_that_of_plain_decoding(
    target: Target, policy: Chain | Fixed, params: dict[str, float]
) -> None:
    settings = SamplingParams(max_new_tokens=40, **params)  # type: ignore[arg-type]
    prompts = [[5, 6, 7, 8, 5, 6], [9, 9, 1, 3]]
    drafter = BlockDiffusionDrafter(markov(target), target)
    drafted = Engine(target, drafter, policy).generate(prompts, settings)
    again = Engine(target, None, Chain()).generate(prompts, settings)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in again]


@pytest.mark.parametrize("budget", [CHAIN, 12])
def test_offline_acceptance_is_a_replay_of_the_loop(target: Target, budget: int) -> None:
    network = markov(target, std=0.1)
    policy = Fixed(budget) if budget else Chain()
    drafter = BlockDiffusionDrafter(network, target)
    # learning moves probabilities, which a replay knows nothing of
    drafter._ranking.learn = lambda ranked, picks: None  # type: ignore[method-assign]
    (out,) = Engine(target, drafter, policy).generate(
        [[5, 6, 7, 8]], SamplingParams(max_new_tokens=60)
    )
    row = ResponseRow((5, 6, 7, 8, *out.token_ids), 4, "")
    example = run_target(target.model, row, network.config.target_layer_ids, 0)
    found = evaluate(network, [example], (budget,))["all"]
    assert abs(found.num_cycles[budget] - out.num_cycles) <= 1  # the limit may cut the last one


def test_a_folder_is_a_plain_drafter_to_others(target: Target, tmp_path: Path) -> None:
    network = markov(target)
    save_draft(tmp_path / "ours", network.config, network, dtype=torch.float64)
    config, again = load_draft(tmp_path / "ours", dtype=torch.float64)
    assert config.markov_rank == 6
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in network.state_dict().items()
    )
    # what other engines read: one file of weights that they all know
    save_draft(tmp_path / "plain", plain(target).config, plain(target), dtype=torch.float64)
    names = [{file.name for file in (tmp_path / name).iterdir()} for name in ("ours", "plain")]
    assert names[0] - names[1] == {"markov_head.st"}
    contents = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("ours", "plain")]
    assert contents[0] == contents[1]


def test_half_a_head_is_refused(target: Target, tmp_path: Path) -> None:
    network = markov(target)
    for name in ("a", "b", "c"):
        save_draft(tmp_path / name, network.config, network)
    (tmp_path / "a" / "markov_head.st").unlink()
    with pytest.raises(ValueError, match=r"missing: markov\."):
        load_draft(tmp_path / "a")
    for folder, section in (("b", None), ("c", {"kind": "dflash", "markov_rank": 0})):
        file = tmp_path / folder / "config.json"
        raw = json.loads(file.read_text())
        file.write_text(json.dumps({**raw, "draftwood": section}))
    with pytest.raises(ValueError, match=r"unknown: markov\."):
        load_draft(tmp_path / "b")
    with pytest.raises(ValueError, match="markov_rank"):
        load_draft(tmp_path / "c")
    with pytest.raises(ValueError, match="softcap"):
        dataclasses.replace(network.config, logit_softcap=3.0)
    with pytest.raises(ValueError, match="hidden size"):
        dataclasses.replace(network.config, markov_rank=10**9)


def test_another_head_is_another_drafter(target: Target, tmp_path: Path) -> None:
    """Its weights count where drafters are told apart, and it may bring nothing else."""
    for std, name in ((0.5, "a"), (0.4, "b")):
        save_draft(tmp_path / name, (network := markov(target, std=std)).config, network)
    sums = [weights_checksums(str(tmp_path / name)) for name in ("a", "b")]
    assert sums[0] != sums[1]
    assert checksum(tmp_path / "a") != checksum(tmp_path / "b")
    file = tmp_path / "a" / "markov_head.st"
    save_file({**load_file(file), "norm.weight": network.norm.weight * 9}, file)
    with pytest.raises(ValueError, match=r"norm\.weight"):
        load_draft(tmp_path / "a")
