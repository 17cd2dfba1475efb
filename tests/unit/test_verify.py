"""The walk: a tree changes how many tokens a cycle yields, never which."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from draftwood import verify
from draftwood.noise import KeyedNoise
from draftwood.sampling import Pick, Sampler, SamplingParams
from draftwood.tree.tree import NO_PARENT, DraftTree
from draftwood.verify import Verdict, row_logits, walk

VOCAB = 4
PROMPT = (1, 0)
Drafts = Callable[[Sequence[int]], list[list[int]]]


def model(tokens: Sequence[int]) -> torch.Tensor:
    """[VOCAB] logits of a little language model: a fixed random function of all tokens before."""
    return _model(tuple(tokens))


@cache
def _model(tokens: tuple[int, ...]) -> torch.Tensor:
    key = 0
    for token in tokens:
        key = key * (VOCAB + 1) + token + 1
    noise = KeyedNoise(key % 2**63, 777).gumbel(0, torch.arange(VOCAB))
    return (noise * 0.8).float()


def plant(anchor: int, paths: Sequence[Sequence[int]]) -> DraftTree:
    """The prefix tree of ``paths`` below an anchor."""
    nodes = [(), *sorted({tuple(p[:n]) for p in paths for n in range(1, len(p) + 1)}, key=len)]
    index = {node: i for i, node in enumerate(nodes)}
    return DraftTree(
        np.array([anchor, *(node[-1] for node in nodes[1:])]),
        np.array([NO_PARENT, *(index[node[:-1]] for node in nodes[1:])]),
        np.array([len(node) for node in nodes]),
        np.zeros(len(nodes), dtype=np.int64),
        np.array([0, len(nodes)]),
    )


def text_of(tree: DraftTree, node: int) -> list[int]:
    """Tokens on the way from below the anchor to a packed node."""
    path: list[int] = []
    while tree.parents[node] != NO_PARENT:
        path.append(int(tree.token_ids[node]))
        node = int(tree.parents[node])
    return path[::-1]


def logits_for(tree: DraftTree, committed: Sequence[Sequence[int]], lm=model):
    """The target: logits after each packed node, one call per depth."""

    def logits_of(nodes: np.ndarray) -> torch.Tensor:
        return torch.stack(
            [lm([*committed[tree.seq[node]], *text_of(tree, int(node))]) for node in nodes]
        )

    return logits_of


def generate(
    params: SamplingParams, drafts: Drafts, num_tokens: int, *, sampler_class=Sampler, sample=0
) -> tuple[list[int], list[Verdict]]:
    """Decode one sequence with a tree per cycle."""
    sampler = sampler_class(params, PROMPT, vocab_size=VOCAB, sample_index=sample)
    tokens, verdicts = list(PROMPT), []
    while len(tokens) - len(PROMPT) < num_tokens:
        tree = plant(tokens[-1], drafts(tokens))
        (verdict,) = verify.walk(tree, logits_for(tree, [tokens]), [sampler])
        assert verdict.error is None
        picks = [pick.token_id for pick in verdict.picks]
        assert picks[:-1] == tree.token_ids[verdict.path[1:]].tolist()
        verdicts.append(verdict)
        sampler.commit(picks)
        tokens += picks
    return tokens[len(PROMPT) :][:num_tokens], verdicts


def no_drafts(tokens: Sequence[int]) -> list[list[int]]:
    return []


def random_drafts(seed: int) -> Drafts:
    rng = np.random.default_rng(seed)

    def drafts(tokens: Sequence[int]) -> list[list[int]]:
        lens = rng.integers(0, 5, size=rng.integers(0, 6))
        return [rng.integers(0, VOCAB, size=n).tolist() for n in lens]

    return drafts


def informed_drafts(params: SamplingParams, sample: int = 0) -> Drafts:
    """Drafts that use the request's own noise: mostly right, and never allowed to matter."""
    noise = KeyedNoise(params.seed or 0, sample)
    rng = np.random.default_rng(params.seed)

    def drafts(tokens: Sequence[int]) -> list[list[int]]:
        path: list[int] = []
        for _ in range(int(rng.integers(1, 4))):
            before = [*tokens, *path]
            g = noise.gumbel(len(before) - len(PROMPT), torch.arange(VOCAB))
            path.append(int((model(before) + g).argmax()))
        siblings = [[*path[:n], (path[n] + 1) % VOCAB] for n in range(len(path))]
        return [path, *siblings]

    return drafts


