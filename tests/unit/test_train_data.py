"""Training data: prompts, overlap with evaluation, replies on disk, continuing after a kill."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import draftwood as dw
from draftwood.errors import DraftwoodError
from draftwood.records import Output, StepEvent
from draftwood.sampling import SamplingParams
from draftwood.train.data import DataConfig, generate_responses
from draftwood.train.overlap import OverlapCheck
from draftwood.train.progress import DataProgress, bar
from draftwood.train.prompts import Conversation, hub_prompts, interleave, read_prompts, unique
from draftwood.train.serving import Prompt, run
from draftwood.train.shards import ShardWriter, load_rows
from draftwood.train.synthesis import SynthesisConfig, synthesise, user_turn
from tiny_folder import save_tiny_folder, tiny_tokenizer

TWO = (SamplingParams(max_new_tokens=8), SamplingParams(temperature=1.0, max_new_tokens=8))


class FakeEngine:
    """Replies that depend on the prompt and the seed only; the newest sequence finishes first."""

    def __init__(self, max_batch: int = 3, die_after: int | None = None) -> None:
        self.max_batch = max_batch
        self.die_after = die_after
        self.running: dict[int, tuple[str, SamplingParams]] = {}
        self.most_running = 0
        self.prompts: list[Prompt] = []
        self.settings: list[SamplingParams] = []

    def add(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        if "too long" in text:
            raise ValueError("the prompt has 9 tokens and the context holds 8")
        assert params is not None
        self.prompts.append(prompt)
        self.settings.append(params)
        seq_id = len(self.prompts)
        self.running[seq_id] = text, params
        self.most_running = max(self.most_running, len(self.running))
        return seq_id

    def step(self) -> list[StepEvent]:
        if self.die_after == 0:
            raise KeyboardInterrupt
        if self.die_after is not None:
            self.die_after -= 1
        seq_id = max(self.running)
        text, params = self.running.pop(seq_id)
        assert params.seed is not None
        reply = list(hashlib.md5(f"{text}{params.seed}".encode()).digest()[:4])
        failed = "poison" in text
        output = Output(
            seq_id, [ord(c) % 256 for c in text], [] if failed else reply, f"reply {reply}",
            "error" if failed else "stop", "the logits hold NaN" if failed else None,
        )  # fmt: skip
        return [StepEvent(seq_id, reply, "", output)]

    def abort(self, seq_id: int) -> None:
        del self.running[seq_id]


def conversations(count: int = 6) -> list[Conversation]:
    single = [Conversation((f"question {i}",), domain="chat") for i in range(count)]
    return [*single, Conversation(("first", "second", "third"), "be brief", "math", "set")]


def stored(folder: Path) -> list[str]:
    return sorted(line for f in folder.glob("*.jsonl") for line in f.read_text().splitlines())


# ---- replies on disk --------------------------------------------------------------------------


def test_rows_hold_prompt_reply_and_how_they_were_made(tmp_path: Path) -> None:
    engine = FakeEngine()
    config = DataConfig(TWO, rows_per_shard=5)
    now = generate_responses(engine, conversations(), tmp_path, config, target="tiny")

    rows = [json.loads(line) for line in stored(tmp_path)]
    assert len(rows) == (6 + 3) * 2
    for row in rows:
        reply = row["token_ids"][row["response_start"] :]
        assert len(reply) == 4
        assert row["made"]["max_new_tokens"] == 8
        assert row["made"]["temperature"] in (0.0, 1.0)
    assert len({row["made"]["seed"] for row in rows if row["made"]["temperature"]}) == 9
    shards = sorted(tmp_path.glob("responses-*.jsonl"))
    assert [len(s.read_text().splitlines()) for s in shards] == [5, 5, 5, 3]
    assert (now.num_threads, now.num_finished, now.num_rows) == (14, 14, 18)
    assert now.num_response_tokens == 18 * 4
    assert now.num_prompt_tokens == sum(row["response_start"] for row in rows)
    assert now.tokens_per_s > 0
    assert engine.most_running == engine.max_batch


def test_loaded_rows_are_what_the_trainer_takes(tmp_path: Path) -> None:
    generate_responses(FakeEngine(), conversations(), tmp_path)
    rows = load_rows(tmp_path)
    assert {row.domain for row in rows} == {"chat", "math"}
    assert all(len(row.token_ids) - row.response_start == 4 for row in rows)
    (file,) = tmp_path.glob("responses-*.jsonl")
    assert load_rows(file) == rows
    with pytest.raises(ValueError, match="no response rows"):
        load_rows(tmp_path / "nowhere")


def test_each_turn_is_answered_after_the_targets_own_earlier_replies(tmp_path: Path) -> None:
    engine = FakeEngine()
    generate_responses(engine, conversations(0), tmp_path)
    lens = [len(p) for p in engine.prompts]
    assert lens == [2, 4, 6]
    last: Any = engine.prompts[-1]
    assert [m["role"] for m in last] == ["system", *["user", "assistant"] * 2, "user"]
    assert [m["content"] for m in last][::2] == ["be brief", last[2]["content"], last[4]["content"]]
    assert [m["content"] for m in last if m["role"] == "user"] == ["first", "second", "third"]
    assert last[2]["content"].startswith("reply [")
    assert last[:4] == list(engine.prompts[1])


@pytest.mark.parametrize("steps", [0, 1, 4, 9, 17])
def test_a_killed_run_continues_to_the_same_rows(tmp_path: Path, steps: int) -> None:
    config = DataConfig(TWO, rows_per_shard=4)
    generate_responses(FakeEngine(), conversations(), tmp_path / "whole", config)

    dying = FakeEngine(die_after=steps)
    with pytest.raises(KeyboardInterrupt):
        generate_responses(dying, conversations(), tmp_path / "cut", config)
    assert not dying.running
    kept = stored(tmp_path / "cut")
    engine = FakeEngine(max_batch=2)
    now = generate_responses(engine, conversations(), tmp_path / "cut", config)

    assert set(kept) < set(stored(tmp_path / "whole"))
    assert stored(tmp_path / "cut") == stored(tmp_path / "whole")
    assert now.num_resumed + now.num_finished == now.num_threads
    assert now.num_rows == 18 - len(kept)


@pytest.mark.parametrize("keep_bytes", [1, 40, -1])
def test_a_half_written_last_line_is_ignored_and_made_again(
    tmp_path: Path, keep_bytes: int
) -> None:
    generate_responses(FakeEngine(), conversations(), tmp_path)
    before = stored(tmp_path)
    (file,) = tmp_path.glob("responses-*.jsonl")
    *lines, last = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines) + last[:keep_bytes])

    assert len(load_rows(tmp_path)) == len(before) - 1
    generate_responses(FakeEngine(), conversations(), tmp_path)
    assert stored(tmp_path) == before


def test_a_thread_of_which_some_turns_are_missing_is_completed(tmp_path: Path) -> None:
    generate_responses(FakeEngine(), conversations(0), tmp_path)
    before = stored(tmp_path)
    (file,) = tmp_path.glob("responses-*.jsonl")
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:2]))
    now = generate_responses(FakeEngine(), conversations(0), tmp_path)
    assert now.num_rows == 1
    assert stored(tmp_path) == before


def test_prompts_and_samples_can_be_added_later(tmp_path: Path) -> None:
    sampled = (SamplingParams(temperature=0.7),)
    generate_responses(FakeEngine(), conversations(2), tmp_path, DataConfig(sampled))
    first = set(stored(tmp_path))
    now = generate_responses(FakeEngine(), conversations(4), tmp_path, DataConfig(sampled, 3))
    assert first < set(stored(tmp_path))
    assert (now.num_resumed, now.num_threads) == (3, 15)
    assert len({tuple(r.token_ids) for r in load_rows(tmp_path)}) == (4 + 3) * 3


def test_other_settings_in_the_same_folder_are_refused(tmp_path: Path) -> None:
    generate_responses(FakeEngine(), conversations(), tmp_path, target="a")
    before = stored(tmp_path)
    with pytest.raises(ValueError, match='seed: 0 there, 1 given; target: "a" there'):
        generate_responses(FakeEngine(), conversations(), tmp_path, DataConfig(seed=1), target="b")
    assert stored(tmp_path) == before


def test_two_writers_cannot_share_a_folder(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, {}), pytest.raises(DraftwoodError, match="another process"):
        generate_responses(FakeEngine(), conversations(), tmp_path)
    with ShardWriter(tmp_path, {}) as writer:
        assert list(writer.rows()) == []


def test_a_failing_prompt_is_counted_and_the_others_are_answered(tmp_path: Path) -> None:
    bad = [Conversation(("too long",)), Conversation(("fine", "poison")), Conversation(("poison",))]
    now = generate_responses(FakeEngine(), [*bad, *conversations(2)], tmp_path)
    assert (now.num_failed, now.num_finished, now.num_rows) == (3, 6, 2 + 3 + 1)
    assert "NaN" in now.last_error or "context" in now.last_error
    again = generate_responses(FakeEngine(), [*bad, *conversations(2)], tmp_path)
    assert (again.num_rows, again.num_failed) == (0, 2)


def test_a_run_in_which_every_prompt_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DraftwoodError, match="the context holds 8"):
        generate_responses(FakeEngine(), [Conversation(("too long",))], tmp_path)


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    real, budget = os.write, 700

    def full(descriptor: int, data: Any) -> int:
        nonlocal budget
        if budget <= 0:
            raise OSError(28, "No space left on device")
        written = real(descriptor, bytes(data)[: min(len(data), budget, 100)])
        budget -= written
        return written

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        generate_responses(FakeEngine(), conversations(), tmp_path)
    monkeypatch.undo()
    (file,) = tmp_path.glob("responses-*.jsonl")
    assert file.read_bytes().endswith(b"\n")
    assert 0 < len(load_rows(tmp_path)) < 9
    generate_responses(FakeEngine(), conversations(), tmp_path)
    assert len(load_rows(tmp_path)) == 9


def test_progress_is_reported_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[DataProgress] = []
    with bar("replies") as show:

        def note(now: DataProgress) -> None:
            seen.append(now)
            show(now)

        generate_responses(FakeEngine(), conversations(), tmp_path, on_progress=note)
    done = [now.num_finished for now in seen]
    assert done == list(range(8))
    err = capsys.readouterr().err
    assert "replies" in err
    assert "7/7" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"settings": ()}, "at least one setting"),
        ({"samples_per_prompt": 0}, "at least one setting"),
        ({"samples_per_prompt": 2}, "temperature 0"),
        ({"settings": (SamplingParams(), SamplingParams(seed=3))}, "equal"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**arguments)


def test_no_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no prompts"):
        generate_responses(FakeEngine(), [], tmp_path)


# ---- serving ----------------------------------------------------------------------------------


def test_an_abandoned_run_frees_the_engine() -> None:
    engine = FakeEngine()
    jobs = iter([(i, f"p{i}", SamplingParams(seed=0)) for i in range(9)])
    results = run(engine, lambda: next(jobs, None))
    next(results)
    results.close()
    assert not engine.running


# ---- prompts ----------------------------------------------------------------------------------


def test_local_prompts_as_turns_and_as_messages(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "not kept"},
        {"role": "user", "content": "b"},
    ]
    share_gpt = [{"from": "human", "value": "c"}, {"from": "gpt", "value": "no"}]
    lines = [{"turns": ["x", "y"], "domain": "math"}, {"messages": messages},
             {"conversations": share_gpt}, {"prompt": "one", "source": "here"}]  # fmt: skip
    file.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    assert read_prompts(file, domain="chat") == [
        Conversation(("x", "y"), None, "math", "prompts.jsonl"),
        Conversation(("a", "b"), "s", "chat", "prompts.jsonl"),
        Conversation(("c",), None, "chat", "prompts.jsonl"),
        Conversation(("one",), None, "chat", "here"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting"),
        ("[1]", "expected an object"),
        ('{"other": "x"}', "'other'"),
        ('{"turns": []}', "'turns' is empty"),
        ('{"turns": ["x", 5]}', "is 5"),
        ("nonsense", "no JSON"),
        pytest.param("[" * 100_000, "no JSON", id="deep"),
        ('{"turns": ["\\ud800 x"]}', "surrogate"),
        ('{"turns": ["a", "  "]}', "with text"),
        ('{"turns": 3}', "'turns': expected text"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "role"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "user turns"),
        ('{"messages": [1]}', "role and content"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"turns": ["fine"]}\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as caught:
        read_prompts(file)
    assert "bad.jsonl:2" in str(caught.value)


def test_a_prompt_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    file = tmp_path / "latin.jsonl"
    file.write_bytes('{"turns": ["Grüße"]}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.jsonl:1: this is not UTF-8"):
        read_prompts(file)
    file.write_bytes(b"\xef\xbb\xbf" + '{"turns": ["Grüße"]}\n'.encode())
    assert read_prompts(file)[0].turns == ("Grüße",)


def test_prompts_of_a_data_set(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"q": f"q{i}", "n": i}) + "\n" for i in range(5)))
    found = list(hub_prompts(str(tmp_path), column="q", domain="qa", limit=3))
    assert [c.turns for c in found] == [("q0",), ("q1",), ("q2",)]
    assert {c.domain for c in found} == {"qa"}
    with pytest.raises(ValueError, match="but none of"):
        list(hub_prompts(str(tmp_path)))


def test_every_prefix_of_interleaved_groups_is_balanced() -> None:
    a = [Conversation((f"a{i}",)) for i in range(30)]
    b = [Conversation((f"b{i}",)) for i in range(10)]
    merged = interleave([a, b, []])
    assert sorted(c.turns[0] for c in merged) == sorted(c.turns[0] for c in a + b)
    for n in range(1, 41):
        share = sum(c.turns[0].startswith("a") for c in merged[:n])
        assert abs(share - 0.75 * n) <= 1.5


def test_repeated_prompts_are_dropped_whatever_their_labels() -> None:
    many = [Conversation(("x",)), Conversation(("y",)), Conversation(("x",), domain="d")]
    assert unique(many) == many[:2]


# ---- overlap ----------------------------------------------------------------------------------

STORY = "a farmer sells nine red apples to each of seven neighbours every second day of the week"


def test_overlap_finds_copies_and_long_shared_passages() -> None:
    check = OverlapCheck([STORY, "How many moons has Mars?"])
    assert check.shared("how many moons has MARS") == "how many moons has mars"
    assert check.shared("How many moons has Mars in total?") is None
    longer = f"Listen: {STORY.upper().replace(' ', ',  ')}. How many in total?"
    assert "nine red apples" in (check.shared(longer) or "")
    words = STORY.split()
    assert check.shared(" ".join(words[2:15])) is not None
    assert check.shared(" ".join(words[2:14])) is None


def test_format_that_evaluation_prompts_share_is_no_overlap() -> None:
    ask = "please reason step by step and put your final answer within a box at the end"
    rng = [f"{' '.join(f'w{i}x{j}' for j in range(14))} {ask}" for i in range(20)]
    check = OverlapCheck(rng, max_repeats=10)
    assert check.shared(f"a new and different problem about w3x13 {ask}") is None
    assert check.shared(f"{rng[3]} now") is not None
    assert OverlapCheck(rng[:5], max_repeats=10).shared(f"another problem {ask}") is not None


def test_overlapping_conversations_are_split_off_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "eval.jsonl"
    file.write_text(json.dumps({"turns": ["First turn.", STORY]}) + "\n")
    check = OverlapCheck.from_files([file])
    bad = Conversation(("Hello", "Well: " + STORY))
    kept, dropped = check.split([*conversations(2), bad])
    assert kept == conversations(2)
    assert [(d.conversation, d.shared in STORY) for d in dropped] == [(bad, True)]


def test_an_empty_check_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "eval.jsonl"
    file.write_text("\n")
    with pytest.raises(ValueError, match="no evaluation prompts"):
        OverlapCheck.from_files([file])
    with pytest.raises(ValueError, match="num_words"):
        OverlapCheck([STORY], num_words=2)


# ---- synthesis --------------------------------------------------------------------------------


class Talker(FakeEngine):
    """Writes user turns: some repeated, some cut off, some short."""

    def step(self) -> list[StepEvent]:
        seq_id = min(self.running)
        _, params = self.running.pop(seq_id)
        kind = (params.seed or 0) % 5
        text = ["same  Question again", f"question {params.seed}", "short", f"cut {params.seed}",
                f"another {params.seed}"][kind]  # fmt: skip
        reason: Any = "length" if kind == 3 else "stop"
        return [StepEvent(seq_id, [], "", Output(seq_id, [], [1], text, reason))]


def test_synthesised_prompts_are_whole_different_and_repeatable() -> None:
    tokenizer = tiny_tokenizer()
    engine = Talker()
    config = SynthesisConfig(12, openings=("", "Explain: "), domain="chat")
    found = synthesise(engine, tokenizer, config)
    texts = [c.turns[0] for c in found]
    assert len(found) == 12
    assert len({" ".join(t.lower().split()) for t in texts}) == 12
    assert any(t.startswith("Explain: ") for t in texts)
    assert not any("cut" in t or t == "short" for t in texts)
    again: list[Conversation] = []
    assert synthesise(Talker(), tokenizer, config, on_prompt=again.append) == found == again

    assert user_turn(tokenizer).footer == "\nassistant: "
    assert {p.stop for p in engine.settings} == {("assistant:",)}
    header = tokenizer("<s>user: ", add_special_tokens=False)["input_ids"]
    prompts: Sequence[Any] = engine.prompts
    assert all(p[: len(header)] == header for p in prompts)
    assert any(tokenizer.decode(p[len(header) :]) == "Explain: " for p in prompts)


def test_synthesis_gives_up_when_the_target_repeats_itself() -> None:
    class Parrot(Talker):
        def step(self) -> list[StepEvent]:
            seq_id = min(self.running)
            del self.running[seq_id]
            return [StepEvent(seq_id, [], "", Output(seq_id, [], [1], "the same again", "stop"))]

    assert len(synthesise(Parrot(), tiny_tokenizer(), SynthesisConfig(5, max_attempts=3))) == 1


def test_synthesis_needs_a_chat_template_and_a_temperature() -> None:
    with pytest.raises(ValueError, match="chat template"):
        user_turn(tiny_tokenizer(chat=False))
    with pytest.raises(ValueError, match="temperature"):
        SynthesisConfig(3, params=SamplingParams())
    with pytest.raises(ValueError, match="num_prompts"):
        SynthesisConfig(0)
    with pytest.raises(ValueError, match="openings"):
        SynthesisConfig(1, openings=())


# ---- the real engine --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dw.Engine:
    folder = save_tiny_folder(tmp_path_factory.mktemp("model"))
    return dw.load(str(folder), drafter="none", budget="off", max_batch=4)


def test_the_engine_answers_the_same_in_any_batch(engine: dw.Engine, tmp_path: Path) -> None:
    prompts = [Conversation((f"hi {i}",)) for i in range(5)]
    prompts.append(Conversation(("one", "two"), "sys"))
    config = DataConfig(TWO)
    now = generate_responses(engine, prompts, tmp_path / "batch", config)
    assert now.num_failed == 0
    assert engine.num_active == 0
    for conversation in reversed(prompts):
        generate_responses(engine, [conversation], tmp_path / "single", config)
    assert stored(tmp_path / "single") == stored(tmp_path / "batch")

    tokenizer = engine.target.tokenizer
    rows = [json.loads(line) for line in stored(tmp_path / "batch")]
    for row in rows:
        start = row["response_start"]
        text = tokenizer.decode(row["token_ids"][:start])
        assert text.startswith("<s>")
        assert text.endswith("assistant: ")
        params = SamplingParams(
            temperature=row["made"]["temperature"], seed=row["made"]["seed"], max_new_tokens=8
        )
        again = engine.generate(row["token_ids"][:start], params)[0]
        assert again.token_ids == row["token_ids"][start:]


def test_the_engine_synthesises_prompts(engine: dw.Engine) -> None:
    end_soon = {engine.target.eos_token_ids[0]: 4.0}
    params = SamplingParams(temperature=1.0, max_new_tokens=60, logit_bias=end_soon)
    config = SynthesisConfig(3, params=params, min_chars=1, max_attempts=20)
    found = synthesise(engine, engine.target.tokenizer, config)
    assert engine.num_active == 0
    assert len({c.turns for c in found}) == len(found) >= 1
    assert not any("</s>" in c.turns[0] for c in found)
