"""Independent drafters: does the language-model loss help, does pretraining, which layers to prune?

Every variant is trained for the same number of steps on the same replies; the pruning orders start
from the first variant and recover for the same number of steps per layer. The folder keeps what is
done: the same command continues.

    python benchmarks/d3d_ablations.py --target demo --data replies --out runs/d3d --steps 2000
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from common import machine, save

from draftwood.cli.accelerator import open_accelerator
from draftwood.draft.independent_checkpoint import fingerprint
from draftwood.target.load import load_target
from draftwood.target.model import Target
from draftwood.train.accepted import CHAIN
from draftwood.train.independent import IndependentRecipe
from draftwood.train.layer_choice import ORDERS
from draftwood.train.loss import LossConfig
from draftwood.train.measure import evaluate_drafter
from draftwood.train.prune import PruneConfig, prune_drafter
from draftwood.train.prune_report import write_csv, write_plot
from draftwood.train.run import DataUse, train_drafter, unused_token
from draftwood.train.shards import load_rows
from draftwood.train.target_side import ResponseRow, split_rows
from draftwood.train.train_config import TrainConfig

# name → (λ, pretrained)
VARIANTS = {"joint": (1.0, True), "random-init": (1.0, False), "blocks-only": (0.0, True)}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--data", action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", help="kept layers of the body; all if left")
    parser.add_argument("--borrow", action="store_true", help="frozen tables of the target")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--anchors", type=int, default=128)
    parser.add_argument("--head-negatives", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--prune-to", type=int, default=1, help="layers")
    parser.add_argument("--prune-steps", type=int, default=200, help="per removed layer")
    parser.add_argument("--ranking", type=int, default=48, help="replies that layers compete on")
    parser.add_argument("--validation", type=int, default=48, help="replies that τ is measured on")
    parser.add_argument("--prune-validation", type=int, default=48, help="the same when pruning")
    parser.add_argument("--no-pruning", action="store_true", help="stop after the variants")
    parser.add_argument(
        "--precision", default="auto", help="of the layers, as in `draftwood train`"
    )
    parser.add_argument("--name", default="d3d_ablations", help="of the result file")
    return parser.parse_args()


def config_of(args: argparse.Namespace, ar_weight: float) -> TrainConfig:
    return TrainConfig(
        learning_rate=args.lr, warmup_steps=max(args.steps // 20, 1), max_steps=args.steps,
        blocks=args.blocks, blocks_per_response=args.anchors, head_negatives=args.head_negatives,
        train_head=not args.borrow, eval_minutes=1e9, log_steps=5,
        loss=LossConfig(autoregressive=ar_weight),
    )  # fmt: skip


def trained(
    args: argparse.Namespace, target: Target, rows: list[ResponseRow], recipe: IndependentRecipe
) -> dict[str, Any]:
    """Train and evaluate all variants; what is in the folder already is not trained again."""
    held = split_rows(rows)[1][: args.validation]
    found: dict[str, Any] = {}
    for name, (ar_weight, pretrained) in VARIANTS.items():
        folder = args.out / name
        if not (folder / "draft").is_dir():
            train_drafter(
                target.model, rows, folder, replace(recipe, pretrained=pretrained),
                config_of(args, ar_weight), use=DataUse(num_validation=0), device=target.device,
                accelerator=open_accelerator("cpu", args.precision),
            )  # fmt: skip
        done = folder / f"evaluation-{args.validation}.json"
        if not done.is_file():
            done.write_text(json.dumps(evaluation(folder, target, held)))
        found[name] = json.loads(done.read_text())
        print(name, found[name], flush=True)
    return found


def evaluation(folder: Path, target: Target, held: list[ResponseRow]) -> dict[str, Any]:
    """Acceptance on held-out replies, and what training cost."""
    one = evaluate_drafter(folder / "draft", target, held, budgets=(CHAIN, 32))["all"]
    records = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    last = [record for record in records if record["kind"] == "train"][-1]
    return {
        "tau_chain": one.tau(CHAIN), "tau_32": one.tau(32), "accuracy": one.accuracy,
        "num_tokens": one.num_tokens, "last_loss": last["loss"],
        "positions": last["positions"], "minutes": last["elapsed_s"] / 60,
    }  # fmt: skip


def pruned(
    args: argparse.Namespace, target: Target, rows: list[ResponseRow]
) -> dict[str, list[dict[str, Any]]]:
    """All orders from the jointly trained drafter."""
    recovery = replace(config_of(args, 1.0), max_steps=args.prune_steps, warmup_steps=2)
    tables = {}
    for order in ORDERS:
        config = PruneConfig(
            recovery if args.prune_steps else None, order=order, min_depth=args.prune_to,
            num_ranking=args.ranking, num_validation=args.prune_validation,
        )  # fmt: skip
        folder = args.out / f"prune-{order}"
        tables[order] = prune_drafter(
            args.out / "joint" / "draft", target, rows, folder, config,
            on_stage=lambda stage: print(order, stage, flush=True),  # noqa: B023
            accelerator=open_accelerator("cpu", args.precision),
        )  # fmt: skip
        write_csv(tables[order], folder)
    try:
        write_plot(tables, args.out / "prune.png")
    except ImportError:
        print("no plot: matplotlib is not installed")
    return {
        order: [{**asdict(stage), "folder": ""} for stage in table.stages]
        for order, table in tables.items()
    }


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    target = load_target(args.target)
    rows = [row for path in args.data for row in load_rows(path)]
    recipe = IndependentRecipe(
        unused_token(target.tokenizer, target.vocab_size, rows),
        layers=tuple(map(int, args.layers.split(","))) if args.layers else None,
        block_size=args.block_size, borrows=args.borrow, tokenizer=fingerprint(target.tokenizer),
    )  # fmt: skip
    about = {name: str(value) for name, value in vars(args).items() if name not in ("out", "data")}
    content: dict[str, Any] = {"machine": machine(), "settings": about}
    content["variants"] = trained(args, target, rows, recipe)
    save(args.name, **content)
    if not args.no_pruning:
        content["pruning"] = pruned(args, target, rows)
        save(args.name, **content)


if __name__ == "__main__":
    main()
