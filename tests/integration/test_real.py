"""On a real model in float32: the engine's own plain output, whatever drafts.

See ``real_suite`` for the cells. Divergences are accepted by the rule of ``bench/compare.py`` only,
and printed. About three minutes on two cores: the temperatures run side by side, a process each.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from draftwood.errors import DraftwoodError
from draftwood.target.demo import ensure_demo
from real_suite import BATCHES, BUDGETS, CELLS, NUM_NEW, NUM_PROMPTS, Report, check

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1800)]
TEMPERATURES = (0.0, 1.0)


@pytest.fixture(scope="module")
def reports() -> Iterator[dict[float, Future[Report]]]:
    try:
        ensure_demo()
    except DraftwoodError as error:
        pytest.skip(f"SmolLM2 cannot be had: {error}")
    with ProcessPoolExecutor(len(TEMPERATURES), mp_context=get_context("spawn")) as pool:
        yield {temperature: pool.submit(check, temperature) for temperature in TEMPERATURES}


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_output_is_the_targets_own(
    reports: dict[float, Future[Report]],
    temperature: float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = reports[temperature].result()
    with capsys.disabled():
        print(f"\ntemperature {temperature}: {report.tally.num_tokens} tokens compared")
        print("\n".join(report.lines))
        for name, divergence in report.tally.divergences:
            print(f"{name}: {divergence}")
    assert not report.tally.unexplained
    assert report.tally.is_exact
    assert report.tally.num_tokens >= 0.9 * sum(c.num_prompts * c.num_new for c in CELLS)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_suite_is_not_vacuous(reports: dict[float, Future[Report]], temperature: float) -> None:
    """The oracle gets deep, and its accepted paths have holes, in ≥ 30 % of the cycles."""
    report = reports[temperature].result()
    assert np.mean(np.array(report.depths) >= 4) >= 0.3
    assert np.mean(report.scattered) >= 0.3


def test_the_grid_is_complete() -> None:
    """All budgets × batch sizes with all prompts; "off" in a batch of one is the reference."""
    full = {(c.budget, c.batch) for c in CELLS if (c.num_prompts, c.num_new) == (8, 48)}
    assert (NUM_PROMPTS, NUM_NEW) == (8, 48)
    assert full | {("off", 1)} == {(budget, batch) for budget in BUDGETS for batch in BATCHES}
