"""The command line on a tiny model: what is printed where, exit codes, bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import draftwood as dw
from draftwood.cli.app import app
from tiny_folder import save_tiny_folder

RUNNER = CliRunner()
PROMPT = "abcabcabcabc"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("tiny"))


def invoke(*args: object, stdin: str | bytes | None = None) -> Result:
    return RUNNER.invoke(app, [str(arg) for arg in args], input=stdin)


def generate(folder: Path, *args: object, stdin: str | bytes | None = None) -> Result:
    options = ("--target", folder, "--drafter", "lookup", "--budget", 8, "--max-new-tokens", 24)
    return invoke("generate", *options, *args, stdin=stdin)


def in_process(folder: Path, prompt: str, *, raw: bool = False, **settings: object) -> dw.Output:
    engine = dw.load(str(folder), "lookup", 8)
    params = dw.SamplingParams(max_new_tokens=24, **settings)  # type: ignore[arg-type]
    return engine.generate(prompt, params, raw=raw)[0]


# ---- generate -----------------------------------------------------------------------------


def test_text_goes_to_stdout_and_statistics_to_stderr(folder: Path) -> None:
    result = generate(folder, PROMPT)
    assert result.exit_code == 0, result.output
    assert result.stdout == in_process(folder, PROMPT).text + "\n"
    assert "τ" in result.stderr
    assert "tok/s" in result.stderr


def test_json_is_one_object_that_agrees_with_python(folder: Path) -> None:
    result = generate(folder, PROMPT, "--json")
    assert result.exit_code == 0, result.output
    got = json.loads(result.stdout)
    want = in_process(folder, PROMPT)
    assert got["token_ids"] == want.token_ids
    assert got["text"] == want.text
    assert got["finish_reason"] == want.finish_reason
    assert got["num_prompt_tokens"] == len(want.prompt_token_ids)
    assert got["seed"] is None
    assert got["num_cycles"] == len(got["cycles"])
    assert sum(cycle["num_committed"] for cycle in got["cycles"]) == len(got["token_ids"])
    assert got["acceptance_length"] == pytest.approx(len(got["token_ids"]) / got["num_cycles"])
    assert got["hit_rate"] is None
    for cycle in got["cycles"]:
        assert cycle.pop("ahead") is None
        assert set(cycle) == {
            "num_drafted", "num_accepted", "num_committed", "phi", "context_len", "num_seqs",
            "draft_s", "verify_s", "walk_s", "commit_s", "other_s",
        }  # fmt: skip
        assert all(value >= 0 for value in cycle.values())


def test_a_drawn_seed_is_reported_and_reproduces_the_text(folder: Path) -> None:
    first = json.loads(generate(folder, PROMPT, "--json", "-T", "1").stdout)
    again = generate(
        folder, PROMPT, "--json", "-T", "1", "--seed", first["seed"], "--budget", "off"
    )
    assert json.loads(again.stdout)["token_ids"] == first["token_ids"]


def test_prompt_from_file_stdin_and_argument_are_the_same(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Grüße\nan alle\n", encoding="utf-8")
    want = generate(folder, "Grüße\nan alle").stdout
    assert generate(folder, "--file", path).stdout == want
    assert generate(folder, stdin="Grüße\nan alle\n").stdout == want
    assert generate(folder, "-", stdin="Grüße\nan alle").stdout == want


def test_raw_bypasses_the_chat_template(folder: Path) -> None:
    plain, raw = (
        json.loads(generate(folder, PROMPT, "--json", *o).stdout) for o in ((), ("--raw",))
    )
    assert raw["num_prompt_tokens"] == len(PROMPT)
    assert plain["num_prompt_tokens"] > len(PROMPT)
    assert raw["token_ids"] == in_process(folder, PROMPT, raw=True).token_ids


def test_stop_may_be_repeated_and_is_not_part_of_the_text(folder: Path) -> None:
    whole = in_process(folder, PROMPT).text
    stop = next(c for c in whole[4:] if c not in whole[:4])
    result = generate(folder, PROMPT, "--json", "--stop", "never there", "--stop", stop)
    got = json.loads(result.stdout)
    assert got["finish_reason"] == "stop"
    assert got["text"] == whole[: whole.index(stop)]


def test_sampling_options_reach_the_sampler(folder: Path) -> None:
    settings = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 5}
    args = [
        part for name, value in settings.items() for part in (f"--{name}".replace("_", "-"), value)
    ]
    got = json.loads(generate(folder, PROMPT, "--json", *args, "--repetition-penalty", 1.3).stdout)
    want = in_process(folder, PROMPT, repetition_penalty=1.3, **settings)
    assert got["token_ids"] == want.token_ids


def test_trace_holds_every_cycle(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    got = json.loads(generate(folder, PROMPT, "--json", "--trace", path).stdout)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines[0]["kind"] == "header"
    cycles = [line for line in lines if line["kind"] == "cycle"]
    assert [line["num_committed"] for line in cycles] == [
        cycle["num_committed"] for cycle in got["cycles"]
    ]
    picks = [pick for line in cycles for pick in line["picks"][: line["num_committed"]]]
    assert picks == got["token_ids"]


# ---- bad input ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ("-T", "-1", PROMPT),
        ("-T", "warm", PROMPT),
        ("--top-p", "1.5", PROMPT),
        ("--max-new-tokens", "0", PROMPT),
        ("--stop", "", PROMPT),
        ("--budget", "many", PROMPT),
        ("--budget", "-3", PROMPT),
        ("--file", "no/such/file"),
        ("--file", __file__, PROMPT),
        ("--no-such-option", PROMPT),
        ("",),
        (),
        ("--trace", "no/such/folder/trace.jsonl"),
    ],
)
def test_usage_errors_exit_with_2(folder: Path, args: tuple[str, ...]) -> None:
    result = generate(folder, *args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.output


def test_undecodable_prompt_is_a_usage_error(folder: Path) -> None:
    assert generate(folder, stdin=b"\xff\xfe").exit_code == 2


@pytest.mark.parametrize(
    "args",
    [
        ("--target", "no/such/folder/here"),
        ("--drafter", "no/such/folder/here"),
        ("--dtype", "float7"),
        ("--device", "abacus"),
    ],
)
def test_failures_are_one_line_and_exit_with_1(folder: Path, args: tuple[str, ...]) -> None:
    result = generate(folder, *args, PROMPT)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, result.stderr


def test_failures_quote_names_as_they_are() -> None:
    result = invoke("generate", "--target", "./a:b:[red]c", PROMPT)
    assert result.exit_code == 1
    assert "./a:b:[red]c" in result.stderr


def test_files_that_are_no_text_name_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b"\xff\xfe\x00")
    result = invoke("bench", "--data", file, "--out", tmp_path / "results")
    assert result.exit_code == 1
    assert "save it as UTF-8" in result.stderr


def test_prompt_longer_than_the_context_fails_cleanly(folder: Path) -> None:
    result = generate(folder, "x" * 600)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "context" in result.stderr


# ---- chat ---------------------------------------------------------------------------------


def chat(folder: Path, stdin: str, *args: object) -> Result:
    return invoke("chat", "--target", folder, "--max-new-tokens", 8, *args, stdin=stdin)


def test_chat_turns_equal_whole_conversations(folder: Path) -> None:
    engine = dw.load(str(folder))
    params = dw.SamplingParams(max_new_tokens=8)
    messages: list[dict[str, str]] = []
    for turn in ("hello", "more"):
        messages.append({"role": "user", "content": turn})
        text = engine.generate(messages, params)[0].text
        messages.append({"role": "assistant", "content": text})
    result = chat(folder, "hello\n\nmore\n/exit\nignored\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == "".join(
        m["content"] + "\n" for m in messages if m["role"] == "assistant"
    )


def test_chat_keeps_the_cache_between_turns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[tuple[int | None, int]] = []
    add = dw.Engine.add

    def spy(self: dw.Engine, *args: object, **kwargs: object) -> int:
        resume = kwargs["resume"]
        cached = self._kept[resume].cache.length if resume is not None else 0
        added.append((resume, cached))
        return add(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(dw.Engine, "add", spy)
    assert chat(folder, "hello\nmore\n/reset\nhello\n").exit_code == 0
    (first, _), (second, cached), (third, _) = added
    assert first is None
    assert second is not None
    assert cached > 0
    assert third is None


def test_chat_reset_forgets(folder: Path) -> None:
    first, second = chat(folder, "hello\n/reset\nhello\n", "--stop", "\n").stdout.splitlines()
    assert first == second


def test_chat_survives_a_turn_that_is_too_long(folder: Path) -> None:
    result = chat(folder, f"hello\n{'x' * 600}\n/reset\nhello\n", "--stop", "\n")
    assert result.exit_code == 0, result.output
    assert "error:" in result.stderr
    first, second = result.stdout.splitlines()
    assert first == second


def test_chat_needs_a_template(tmp_path: Path) -> None:
    result = chat(save_tiny_folder(tmp_path, chat=False), "hello\n")
    assert result.exit_code == 1
    assert "template" in result.stderr


@pytest.fixture
def python_handles_ctrl_c() -> Iterator[None]:
    """Background jobs of a shell ignore SIGINT, which ``interruptible`` respects: not here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_ctrl_c_stops_the_reply_and_keeps_the_session(folder: Path) -> None:
    from draftwood.cli.reply import interruptible, run_reply

    engine = dw.load(str(folder), "none")
    seq_id = engine.add(PROMPT, dw.SamplingParams(max_new_tokens=200, ignore_eos=True), keep=True)
    pieces: list[str] = []

    def write(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with interruptible() as stopped:
        output = run_reply(engine, seq_id, write, stopped)
    assert output.finish_reason == "abort"
    assert 3 <= len(output.token_ids) < 200
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = engine.add(PROMPT, dw.SamplingParams(max_new_tokens=4), resume=seq_id)
    with interruptible() as stopped:
        assert run_reply(engine, resumed, pieces.append, stopped).finish_reason != "abort"


@pytest.mark.parametrize("outcome", ["swallowed", "another error"])
def test_ctrl_c_while_loading_is_heeded_whatever_a_library_makes_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    load = dw.load

    def careless(*args: object, **kwargs: object) -> dw.Engine:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if outcome == "another error":
                raise ValueError("could not import") from None
        return load(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("draftwood.api.load", careless)
    result = generate(folder, PROMPT)
    assert result.exit_code == 130
    assert result.stdout == ""
    assert "could not import" not in result.stderr
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interruptible_outside_the_main_thread_changes_nothing() -> None:
    from draftwood.cli.reply import interruptible

    seen: list[bool] = []

    def body() -> None:
        with interruptible() as stopped:
            seen.append(stopped())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [False]


# ---- demo, info ---------------------------------------------------------------------------


def test_demo_compares_and_reports_identical_outputs(folder: Path) -> None:
    result = invoke("demo", "--target", folder, "--budget", 8, "--max-new-tokens", 12)
    assert result.exit_code == 0, result.output
    assert "lookup" in result.stdout
    assert "speedup" in result.stdout
    assert "yes" in result.stdout


def test_demo_fails_when_an_output_differs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftwood.cli import demo

    monkeypatch.setattr(demo.Comparison, "identical", property(lambda _self: False))
    result = invoke("demo", "--target", folder, "--budget", 8, "--max-new-tokens", 4)
    assert result.exit_code == 1


def test_info_states_versions_and_facts_of_a_target(folder: Path) -> None:
    result = invoke("info", "--target", folder)
    assert result.exit_code == 0, result.output
    assert dw.__version__ in result.stdout
    assert "LlamaForCausalLM" in result.stdout
    assert "512" in result.stdout


def test_info_on_a_missing_model_is_one_line(tmp_path: Path) -> None:
    result = invoke("info", "--target", tmp_path / "nothing")
    assert result.exit_code == 1
    assert "Traceback" not in result.stderr


# ---- the real command ---------------------------------------------------------------------


def run(*args: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "draftwood", *map(str, args)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


def test_piped_command_prints_only_text_on_stdout(folder: Path) -> None:
    options = ("--target", folder, "--drafter", "lookup", "--budget", 8, "--max-new-tokens", 24)
    done = run("generate", *options, stdin=PROMPT + "\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout == in_process(folder, PROMPT).text + "\n"


def test_an_interrupt_while_the_command_loads_leaves_quietly() -> None:
    code = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'draftwood.cli.app':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from draftwood.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom draftwood.cli import main\n"
        "sys.argv = ['draftwood', 'generate', '--help']\n"
        "try:\n    main()\nfinally:\n    assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--temperature" in done.stdout
