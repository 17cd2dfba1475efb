"""A headless browser for tests of pages, and what it must not have done."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

PATIENCE_S = 120  # for anything: machines that run tests may be very busy
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1300,900",
)  # fmt: skip


def start_browser(profile: Path) -> Any:
    """Chromium that logs its console and network; skips the test where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("needs chromium and chromedriver (apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(executable_path=chromedriver)
    )
    driver.set_script_timeout(PATIENCE_S)
    driver.set_page_load_timeout(PATIENCE_S)
    driver.get("about:blank")
    forget(driver)
    return driver


def forget(driver: Any) -> None:
    """Empty the logs: what the browser did so far is not the next page's doing."""
    for log in ("browser", "performance"):
        driver.get_log(log)


def assert_quiet(driver: Any, page: Path) -> None:
    """Nothing in the console, and nothing requested but the page itself."""
    assert driver.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    requested = {
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    }
    assert requested - {"data:,"} == {page.as_uri()}
