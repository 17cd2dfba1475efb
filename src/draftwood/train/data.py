"""Training data: the target's own replies to prompts, resumable and sharded.

A row, one JSON object a line, is one reply::

    {"token_ids": [prompt and reply, a final stop token included],
     "response_start": 57, "domain": "math", "source": "gsm8k",
     "made": {"temperature": 0.7, "seed": 123, "max_new_tokens": 256, ...}}
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from draftwood.errors import DraftwoodError
from draftwood.sampling import SamplingParams
from draftwood.train.progress import DataProgress
from draftwood.train.prompts import Conversation, unique
from draftwood.train.serving import Finished, Prompt, Serves, run
from draftwood.train.shards import ShardWriter
from draftwood.train.threads import Thread, written_turns


@dataclass(frozen=True)
class DataConfig:
    """What to generate.

    Attributes:
        settings: each gives replies of its own to every prompt.
        samples_per_prompt: replies per prompt and setting; above 1 only where temperature > 0.
        seed: every reply has a seed derived from this one, its prompt and its sample; those in
            ``settings`` are not used.
        rows_per_shard: rows per file.
    """

    settings: tuple[SamplingParams, ...] = (SamplingParams(),)
    samples_per_prompt: int = 1
    seed: int = 0
    rows_per_shard: int = 2000

    def __post_init__(self) -> None:
        if not self.settings or self.samples_per_prompt < 1:
            raise ValueError(
                f"at least one setting and one sample per prompt are needed, got "
                f"{len(self.settings)} and {self.samples_per_prompt}"
            )
        plain = [_setting(params) for params in self.settings]
        if any(setting in plain[:i] for i, setting in enumerate(plain)):
            raise ValueError("two settings are equal; use samples_per_prompt for more replies")
        if self.samples_per_prompt > 1 and any(s.temperature == 0 for s in self.settings):
            raise ValueError(
                f"samples_per_prompt = {self.samples_per_prompt} at temperature 0 gives equal "
                "replies; use 1, or a temperature above 0"
            )


def generate_responses(
    engine: Serves,
    conversations: Iterable[Conversation],
    folder: str | os.PathLike[str],
    config: DataConfig | None = None,
    *,
    target: str = "",
    on_progress: Callable[[DataProgress], None] | None = None,
) -> DataProgress:
    """Let the target answer every user turn, each after its own earlier replies.

    Called again with the same folder it continues: finished conversations are kept, and the rows
    are the same as without an interruption (their order may differ). Prompts and samples may be
    added later. Equal conversations are answered once.

    Args:
        engine: serves the target; with keyed noise its replies do not depend on the batch.
        conversations: the prompts.
        folder: gets ``responses-*.jsonl``; ``load_rows`` reads it.
        config: sampling settings, samples, seed; one greedy reply per prompt by default.
        target: name of the target, recorded and compared when a run continues.
        on_progress: called after every finished conversation (``progress.bar`` gives one).

    Returns:
        The final counts.

    Raises:
        ValueError: no prompts, or the folder was made with other settings.
        DraftwoodError: another process writes there, or every prompt of this run failed.
    """
    config = config if config is not None else DataConfig()
    prompts = unique(conversations)
    if not prompts:
        raise ValueError("there are no prompts to answer; check the prompt files and filters")
    settings = {
        "target": target,
        "seed": config.seed,
        "settings": [_setting(params) for params in config.settings],
    }
    with ShardWriter(folder, settings, rows_per_shard=config.rows_per_shard) as writer:
        answering = _Answering(engine, config, writer)
        for now in answering.run(prompts):
            if on_progress is not None:
                on_progress(now)
    now = answering.now
    if now.num_failed and not now.num_rows and not now.num_resumed:
        raise DraftwoodError(f"no prompt could be answered; the last: {now.last_error}")
    return now


class _Answering:
    """One call of ``generate_responses``: its threads, its writer and its counts."""

    def __init__(self, engine: Serves, config: DataConfig, writer: ShardWriter) -> None:
        self._engine = engine
        self._config = config
        self._writer = writer
        self._written = written_turns(writer.rows())
        self._start_s = time.perf_counter()
        self.now = DataProgress(0)

    def run(self, prompts: list[Conversation]) -> Iterator[DataProgress]:
        """Answer all that is not written yet; yields the counts after every thread."""
        threads = [
            Thread(conversation, setting, sample)
            for conversation in prompts
            for setting in range(len(self._config.settings))
            for sample in range(self._config.samples_per_prompt)
        ]
        todo = deque(thread for thread in threads if not self._written[thread.key].is_complete)
        self._count(num_threads=len(threads), num_resumed=len(threads) - len(todo))
        yield self.now

        def next_job() -> tuple[Thread, Prompt, SamplingParams] | None:
            if not todo:
                return None
            thread = todo.popleft()
            return thread, thread.next_prompt(), self._params(thread)

        for thread, output in run(self._engine, next_job):
            error = _reason(output)
            if error is None and not isinstance(output, ValueError):
                thread.take(output, self._params(thread))
                if not thread.is_complete:
                    todo.appendleft(thread)
                    continue
            self._finish(thread, error)
            yield self.now

    def _params(self, thread: Thread) -> SamplingParams:
        params = self._config.settings[thread.setting]
        if params.temperature == 0:
            return dataclasses.replace(params, seed=0)
        identity = f"{self._config.seed} {_setting(params)} {thread.key} {len(thread.rows)}"
        digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
        return dataclasses.replace(params, seed=int.from_bytes(digest, "big") >> 1)

    def _finish(self, thread: Thread, error: str | None) -> None:
        # All rows of a thread at once: continuing then never has to pick up its text half-way.
        new = thread.rows_without(self._written[thread.key].turns)
        self._writer.append(new)
        lens = [(row["response_start"], len(row["token_ids"])) for row in new]
        now = self.now
        self._count(
            num_finished=now.num_finished + 1,
            num_failed=now.num_failed + (error is not None),
            num_rows=now.num_rows + len(new),
            num_prompt_tokens=now.num_prompt_tokens + sum(start for start, _ in lens),
            num_response_tokens=now.num_response_tokens + sum(end - start for start, end in lens),
            last_error=error if error is not None else now.last_error,
        )

    def _count(self, **changes: Any) -> None:
        seconds = time.perf_counter() - self._start_s
        self.now = dataclasses.replace(self.now, seconds=seconds, **changes)


def _reason(output: Finished | ValueError) -> str | None:
    """Why there is no reply, or None."""
    if isinstance(output, ValueError):
        return str(output)
    if output.finish_reason in ("stop", "length") and output.token_ids:
        return None
    return output.error or f"the target ended with {output.finish_reason!r} and no reply"


def _setting(params: SamplingParams) -> dict[str, Any]:
    """What a setting changes from the defaults, as JSON values."""
    default = SamplingParams()
    changed = {
        f.name: getattr(params, f.name)
        for f in dataclasses.fields(params)
        if f.name != "seed" and getattr(params, f.name) != getattr(default, f.name)
    }
    if "logit_bias" in changed:
        changed["logit_bias"] = {str(t): str(v) for t, v in sorted(params.logit_bias.items())}
    return changed
