"""The incremental detokenizer: same text as decoding at once, stop strings, nothing taken back."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from draftwood.text import TextStream


class ByteTokenizer:
    """One token per byte; 256 and up are special tokens."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(t for t in token_ids if t < 256).decode("utf-8", errors="replace")


def run(data: bytes, stop: Sequence[str] = ()) -> tuple[list[str], TextStream, int]:
    stream = TextStream(ByteTokenizer(), stop)
    pieces, used = [], 0
    for byte in data:
        used += 1
        stopped = stream.push(byte)
        pieces.append(stream.take())
        if stopped:
            break
    pieces.append(stream.finish())
    return pieces, stream, used


@given(st.text())
def test_pieces_join_to_the_whole_text(text: str) -> None:
    pieces, stream, _ = run(text.encode())
    assert "".join(pieces) == stream.text == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@given(st.text(alphabet="abé∑😀"), st.lists(st.text("abé∑😀", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_complete_stop_string(text: str, stop: list[str]) -> None:
    pieces, stream, used = run(text.encode(), stop)
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if not ends:
        assert "".join(pieces) == text
        assert not stream.stopped
        return
    # The stream stops with the character that completes a stop string first.
    done = min(ends)
    starts = [text.find(s, 0, done) for s in stop if text.find(s, 0, done) >= 0]
    assert stream.stopped
    assert used == len(text[:done].encode())
    assert "".join(pieces) == stream.text == text[: min(starts)]


def test_a_possible_stop_string_is_held_back_and_released() -> None:
    stream = TextStream(ByteTokenizer(), ["<end>"])
    for byte in b"ok <en":
        stream.push(byte)
    assert stream.take() == "ok "
    stream.push(ord("x"))
    assert stream.take() == "<enx"


def test_incomplete_character_is_held_back_then_replaced_at_the_end() -> None:
    stream = TextStream(ByteTokenizer())
    for byte in "a😀".encode()[:3]:
        stream.push(byte)
    assert stream.take() == "a"
    assert stream.finish() == "\ufffd"


def test_endless_garbage_does_not_grow_the_window() -> None:
    stream = TextStream(ByteTokenizer())
    for _ in range(1000):
        stream.push(0xFF)
    assert len(stream.take()) > 900


def test_special_tokens_give_no_text() -> None:
    stream = TextStream(ByteTokenizer(), ["b"])
    for token in (97, 300, 301):
        stream.push(token)
    assert stream.finish() == "a"


def test_stop_strings_wait_until_they_may_stop() -> None:
    stream = TextStream(ByteTokenizer(), ["b"])
    assert not stream.push(ord("b"), may_stop=False)
    assert not stream.push(ord("a"))
    assert stream.push(ord("b"))
    assert stream.text == "ba"
