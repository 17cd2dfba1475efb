"""``draftwood info``: what is installed, what is cached, and the facts of a model."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftwood.cli.options import MODEL, quiet_libraries

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Facts = dict[str, str]


def info(
    target: Annotated[
        str | None,
        typer.Option(
            "--target", "-t", rich_help_panel=MODEL, help="Show a target's facts (no weights)."
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter", "-d", rich_help_panel=MODEL, help="Load a drafter and show its facts."
        ),
    ] = None,
) -> None:
    """Show versions, device, cache and models, and the facts of a target or drafter."""
    from rich.console import Console
    from rich.table import Table

    quiet_libraries()
    groups = [("draftwood", environment())]
    if target is not None:
        groups.append((f"target {target}", target_facts(target)))
    if drafter is not None:
        groups.append((f"drafter {drafter}", drafter_facts(drafter)))
    console = Console(highlight=False, soft_wrap=True)
    for title, facts in groups:
        grid = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            grid.add_row(name, value)
        console.print(title, style="bold", markup=False)
        console.print(grid)


def environment() -> Facts:
    """Versions, compute device, and what is already on this machine."""
    import torch

    from draftwood import __version__
    from draftwood.target.demo import cache_dir, find_demo
    from draftwood.target.native import find_native

    cuda = torch.cuda.is_available()
    demo_folder = find_demo()
    return {
        "version": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "threads": str(torch.get_num_threads()),
        "CPU kernels": find_native()[1],
        "cache": str(cache_dir()),
        "demo model": str(demo_folder) if demo_folder else "not fetched yet (draftwood demo)",
        "drafters shipped": ", ".join(shipped_drafters()) or "none",
    }


def shipped_drafters() -> list[str]:
    """Names of the trained drafters inside the package."""
    import draftwood

    weights = Path(draftwood.__file__).parent / "weights"
    return sorted(path.parent.name for path in weights.glob("*/config.json"))


def target_facts(name: str) -> Facts:
    """Facts from a target's configuration, and whether it can be run on draft trees.

    The model is built without memory (meta device), so that this is quick for any size.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from draftwood.target import support

    config = _config(name)
    text = config.get_text_config(decoder=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).eval()
    try:
        support.check_supported(model)
        supported = "yes; parity is checked when it is loaded"
    except ValueError as error:
        supported = f"no: {error}"
    return {
        "class": type(model).__name__,
        "layers": str(text.num_hidden_layers),
        "hidden size": str(text.hidden_size),
        "vocabulary": str(text.vocab_size),
        "context": f"{support.max_length(text)} tokens",
        "parameters": f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} M",
        "supported": supported,
    }


def _config(name: str) -> PretrainedConfig:
    from transformers import AutoConfig

    from draftwood.target.demo import find_demo
    from draftwood.target.gguf import is_gguf, require_gguf

    path = find_demo() if name == "demo" else Path(name).expanduser()
    if path is None:
        raise ValueError("the demo model has not been fetched yet; run 'draftwood demo' first")
    if is_gguf(path):
        require_gguf()
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    return AutoConfig.from_pretrained(path if path.is_dir() else name)


def drafter_facts(name: str) -> Facts:
    """Facts of a drafter folder, which is loaded to see that it is whole."""
    from draftwood.draft.checkpoint import load_draft
    from draftwood.draft.independent_config import is_independent
    from draftwood.draft.load import read_config

    if is_independent(read_config(name, None)):
        return _independent_facts(name)
    config, network = load_draft(name)
    return {
        "block size": f"{config.block_size} (drafts {config.horizon} tokens)",
        "taps": " ".join(map(str, config.target_layer_ids)),
        "layers": str(config.num_hidden_layers),
        "hidden size": f"{config.hidden_size} (target's: {config.target_hidden_size})",
        "vocabulary": f"{config.vocab_size}, head {config.head_size}",
        "mask token": str(config.mask_token_id),
        "Markov head": f"rank {config.markov_rank}" if config.markov_rank else "none",
        "embeddings": "own" if config.own_embeddings else "the target's",
        "head": "own" if config.own_head else "the target's",
        "parameters": f"{sum(weight.numel() for weight in network.parameters()) / 1e6:.1f} M",
    }


def _independent_facts(name: str) -> Facts:
    from draftwood.draft.independent_checkpoint import load_independent

    network = load_independent(name)
    config = network.config
    return {
        "block size": f"{config.block_size} (drafts {config.horizon} tokens)",
        "taps": "none: it reads tokens only",
        "layers": f"{config.num_hidden_layers} (of its body: {' '.join(map(str, config.layers))})",
        "hidden size": str(config.hidden_size),
        "vocabulary": str(config.vocab_size),
        "mask token": str(config.mask_token_id),
        "Markov head": f"rank {config.markov_rank}" if config.markov_rank else "none",
        "embeddings and head": "the target's" if config.borrows else "own",
        "parameters": f"{sum(weight.numel() for weight in network.parameters()) / 1e6:.1f} M",
    }