STEERING = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "seed": 9, "top_p": 0.8},
    {"temperature": 1.2, "seed": 2, "repetition_penalty": 1.6, "frequency_penalty": 0.4},
    {"presence_penalty": 1.0, "bad_words": ((2,), (0, 1), (3, 3, 3))},
    {"temperature": 1.0, "seed": 3, "logit_bias": {0: 2.0}, "top_k": 2},
]


def tree_changes_nothing(settings_: dict, trees: int, **how) -> bool:
    params = SamplingParams(**settings_)
    plain, _ = generate(params, no_drafts, 12)
    return generate(params, random_drafts(trees), 12, **how)[0] == plain


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(STEERING), st.integers(0, 2**32))
def test_trees_never_change_the_tokens(settings_, trees):
    assert tree_changes_nothing(settings_, trees)


def test_right_drafts_are_followed_to_the_end():
    params = SamplingParams(temperature=1.0, seed=4)
    plain, _ = generate(params, no_drafts, 30)
    tokens, verdicts = generate(params, informed_drafts(params), 30)
    assert tokens == plain
    assert len(verdicts) < 15
    assert all(len(verdict.picks) == len(verdict.path) for verdict in verdicts)


def test_a_path_may_jump_over_siblings():
    tree = plant(9, [[0], [1], [1, 2], [1, 3], [1, 3, 0]])
    wanted = {(): 1, (1,): 3, (1, 3): 2}

    def lm(tokens: Sequence[int]) -> torch.Tensor:
        return torch.eye(VOCAB)[wanted[tuple(tokens[1:])]]

    sampler = Sampler(SamplingParams(), [9], vocab_size=VOCAB)
    (verdict,) = walk(tree, logits_for(tree, [[9]], lm), [sampler])
    assert [pick.token_id for pick in verdict.picks] == [1, 3, 2]
    assert tree.token_ids[verdict.path].tolist() == [9, 1, 3]
    assert verdict.path.tolist() != [0, 1, 2]


# ---- a batch in lock-step -----------------------------------------------------------------


def batch() -> tuple[DraftTree, list[list[int]], list[Sampler | None]]:
    """Greedy, prefill, sampled, steered, and greedy again, with different trees."""
    settings_ = [{}, None, *STEERING[1:4], {}]
    trees, committed, samplers = [], [], []
    for i, one in enumerate(settings_):
        tokens = [*PROMPT, i % VOCAB]
        if one is None:
            trees.append(DraftTree.chain([3, 1, 2]))
        else:
            trees.append(plant(tokens[-1], random_drafts(i)(tokens)))
        committed.append(tokens)
        params = SamplingParams(**one) if one is not None else None
        samplers.append(Sampler(params, tokens, vocab_size=VOCAB) if params else None)
    return DraftTree.pack(trees), committed, samplers


def test_batch_equals_one_by_one():
    tree, committed, samplers = batch()
    verdicts = walk(tree, logits_for(tree, committed), samplers)
    for s, verdict in enumerate(verdicts):
        others = [sampler if i == s else None for i, sampler in enumerate(samplers)]
        alone = walk(tree, logits_for(tree, committed), others)[s]
        assert alone.picks == verdict.picks
        assert np.array_equal(alone.path, verdict.path)


def test_prefill_chunk_is_accepted_whole_and_needs_no_logits():
    def never(nodes: np.ndarray) -> torch.Tensor:
        raise AssertionError(nodes)

    (verdict,) = walk(DraftTree.chain([3, 1, 2]), never, [None])
    assert verdict.path.tolist() == [0, 1, 2]
    assert (verdict.picks, verdict.error) == ([], None)


def test_logits_are_asked_once_per_depth_and_only_where_the_walk_goes():
    tree, committed, samplers = batch()
    asked: list[np.ndarray] = []
    target = logits_for(tree, committed)

    def spying(nodes: np.ndarray) -> torch.Tensor:
        asked.append(nodes)
        return target(nodes)

    verdicts = walk(tree, spying, samplers)
    paths = [v.path.tolist() for v, sampler in zip(verdicts, samplers, strict=True) if sampler]
    assert len(asked) == max(len(path) for path in paths)
    for depth, nodes in enumerate(asked):
        assert nodes.tolist() == [path[depth] for path in paths if len(path) > depth]


