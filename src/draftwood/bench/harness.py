"""Run a benchmark: methods in turns on the same work, every result kept at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftwood.bench.engines.base import Runner
from draftwood.bench.engines.worker import SCRIPTS
from draftwood.bench.identity import check
from draftwood.bench.measure import measured
from draftwood.bench.methods import REFERENCE, Bench, Method, open_runner, parse_method
from draftwood.bench.plan import Plan, Unit, in_turn, order_numbers
from draftwood.bench.runs import Request
from draftwood.bench.store import Store
from draftwood.bench.workloads import Task
from draftwood.sampling import SamplingParams
from draftwood.target.model import Target

WARM_UP = "Explain in a few sentences how bread is made."
WARM_UP_TOKENS = 32

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Decoding:
    """How every request is decoded.

    Attributes:
        max_new_tokens: longest output.
        seed: of the choice of prompts and of all draws.
        thinking: leave reasoning on in chat templates that have a switch for it; the papers
            switch it off.
    """

    max_new_tokens: int = 256
    seed: int = 0
    thinking: bool = False


def encode(target: Target, task: Task, replies: Sequence[str], *, thinking: bool) -> list[int]:
    """Token ids of a conversation up to the user's next turn, in the target's chat template."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ValueError("a benchmark needs a target with a tokenizer")
    turns = task.turns[: len(replies) + 1]
    if not tokenizer.chat_template:
        parts = [part for pair in zip(turns, [*replies, ""], strict=True) for part in pair]
        return list(tokenizer("\n\n".join(filter(None, parts)))["input_ids"])
    messages = [{"role": "system", "content": task.system}] if task.system is not None else []
    for turn, reply in zip(turns, [*replies, None], strict=True):
        messages.append({"role": "user", "content": turn})
        if reply is not None:
            messages.append({"role": "assistant", "content": reply})
    text = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, enable_thinking=thinking
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def room_for(
    bench: Bench, decoding: Decoding, max_prompt_len: int | None
) -> Callable[[Task], bool]:
    """Whether a task's first prompt leaves room for the output."""
    most = bench.max_len - decoding.max_new_tokens
    if max_prompt_len is not None:
        most = min(most, max_prompt_len)
    return lambda task: len(encode(bench.target, task, (), thinking=decoding.thinking)) <= most


