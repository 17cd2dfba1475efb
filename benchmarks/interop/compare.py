"""Our drafter in another engine: the same tokens and the same cycles as ours in chain mode?

The other engine runs in its own environment (``--python``) by a script of this folder. Both decode
greedily. The first token comes from the prompt's pass, as there, so that all cycles are alike.
Where the tokens part, ours and theirs must be tied: within ``TIE`` in our logits. The result goes
to ``results/interop.json``, next to those of other engines.

    python benchmarks/interop/compare.py vllm --python ENV/bin/python --target DIR --drafter DIR
    python benchmarks/interop/compare.py vllm-key-norms …  # the same, a fault on CPUs mended
    python benchmarks/interop/compare.py llama --python ENV/bin/python --target DIR --drafter DIR \\
        --their-target target.gguf --their-drafter draft.gguf
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import RESULTS, encode_prompts, machine, save

from draftwood.bench.compare import MAX_DELTA, first_divergence
from draftwood.bench.runs import Request, rerun_row
from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.draft.checkpoint import load_draft
from draftwood.engine import Engine
from draftwood.sampling import SamplingParams
from draftwood.target.load import load_target
from draftwood.target.model import Target
from draftwood.tree.budget import Chain

SCRIPTS = {
    "vllm": ["vllm_dflash.py"],
    "vllm-key-norms": ["vllm_dflash.py", "--layer-key-norms"],
    "llama": ["llama_dflash.py"],
}
TIE = 2 * MAX_DELTA


@dataclass(frozen=True)
class Decoded:
    """One reply, a final stop token left out, and the cycles after its first token."""

    token_ids: list[int]
    num_cycles: int


def ask(
    script: Sequence[str], python: str, models: Sequence[str], request: dict[str, Any]
) -> dict[str, Any]:
    """Run the other engine by a script and its options; its log goes to standard error.

    Raises:
        RuntimeError: it failed.
    """
    name, *options = script
    done = subprocess.run(
        [python, str(Path(__file__).parent / name), *models, *options],
        input=json.dumps(request), stdout=subprocess.PIPE, text=True,
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )  # fmt: skip
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"{name} ended with {done.returncode}; its log is above")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def ours(target: Target, drafter: str, prompt: list[int], max_new_tokens: int) -> Decoded:
    """One token without drafting, then chains; without the Markov head, which others lack."""
    (first,) = Engine(target).generate(prompt, SamplingParams(max_new_tokens=1))
    _, network = load_draft(drafter, dtype=target.dtype, device=target.device)
    network.markov = None
    engine = Engine(target, BlockDiffusionDrafter(network, target), Chain())
    params = SamplingParams(max_new_tokens=max_new_tokens - 1)
    (rest,) = engine.generate([*prompt, *first.token_ids], params)
    return Decoded(trimmed([*first.token_ids, *rest.token_ids], target), rest.num_cycles)


def trimmed(token_ids: list[int], target: Target) -> list[int]:
    """Without a final stop token, which not every engine hands out."""
    ends = bool(token_ids) and token_ids[-1] in target.eos_token_ids
    return token_ids[:-1] if ends else token_ids


def parting(
    target: Target, prompt: list[int], left: list[int], right: list[int]
) -> dict[str, Any] | None:
    """Where two replies part and how far apart both tokens are in our logits; None if nowhere."""
    position = first_divergence(left, right)
    if position is None:
        return None
    pair = [ids[position] if position < len(ids) else None for ids in (left, right)]
    gap = None
    if None not in pair:
        request = Request([*prompt, *left[:position]], SamplingParams(max_new_tokens=1))
        row = rerun_row(Engine(target), [request], 0, 0)
        assert row is not None
        gap = float((row[pair[0]] - row[pair[1]]).abs())
    return {"position": position, "tokens": pair, "gap": gap, "tie": gap is not None and gap <= TIE}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Acceptance lengths: tokens per cycle over all prompts, the first token of each left out."""

    def tau(who: str) -> float:
        tokens = sum(row[f"{who}_tokens"] - 1 for row in rows)
        return tokens / sum(row[f"{who}_cycles"] for row in rows)

    return {
        "same_tokens_up_to_ties": all(not r["parting"] or r["parting"]["tie"] for r in rows),
        "identical_prompts": sum(not row["parting"] for row in rows),
        "our_acceptance_length": tau("our"),
        "their_acceptance_length": tau("their"),
    }


def weights_hash(drafter: str) -> str:
    """Of the drafter's weight file."""
    return hashlib.sha256((Path(drafter) / "model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=SCRIPTS)
    parser.add_argument("--python", required=True, help="interpreter of the engine's environment")
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--their-target", help="the same target in the engine's format")
    parser.add_argument("--their-drafter", help="the same drafter in the engine's format")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args()

    target = load_target(args.target, dtype="float32", device="cpu", probe=False)
    prompts = encode_prompts(target, args.prompts)
    models = [args.their_target or args.target, args.their_drafter or args.drafter]
    request = {"prompts": prompts, "max_new_tokens": args.max_new_tokens}
    answer = ask(SCRIPTS[args.engine], args.python, models, request)
    rows = []
    for prompt, output in zip(prompts, answer["outputs"], strict=True):
        mine = ours(target, args.drafter, prompt, args.max_new_tokens)
        theirs = Decoded(trimmed(output["token_ids"], target), output["num_cycles"])
        rows.append(
            {
                "parting": parting(target, prompt, mine.token_ids, theirs.token_ids),
                "our_tokens": len(mine.token_ids), "their_tokens": len(theirs.token_ids),
                "our_cycles": mine.num_cycles, "their_cycles": theirs.num_cycles,
            }
        )  # fmt: skip
    settings = {
        "max_new_tokens": args.max_new_tokens,
        "drafter_sha256": weights_hash(args.drafter),
        "versions": answer["versions"],
        "machine": machine(),
    }
    found = {**summary(rows), **settings, "prompts": rows}
    print(json.dumps(found, indent=1))
    file = RESULTS / "interop.json"
    before = json.loads(file.read_text()) if file.is_file() else {}
    save("interop", **{**before, args.engine: found})
    if not found["same_tokens_up_to_ties"]:
        sys.exit("the tokens differ")


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main()
