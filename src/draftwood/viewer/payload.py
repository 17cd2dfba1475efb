"""What the page carries: an overview of all cycles, and one short line per tree."""

from __future__ import annotations

import json
from typing import Any

from draftwood.viewer.read import STAGES, Line, Trace


class Vocabulary:
    """The distinct tokens of a trace, each stored once."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self.token_ids: list[int] = []
        self.texts: list[str | None] = []

    def places(self, token_ids: list[int], texts: list[str]) -> list[int]:
        """Where each token is stored; ``texts`` may be empty (no tokenizer)."""
        for at, token_id in enumerate(token_ids):
            if token_id not in self._places:
                self._places[token_id] = len(self.token_ids)
                self.token_ids.append(token_id)
                self.texts.append(texts[at] if at < len(texts) else None)
        return [self._places[token_id] for token_id in token_ids]


def overview_and_trees(trace: Trace, name: str) -> tuple[dict[str, Any], list[str]]:
    """(data for the whole page, one JSON text per cycle in the order of the trace).

    A tree is ``[tokens, parents, log_probs, path, picks, phi]``, tokens as places in the
    vocabulary. The page parses a tree only when it is shown.
    """
    vocabulary = Vocabulary()
    trees = [_tree(cycle, vocabulary) for cycle in trace.cycles]
    by_seq: dict[int, list[int]] = {}
    for at, cycle in enumerate(trace.cycles):
        by_seq.setdefault(cycle["seq"], []).append(at)
    overview = {
        "name": name,
        "header": trace.header,
        "cut_short": trace.cut_short,
        "vocabulary": {"ids": vocabulary.token_ids, "texts": vocabulary.texts},
        "sequences": [_sequence(trace, seq, places) for seq, places in by_seq.items()],
        "total": totals(trace.cycles, trace.prefills),
    }
    return overview, trees


def _tree(cycle: Line, vocabulary: Vocabulary) -> str:
    tree = [
        vocabulary.places(cycle["tokens"], cycle.get("texts", [])),
        cycle["parents"],
        [round(value, 3) for value in cycle["log_probs"]],
        cycle["path"],
        vocabulary.places(cycle["picks"], cycle.get("pick_texts", [])),
        [round(value, 3) for value in cycle["phi"]],
    ]
    return json.dumps(tree, separators=(",", ":"))


def _sequence(trace: Trace, seq: int, places: list[int]) -> dict[str, Any]:
    cycles = [trace.cycles[at] for at in places]
    prefills = [line for line in trace.prefills if line["seq"] == seq]
    return {
        "id": seq,
        "prompt": "".join(line.get("text", "") for line in prefills),
        "prompt_len": cycles[0]["start"] + 1,  # the anchor of the first cycle is its last token
        "stats": totals(cycles, prefills),
        "cycles": {
            "tree": places,
            "start": [cycle["start"] for cycle in cycles],
            "committed": [cycle["num_committed"] for cycle in cycles],
            "accepted": [len(cycle["path"]) - 1 for cycle in cycles],
            "budget": [cycle["budget"] for cycle in cycles],
            "why": [cycle.get("why", "") for cycle in cycles],
            "phi": [_phi(cycle) for cycle in cycles],
            "drafted": [bool(cycle.get("drafted", len(cycle["phi"]) > 1)) for cycle in cycles],
            "pieces": [_pieces(cycle) for cycle in cycles],
            "seconds": [[round(cycle["seconds"][s], 7) for s in STAGES] for cycle in cycles],
            "predicted": [cycle.get("predicted") for cycle in cycles],
            "error": [cycle.get("error") for cycle in cycles],
        },
    }


def totals(cycles: list[Line], prefills: list[Line]) -> dict[str, Any]:
    """Statistics of some cycles; a pass that several sequences shared counts once."""
    num_tokens = sum(cycle["num_committed"] for cycle in cycles)
    num_drafted = sum(cycle["budget"] for cycle in cycles)
    decode = _passes(cycles)
    decode_s = sum(sum(seconds.values()) for seconds in decode)
    return {
        "num_tokens": num_tokens,
        "num_cycles": len(cycles),
        "acceptance_length": num_tokens / len(cycles),
        "mean_budget": num_drafted / len(cycles),
        "num_drafted": num_drafted,
        "num_accepted": sum(len(cycle["path"]) - 1 for cycle in cycles),
        "phi": sum(_phi(cycle) for cycle in cycles),
        "decode_s": decode_s,
        "prefill_s": sum(sum(seconds.values()) for seconds in _passes(prefills)),
        "tokens_per_s": num_tokens / decode_s if decode_s > 0 else None,
        "stages": [sum(seconds[stage] for seconds in decode) for stage in STAGES],
    }


def _passes(lines: list[Line]) -> list[dict[str, float]]:
    """The stage seconds of the distinct passes among ``lines``."""
    distinct = {line.get("pass", f"line {at}"): line["seconds"] for at, line in enumerate(lines)}
    return [{stage: seconds[stage] for stage in STAGES} for seconds in distinct.values()]


def _phi(cycle: Line) -> float:
    return round(cycle["phi"][min(cycle["budget"], len(cycle["phi"]) - 1)], 4)


def _pieces(cycle: Line) -> list[str]:
    num = cycle["num_committed"]
    pieces = cycle.get("committed_texts") or cycle.get("pick_texts", [])[:num]
    return pieces if len(pieces) == num else [f"⟨{token}⟩" for token in cycle["picks"][:num]]
