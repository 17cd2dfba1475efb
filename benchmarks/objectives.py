"""Does the tree-aware loss term make a drafter better, when steps and batches are equal?

Every variant starts from the same drafter and takes the same steps on the same batches; only the
weight of the term differs. One run without it has other batches, which shows what chance does. Each
is then replayed offline, as is the untouched start, on replies that were held out and on replies to
other prompts. The folder keeps what is done: the same command continues; ``--measure`` stops after
the share of the gradient and the cost of a step.

    draftwood data --jsonl prompts.jsonl --out replies-eval --max-new-tokens 128
    python benchmarks/objectives.py --data replies --evaluation replies-eval --out runs/objectives
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, save

from draftwood.draft.config import DraftConfig
from draftwood.draft.network import DraftNetwork
from draftwood.target.load import load_target
from draftwood.target.model import Target
from draftwood.train.accepted import CHAIN
from draftwood.train.anchors import BlockBatch, Example, choose_anchors
from draftwood.train.evaluate import Replay, replay
from draftwood.train.features import StoreSource
from draftwood.train.loss import LossConfig
from draftwood.train.objective import BlockObjective
from draftwood.train.run import DataUse, train_drafter
from draftwood.train.shards import load_rows
from draftwood.train.start import TrainedStart, load_fitting, load_start, trained_start
from draftwood.train.target_side import ResponseRow, build_store, run_target, split_rows
from draftwood.train.train_config import TrainConfig

BUDGETS = (CHAIN, 8, 32, 128)
START = "start"
PLAIN = "tree-0"
OTHER_SEED = "tree-0-other-seed"
HELD_OUT, EVALUATION = "held out", "evaluation"
NUM_RESAMPLES = 4000


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--init", default="shipped", help="drafter that all variants start from")
    parser.add_argument("--data", required=True, help="replies to train on")
    parser.add_argument("--rows", type=int, help="train on no more than the first so many")
    parser.add_argument("--evaluation", required=True, help="replies to other prompts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tree", default="1,2", help="weights of the term, beside 0")
    parser.add_argument("--tree-budget", type=int, default=32)
    parser.add_argument("--tree-softness", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--anchors", type=int, default=32, help="blocks of a reply at a time")
    parser.add_argument("--held-out", type=float, default=6.0, help="percent of the prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", action="store_true", help="no training")
    parser.add_argument("--name", default="objectives", help="of the result file")
    return parser.parse_args()


def config_of(args: argparse.Namespace, tree: float, other_seed: bool = False) -> TrainConfig:
    """Through the whole head: a sample's columns stand for others, which a tree cannot hold."""
    return TrainConfig(
        learning_rate=args.lr, warmup_steps=10, max_steps=args.steps, blocks=args.blocks,
        blocks_per_response=args.anchors, head_negatives=0, train_head=False, eval_minutes=1e9,
        save_minutes=2.0, seed=args.seed + other_seed,
        loss=LossConfig(
            distill=0.5, tree=tree, tree_budget=args.tree_budget, tree_softness=args.tree_softness
        ),
    )  # fmt: skip


def batches(
    args: argparse.Namespace, objective: BlockObjective, taps: Sequence[int], device: torch.device
) -> Iterator[BlockBatch]:
    """A few, from replies that are trained on."""
    features = args.out / "features"
    source = StoreSource(features, taps, held_out=False, percent=args.held_out)
    rng = np.random.default_rng(args.seed)
    size = objective.network.config.block_size
    for _ in range(9):
        chosen = rng.choice(len(source), args.blocks // args.anchors, replace=False)
        examples = [source.example(int(i)) for i in chosen]
        anchors = [
            choose_anchors(rng, e.response_start, len(e.token_ids), args.anchors) for e in examples
        ]
        yield objective.draw(
            examples, anchors, block_size=size, num_negatives=0, rng=rng, device=device
        )[0]


def gradients(
    args: argparse.Namespace, target: Target, start: TrainedStart, weights: Sequence[float]
) -> dict[str, Any]:
    """What the term does to the gradient at the start, and to the CPU time of a step.

    Returns:
        By weight, means over a few batches: norm of the term's gradient over the sum of both
        norms, and cosine of the two. Medians of CPU seconds, forward and backward, with and
        without it.
    """
    network = load_start(start, target.model, target.device)
    assert isinstance(network, DraftNetwork)
    plain, whole = (BlockObjective(network, config_of(args, weight).loss) for weight in (0.0, 1.0))
    plain.train_tables(False)
    trained = [p for p in network.parameters() if p.requires_grad]
    seconds: list[tuple[float, float]] = []
    norms, cosines = [], []
    for batch in batches(args, plain, network.config.target_layer_ids, target.device):
        clock, found = [time.process_time()], []
        for objective in (plain, whole):
            total, count, _, _ = objective(batch, None)
            parts = torch.autograd.grad(total / count, trained)
            clock.append(time.process_time())
            found.append(torch.cat([part.flatten() for part in parts]))
        seconds.append((clock[1] - clock[0], clock[2] - clock[1]))
        term = found[1] - found[0]
        norms.append((float(term.norm()), float(found[0].norm())))
        cosines.append(float(term @ found[0]) / (norms[-1][0] * norms[-1][1]))
    without, with_term = np.median(seconds, axis=0)
    return {
        "share": {w: float(np.mean([w * t / (w * t + p) for t, p in norms])) for w in weights},
        "cosine": float(np.mean(cosines)),
        "cpu_s_without": without, "cpu_s_with": with_term,
    }  # fmt: skip


def train_variant(
    args: argparse.Namespace, target: Target, rows: list[ResponseRow], start: TrainedStart,
    name: str,
) -> Path:  # fmt: skip
    """The trained drafter's folder; features are shared by all variants."""
    folder = args.out / name
    other_seed = name == OTHER_SEED
    config = config_of(args, 0.0 if other_seed else float(name.removeprefix("tree-")), other_seed)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "features").exists():
        (folder / "features").symlink_to((args.out / "features").resolve())
    if not (folder / "done").is_file():
        use = DataUse(held_out_percent=args.held_out, num_validation=0)
        train_drafter(target.model, rows, folder, start, config, use=use, device=target.device)
        (folder / "done").touch()
    return folder / "draft"


