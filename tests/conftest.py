"""Shared test setup: one thread, and ``tests`` importable (``from tiny import tiny_model``)."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
