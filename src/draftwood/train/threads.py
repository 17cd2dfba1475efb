"""A conversation being answered turn by turn, and the rows that come of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from draftwood.sampling import SamplingParams
from draftwood.train.prompts import Conversation
from draftwood.train.serving import Finished, Prompt

ThreadKey: TypeAlias = tuple[str, int, int]  # conversation, setting, sample


@dataclass
class Thread:
    """One conversation under one sampling setting and sample: its replies so far."""

    conversation: Conversation
    setting: int
    sample: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    _replies: list[str] = field(default_factory=list)

    @property
    def key(self) -> ThreadKey:
        return self.conversation.key, self.setting, self.sample

    @property
    def is_complete(self) -> bool:
        return len(self.rows) == len(self.conversation.turns)

    def next_prompt(self) -> Prompt:
        """What the target answers next: all earlier turns with its own replies."""
        turns, system = self.conversation.turns, self.conversation.system
        if system is None and not self._replies:
            return turns[0]  # text also works for a target without a chat template
        messages = [] if system is None else [{"role": "system", "content": system}]
        for turn, reply in zip(turns, self._replies, strict=False):
            messages.append({"role": "user", "content": turn})
            messages.append({"role": "assistant", "content": reply})
        return [*messages, {"role": "user", "content": turns[len(self._replies)]}]

    def take(self, output: Finished, params: SamplingParams) -> None:
        """Add the reply to the next turn."""
        prompt, reply = list(output.prompt_token_ids), list(output.token_ids)
        key, setting, sample = self.key
        made = {
            "temperature": params.temperature, "seed": params.seed,
            "max_new_tokens": params.max_new_tokens, "finish_reason": output.finish_reason,
            "prompt": key, "setting": setting, "sample": sample, "turn": len(self.rows),
        }  # fmt: skip
        self.rows.append({
            "token_ids": prompt + reply, "response_start": len(prompt),
            "domain": self.conversation.domain, "source": self.conversation.source, "made": made,
        })  # fmt: skip
        self._replies.append(output.text)

    def rows_without(self, written: set[int]) -> list[dict[str, Any]]:
        """The rows of turns that are not written yet; each says how many turns there are."""
        for row in self.rows:
            row["made"]["num_turns"] = len(self.rows)
        return [row for row in self.rows if row["made"]["turn"] not in written]


@dataclass
class Written:
    """The rows of one thread that are on disk: their turns, and how many there should be."""

    turns: set[int] = field(default_factory=set)
    num_turns: int = 1

    @property
    def is_complete(self) -> bool:
        return len(self.turns) >= self.num_turns


def written_turns(rows: Iterable[Mapping[str, Any]]) -> defaultdict[ThreadKey, Written]:
    """What is on disk, by thread."""
    found: defaultdict[ThreadKey, Written] = defaultdict(Written)
    for row in rows:
        made = row["made"]
        thread = found[made["prompt"], made["setting"], made["sample"]]
        thread.turns.add(made["turn"])
        thread.num_turns = made["num_turns"]
    return found
