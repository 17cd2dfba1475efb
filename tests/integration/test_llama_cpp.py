"""Our drafters in llama.cpp's DFlash mode: the same tokens and the same cycles as ours.

The file that goes there is always checked; llama.cpp itself only where ``xllamacpp`` is installed.
"""

from __future__ import annotations

import importlib.util
import json
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.draft.checkpoint import load_draft
from draftwood.engine import Engine
from draftwood.sampling import SamplingParams
from draftwood.target.model import Target
from draftwood.train import DataUse, Recipe, TrainConfig, train_drafter
from draftwood.train.target_side import ResponseRow
from draftwood.tree.budget import Chain

gguf = pytest.importorskip("gguf", reason="writing GGUF files needs: pip install gguf")
from tiny_gguf import write_tiny_gguf  # noqa: E402

INTEROP = Path(__file__).parents[2] / "benchmarks" / "interop"
PROMPTS = ([5, 9, 11, 30, 9, 9, 20], [7], [4, 8, 15, 16, 23, 42, 4, 8, 15, 16, 23])
NUM_NEW = 24


@dataclass(frozen=True)
class Case:
    """A tiny target and a drafter of it, in both formats."""

    target: Target
    drafter: Path
    target_gguf: Path
    drafter_gguf: Path


@pytest.fixture(scope="module", params=[None, 60], ids=["whole vocabulary", "reduced"])
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("gguf")
    model = write_tiny_gguf(folder / "target.gguf")
    target = Target(model)
    rows = []
    for prompt in PROMPTS:
        (output,) = Engine(target).generate(prompt, SamplingParams(max_new_tokens=NUM_NEW))
        rows.append(ResponseRow((*prompt, *output.token_ids), len(prompt), ""))
    recipe = Recipe(3, layers=(0, 2), block_size=6, draft_vocab_size=request.param)
    config = TrainConfig(
        learning_rate=5e-3, warmup_steps=5, max_steps=60, blocks=48, blocks_per_response=16
    )
    use = DataUse(held_out_percent=0, cache_features=False, top_k=0)
    train_drafter(model, rows, folder, recipe, config, use=use)
    case = Case(target, folder / "draft", folder / "target.gguf", folder / "draft.gguf")
    convert = runpy.run_path(str(INTEROP / "to_gguf.py"))["convert"]
    convert(case.drafter, case.target_gguf, case.drafter_gguf)
    return case


def test_the_file_has_every_weight_and_the_targets_tokenizer(case: Case) -> None:
    config, network = load_draft(case.drafter)
    reader = gguf.GGUFReader(case.drafter_gguf)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert len(tensors) == len(network.state_dict())
    assert np.array_equal(tensors["fc.weight"], network.fc.weight.numpy())
    last = network.stack()[-1].mlp.down_proj.weight
    assert np.array_equal(tensors["blk.1.ffn_down.weight"], last.numpy())
    ids = network.target_ids()
    if ids is not None:
        assert np.array_equal(tensors["d2t"], ids.numpy())
    fields = reader.fields
    assert fields["dflash.block_size"].contents() == config.block_size
    assert fields["dflash.target_layers"].contents() == [t + 1 for t in config.target_layer_ids]
    assert fields["tokenizer.ggml.mask_token_id"].contents() == config.mask_token_id
    tokens = gguf.GGUFReader(case.target_gguf).fields["tokenizer.ggml.tokens"].contents()
    assert fields["tokenizer.ggml.tokens"].contents() == tokens


@pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None,
    reason="llama.cpp is not here; pip install xllamacpp",
)
def test_llama_cpp_gives_the_same_tokens_in_the_same_cycles(case: Case) -> None:
    script = [sys.executable, str(INTEROP / "llama_dflash.py")]
    done = subprocess.run(
        [*script, str(case.target_gguf), str(case.drafter_gguf)],
        input=json.dumps({"prompts": PROMPTS, "max_new_tokens": NUM_NEW}),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.splitlines()[-1])["outputs"]
    _, network = load_draft(case.drafter)
    engine = Engine(case.target, BlockDiffusionDrafter(network, case.target), Chain())
    num_tokens = num_cycles = 0
    for prompt, their in zip(PROMPTS, theirs, strict=True):
        # there the prompt's own pass gives the first token
        first = their["token_ids"][0]
        params = SamplingParams(max_new_tokens=NUM_NEW - 1)
        (our,) = engine.generate([*prompt, first], params)
        assert their["token_ids"] == [first, *our.token_ids][: len(their["token_ids"])]
        if our.finish_reason == "length":
            assert len(their["token_ids"]) == NUM_NEW
            assert their["num_cycles"] == our.num_cycles
            num_tokens += len(our.token_ids)
            num_cycles += our.num_cycles
    assert num_tokens > 1.3 * num_cycles  # drafts were accepted: the comparison says something