@pytest.mark.parametrize("failing", [0, 2, 3, 5])
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_a_failure_stays_in_its_sequence(failing, bad):
    tree, committed, samplers = batch()
    good = walk(tree, logits_for(tree, committed), samplers)
    target = logits_for(tree, committed)

    def failing_target(nodes: np.ndarray) -> torch.Tensor:
        rows = target(nodes)
        rows[torch.from_numpy(tree.seq[nodes] == failing)] = bad
        return rows

    verdicts = walk(tree, failing_target, samplers)
    assert verdicts[failing].error is not None
    assert verdicts[failing].picks == []
    for s, verdict in enumerate(verdicts):
        if s != failing:
            assert (verdict.picks, verdict.error) == (good[s].picks, None)


def test_picks_before_a_failure_stay_valid():
    tree = plant(9, [[1, 2]])

    def lm(tokens: Sequence[int]) -> torch.Tensor:
        return torch.eye(VOCAB)[1] if len(tokens) == 1 else torch.full((VOCAB,), torch.nan)

    sampler = Sampler(SamplingParams(), [9], vocab_size=VOCAB)
    (verdict,) = walk(tree, logits_for(tree, [[9]], lm), [sampler])
    assert verdict.picks == [Pick(1)]
    assert verdict.error is not None


def test_processors_are_called_once_per_visited_position_in_order():
    params = SamplingParams(temperature=1.0, seed=8)
    calls: list[list[int]] = []

    class Recording(Sampler):
        def __init__(self, *args, **kwargs) -> None:
            def record(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                calls.append(input_ids[0].tolist())
                return scores

            super().__init__(*args, processors=[record], **kwargs)

    tokens, verdicts = generate(params, informed_drafts(params), 20, sampler_class=Recording)
    assert any(len(verdict.path) > 2 for verdict in verdicts)
    assert calls[:20] == [[*PROMPT, *tokens[:n]] for n in range(20)]


# ---- the law ------------------------------------------------------------------------------


def enumerated_law(num_tokens: int, temperature: float) -> dict[tuple[int, ...], float]:
    law = {}
    for outcome in itertools.product(range(VOCAB), repeat=num_tokens):
        prob = 1.0
        for n, token in enumerate(outcome):
            logits = model([*PROMPT, *outcome[:n]]).double()
            prob *= float((logits / temperature).softmax(-1)[token])
        law[outcome] = prob
    return law


def law_pvalue(drafts_of: Callable[[SamplingParams], Drafts], num_samples: int, **how) -> float:
    """Chi-square of decoded texts of 3 tokens against the enumerated law."""
    law = enumerated_law(3, 0.9)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(num_samples):
        params = SamplingParams(temperature=0.9, seed=seed)
        tokens, _ = generate(params, drafts_of(params), 3, **how)
        counts[tuple(tokens)] += 1
    outcomes = sorted(law, key=lambda outcome: -law[outcome])
    expected = np.array([law[outcome] for outcome in outcomes]) * num_samples
    observed = np.array([counts[outcome] for outcome in outcomes], dtype=float)
    rare = expected < 5
    if rare.any():  # pool them: chi-square needs expected counts of a few
        expected = np.append(expected[~rare], expected[rare].sum())
        observed = np.append(observed[~rare], observed[rare].sum())
    return float(stats.chisquare(observed, expected).pvalue)


NUM_SAMPLES = 4000


@pytest.mark.parametrize("kind", ["random", "informed"])
def test_sampled_law_is_the_softmax_law(kind):
    def drafts_of(params: SamplingParams) -> Drafts:
        return random_drafts(params.seed or 0) if kind == "random" else informed_drafts(params)

    assert law_pvalue(drafts_of, NUM_SAMPLES) > 1e-4


def biased_children(tree: DraftTree, node: int, logits: torch.Tensor) -> torch.Tensor:
    """Logits in which drafted tokens are slightly likelier."""
    logits = logits.clone()
    logits[[token for parent, token in tree.edges() if parent == node]] += 0.4
    return logits


def test_law_test_rejects_a_walk_that_prefers_children(monkeypatch):
    honest = verify.walk

    def biased(tree, logits_of, samplers):
        def steered(nodes: np.ndarray) -> torch.Tensor:
            rows = logits_of(nodes)
            return torch.stack(
                [biased_children(tree, int(n), row) for n, row in zip(nodes, rows, strict=True)]
            )

        return honest(tree, steered, samplers)

    monkeypatch.setattr(verify, "walk", biased)
    assert law_pvalue(lambda params: lambda tokens: [[0, 0]], NUM_SAMPLES) < 1e-6


# ---- mutations: a wrong walk does not survive the tests above -----------------------------


def survives() -> bool:
    return all(tree_changes_nothing(one, trees) for one in STEERING for trees in range(6))


def test_the_real_walk_survives():
    assert survives()


def test_mutation_step_into_any_child(monkeypatch):
    def wrong(walker, edges: dict[tuple[int, int], int]) -> bool:
        below = [
            (token, child) for (node, token), child in edges.items() if node == walker.path[-1]
        ]
        if not below:
            return False
        token, child = below[0]
        walker.picks[-1] = Pick(token)
        walker.path.append(child)
        return True

    monkeypatch.setattr(verify, "_step", wrong)
    assert not survives()


def test_mutation_logits_of_the_parent(monkeypatch):
    honest = verify.walk

    def wrong(tree, logits_of, samplers):
        return honest(tree, lambda nodes: logits_of(np.maximum(tree.parents[nodes], 0)), samplers)

    monkeypatch.setattr(verify, "walk", wrong)
    assert not survives()


class NoiseByDepth(Sampler):
    @property
    def num_output(self) -> int:
        return 0


class BlindToPath(Sampler):
    def process(self, logits: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        return super().process(logits, [])


class SeesSiblings(Sampler):
    def process(self, logits: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        return super().process(logits, [*path, 0] if path else path)


@pytest.mark.parametrize("wrong", [NoiseByDepth, BlindToPath, SeesSiblings])
def test_mutation_of_the_sampler(monkeypatch, wrong):
    mutated = [
        tree_changes_nothing(one, trees, sampler_class=wrong)
        for one in STEERING
        for trees in range(6)
    ]
    assert not all(mutated)


# ---- the head -----------------------------------------------------------------------------


@pytest.mark.parametrize("rows_together", [1, 3, 4])
@given(parents=st.lists(st.integers(0, 30), min_size=1, max_size=30), data=st.data())
def test_head_rows_are_those_asked_for(
    rows_together: int, parents: list[int], data: st.DataObject
) -> None:
    above = [NO_PARENT] + [min(parent, index) for index, parent in enumerate(parents)]
    depths = [0]
    for parent in above[1:]:
        depths.append(depths[parent] + 1)
    size = len(above)
    seq = np.zeros(size, np.int64)
    tree = DraftTree(np.arange(size), np.array(above), np.array(depths), seq, np.array([0, size]))
    hidden = torch.arange(size, dtype=torch.float64)[:, None]
    calls: list[int] = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        calls.append(len(rows))
        return rows * torch.tensor([[1.0, 10.0]])

    logits_of = row_logits(head, hidden, tree, [0], rows_together=rows_together)
    node, visited = 0, 0
    while True:
        visited += 1
        assert logits_of(np.array([node])).tolist() == [[node, 10.0 * node]]
        below = [child for child in range(size) if above[child] == node]
        if not below:
            break
        node = data.draw(st.sampled_from(below))
    assert len(calls) <= visited
    assert max(calls) <= rows_together
    both = np.array([node, 0])
    assert logits_of(both)[:, 0].tolist() == [node, 0]


def test_the_likeliest_path_needs_one_call_of_the_head() -> None:
    tree = DraftTree.chain([5, 6, 7, 8])
    calls: list[int] = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        calls.append(len(rows))
        return rows

    logits_of = row_logits(head, torch.eye(4), tree, [0], rows_together=4)
    for node in range(4):
        logits_of(np.array([node]))
    assert calls == [4]
