"""Train a drafter on a target's own replies, and decode with it.

A few prompts and steps, to see the parts; docs/training.md has the commands and settings for a
drafter that is worth having.
"""

import tempfile
from pathlib import Path

import draftwood as dw
from draftwood.train import (
    Conversation,
    DataConfig,
    DataUse,
    Recipe,
    TrainConfig,
    generate_responses,
    load_rows,
    train_drafter,
    unused_token,
)

TOPICS = ("rivers", "bread", "bridges", "clouds", "violins", "maps", "tides", "bees")
run = Path(tempfile.mkdtemp())

# 1. the target answers prompts
engine = dw.load("demo", "lookup")
target = engine.target
prompts = [Conversation((f"Tell me something about {topic}.",)) for topic in TOPICS]
settings = DataConfig((dw.SamplingParams(max_new_tokens=48),))
generate_responses(engine, prompts, run / "replies", settings, target="demo")
rows = load_rows(run / "replies")

# 2. a drafter learns to predict the answers a block at a time
mask = unused_token(target.tokenizer, target.vocab_size, rows)
recipe = Recipe(mask, block_size=8, draft_vocab_size=None)
config = TrainConfig(max_steps=30, warmup_steps=5, blocks=32, blocks_per_response=16)
use = DataUse(held_out_percent=0, cache_features=False, top_k=0)
train_drafter(target.model, rows, run, recipe, config, use=use)

# 3. it drafts; the text is the target's own
params = dw.SamplingParams(max_new_tokens=48)
plain = dw.load(target, "none").generate("Tell me something about bees.", params)[0]
fast = dw.load(target, str(run / "draft"), 8).generate("Tell me something about bees.", params)[0]
print(fast.text)
print(f"τ = {fast.acceptance_length:.2f}, the same text: {fast.token_ids == plain.token_ids}")
print(f"drafter in {run / 'draft'}")
