"""draftwood: exact, several times faster decoding with block-diffusion draft trees.

The public names are imported on first use, so that ``import draftwood`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftwood.api import load as load
    from draftwood.draft.base import Drafter as Drafter
    from draftwood.engine import Engine as Engine
    from draftwood.errors import DraftwoodError as DraftwoodError
    from draftwood.hf import custom_generate as custom_generate
    from draftwood.records import CycleStats as CycleStats
    from draftwood.records import Output as Output
    from draftwood.records import StepEvent as StepEvent
    from draftwood.sampling import SamplingParams as SamplingParams

__version__ = "0.1.0"

_HOME = {
    "load": "draftwood.api",
    "Drafter": "draftwood.draft.base",
    "Engine": "draftwood.engine",
    "DraftwoodError": "draftwood.errors",
    "custom_generate": "draftwood.hf",
    "CycleStats": "draftwood.records",
    "Output": "draftwood.records",
    "StepEvent": "draftwood.records",
    "SamplingParams": "draftwood.sampling",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'draftwood' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
