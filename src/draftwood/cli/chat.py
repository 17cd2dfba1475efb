"""``draftwood chat``: a conversation that keeps the KV cache between its turns."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from draftwood.cli import options
from draftwood.cli.console import note, stderr, write
from draftwood.cli.options import how_ahead, open_engine, sampling_params
from draftwood.cli.reply import interruptible, note_failures, run_reply, summary

if TYPE_CHECKING:
    from draftwood.engine import Engine
    from draftwood.records import Output
    from draftwood.sampling import SamplingParams

COMMANDS = "/reset starts over, /exit leaves, Ctrl-C stops a reply"


class Conversation:
    """Messages so far, and the kept sequence whose cache the next turn continues."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None) -> None:
        self.engine = engine
        self._params = params
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._system)
        self._kept: int | None = None

    def reply(self, text: str) -> Output:
        """Answer one user turn on standard output; a turn that is refused leaves no mark."""
        messages = [*self._messages, {"role": "user", "content": text}]
        seq_id = self.engine.add(messages, self._params, keep=True, resume=self._kept)
        self._kept = None
        with interruptible() as stopped:
            output = run_reply(self.engine, seq_id, write, stopped)
        if output.finish_reason != "error":
            self._kept = seq_id
            self._messages = [*messages, {"role": "assistant", "content": output.text}]
        return output

    def reset(self) -> None:
        """Forget everything but the system message and free the cache."""
        if self._kept is not None:
            self.engine.abort(self._kept)
        self._kept, self._messages = None, list(self._system)


def chat(
    target: options.Target = "demo",
    drafter: options.Drafter = "auto",
    budget: options.Budget = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    ahead: options.Ahead = None,
    ahead_branches: options.AheadBranches = None,
    ahead_grid: options.AheadGrid = None,
    ahead_timeout: options.AheadTimeout = None,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    max_new_tokens: options.MaxNewTokens = 512,
    stop: options.Stop = None,
    system: Annotated[str | None, typer.Option(help="System message of the conversation.")] = None,
) -> None:
    """Talk with a model; each turn continues on the cache of the turns before."""
    params = sampling_params(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, stop=stop,
        repetition_penalty=repetition_penalty, max_new_tokens=max_new_tokens,
    )  # fmt: skip
    engine = open_engine(
        target, drafter, budget, dtype=dtype, device=device, ahead=ahead,
        ahead_options=how_ahead(ahead, ahead_branches, ahead_grid, ahead_timeout),
    )  # fmt: skip
    if engine.target.tokenizer is None or not engine.target.tokenizer.chat_template:
        raise ValueError(f"{target} has no chat template; use 'draftwood generate --raw'")
    conversation = Conversation(engine, params, system)
    note(COMMANDS)
    while (line := _read_line()) is not None:
        match line.strip():
            case "":
                continue
            case "/exit":
                break
            case "/reset":
                conversation.reset()
                note("starting over")
            case text if text.startswith("/"):
                note(f"unknown command {text}; {COMMANDS}")
            case text:
                _turn(conversation, text)


def _turn(conversation: Conversation, text: str) -> None:
    try:
        output = conversation.reply(text)
    except ValueError as error:  # this turn cannot be taken (too long, …); the session goes on
        stderr().print(f"error: {error}", style="red", markup=False)
        return
    write("\n")
    if output.finish_reason == "error":
        stderr().print(f"error: {output.error}", style="red", markup=False)
    note(summary(output))
    note_failures(conversation.engine)


def _read_line() -> str | None:
    """The next line the user typed, None at the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    while True:
        try:
            return input("\n› " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            note(f"\n{COMMANDS}")
