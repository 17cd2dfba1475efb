"""The viewer's page in a real browser: quiet, offline, usable by keys and pointer, fast enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftwood.viewer.view import render
from headless import PATIENCE_S, assert_quiet, forget, start_browser
from synthetic_trace import trace_lines, write_trace

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

HOSTILE = (
    "<script>window.broken=1</script>", "</script><script>window.broken=1</script>", "<!--",
    "<img src=x onerror=window.broken=1>", "<b>", "&amp;", "\u202e", "\n", " tree", "é🪵",
)  # fmt: skip

Open = Callable[[list[dict[str, Any]]], Any]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    driver = start_browser(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Show a trace; afterwards the console must be empty and nothing else requested."""
    page = tmp_path / "page.html"
    forget(browser)

    def open_(lines: list[dict[str, Any]]) -> Any:
        page.write_text(render(write_trace(tmp_path / "t", lines)), encoding="utf-8")
        browser.get(page.as_uri())
        settle(browser)
        return browser

    yield open_
    assert_quiet(browser, page)


def settle(browser: Any) -> None:
    """Wait until pictures are drawn."""
    browser.execute_async_script(
        "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))"
    )


def press(browser: Any, *keys: str) -> None:
    browser.switch_to.active_element.send_keys(*keys)
    settle(browser)


def title(browser: Any) -> str:
    return browser.find_element(By.ID, "cycle-title").text


def selected(browser: Any) -> int:
    (span,) = browser.find_elements(By.CSS_SELECTOR, "#text [aria-selected=true]")
    return int(span.get_attribute("data-cycle"))


def tree_nodes(browser: Any, kind: str = "") -> int:
    return len(browser.find_elements(By.CSS_SELECTOR, f"#tree .node{kind}"))


def test_keys_move_through_the_cycles(open_page: Open) -> None:
    lines = trace_lines(40, 20)
    cycles = lines[2:]
    browser = open_page(lines)
    assert title(browser) == "Cycle 1 of 40"
    for keys, at in (
        ((Keys.ARROW_RIGHT,) * 3, 3), ((Keys.ARROW_LEFT,), 2), ((Keys.END,), 39),
        ((Keys.ARROW_RIGHT,), 39), ((Keys.PAGE_UP,), 29), ((Keys.HOME,), 0),
        ((Keys.ARROW_LEFT,), 0),
    ):  # fmt: skip
        press(browser, *keys)
        assert title(browser) == f"Cycle {at + 1} of 40"
        assert selected(browser) == at
        assert tree_nodes(browser) == len(cycles[at]["tokens"]) + 1
        assert tree_nodes(browser, ".accepted") == len(cycles[at]["path"]) - 1
        assert tree_nodes(browser, ".bonus") == 1


def test_search_finds_text_across_cycles_and_escape_leaves(open_page: Open) -> None:
    lines = trace_lines(30, 10)
    for line in lines[2:]:
        line["committed_texts"] = ["a"] * line["num_committed"]
    lines[12]["committed_texts"][-1], lines[13]["committed_texts"][0] = " Nee", "dle.* "
    lines[22]["committed_texts"][-1], lines[23]["committed_texts"][0] = " Nee", "dle.* "
    browser = open_page(lines)
    press(browser, "/")
    assert browser.switch_to.active_element.get_attribute("id") == "query"
    press(browser, *"needle.*")
    assert browser.find_element(By.ID, "found").text == "1 of 2"
    assert selected(browser) == 10
    press(browser, Keys.ENTER)
    assert selected(browser) == 20
    press(browser, Keys.ENTER)
    assert selected(browser) == 10
    press(browser, Keys.ARROW_LEFT, Keys.HOME)  # in the field, these move the caret
    assert selected(browser) == 10
    press(browser, "never")
    assert browser.find_element(By.ID, "found").text == "not found"
    press(browser, Keys.ESCAPE)
    assert browser.find_element(By.ID, "found").text == ""
    press(browser, Keys.ARROW_RIGHT)
    assert selected(browser) == 11


