"""What the documentation says about the tests is true."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_known_fault_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\d+) \|(.*)$", text, re.MULTILINE))
    assert [int(number) for number in rows] == list(range(1, 17))
    files = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("tests/*/test_*.py")}
    for number, row in rows.items():
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert named, f"fault {number} names no test"
        for file, test in named:
            assert re.search(rf"def {test}\(", files.get(file, "")), (
                f"fault {number}: {file}::{test}"
            )
