"""Make recordings: draft at every position of texts that the target wrote by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import torch

from draftwood.draft.base import Committed, Drafter, DraftLimits
from draftwood.draft.blend import BlendDrafter
from draftwood.draft.block_diffusion import BlockDiffusionDrafter
from draftwood.engine import Engine
from draftwood.records import Output
from draftwood.replay.recording import RecordedText, Recording
from draftwood.request import Prompt, new_sequence
from draftwood.sampling import Pick, SamplingParams
from draftwood.sequence import SequenceState
from draftwood.target.measure import calibrated
from draftwood.target.model import Target
from draftwood.target.shape import model_shape
from draftwood.tree.policy import MAX_NODES
from draftwood.tree.roofline import ModelShape
from draftwood.tree.tree import DraftTree, ScoredPrefixes

_CHUNK_LEN = 512


def record(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    name: str = "",
    drafter_name: str = "",
    raw: bool = False,
    max_nodes: int = MAX_NODES,
) -> Recording:
    """Decode prompts plainly, then let ``drafter`` propose at every position of the outputs.

    The drafter sees what it would see in the loop and learns from every position, where the loop
    would show it one position per cycle.

    Args:
        target: writes the texts.
        drafter: a new one; what it learns carries over from text to text.
        prompts: one text each.
        params: sampling settings; the seed of text i is ``params.seed`` + i.
        name: what the prompts are, kept with the recording.
        drafter_name: kept with the recording.
        raw: take text prompts without the chat template.
        max_nodes: prefixes to keep per position.

    Raises:
        ValueError: a drafter that never drafts, or no prompt.
    """
    if drafter.horizon == 0 or not prompts:
        raise ValueError(f"nothing to record: {len(prompts)} prompts, horizon {drafter.horizon}")
    texts: list[RecordedText] = []
    outputs: list[Output] = []
    settings = _seeded(params, len(prompts))
    for index, (prompt, setting) in enumerate(zip(prompts, settings, strict=True)):
        (output,) = Engine(target).generate([prompt], setting, raw=raw)
        if output.error is not None:
            raise ValueError(f"prompt {index} failed: {output.error}")
        if output.token_ids:
            outputs.append(output)
            texts.append(record_text(target, drafter, output, setting, index, max_nodes))
    cycles = [cycle.seconds for output in outputs for cycle in output.cycles]
    return Recording(
        texts,
        {
            "name": name,
            "target": target.name,
            "drafter": drafter_name or type(drafter).__name__,
            "drafter_type": type(_model_of(drafter)).__name__,
            "temperature": params.temperature,
            "max_new_tokens": params.max_new_tokens,
            "max_nodes": max_nodes,
            "horizon": drafter.horizon,
            "target_shape": asdict(model_shape(target)),
            **_draft_shape(drafter),
            "curve": asdict(calibrated(target, drafter.taps)),
            "device": target.device.type,
            "other_s": statistics.median(c.commit_s + c.other_s for c in cycles),
            "walk_s": statistics.median(c.walk_s for c in cycles),
        },
    )


@torch.inference_mode()
def record_text(
    target: Target,
    drafter: Drafter,
    output: Output,
    params: SamplingParams,
    seq_id: int,
    max_nodes: int = MAX_NODES,
) -> RecordedText:
    """Draft at every position of one finished output."""
    seq = new_sequence(
        target, seq_id, output.prompt_token_ids, params, raw=True, processors=(), stop_when=None,
        sample_index=0, keep=False, old=None,
    )  # fmt: skip
    features = _features(target, [*output.prompt_token_ids, *output.token_ids], drafter.taps)
    first = seq.prompt_len - 1
    for start in range(0, first, _CHUNK_LEN):
        end = min(start + _CHUNK_LEN, first)
        rows = None if features is None else features[start:end]
        drafter.observe([Committed(seq_id, start, seq.token_ids[start:end], rows, (), 0)])
    rows_of = [
        _position(drafter, seq, output.token_ids[at:], features, max_nodes)
        for at in range(len(output.token_ids))
    ]
    drafter.release(seq_id)
    columns = [np.stack(column) for column in zip(*rows_of, strict=True)]
    return RecordedText(seq.prompt_len, *columns)


def _position(
    drafter: Drafter,
    seq: SequenceState,
    future: Sequence[int],
    features: torch.Tensor | None,
    max_nodes: int,
) -> tuple[np.ndarray, ...]:
    """The fields of a ``RecordedText`` at one position; then ``seq`` is one token on."""
    context, anchor = seq.context(), len(seq.token_ids) - 1
    chain = drafter.propose([context], DraftLimits(drafter.horizon, 1))
    begin = time.perf_counter()
    scored = drafter.propose([context], DraftLimits(max_nodes))
    draft_s = time.perf_counter() - begin
    path = follow(scored, future)
    rows = None if features is None else features[anchor : anchor + 1]
    picks = list(future[: len(path) + 1])
    record = Committed(
        seq.seq_id, anchor, seq.token_ids[anchor:], rows, picks, int(scored.counts[0])
    )
    drafter.observe([record])
    seq.accept([Pick(future[0])])
    return (
        _padded(scored.log_probs, scored, max_nodes, -np.inf, np.float32),
        _padded(scored.parents, scored, max_nodes, -1, np.int16),
        np.pad(np.array(path, np.int16), (0, drafter.horizon - len(path)), constant_values=-1),
        _padded(chain.log_probs, chain, drafter.horizon, -np.inf, np.float32),
        np.int16(len(follow(chain, future))),
        np.float32(draft_s),
    )  # fmt: skip


def follow(scored: ScoredPrefixes, tokens: Sequence[int]) -> list[int]:
    """Columns of the proposed nodes that ``tokens`` run along, from the anchor."""
    count = int(scored.counts[0])
    children = {
        (int(scored.parents[0, c]), int(scored.token_ids[0, c])): c for c in range(count)
    }  # fmt: skip
    path: list[int] = []
    for token in tokens:
        node = children.get((path[-1] if path else -1, token))
        if node is None:
            break
        path.append(node)
    return path


def _padded(
    values: np.ndarray, scored: ScoredPrefixes, width: int, fill: float, dtype: type
) -> np.ndarray:
    row: np.ndarray = np.full(width, fill, dtype=dtype)
    count = int(scored.counts[0])
    row[:count] = values[0, :count]
    return row


def _features(target: Target, token_ids: list[int], taps: Sequence[int]) -> torch.Tensor | None:
    """[N, taps · H] of a whole text."""
    if not taps:
        return None
    cache, parts = target.new_cache(), []
    for start in range(0, len(token_ids), _CHUNK_LEN):
        chunk = token_ids[start : start + _CHUNK_LEN]
        out = target.forward(DraftTree.chain(chunk), [cache], taps)
        cache.commit(np.arange(len(chunk)))
        assert out.features is not None
        parts.append(out.features)
    cache.release()
    return torch.cat(parts)


def _seeded(params: SamplingParams, count: int) -> list[SamplingParams]:
    if params.seed is None:
        return [params] * count
    return [replace(params, seed=params.seed + index) for index in range(count)]


def _draft_shape(drafter: Drafter) -> dict[str, object]:
    """Shape of a block-diffusion drafter, whose pass is one block; None for others."""
    model = _model_of(drafter)
    if not isinstance(model, BlockDiffusionDrafter):
        return {"draft_shape": None, "block_size": None}
    c = model.config
    shape = ModelShape(
        num_layers=c.num_hidden_layers,
        hidden_size=c.hidden_size,
        query_size=c.num_attention_heads * c.head_dim,
        kv_size=c.num_key_value_heads * c.head_dim,
        num_heads=c.num_attention_heads,
        ffn_size=c.intermediate_size,
        vocab_size=c.draft_vocab_size or c.vocab_size,
        bytes_per_value=4,
    )
    return {"draft_shape": asdict(shape), "block_size": c.block_size}


def _model_of(drafter: Drafter) -> Drafter:
    """The part of a drafter whose passes take time."""
    return drafter.model if isinstance(drafter, BlendDrafter) else drafter
