"""Make the pictures of the documentation with draftwood's own commands.

    python docs/img/make.py [tree] [calibrate] [acceptance]

Needs the ``bench`` extra and, for ``tree``, selenium, chromium and chromedriver. ``calibrate`` is a
timing: run it on a quiet machine.
"""

from __future__ import annotations

import base64
import io
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROMPT = "Write a Python class Point with methods to add, subtract and scale."
WINDOW = (1120, 900)
CYCLES = 6  # how often "next cycle" is pressed
# Text and tree: what is above and below them has timings, which nobody should take for results.
CLIP = """
const columns = document.querySelector(".columns").getBoundingClientRect();
const tree = document.querySelector(".card.tree").getBoundingClientRect();
return {x: 0, y: columns.top + scrollY - 12, width: innerWidth, scale: 1,
        height: tree.bottom - columns.top + 20};
"""


def draftwood(*arguments: object) -> None:
    """Run the command line in this environment."""
    subprocess.run([sys.executable, "-m", "draftwood", *map(str, arguments)], check=True)


def tree(folder: Path) -> None:
    """The viewer's page at one cycle, light and dark."""
    trace, page = folder / "trace.jsonl", folder / "trace.html"
    draftwood("generate", PROMPT, "--budget", 16, "--max-new-tokens", 96, "--trace", trace)
    draftwood("view", trace, "--output", page)
    for scheme in ("light", "dark"):
        shrink(screenshot(page, scheme), HERE / f"tree-{scheme}.png")


def screenshot(page: Path, scheme: str) -> bytes:
    """A PNG of the page in a colour scheme."""
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in ("--headless", "--no-sandbox", "--disable-gpu"):
        options.add_argument(flag)
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        metrics = {"width": WINDOW[0], "height": WINDOW[1], "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        driver.get(page.as_uri())
        body = driver.find_element(By.TAG_NAME, "body")
        for _ in range(CYCLES):
            body.send_keys(Keys.ARROW_RIGHT)
        time.sleep(0.5)  # the page draws in animation frames
        shot = {"clip": driver.execute_script(CLIP), "captureBeyondViewport": True}
        return base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", shot)["data"])
    finally:
        driver.quit()


def shrink(png: bytes, path: Path) -> None:
    """Write a PNG with a palette: a third of the bytes, and nobody sees it."""
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    image.save(path, optimize=True)


def calibrate(folder: Path) -> None:
    """Milliseconds of a target pass by rows."""
    draftwood("calibrate", "--png", folder / "calibrate.svg")
    on_white(folder / "calibrate.svg")


def acceptance(folder: Path) -> None:
    """Tokens committed per cycle, chain against tree."""
    prompts = ROOT / "benchmarks" / "prompts.jsonl"
    draftwood("bench", "--out", folder, "--data", prompts, "--prompts", 8, "--methods",
              "ar,chain,tree:32", "--max-new-tokens", 64)  # fmt: skip
    draftwood("report", folder)
    on_white(folder / "report" / "acceptance-T0.svg")


def on_white(svg: Path) -> None:
    """Copy a chart here, with a background: its letters are dark on any page."""
    text = svg.read_text(encoding="utf-8").replace("<svg ", '<svg style="background:#fff" ', 1)
    name = svg.name.replace("-T0", "")
    (HERE / name).write_text(
        "\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    pictures = {"tree": tree, "calibrate": calibrate, "acceptance": acceptance}
    for name in sys.argv[1:] or pictures:
        with tempfile.TemporaryDirectory() as scratch:
            pictures[name](Path(scratch))
