"""The report's page in a real browser: quiet, offline, usable by keys, readable in the dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftwood.bench.report.build import write_report
from headless import assert_quiet, forget, start_browser
from synthetic_results import record, result_lines, run_line, write_results

pytest.importorskip("matplotlib", reason="reports need matplotlib")
pytest.importorskip("selenium", reason="selenium is not installed")
HOSTILE = "<script>window.broken=1</script><img src=x onerror=window.broken=1>&amp;\"'"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    driver = start_browser(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = result_lines()
    lines += [record("gsm8k", t, 0.0, m, concurrency=4) for t in (0, 1) for m in ("ar", "chain")]
    return write_report(write_results(tmp_path_factory.mktemp("results"), lines))


def column(browser: Any, table: int, number: int) -> list[str]:
    return list(
        browser.execute_script(
            "const body = document.querySelectorAll('table')[arguments[0]].tBodies[0];"
            "return [...body.rows].map((row) => row.cells[arguments[1]].firstChild.textContent)",
            table, number,
        )
    )  # fmt: skip


def test_it_loads_without_a_word_and_without_a_request(browser: Any, page: Path) -> None:
    forget(browser)
    browser.get(page.as_uri())
    assert "Benchmark of tiny" in browser.title
    assert len(browser.find_elements("css selector", "figure svg")) >= 12
    assert len(browser.find_elements("css selector", "table")) >= 8
    text = browser.find_element("tag name", "main").text
    assert "Qwen3-8B" in text
    assert "other hardware and other models" in text
    ids = browser.execute_script("return [...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    for link in browser.find_elements("css selector", "nav a"):
        target = link.get_attribute("href").rpartition("#")[2]
        assert browser.find_element("id", target).tag_name == "section"
    width = browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
    assert width <= 0, "the page must not scroll sideways, only its tables"
    assert_quiet(browser, page)


def test_tables_sort_by_key(browser: Any, page: Path) -> None:
    forget(browser)
    browser.get(page.as_uri())
    from selenium.webdriver.common.keys import Keys

    before = column(browser, 0, 0)
    assert before == ["gsm8k", "alpaca", "all sets"]
    button = browser.find_elements("css selector", "table button")[2]
    browser.execute_script("arguments[0].focus()", button)
    for direction in ("descending", "ascending"):
        browser.switch_to.active_element.send_keys(Keys.ENTER)
        speeds = [float(text.rstrip("×")) for text in column(browser, 0, 2)]
        assert speeds == sorted(speeds, reverse=direction == "descending")
        heading = browser.execute_script("return document.activeElement.parentElement.ariaSort")
        assert heading == direction
    browser.switch_to.active_element.send_keys(Keys.SPACE)
    assert column(browser, 0, 0) == before
    assert_quiet(browser, page)


def test_light_dark_and_paper_have_readable_charts(browser: Any, page: Path) -> None:
    forget(browser)
    browser.get(page.as_uri())
    colors = {}
    for scheme, media in (("light", ""), ("dark", ""), ("dark", "print")):
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"media": media, "features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )
        colors[scheme, media] = browser.execute_script(
            "const text = document.querySelector('figure svg text');"
            "return [getComputedStyle(document.body).backgroundColor, getComputedStyle(text).fill]"
        )
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    assert len({tuple(pair) for pair in colors.values()}) == 3
    for background, ink in colors.values():
        assert abs(brightness(background) - brightness(ink)) > 90
    assert brightness(colors["dark", "print"][0]) == 255
    assert_quiet(browser, page)


def brightness(color: str) -> float:
    parts = color[color.index("(") + 1 : -1].replace("%", "").split(",")
    return sum(float(part) for part in parts[:3]) / 3


def test_names_cannot_become_part_of_the_page(browser: Any, tmp_path: Path) -> None:
    lines = [
        run_line(target=HOSTILE, drafter=HOSTILE),
        *(record(HOSTILE, t, 0.0, m) for t in range(2) for m in ("ar", "chain", "auto")),
    ]
    page = write_report(write_results(tmp_path, lines))
    forget(browser)
    browser.get(page.as_uri())
    assert browser.execute_script("return window.broken") is None
    assert browser.find_elements("css selector", "img") == []
    assert len(browser.find_elements("css selector", "script")) == 1
    assert HOSTILE in column(browser, 0, 0)
    assert_quiet(browser, page)
