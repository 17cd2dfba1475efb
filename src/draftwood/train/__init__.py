"""Training drafters: prompts → the target's replies → a drafter → its offline acceptance.

The public names are imported on first use, so that ``import draftwood.train`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftwood.train.allocator import keep_freed_memory as keep_freed_memory
    from draftwood.train.data import DataConfig as DataConfig
    from draftwood.train.data import generate_responses as generate_responses
    from draftwood.train.evaluate import Acceptance as Acceptance
    from draftwood.train.features import FeatureStore as FeatureStore
    from draftwood.train.features import StoreSource as StoreSource
    from draftwood.train.independent import IndependentRecipe as IndependentRecipe
    from draftwood.train.independent import build_independent as build_independent
    from draftwood.train.loss import LossConfig as LossConfig
    from draftwood.train.measure import dry_run as dry_run
    from draftwood.train.measure import evaluate_drafter as evaluate_drafter
    from draftwood.train.overlap import OverlapCheck as OverlapCheck
    from draftwood.train.precision import has_fast_bfloat16 as has_fast_bfloat16
    from draftwood.train.prompts import Conversation as Conversation
    from draftwood.train.prompts import hub_prompts as hub_prompts
    from draftwood.train.prompts import interleave as interleave
    from draftwood.train.prompts import read_prompts as read_prompts
    from draftwood.train.prune import PruneConfig as PruneConfig
    from draftwood.train.prune import prune_drafter as prune_drafter
    from draftwood.train.recipe import Recipe as Recipe
    from draftwood.train.recipe import build_drafter as build_drafter
    from draftwood.train.run import DataUse as DataUse
    from draftwood.train.run import prepare as prepare
    from draftwood.train.run import train_drafter as train_drafter
    from draftwood.train.run import unused_token as unused_token
    from draftwood.train.shards import load_rows as load_rows
    from draftwood.train.start import TrainedStart as TrainedStart
    from draftwood.train.start import trained_start as trained_start
    from draftwood.train.synthesis import SynthesisConfig as SynthesisConfig
    from draftwood.train.synthesis import synthesise as synthesise
    from draftwood.train.target_side import LiveSource as LiveSource
    from draftwood.train.target_side import build_store as build_store
    from draftwood.train.train_config import TrainConfig as TrainConfig
    from draftwood.train.trainer import Trainer as Trainer

_HOME = {
    "keep_freed_memory": "allocator",
    "DataConfig": "data",
    "generate_responses": "data",
    "Acceptance": "evaluate",
    "FeatureStore": "features",
    "StoreSource": "features",
    "IndependentRecipe": "independent",
    "build_independent": "independent",
    "LossConfig": "loss",
    "dry_run": "measure",
    "evaluate_drafter": "measure",
    "OverlapCheck": "overlap",
    "has_fast_bfloat16": "precision",
    "Conversation": "prompts",
    "hub_prompts": "prompts",
    "interleave": "prompts",
    "read_prompts": "prompts",
    "PruneConfig": "prune",
    "prune_drafter": "prune",
    "Recipe": "recipe",
    "build_drafter": "recipe",
    "DataUse": "run",
    "prepare": "run",
    "train_drafter": "run",
    "unused_token": "run",
    "load_rows": "shards",
    "TrainedStart": "start",
    "trained_start": "start",
    "SynthesisConfig": "synthesis",
    "synthesise": "synthesis",
    "LiveSource": "target_side",
    "build_store": "target_side",
    "TrainConfig": "train_config",
    "Trainer": "trainer",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'draftwood.train' has no attribute {name!r}")
    return getattr(importlib.import_module(f"draftwood.train.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
