"""Budget policies that do not learn, the published adaptive ones, and names for policies."""

from __future__ import annotations

import numpy as np
import pytest

from draftwood.tree.budget import (
    Chain,
    CycleState,
    Fixed,
    Off,
    Online,
    is_constant,
    parse_budget,
)
from draftwood.tree.convex_greedy import ConvexGreedy, convex_fit
from draftwood.tree.enumerate import top_prefixes
from draftwood.tree.ranked import rank_nodes
from draftwood.tree.roofline import ModelShape, Roofline, fit_roofline
from draftwood.tree.tree import ScoredPrefixes


class KnownLatency:
    """A machine whose seconds are known exactly."""

    def __init__(self, curve, draft_s: float = 0.005, other_s: float = 0.001) -> None:
        self.curve, self._draft_s, self._other_s = curve, draft_s, other_s

    def verify_s(self, widths: np.ndarray, context_len: float, num_seqs: int) -> np.ndarray:
        return np.array([self.curve(int(width)) for width in widths])

    def draft_s(self, context_len: float, num_seqs: int) -> float:
        return self._draft_s

    def other_s(self) -> float:
        return self._other_s

    def observe(self, **cycle: object) -> None:
        pass


def scores(num_seqs: int = 1, seed: int = 0, max_nodes: int = 200) -> ScoredPrefixes:
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.full(50, 0.1), (num_seqs, 15))
    return top_prefixes(np.log(np.maximum(probs, 1e-12)), max_nodes)


def state(num_seqs: int = 1) -> CycleState:
    return CycleState([100] * num_seqs, 15)


def flat(width: int) -> float:
    return 0.03 + 0.0001 * width


def steep(width: int) -> float:
    return 0.03 + 0.003 * width


@pytest.mark.parametrize(
    ("given", "policy"),
    [("off", Off()), ("Chain ", Chain()), (32, Fixed(32)), ("32", Fixed(32)), (0, Fixed(0)),
     (Fixed(7), Fixed(7)), (np.int64(8), Fixed(8)), ("Convex", ConvexGreedy())],
)  # fmt: skip
def test_parse_budget(given: object, policy: object) -> None:
    assert parse_budget(given) == policy  # type: ignore[arg-type]


def test_auto_is_a_new_online_policy_each_time() -> None:
    first, second = parse_budget("auto"), parse_budget("AUTO")
    assert isinstance(first, Online)
    assert first is not second


def test_roofline_needs_a_target() -> None:
    with pytest.raises(ValueError, match=r"draftwood\.load"):
        parse_budget("roofline")
    assert parse_budget(" Roofline", {"roofline": Off}) == Off()
    assert not is_constant("roofline")


def test_constant_budgets() -> None:
    assert [is_constant(b) for b in ("off", 3, "chain", Fixed(1), "auto", "convex", Online())] == [
        True, True, True, True, False, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("given", ["", "many", "-1", -1, "1.5", 1.5, True, None, []])
def test_parse_budget_says_what_it_accepts(given: object) -> None:
    with pytest.raises(ValueError, match=r"budget must be.*got"):
        parse_budget(given)  # type: ignore[arg-type]


def test_fixed_chain_and_off() -> None:
    latency = KnownLatency(flat)
    scored = ScoredPrefixes.stack([scores(max_nodes=5), scores(max_nodes=40)])
    assert Fixed(32).limits(state(2), latency) == (32, None)
    assert Fixed(32).choose(scored, state(2), latency).tolist() == [5, 32]
    assert Chain().limits(state(2), latency) == (15, 1)
    assert Chain().choose(scored, state(2), latency).tolist() == [5, 40]
    assert Off().limits(state(2), latency)[0] == 0
    assert Off().choose(scored, state(2), latency).tolist() == [0, 0]


def test_ranked_nodes_merge_sequences_prefix_closed() -> None:
    scored = ScoredPrefixes.stack([scores(1, 1, 30), ScoredPrefixes.empty(1), scores(1, 2, 50)])
    ranked = rank_nodes(scored)
    alone = np.sort(np.exp(scored.log_probs[np.isfinite(scored.log_probs)]))[::-1]
    np.testing.assert_allclose(np.diff(ranked.phi), alone)
    for total in (0, 1, 17, 80):
        budgets = ranked.budgets(total)
        assert budgets.sum() == total
        assert (budgets <= scored.counts).all()
        phi = scored.phi()[np.arange(3), budgets].sum()
        assert phi == pytest.approx(ranked.phi[total])


def test_convex_fit() -> None:
    convex = np.array([1.0, 1.0, 1.5, 2.5, 4.0])
    np.testing.assert_allclose(convex_fit(convex), convex)
    found = convex_fit(np.array([1.0, 2.0, 2.1, 1.9, 5.0, 5.5, 5.4]))
    steps = np.diff(found)
    assert (steps >= 0).all()
    assert (np.diff(steps) >= -1e-12).all()
    np.testing.assert_allclose(convex_fit(np.array([3.0])), [3.0])


@pytest.mark.parametrize("curve", [flat, steep])
@pytest.mark.parametrize("num_seqs", [1, 3])
def test_convex_greedy_is_optimal_on_convex_costs(curve, num_seqs: int) -> None:
    latency = KnownLatency(curve)
    scored = scores(num_seqs)
    total = ConvexGreedy().choose(scored, state(num_seqs), latency).sum()
    phi = rank_nodes(scored).phi
    widths = num_seqs + np.arange(len(phi))
    speed = (num_seqs + phi) / (0.005 + latency.verify_s(widths, 100, num_seqs))
    assert speed[total] == pytest.approx(speed.max())


SHAPE = ModelShape(30, 576, 576, 192, 9, 1536, 49152, 4)


def test_roofline_fit_recovers_its_own_curve() -> None:
    widths = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    contexts = [64.0, 512.0] * 5
    true = [
        max(
            2e-11 * float(SHAPE.traffic_bytes(np.float64(w), c)) + 1e-3,
            4e-12 * float(SHAPE.flops(np.float64(w), c)),
        )
        for w, c in zip(widths, contexts, strict=False)
    ]
    fit = fit_roofline(SHAPE, widths, contexts[: len(widths)], true)
    found = [float(fit.seconds(np.float64(w), c)) for w, c in zip(widths, contexts, strict=False)]
    np.testing.assert_allclose(found, true, rtol=0.02)
    with pytest.raises(ValueError, match="two measured passes"):
        fit_roofline(SHAPE, [1], [1.0], [1.0])


def test_roofline_shape_counts_weights_of_a_known_model() -> None:
    # SmolLM2-135M has 134,515,008 parameters with one (tied) embedding.
    weights = float(SHAPE.flops(np.float64(1), -1.0)) / 2  # attention over nothing
    assert weights == pytest.approx(134_515_008, rel=2e-3)


def test_roofline_stops_where_nodes_cost_and_keeps_to_its_steps() -> None:
    def measured(width: int) -> float:
        return max(0.03, 0.0005 * width)

    widths = [1, 4, 16, 64, 128, 256]
    fit = fit_roofline(SHAPE, widths, [100.0] * 6, [measured(w) for w in widths])
    policy = Roofline(fit)
    total = int(policy.choose(scores(), state(), KnownLatency(measured)).sum()) + 1
    assert total % 32 == 0
    assert 32 <= total <= 96  # the ridge lies at 60 rows
    few = scores(max_nodes=4)
    assert policy.choose(few, state(), KnownLatency(measured)).tolist() == [4]
