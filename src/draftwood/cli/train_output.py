"""What ``draftwood train`` says while it works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftwood.cli.console import note

if TYPE_CHECKING:
    from draftwood.target.model import Target
    from draftwood.train.networks import Network
    from draftwood.train.run import Start
    from draftwood.train.target_side import ResponseRow


def data_line(rows: list[ResponseRow], target: Target, recipe: Start) -> str:
    """How many replies and tokens there are, and the mask token."""
    tokens = sum(len(row.token_ids) - row.response_start for row in rows)
    mask = recipe.mask_token_id
    name = target.tokenizer.convert_ids_to_tokens(mask) if target.tokenizer is not None else None
    return f"{len(rows)} replies, {tokens:,} tokens · mask token {mask} {name or ''}".rstrip()


def show_record(kind: str, step: int, values: dict[str, Any]) -> None:
    """One line per log record, as it comes."""
    if kind == "start":
        note(f"{values['responses']} replies to train on, from step {step}")
    elif kind == "train":
        note(
            f"step {step} · {values['elapsed_s'] / 60:.1f} min · loss {values['loss']:.3f} · "
            f"first token {values['first_accuracy']:.2f} · {values['positions_per_s']:,.0f} "
            "positions/s"
        )
    elif kind == "eval":
        taus = (f"{k.removeprefix('tau_')} {v:.2f}" for k, v in values.items() if "tau_" in k)
        note(f"step {step} · held out, τ: {', '.join(taus)}")


def show_plan(network: Network, figures: dict[str, float]) -> None:
    """Shapes and figures of a dry run on standard output."""
    from rich.console import Console
    from rich.table import Table

    shapes, facts = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
    for name, weight in network.named_parameters():
        frozen = "" if weight.requires_grad else "frozen"
        shapes.add_row(name, " × ".join(map(str, weight.shape)), frozen)
    for name, value in _facts(figures).items():
        facts.add_row(name, value)
    console = Console(highlight=False, soft_wrap=True)
    console.print(shapes)
    console.print()
    console.print(facts)


def _facts(figures: dict[str, float]) -> dict[str, str]:
    found = {
        "parameters": f"{figures['parameters']:,.0f}, trained {figures['trained_parameters']:,.0f}",
        "drafter on disk": f"{figures['saved_bytes'] / 1e6:,.1f} MB",
        "weights and optimizer": f"{figures['training_bytes'] / 1e6:,.1f} MB",
        "step": f"{figures['step_s']:.2f} s, about {figures['flops_per_step'] / 1e9:,.1f} GFLOP",
        "training": f"{figures['positions_per_s']:,.0f} response tokens/s",
    }
    if "feature_bytes" in figures:
        found["feature cache"] = f"{figures['feature_bytes'] / 1e6:,.1f} MB"
        found["computing features"] = f"{figures['target_tokens_per_s']:,.0f} tokens/s"
    if "peak_bytes" in figures:
        found["peak of the GPU"] = f"{figures['peak_bytes'] / 1e9:,.1f} GB"
    return found
