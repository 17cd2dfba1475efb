"""Two processes (accelerate, gloo) train exactly like one that accumulates two parts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftwood.train.state import latest_checkpoint, load_checkpoint

UNIT = Path(__file__).parents[1] / "unit"
sys.path.insert(0, str(UNIT))
pytest.importorskip("accelerate")

SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {unit!r})
import torch
torch.set_num_threads(1)
from accelerate import Accelerator
from test_network import tiny_network
from test_trainer import Listed, responses
from test_data_parallel import CONFIG
from draftwood.train.trainer import Trainer
network = tiny_network(torch.float32)
network.d2t.copy_(torch.arange(40) + 10)
accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2
run = Trainer(network, Listed(responses()), lambda: responses(2), Path({folder!r}), CONFIG,
              accelerator)
run.run()
"""


def _config() -> object:
    import test_trainer

    return replace(test_trainer.CONFIG, max_steps=2, ema_decay=0.0, accumulate=1)


CONFIG = _config()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_processes_equal_accumulation(tmp_path: Path) -> None:
    from test_trainer import trainer

    script = tmp_path / "run.py"
    script.write_text(SCRIPT.format(unit=str(UNIT), folder=str(tmp_path / "two")))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(_free_port()), str(script)]
    paths = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    alone = trainer(tmp_path / "one", replace(CONFIG, accumulate=2))  # type: ignore[type-var]
    alone.run()
    file = latest_checkpoint(tmp_path / "two")
    assert file is not None
    together = load_checkpoint(file)
    assert together["progress"]["step"] == alone.progress.step == 2
    assert together["progress"]["cursor"] == alone.progress.cursor
    for name, value in alone.network.state_dict().items():
        torch.testing.assert_close(together["network"][name], value, atol=1e-5, rtol=1e-4)
