"""Calibrated scores: what they learn, and what they must never break."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.draft import surrogate_store
from draftwood.draft.surrogate import KINDS, REGIMES, Surrogate, stated
from draftwood.draft.surrogate_store import stored_surrogate, surrogate_key, surrogate_path
from draftwood.engine import Engine
from draftwood.records import CycleRecord
from draftwood.sampling import SamplingParams
from draftwood.target.model import Target
from draftwood.tree.budget import Fixed
from draftwood.tree.enumerate import top_prefixes
from draftwood.tree.tree import ScoredPrefixes
from oracle import NoisyOracleDrafter
from tiny import tiny_model

HORIZON = 6


def blocks(rng: np.random.Generator, num_seqs: int = 1, vocab: int = 12) -> np.ndarray:
    return rng.dirichlet(np.full(vocab, 0.15), (num_seqs, HORIZON)).clip(1e-9)


def prefixes(rng: np.random.Generator, num_seqs: int = 1, max_nodes: int = 40) -> ScoredPrefixes:
    return top_prefixes(np.log(blocks(rng, num_seqs)), max_nodes)


def paths_of(scored: ScoredPrefixes, row: int, count: int) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for node in range(count):
        parent = int(scored.parents[row, node])
        assert parent < node
        above = paths[parent] if parent >= 0 else ()
        paths.append((*above, int(scored.token_ids[row, node])))
        assert len(paths[-1]) == scored.depths[row, node]
    assert len(set(paths)) == count
    return set(paths)


def test_a_new_one_changes_nothing() -> None:
    scored = prefixes(np.random.default_rng(0), 3)
    found = Surrogate().calibrated(scored, [False, True, False])
    np.testing.assert_allclose(found.log_probs, scored.log_probs, atol=1e-6)
    np.testing.assert_array_equal(np.sort(found.token_ids), np.sort(scored.token_ids))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    a=st.floats(0.1, 3),
    b=st.floats(-3, 3),
    a_sibling=st.floats(0.1, 3),
    b_sibling=st.floats(-3, 3),
    trend=st.floats(-0.5, 0.5),
)
def test_any_weights_keep_trees_and_order(
    seed: int, a: float, b: float, a_sibling: float, b_sibling: float, trend: float
) -> None:
    surrogate = Surrogate()
    state = surrogate.state()
    state["greedy"]["spine"]["mean"] = [a, trend, b, trend]
    state["greedy"]["sibling"]["mean"] = [a_sibling, -trend, b_sibling, trend]
    surrogate.restore(state)
    scored = prefixes(np.random.default_rng(seed), 2)
    found = surrogate.calibrated(scored, [False, False])
    for row, count in enumerate(scored.counts.tolist()):
        assert found.counts[row] == count
        assert paths_of(found, row, count) == paths_of(scored, row, count)
        scores = found.log_probs[row, :count]
        assert (np.diff(scores) <= 1e-12).all()
        assert (scores <= 1e-12).all()
    np.testing.assert_allclose(
        np.diff(found.phi()), np.exp(found.log_probs), atol=1e-12
    )  # Φ(n) is the sum of the n best


def play(surrogate: Surrogate, cycles: int, bend, *, sampled: bool = False, seed: int = 0):
    """Drafts whose stated probabilities q come true with ``bend(q)`` of the first choice."""
    rng = np.random.default_rng(seed)
    promised, accepted = [], []
    for _ in range(cycles):
        probs = blocks(rng)
        scored = top_prefixes(np.log(probs), 40)
        found = surrogate.calibrated(scored, [sampled])
        best = probs[0].argmax(axis=1)
        true = probs[0].copy()
        first = bend(true[np.arange(HORIZON), best])
        rest = 1 - true[np.arange(HORIZON), best]
        true *= ((1 - first) / np.maximum(rest, 1e-12))[:, None]
        true[np.arange(HORIZON), best] = first
        picks = [int(rng.choice(len(row), p=row / row.sum())) for row in true]
        surrogate.learn([picks])
        promised.append(float(found.phi()[0, -1]))
        known = paths_of(found, 0, int(found.counts[0]))
        depth = next((d for d in range(HORIZON) if tuple(picks[: d + 1]) not in known), HORIZON)
        accepted.append(depth)
    return np.array(promised), np.array(accepted)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("bend", [lambda q: 0.5 * q, lambda q: q**0.4])
def test_promises_come_true_after_some_cycles(bend, sampled: bool) -> None:
    surrogate = Surrogate()
    promised, accepted = play(surrogate, 800, bend, sampled=sampled)
    late = slice(400, None)
    naive, _ = play(Surrogate(), 1, bend)
    assert promised[late].mean() == pytest.approx(accepted[late].mean(), rel=0.1)
    other = surrogate.state()["greedy" if sampled else "sampled"]
    assert other == Surrogate().state()["greedy"]  # a regime of its own
    assert len(naive) == 1


def test_a_drafter_without_faults_is_believed() -> None:
    surrogate = Surrogate()
    play(surrogate, 600, lambda q: q)
    for depth in (1, 4):
        a, b = surrogate.weights(0, 0, depth)
        assert a == pytest.approx(1.0, abs=0.2)
        assert b == pytest.approx(0.0, abs=0.3)


def test_siblings_and_spine_learn_apart() -> None:
    surrogate = Surrogate()
    play(surrogate, 600, lambda q: np.minimum(1.5 * q, 0.98))
    q = 0.4
    logit = np.log(q / (1 - q))

    def said(kind: int) -> float:
        a, b = surrogate.weights(REGIMES.index("greedy"), kind, 1)
        return float(1 / (1 + np.exp(-(a * logit + b))))

    assert said(KINDS.index("spine")) > 0.5
    assert said(KINDS.index("sibling")) < 0.35


def test_stated_features() -> None:
    probs = np.array([[[0.6, 0.3, 0.1], [0.9, 0.05, 0.05]]])
    scored = top_prefixes(np.log(probs), 4)
    features, is_spine = stated(scored)
    q = 1 / (1 + np.exp(-features[:, 0]))
    np.testing.assert_allclose(q, [0.6, 0.9, 0.3, 0.9], rtol=1e-9)
    np.testing.assert_array_equal(is_spine, [True, True, False, True])
    np.testing.assert_array_equal(features[:, 3], [0, 1, 0, 1])


def test_nothing_proposed_is_fine() -> None:
    surrogate = Surrogate()
    scored = ScoredPrefixes.stack([ScoredPrefixes.empty(1), prefixes(np.random.default_rng(1))])
    assert surrogate.calibrated(scored, [False, False]).counts.tolist() == [0, 40]
    surrogate.learn([[3], []])
    assert len(surrogate.calibrated(ScoredPrefixes.empty(0), [])) == 0


# ---- kept on disk -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama"))


def test_kept_from_run_to_run_per_drafter(target: Target) -> None:
    first = stored_surrogate("lookup", target)
    play(first, 70, lambda q: 0.3 * q)
    first.store()
    again = stored_surrogate("lookup", target)
    assert again.state() == first.state() != Surrogate().state()
    assert stored_surrogate("another", target).state() == Surrogate().state()
    path = surrogate_path(surrogate_key("lookup", target))
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"format": 1}', "\udcff",
     '{"format": 1, "key": KEY, "state": {"greedy": {}}}',
     '{"format": 99, "key": KEY, "state": STATE}', '{"format": 1, "key": KEY, "state": NAN}'],
)  # fmt: skip
def test_invalid_files_are_ignored(target: Target, content: str) -> None:
    key = surrogate_key("lookup", target)
    path = surrogate_path(key)
    state = Surrogate().state()
    state["greedy"]["spine"]["mean"][0] = 2.0
    nan = json.loads(json.dumps(state))
    nan["sampled"]["sibling"]["precision"][1][1] = float("nan")
    content = content.replace("KEY", json.dumps(key)).replace("STATE", json.dumps(state))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.replace("NAN", json.dumps(nan)).encode("utf-8", "surrogateescape"))
    assert stored_surrogate("lookup", target).state() == Surrogate().state()


@pytest.mark.parametrize("name", ["FOLDER", "FOLDER+lookup", "shipped", "auto"])
def test_a_changed_checkpoint_is_another_drafter(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("draftwood.draft.load.shipped_folder", lambda _: tmp_path)
    name = name.replace("FOLDER", str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"one")
    before = surrogate_key(name, target)
    assert surrogate_key(name, target) == before
    (tmp_path / "model.safetensors").write_bytes(b"other")
    assert surrogate_key(name, target) != before


def test_a_cache_that_cannot_be_written_is_no_error(target: Target, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr(surrogate_store, "write_text", refuse)
    surrogate = stored_surrogate("lookup", target)
    play(surrogate, 2, lambda q: q)
    surrogate.store()


# ---- in the loop --------------------------------------------------------------------------


def test_the_engine_learns_and_the_text_stays(target: Target) -> None:
    for temperature, seed in ((0.0, None), (1.0, 7)):
        params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=seed)
        prompts = [[5, 20, 7, 33], [60, 8, 2]]
        plain = [output.token_ids for output in Engine(target).generate(prompts, params)]
        drafter = NoisyOracleDrafter({
            tuple(p): tokens for p, tokens in zip(prompts, plain, strict=True)
        })  # fmt: skip
        records: list[CycleRecord] = []
        surrogate = Surrogate()
        engine = Engine(
            target, drafter, Fixed(6), surrogate=surrogate, on_cycle=records.append
        )  # fmt: skip
        outputs = engine.generate(prompts, params)
        assert [output.token_ids for output in outputs] == plain
        assert max(cycle.num_accepted for output in outputs for cycle in output.cycles) >= 3
        regime = REGIMES[int(temperature > 0)]
        assert surrogate.state()[regime] != Surrogate().state()[regime]
        assert {record.why for record in records if record.decoding} == {"fixed"}