def seconds_per_step(folder: Path) -> float:
    """Of a run's log: wall seconds, on a machine that may have been busy."""
    records = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    last = [record for record in records if record["kind"] == "train"][-1]
    return float(last["elapsed_s"] / last["step"])


def summary(replays: Sequence[Replay]) -> dict[str, Any]:
    tokens = sum(one.num_tokens for one in replays)
    right = torch.stack([one.right for one in replays]).sum(0)
    counted = torch.stack([one.counted for one in replays]).sum(0)
    taus = {b or "chain": tokens / sum(one.cycles[b] for one in replays) for b in BUDGETS}
    accuracy = [round(value, 4) for value in (right / counted).tolist()]
    return {"replies": len(replays), "tokens": tokens, "tau": taus, "accuracy": accuracy}


def difference(one: Sequence[Replay], other: Sequence[Replay], budget: int) -> dict[str, float]:
    """τ of ``one`` minus that of ``other`` on the same replies; 95 % interval over replies."""
    counts = np.array(
        [
            (a.num_tokens, a.cycles[budget], b.cycles[budget])
            for a, b in zip(one, other, strict=True)
        ]
    )
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(counts), (NUM_RESAMPLES, len(counts)))
    tokens, ours, theirs = np.moveaxis(counts[picks].sum(1), 1, 0)
    low, high = np.percentile(tokens / ours - tokens / theirs, [2.5, 97.5])
    tokens, ours, theirs = counts.sum(0)
    return {"mean": tokens / ours - tokens / theirs, "low": low, "high": high}


def compared(groups: dict[str, list[Example]], drafters: dict[str, Path], target: Target) -> Any:
    """Every drafter on every group of replies, and paired differences between drafters.

    All groups but the held-out replies make up the evaluation.
    """
    found: dict[str, dict[str, list[Replay]]] = {}
    for name, folder in drafters.items():
        network = load_fitting(folder, target)
        found[name] = {
            group: [replay(network, example, BUDGETS) for example in examples]
            for group, examples in groups.items()
        }
        sets = [replays for group, replays in found[name].items() if group != HELD_OUT]
        found[name][EVALUATION] = [one for replays in sets for one in replays]
        print(name, {group: summary(r)["tau"] for group, r in found[name].items()}, flush=True)
    pairs = [(name, PLAIN) for name in drafters if name not in (START, PLAIN)]
    pairs += [(name, START) for name in drafters if name != START]
    return {
        "results": {
            name: {group: summary(replays) for group, replays in by_group.items()}
            for name, by_group in found.items()
        },
        "differences": {
            f"{one} − {other}": {
                group: {
                    budget or "chain": difference(found[one][group], found[other][group], budget)
                    for budget in BUDGETS
                }
                for group in (HELD_OUT, EVALUATION)
            }
            for one, other in pairs
        },
    }


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    target = load_target(args.target)
    start = trained_start(args.init, target)
    weights = [float(part) for part in args.tree.split(",")]
    every = load_rows(args.data)
    rows = every[: args.rows]
    if not isinstance(start.config, DraftConfig):
        raise SystemExit("the term needs a drafter that reads the target's hidden states")
    taps = start.config.target_layer_ids
    build_store(args.out / "features", rows, target.model, taps, top_k=16)
    paths = ("out", "data", "evaluation")
    about = {name: str(value) for name, value in vars(args).items() if name not in paths}
    content: dict[str, Any] = {"machine": machine(), "settings": about}
    content["loss"] = asdict(config_of(args, weights[0]).loss)
    content["gradient"] = gradients(args, target, start, weights)
    print(content["gradient"], flush=True)
    if args.measure:
        return
    drafters = {START: start.folder}
    for name in [PLAIN, *(f"tree-{weight:g}" for weight in weights), OTHER_SEED]:
        drafters[name] = train_variant(args, target, rows, start, name)
    content["seconds_per_step"] = {
        name: seconds_per_step(args.out / name) for name in drafters if name != START
    }
    held = split_rows(every, args.held_out)[1]
    groups: dict[str, list[Example]] = {}
    for group, replies in ((HELD_OUT, held), (None, load_rows(args.evaluation))):
        for row in replies:
            example = run_target(target.model, row, taps, 0)
            groups.setdefault(group or row.domain or "other", []).append(example)
    save(args.name, **content, **compared(groups, drafters, target))


if __name__ == "__main__":
    main()
