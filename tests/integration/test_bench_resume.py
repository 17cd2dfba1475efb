"""A benchmark that is killed at random moments ends with the results of one that was not."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from draftwood.bench.store import FILE, read_lines
from draftwood.cli.app import app
from tiny_folder import save_tiny_folder

pytestmark = pytest.mark.timeout(1800)
SRC = Path(__file__).parents[2] / "src"
PATIENCE_S = 400


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    folder = save_tiny_folder(tmp_path / "tiny")
    data = tmp_path / "mine.jsonl"
    rows = [{"turns": ["abcabcabcabc", "more abcabc"]}, {"turns": ["xyz xyz"]}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    work = ["--data", str(data), "-n", "10", "-m", "ar,chain,tree:4", "-T", "0,1"]
    return ["bench", "--target", str(folder), "--drafter", "lookup", *work]


def outcome(folder: Path) -> dict[str, Any]:
    """What the lines say besides seconds."""
    found: dict[str, Any] = {}
    for line in read_lines(folder / FILE):
        if line["kind"] == "record":
            assert ("record", line["key"]) not in found, "measured twice"
            sequences = [(s["token_ids"], s["bursts"]) for s in line["sequences"]]
            found["record", line["key"]] = sequences
        elif line["kind"] == "check":
            found["check", line["key"]] = [one["found"] for one in line["findings"]]
    return found


def start(command: list[str], out: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "draftwood", *command, "--out", str(out)],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def num_lines(folder: Path) -> int:
    path = folder / FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_killed_at_random_moments_and_resumed(command: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "whole")])
    assert result.exit_code == 0, result.output
    whole = outcome(tmp_path / "whole")
    assert len([key for kind, key in whole if kind == "record"]) == 18
    dice, out = random.Random(0), tmp_path / "killed"
    for _ in range(2):
        enough = num_lines(out) + dice.randint(2, 8)
        process = start(command, out)
        deadline = time.monotonic() + PATIENCE_S
        while num_lines(out) < enough and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(dice.random() * 0.02)
        process.kill()
        process.wait()
    assert 0 < len(outcome(out)) < len(whole), "it was killed too late to tell"
    last = CliRunner().invoke(app, [*command, "--out", str(out)])
    assert last.exit_code == 0, last.output
    assert outcome(out) == whole
    assert [line["run"] for line in read_lines(out / FILE) if line["kind"] == "run"] == [0, 1, 2]


def test_other_settings_go_elsewhere(command: list[str], tmp_path: Path) -> None:
    small = [*command, "-p", "1", "--max-turns", "1"]
    assert CliRunner().invoke(app, [*small, "--out", str(tmp_path / "a")]).exit_code == 0
    result = CliRunner().invoke(app, [*small, "-n", "11", "--out", str(tmp_path / "a")])
    assert result.exit_code == 1
    assert "max_new_tokens 10, now it is 11" in " ".join(result.stderr.split())
    run = read_lines(tmp_path / "a" / FILE)[0]
    assert run["settings"]["target_sha256"]
    assert {"command", "started", "versions", "commit", "hardware"} <= set(run)
