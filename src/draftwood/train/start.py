"""Runs that start from a drafter that is trained already, to fine-tune it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from draftwood.draft.checkpoint import check_compatible, load_draft
from draftwood.draft.config import DraftConfig
from draftwood.draft.folder import CONFIG, MARKOV, find_folder
from draftwood.draft.independent_checkpoint import check_fits, load_independent
from draftwood.draft.independent_config import IndependentConfig, is_independent
from draftwood.draft.independent_network import IndependentNetwork
from draftwood.draft.load import read_config, shipped_folder
from draftwood.draft.network import DraftNetwork
from draftwood.target.model import Target
from draftwood.train.grow import with_layers, with_markov
from draftwood.train.networks import Network
from draftwood.train.target_side import ResponseRow


@dataclass(frozen=True)
class TrainedStart:
    """A drafter folder as the start of a run; see ``trained_start``.

    Attributes:
        folder: of the drafter; everything about its shape is what it says.
        checksum: of its configuration and weights, which a continued run must find unchanged.
        config: what its folder says.
        add_layers: layers that it gets, see ``grow.with_layers``.
        draft_vocab_size: tokens of a draft vocabulary chosen anew from the replies, see
            ``grow.with_vocabulary``; None keeps its own.
        markov_rank: width of a Markov head that it gets, see ``grow.with_markov``; 0 keeps what
            it has.
    """

    folder: Path
    checksum: str
    config: DraftConfig | IndependentConfig
    add_layers: int = 0
    draft_vocab_size: int | None = None
    markov_rank: int = 0

    @property
    def mask_token_id(self) -> int:
        return self.config.mask_token_id

    @property
    def can_sample_head(self) -> bool:
        """Whether ``TrainConfig.head_negatives`` may be used."""
        if isinstance(self.config, IndependentConfig) or self.config.own_head:
            return True
        return self.draft_vocab_size is not None

    def choices(self) -> dict[str, str | int | None]:
        """What a continued run must repeat."""
        return {
            "init": self.checksum,
            "add_layers": self.add_layers or None,
            "draft_vocab_size": self.draft_vocab_size,
            "markov_rank": self.markov_rank or self.config.markov_rank or None,
        }


def trained_start(
    drafter: str | os.PathLike[str],
    target: Target,
    *,
    add_layers: int = 0,
    draft_vocab_size: int | None = None,
    markov_rank: int = 0,
) -> TrainedStart:
    """The start of a run that goes on with the weights of ``drafter``.

    Args:
        drafter: ``"shipped"``, or a folder or hub id of a DFlash or independent drafter.
        target: the model that it drafts for.
        add_layers: layers to add to a DFlash drafter; at first they change nothing.
        draft_vocab_size: choose a draft vocabulary of this size anew, for a DFlash drafter; None
            keeps the one it has.
        markov_rank: give a drafter that has none a Markov head of this width.

    Raises:
        ValueError: there is no such drafter, it does not fit the target, or it is an independent
            one, which cannot get layers or a vocabulary.
    """
    if add_layers < 0:
        raise ValueError(f"add_layers must be ≥ 0, got {add_layers}; layers go by 'prune'")
    if draft_vocab_size is not None and not 0 < draft_vocab_size <= target.vocab_size:
        raise ValueError(
            f"a new draft vocabulary must have 1 to {target.vocab_size} tokens, got "
            f"{draft_vocab_size}; leave it out to keep the one that the drafter has"
        )
    if markov_rank < 0:
        raise ValueError(f"markov_rank must be ≥ 0, got {markov_rank}; 0 keeps what there is")
    found = trained_folder(drafter, target)
    config = load_fitting(found, target).config
    if isinstance(config, IndependentConfig) and (add_layers or draft_vocab_size is not None):
        raise ValueError("an independent drafter cannot get layers or a draft vocabulary")
    if markov_rank and config.markov_rank not in (0, markov_rank):
        raise ValueError(
            f"the drafter has a Markov head of rank {config.markov_rank}, it cannot get one of "
            f"rank {markov_rank}; leave markov_rank out to go on with it"
        )
    if markov_rank:
        replace(config, markov_rank=markov_rank)  # refused here if it does not fit
    return TrainedStart(found, checksum(found), config, add_layers, draft_vocab_size, markov_rank)


def trained_folder(drafter: str | os.PathLike[str], target: Target) -> Path:
    """The folder of a trained drafter: a folder, a hub id, or ``"shipped"``.

    Raises:
        ValueError: there is none.
    """
    if str(drafter) in ("auto", "lookup", "none") or str(drafter).endswith("+lookup"):
        raise ValueError(f"{str(drafter)!r} is no trained drafter; give a folder, or 'shipped'")
    found = shipped_folder(target) if str(drafter) == "shipped" else find_folder(drafter, None)
    if found is None:
        raise ValueError("no drafter is shipped for this target; give a drafter's folder")
    return found


def load_fitting(drafter: str | os.PathLike[str], target: Target) -> Network:
    """A saved drafter in float32 on the target's device, with the target's tables to borrow.

    Raises:
        ValueError: it cannot be loaded, or does not fit the target.
    """
    network = _load(drafter, target.device)
    if isinstance(network, IndependentNetwork):
        check_fits(network.config, target)
    else:
        check_compatible(
            network.config,
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
        )
    network.borrow(target.input_embeddings(), target.output_embeddings())
    return network


def load_start(start: TrainedStart, model: nn.Module, device: torch.device | str) -> Network:
    """The network of ``start`` in float32, ready to be trained for the target ``model``.

    Raises:
        ValueError: the folder is not what it was when ``start`` was made.
    """
    if checksum(start.folder) != start.checksum:
        raise ValueError(
            f"the drafter in {start.folder} has changed since this run chose it; restore it"
        )
    network = _load(start.folder, device)
    if start.add_layers:
        assert isinstance(network, DraftNetwork)
        network = with_layers(network, start.add_layers)
    if start.markov_rank and network.markov is None:
        network = with_markov(network, start.markov_rank)
    lend_tables(network, model)
    return network


def lend_tables(network: Network, model: nn.Module) -> None:
    """Let a network borrow the tables of the target ``model``, and make it ready to be trained."""
    inputs = model.get_input_embeddings().weight  # type: ignore[operator]
    outputs = model.get_output_embeddings().weight  # type: ignore[operator]
    if isinstance(network, IndependentNetwork):
        inputs, outputs = inputs.float(), outputs.float()
    network.borrow(inputs, outputs)
    network.requires_grad_(True).train()


def check_masks(mask: int, rows: Iterable[ResponseRow]) -> None:
    """Refuse replies that contain the token which stands for a masked position."""
    count = sum(mask in row.token_ids[row.response_start :] for row in rows)
    if count:
        raise ValueError(
            f"{count} replies contain the drafter's mask token {mask}; leave those replies out, or "
            "train a new drafter with another mask token"
        )


def checksum(folder: Path) -> str:
    """Of the files that make a drafter: its configuration and its weights."""
    digest = hashlib.sha256()
    weights = [*sorted(folder.glob("*.safetensors")), *folder.glob(MARKOV)]
    for file in [folder / CONFIG, *weights]:
        with file.open("rb") as handle:
            for part in iter(lambda: handle.read(2**20), b""):
                digest.update(part)
    return digest.hexdigest()[:32]


def _load(drafter: str | os.PathLike[str], device: torch.device | str) -> Network:
    if is_independent(read_config(str(drafter), None)):
        return load_independent(drafter, device=device)
    return load_draft(drafter, device=device)[1]