@dataclass
class Harness:
    """Decodes a plan with some methods into a store.

    Args:
        bench: target, drafter and engines.
        methods: what is compared; plain decoding is added in front where it is missing.
        plan: the work.
        decoding: settings of all requests.
        store: where results are and go; what is there is not done again.
    """

    bench: Bench
    methods: list[Method]
    plan: Plan
    decoding: Decoding
    store: Store
    run_number: int = 0
    _runners: dict[tuple[str, float], Runner] = field(default_factory=dict)
    _warm: set[tuple[str, float, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        if all(method.name != REFERENCE for method in self.methods):
            self.methods = [parse_method(REFERENCE), *self.methods]
        names = [method.name for method in self.methods]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"method {twice!r} is named twice")

    def run(self, on_progress: Progress = lambda done, total, what: None) -> None:
        """Do what is missing. Interrupt it at any time; the next call goes on from there.

        Args:
            on_progress: told (results there, results in all, what is measured next); what was
                there before is counted from the start.
        """
        units = list(self.plan.units())
        for method in self.methods:  # what cannot run here fails before hours of work
            for temperature in self.plan.temperatures:
                self._runner(method, temperature)
        keys = [unit.key(method) for unit in units for method in self._methods_for(unit)]
        done, total = sum(key in self.store.records for key in keys), len(keys)
        for number, unit in zip(order_numbers(units), units, strict=True):
            methods = self._methods_for(unit)
            requests = self._requests(unit)
            for method in in_turn(methods, number):
                if unit.key(method) in self.store.records:
                    continue
                on_progress(done, total, f"{unit.set_name} T={unit.temperature:g} {method.name}")
                if requests is not None:
                    self._measure(unit, method, requests)
                done += 1
            if requests is not None:
                self._check(unit, methods, requests)
        on_progress(total, total, "")

    def close(self) -> None:
        """End outside engines."""
        for runner in self._runners.values():
            runner.close()

    def _methods_for(self, unit: Unit) -> list[Method]:
        limits = {m: self._runner(m, unit.temperature).max_concurrency for m in self.methods}
        return [m for m in self.methods if limits[m] is None or unit.concurrency <= limits[m]]  # type: ignore[operator]

    def _runner(self, method: Method, temperature: float) -> Runner:
        # An outside engine is a process with a copy of the model: one serves all temperatures.
        key = method.name, -1.0 if method.engine in SCRIPTS else temperature
        if key not in self._runners:
            self._runners[key] = open_runner(method, self.bench, temperature)
        return self._runners[key]

    def _requests(self, unit: Unit) -> list[Request] | None:
        """None if an earlier reply leaves no room, or has not been written."""
        requests = []
        for place, task in enumerate(unit.tasks):
            replies = [self._reply(unit, turn) for turn in range(unit.turn)]
            if None in replies:
                return None
            texts = [reply for reply in replies if reply is not None]
            ids = encode(self.bench.target, task, texts, thinking=self.decoding.thinking)
            if len(ids) + self.decoding.max_new_tokens > self.bench.max_len:
                return None
            params = SamplingParams(
                temperature=unit.temperature,
                seed=unit.seed(place, self.decoding.seed),
                max_new_tokens=self.decoding.max_new_tokens,
            )
            requests.append(Request(ids, params))
        return requests

    def _reply(self, unit: Unit, turn: int) -> str | None:
        """What plain decoding answered to an earlier turn."""
        record = self.store.records.get(unit.key(REFERENCE, turn))
        if record is None:
            return None
        (sequence,) = record["sequences"]
        tokenizer: Any = self.bench.target.tokenizer
        text: str = tokenizer.decode(sequence["token_ids"], skip_special_tokens=True)
        return text

    def _measure(self, unit: Unit, method: Method, requests: list[Request]) -> None:
        runner = self._runner(method, unit.temperature)
        self._warm_up(runner, method, unit)
        figures = measured(runner.run(requests))
        self.store.add(
            {
                "key": unit.key(method),
                "run": self.run_number,
                "set": unit.set_name,
                "tasks": [task.index for task in unit.tasks],
                "turn": unit.turn,
                "temperature": unit.temperature,
                "concurrency": unit.concurrency,
                "repeat": unit.repeat,
                "method": method.name,
                "num_prompt_tokens": [len(request.prompt_ids) for request in requests],
                **figures,
            }
        )

    def _warm_up(self, runner: Runner, method: Method, unit: Unit) -> None:
        """Before a method is first timed at this temperature and concurrency."""
        key = method.name, unit.temperature, unit.concurrency
        if key in self._warm:
            return
        ids = encode(self.bench.target, Task(0, (WARM_UP,)), (), thinking=self.decoding.thinking)
        most = min(WARM_UP_TOKENS, self.decoding.max_new_tokens)
        params = SamplingParams(temperature=unit.temperature, seed=0, max_new_tokens=most)
        runner.run([Request(ids, params)] * unit.concurrency)
        self._warm.add(key)

    def _check(self, unit: Unit, methods: Sequence[Method], requests: list[Request]) -> None:
        """Compare every method's output with that of plain decoding."""
        reference = self.store.records[unit.key(REFERENCE)]
        runners = {m.name: self._runner(m, unit.temperature) for m in methods}
        for method in methods:
            key = unit.key(method)
            runner = runners[method.name]
            known = key in self.store.checks or method.name == REFERENCE
            if known or not runner.promises_identity:
                continue
            sequences = self.store.records[key]["sequences"]
            findings = check(
                requests,
                [one["token_ids"] for one in reference["sequences"]],
                [one["token_ids"] for one in sequences],
                [one["cycles"]["drafted"] if one["cycles"] else None for one in sequences],
                (runners[REFERENCE], runner),
                sorted(self.bench.target.eos_token_ids),
            )
            self.store.add_check({"key": key, "run": self.run_number, "findings": findings})
