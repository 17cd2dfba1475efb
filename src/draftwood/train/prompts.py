"""Training prompts: conversations from local JSONL files and from data sets on the hub."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Column names that public data sets use, first match wins.
TURN_COLUMNS = ("turns", "messages", "conversations", "conversation")
TEXT_COLUMNS = ("prompt", "instruction", "question", "problem", "query", "text")


@dataclass(frozen=True)
class Conversation:
    """What a user says, turn by turn; the target's replies are not part of it.

    Attributes:
        turns: user turns in order, at least one, none blank.
        system: system message, or None for the chat template's default.
        domain: label for balanced evaluation, e.g. "math"; "" if unknown.
        source: where the prompt comes from.
    """

    turns: tuple[str, ...]
    system: str | None = None
    domain: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if not self.turns or not all(isinstance(t, str) and t.strip() for t in self.turns):
            raise ValueError(f"a conversation needs user turns with text, got {self.turns!r}")
        try:
            "".join((self.system or "", *self.turns)).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"half a character (a lone surrogate) is no text: {error}") from error

    @property
    def key(self) -> str:
        """Identity of the text (labels do not matter)."""
        text = json.dumps([self.system, *self.turns])
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def read_prompts(path: str | os.PathLike[str], *, domain: str = "") -> list[Conversation]:
    """Conversations of a JSONL file, one object a line.

    A line has ``turns`` (user turns) or ``messages`` (role and content; assistant messages are
    left out because the target writes its own), and optionally ``domain``, ``source``.

    Args:
        path: the file.
        domain: label of the lines that have none.

    Raises:
        ValueError: a line is not such an object; the file and line are named.
    """
    found = []
    with open(path, "rb") as handle:
        for number, line in enumerate(handle, 1):
            if not line.strip():
                continue
            try:
                row = _parsed(line)
                found.append(_conversation(row, None, domain, os.path.basename(path)))
            except ValueError as error:
                raise ValueError(f"{os.fspath(path)}:{number}: {error}") from error
    return found


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError("this is not UTF-8 text; convert the file") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"this is no JSON ({error}); a line is an object with 'turns' or 'messages'"
        ) from error


def hub_prompts(
    name: str,
    *,
    subset: str | None = None,
    split: str = "train",
    column: str | None = None,
    domain: str = "",
    limit: int | None = None,
) -> Iterator[Conversation]:
    """Conversations of a data set on the hub, streamed.

    Args:
        name: data set id, or anything else ``datasets.load_dataset`` takes.
        subset: configuration of the data set.
        split: its split.
        column: column with text, user turns or messages; found by its usual names if None.
        domain: label of all conversations.
        limit: most rows to read.

    Raises:
        ValueError: no such column, or a row without user text.
        ImportError: ``datasets`` is not installed.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            'prompts from the hub need the "datasets" package: pip install "draftwood[train]"'
        ) from error
    rows: Iterable[Mapping[str, Any]] = load_dataset(name, subset, split=split, streaming=True)
    for index, row in enumerate(rows):
        if limit is not None and index >= limit:
            return
        try:
            yield _conversation(row, column, domain, name)
        except ValueError as error:
            raise ValueError(f"{name}, {split}[{index}]: {error}") from error


def unique(conversations: Iterable[Conversation]) -> list[Conversation]:
    """The conversations without repeated ones, in order of first appearance."""
    found: dict[str, Conversation] = {}
    for conversation in conversations:
        found.setdefault(conversation.key, conversation)
    return list(found.values())


def interleave(groups: Sequence[Sequence[Conversation]]) -> list[Conversation]:
    """Merge groups so that every prefix holds them in proportion to their sizes."""
    places = [
        ((i + 0.5) / len(group), g, i) for g, group in enumerate(groups) for i in range(len(group))
    ]
    return [groups[g][i] for _, g, i in sorted(places)]


def _conversation(row: Any, column: str | None, domain: str, source: str) -> Conversation:
    if not isinstance(row, Mapping):
        raise ValueError(f"expected an object, got {row!r:.80}")
    names = (column,) if column is not None else TURN_COLUMNS + TEXT_COLUMNS
    name = next((n for n in names if row.get(n)), None)
    if name is None:
        empty = next((n for n in names if n in row), None)
        if empty is not None:
            raise ValueError(f"{empty!r} is empty; give at least one user turn")
        raise ValueError(f"has {sorted(row)} but none of {', '.join(names)}")
    try:
        system, turns = _turns(row[name])
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from error
    return Conversation(
        turns, system, str(row.get("domain") or domain), str(row.get("source") or source)
    )


def _turns(value: Any) -> tuple[str | None, tuple[str, ...]]:
    if isinstance(value, str):
        return None, (value,)
    if not isinstance(value, Sequence):
        raise ValueError(f"expected text, turns or messages, got {value!r:.80}")
    if any(isinstance(turn, str) for turn in value):
        wrong = [turn for turn in value if not isinstance(turn, str)]
        if wrong:
            raise ValueError(f"among user turns, which are text, is {wrong[0]!r:.80}")
        return None, tuple(value)
    pairs = [_role_and_text(message) for message in value]
    system = [text for role, text in pairs if role == "system"]
    if len(system) > 1:
        raise ValueError(f"{len(system)} system messages in one conversation; at most one can be")
    return (system[0] if system else None), tuple(t for role, t in pairs if role == "user")


def _role_and_text(message: Any) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        raise ValueError(f"a message needs role and content, got {message!r:.80}")
    role, text = message.get("role", message.get("from")), message.get("content")
    text = message.get("value") if text is None else text
    role = {"human": "user", "gpt": "assistant"}.get(str(role), role)  # ShareGPT's names
    if role not in ("system", "user", "assistant") or not isinstance(text, str):
        raise ValueError(
            f"a message needs role system, user or assistant and text, got {message!r:.80}"
        )
    return role, text