def test_clicks_choose_cycles_and_nodes(open_page: Open) -> None:
    browser = open_page(trace_lines(20, 12, words=(" alpha", " beta", " gamma")))
    browser.find_element(By.ID, "cycle-7").click()
    assert selected(browser) == 7
    browser.find_element(By.ID, "next").click()
    assert selected(browser) == 8
    canvas = browser.find_element(By.ID, "overview")
    place = int(canvas.size["width"] * (15.5 / 20 - 0.5))
    webdriver.ActionChains(browser).move_to_element_with_offset(canvas, place, 0).click().perform()
    settle(browser)
    assert selected(browser) == 15
    browser.find_element(By.CSS_SELECTOR, '#tree [data-node="1"]').click()
    assert "rank 1 of" in browser.find_element(By.ID, "node").text
    press(browser, Keys.ARROW_DOWN)
    assert "rank 2 of" in browser.find_element(By.ID, "node").text
    before = browser.find_element(By.CSS_SELECTOR, "#tree > g").get_attribute("transform")
    press(browser, "-")
    assert browser.find_element(By.CSS_SELECTOR, "#tree > g").get_attribute("transform") != before


def test_sequences_can_be_chosen(open_page: Open) -> None:
    lines = trace_lines(6, 8, num_seqs=3)
    browser = open_page(lines)
    choice = browser.find_element(By.ID, "sequence")
    webdriver.support.ui.Select(choice).select_by_index(2)
    settle(browser)
    text = browser.find_element(By.ID, "text").get_attribute("textContent")
    mine = [line for line in lines if line["kind"] == "cycle" and line["seq"] == 2]
    assert text == "".join("".join(line["committed_texts"]) for line in mine)


def test_what_the_model_prints_is_inert(open_page: Open) -> None:
    lines = trace_lines(30, 16, words=HOSTILE)
    lines[0]["<script>window.broken=1</script>"] = HOSTILE[0]
    lines[5]["error"] = HOSTILE[3]
    browser = open_page(lines)
    for _ in range(29):
        press(browser, Keys.ARROW_RIGHT)
    browser.find_element(By.CSS_SELECTOR, "#about summary").click()
    browser.find_element(By.CSS_SELECTOR, "#prompt summary").click()
    assert title(browser) == "Cycle 30 of 30"
    assert browser.execute_script("return window.broken") is None
    assert len(browser.find_elements(By.TAG_NAME, "script")) == 3
    assert browser.find_elements(By.CSS_SELECTOR, "img, #text b") == []
    shown = browser.find_element(By.ID, "text").get_attribute("textContent")
    assert shown == "".join("".join(line["committed_texts"]) for line in lines[2:])


def test_odd_cycles_are_shown(open_page: Open) -> None:
    """Nothing drafted, no predictions, a cut, an error, a trace that ends early."""
    lines = trace_lines(4, 10)
    plain = lines[2]
    plain.update(
        tokens=[0], parents=[-1], log_probs=[0.0], texts=["x"], path=[0], picks=[1],
        pick_texts=["y"], committed_texts=["y"], num_committed=1, phi=[0.0], budget=0,
        predicted=None, drafted=False,
    )  # fmt: skip
    lines[3].update(num_committed=0, committed_texts=[])
    lines[4].update(picks=lines[4]["picks"][:-1], error="logits are NaN")
    lines[4].update(num_committed=len(lines[4]["picks"]))
    lines[4].update(committed_texts=["z"] * lines[4]["num_committed"])
    browser = open_page(lines)
    assert "plain cycle" in browser.find_element(By.ID, "outcome").text
    press(browser, Keys.ARROW_RIGHT)
    assert tree_nodes(browser, ".cut") == len(lines[3]["path"])
    press(browser, Keys.ARROW_RIGHT)
    assert "logits are NaN" in browser.find_element(By.ID, "outcome").text
    assert tree_nodes(browser, ".bonus") == 0


def test_two_thousand_wide_cycles_stay_usable(open_page: Open) -> None:
    lines = trace_lines(2000, 256)
    assert max(line["budget"] for line in lines[2:]) == 256
    browser = open_page(lines)
    WebDriverWait(browser, PATIENCE_S).until(lambda b: title(b) == "Cycle 1 of 2,000")
    begin = browser.execute_script("return performance.now()")
    for at in range(10):
        press(browser, Keys.ARROW_RIGHT)
        assert title(browser) == f"Cycle {at + 2} of 2,000"
        assert tree_nodes(browser) == len(lines[at + 3]["tokens"]) + 1
    per_cycle_s = (browser.execute_script("return performance.now()") - begin) / 10 / 1e3
    assert per_cycle_s < 10, "switching must not grow with the number of cycles"
    press(browser, Keys.END)
    assert selected(browser) == 1999
    assert len(browser.find_elements(By.CSS_SELECTOR, "#tree > g")) == 1
