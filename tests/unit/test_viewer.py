"""The viewer's page: what a trace must be, what the page holds, and that texts stay texts."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import draftwood as dw
from draftwood.cli.app import app
from draftwood.trace import TraceWriter, tracing
from draftwood.trace_parts import TokenTexts
from draftwood.viewer.payload import totals
from draftwood.viewer.read import STAGES, read_trace
from draftwood.viewer.view import render
from synthetic_trace import trace_lines, write_trace
from tiny_folder import save_tiny_folder, tiny_tokenizer

HOSTILE = (
    "</script><script>alert(1)</script>", "<!--", "-->", "]]>", "<img src=x onerror=alert(1)>",
    "&lt;", "\u2028", "\x00", "\u202e", "\ud800", '"', "\\", "$script", "é🪵",
)  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dw.Engine:
    folder = save_tiny_folder(tmp_path_factory.mktemp("tiny"))
    return dw.load(str(folder), "lookup", 8)


def data_of(page: str) -> tuple[dict[str, Any], list[list[Any]]]:
    """The overview and the trees inside a page."""
    blocks = re.findall(
        r'<script type="application/json" id="([\w-]+)">(.*?)</script>', page, re.DOTALL
    )
    found = dict(blocks)
    trees = [json.loads(line) for line in found["tree-data"].split("\n")]
    return json.loads(found["overview-data"]), trees


# ---- what the page holds ------------------------------------------------------------------


def test_every_cycle_of_a_real_run_is_on_the_page(engine: dw.Engine, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    params = dw.SamplingParams(max_new_tokens=20)
    with tracing(engine, path, prompt="ab ab ab"):
        outputs = engine.generate(["ab ab ab", "Grüße 🪵🪵"], params)
    overview, trees = data_of(render(path))
    assert overview["header"]["prompt"] == "ab ab ab"
    assert len(overview["sequences"]) == 2
    assert sum(output.num_cycles for output in outputs) == len(trees)
    ids = overview["vocabulary"]["ids"]
    for output, sequence in zip(outputs, overview["sequences"], strict=True):
        cycles = sequence["cycles"]
        picks = [
            ids[place]
            for at, num in zip(cycles["tree"], cycles["committed"], strict=True)
            for place in trees[at][4][:num]
        ]
        assert picks == output.token_ids
        shown = "".join(piece for pieces in cycles["pieces"] for piece in pieces)
        assert output.text.startswith(shown)  # the last bytes may be half a character
        assert len(output.text) - len(shown) <= 8
        assert cycles["budget"] == [cycle.num_drafted for cycle in output.cycles]
        assert sequence["stats"]["acceptance_length"] == pytest.approx(output.acceptance_length)
        assert sequence["stats"]["decode_s"] == pytest.approx(output.decode_s)
        assert sequence["prompt_len"] == len(output.prompt_token_ids)


class _Fading:
    """A latency model whose predictions change with every cycle it observes."""

    def __init__(self) -> None:
        self.num_observed = 0

    def verify_s(self, widths: np.ndarray, context_len: float, num_seqs: int) -> np.ndarray:
        return widths * 10.0 + self.num_observed

    def draft_s(self, context_len: float, num_seqs: int) -> float:
        return 2.0 + self.num_observed

    def other_s(self) -> float:
        return 1.0 + self.num_observed

    def walk_s(self, num_tokens: int) -> float:
        return 0.1 * num_tokens

    def observe(self, **_seconds: Any) -> None:
        self.num_observed += 1


def test_predictions_are_from_before_the_cycle(engine: dw.Engine, tmp_path: Path) -> None:
    path, latency = tmp_path / "trace.jsonl", _Fading()
    fresh = dw.Engine(engine.target, engine.drafter, engine.policy, latency=latency)
    with tracing(fresh, path):
        fresh.generate("abcabcabc", dw.SamplingParams(max_new_tokens=6))
    assert fresh.latency is latency
    assert fresh.on_cycle is None
    trace = read_trace(path)
    assert latency.num_observed == len(trace.cycles)
    assert {cycle["why"] for cycle in trace.cycles} == {"fixed"}
    overview, _ = data_of(render(path))
    assert set(overview["sequences"][0]["cycles"]["why"]) == {"fixed"}
    for at, cycle in enumerate(trace.cycles):
        width = len(cycle["tokens"])
        assert cycle["predicted"] == {
            "draft_s": 2.0 + at if cycle["drafted"] else None,
            "verify_s": pytest.approx(10.0 * width + at + 0.1 * len(cycle["picks"])),
            "other_s": 1.0 + at,
        }


def test_totals_count_a_shared_pass_once() -> None:
    lines = trace_lines(10, 8, num_seqs=3)
    cycles = [line for line in lines if line["kind"] == "cycle"]
    one = [line for line in cycles if line["seq"] == 0]
    both, alone = totals(cycles, []), totals(one, [])
    assert both["decode_s"] == pytest.approx(alone["decode_s"])
    assert both["num_tokens"] == sum(line["num_committed"] for line in cycles)
    assert both["stages"] == pytest.approx([10 * one[0]["seconds"][stage] for stage in STAGES])


def test_a_trace_without_texts_shows_token_ids(tmp_path: Path) -> None:
    lines = trace_lines(3, 5)
    for line in lines[2:]:
        line.update(texts=[], pick_texts=[], committed_texts=[])
    overview, _ = data_of(render(write_trace(tmp_path / "t", lines)))
    assert set(overview["vocabulary"]["texts"]) == {None}
    assert all(
        piece.strip("⟨⟩").isdigit() for piece in overview["sequences"][0]["cycles"]["pieces"][0]
    )


def test_token_texts_keep_leading_spaces() -> None:
    tokenizer = tiny_tokenizer()
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(" é", add_special_tokens=False)
    assert texts.each(ids)[0] == " "
    assert texts.joined(ids) == " é"
    assert TokenTexts(None).each(ids) == []


# ---- safety -------------------------------------------------------------------------------


def test_texts_cannot_leave_the_data(tmp_path: Path) -> None:
    lines = trace_lines(30, 12, words=HOSTILE)
    lines[0]["<script>"] = HOSTILE[0]
    path = tmp_path / "t"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    page = render(path)
    plain = render(write_trace(tmp_path / "plain", trace_lines(30, 12)))
    for mark in ("<", ">", "<!--", "</script"):
        assert page.count(mark) == plain.count(mark)
    overview, _ = data_of(page)
    assert set(overview["vocabulary"]["texts"]) <= set(HOSTILE)
    assert HOSTILE[0] in overview["vocabulary"]["texts"]
    page.encode("utf-8")  # a lone surrogate in a text must not make the page unwritable


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    page = render(write_trace(tmp_path / "t", trace_lines()))
    assert not re.findall(r"(?:src|href)=\"(?!data:,)", page)
    assert "@import" not in page
    assert "url(" not in page
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'")
    for tag in ("style", "script"):
        body = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert body is not None
        digest = base64.b64encode(hashlib.sha256(body[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy[1]


# ---- wrong traces -------------------------------------------------------------------------


def test_a_half_written_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t", trace_lines(5, 6, words=(" é", "🪵")))
    whole = path.read_bytes()
    half = whole[:-1].rindex(b"\n") + 1
    for end in (half + 1, half + 40, len(whole) - 2, whole.rindex("é".encode()) + 1):
        path.write_bytes(whole[:end])
        trace = read_trace(path)
        assert trace.cut_short
        assert len(trace.cycles) == 4
        assert data_of(render(path))[0]["cut_short"]
    path.write_bytes(whole[:-1])  # only the line break is missing
    assert not read_trace(path).cut_short
    assert len(read_trace(path).cycles) == 5


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b'{"kind": "hea', "ends within its first line"),
        (b"hello\nworld\n", "not a draftwood trace"),
        (b"\x89PNG\r\n\x1a\n", "not a draftwood trace"),
        (b"[1, 2]\n", "not a draftwood trace"),
        (b'{"kind": "cycle"}\n', "not a draftwood trace"),
        (b'{"kind": "header", "format": 99}\n', "format 99"),
        (b'{"kind": "header", "format": 1}\n', "no complete cycle"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said) as error:
        render(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line.pop("phi"),
        lambda line: line["parents"].pop(),
        lambda line: line["parents"].__setitem__(2, 5),
        lambda line: line["parents"].__setitem__(0, 0),
        lambda line: line["path"].append(99),
        lambda line: line.update(path=[]),
        lambda line: line.update(path=[0, 1, 1]),
        lambda line: line.update(num_committed=99),
        lambda line: line["log_probs"].__setitem__(1, "x"),
        lambda line: line["log_probs"].__setitem__(1, float("inf")),
        lambda line: line["seconds"].pop("walk_s"),
        lambda line: line.update(seq="<b>"),
        lambda line: line.update(path=[0, 99, 1]),
        lambda line: line.update(parents=3),
        lambda line: line.update(texts=[None]),
        lambda line: line.update(predicted={"verify_s": "soon", "other_s": 1}),
        lambda line: line.update(kind="other"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damage: Callable[[dict[str, Any]], Any]) -> None:
    lines = json.loads(json.dumps(trace_lines(5, 6)))
    damage(lines[3])
    with pytest.raises(ValueError, match="line 4 of"):
        render(write_trace(tmp_path / "t", lines))


# ---- the command --------------------------------------------------------------------------


def test_view_writes_the_page_next_to_the_trace_or_where_told(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "run.jsonl", trace_lines())
    result = CliRunner().invoke(app, ["view", str(trace)])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(tmp_path / "run.html")
    other = tmp_path / "other.html"
    CliRunner().invoke(app, ["view", str(trace), "-o", str(other)])
    assert other.read_text("utf-8") == (tmp_path / "run.html").read_text("utf-8") == render(trace)


def test_view_explains_and_never_replaces_its_trace(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "run.html", trace_lines())
    before = trace.read_bytes()
    assert CliRunner().invoke(app, ["view", str(trace)]).exit_code == 2
    assert trace.read_bytes() == before
    assert CliRunner().invoke(app, ["view", str(tmp_path / "none")]).exit_code == 2
    empty = tmp_path / "empty"
    empty.touch()
    result = CliRunner().invoke(app, ["view", str(empty)])
    assert result.exit_code == 1
    assert "empty" in result.stderr
    assert not empty.with_suffix(".html").exists()


def test_a_writer_alone_gives_a_readable_trace(engine: dw.Engine, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, engine.target) as writer:
        engine.on_cycle = writer
        engine.generate("abc", dw.SamplingParams(max_new_tokens=4))
    engine.on_cycle = None
    assert all(cycle["predicted"] is None for cycle in read_trace(path).cycles)
