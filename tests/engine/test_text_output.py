"""Stop strings and incremental text: what is shown, held back, and when (byte-wise streams included)."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.text_output import StopMatcher, TextOutput


class ByteDecoder:
    """Token id = byte; an incomplete character is held until flush, which shows it as U+FFFD."""

    def __init__(self) -> None:
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self.utf8.decode(bytes([token_id]))

    def flush(self) -> str:
        return self.utf8.decode(b"", final=True)

    def fork(self) -> ByteDecoder:
        return ByteDecoder()


def shown(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """Deltas of a stream, and the stop string that ended it."""
    matcher = StopMatcher(stops)
    deltas = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        deltas.append(text)
        if stop is not None:
            return deltas, stop
    return [*deltas, matcher.flush()], None


def brute_force(stops: list[str], text: str) -> tuple[str, str | None]:
    """The rule itself: the match that ends first, of those the one that begins first."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "stop"),
    [
        (["\nUser:"], ["ok", "\n", "Use", "ful", "\n", "."], "ok\nUseful\n.", None),  # held, then released once
        (["\nUser:"], ["ok", "\n", "Use"], "ok\nUse", None),  # the end comes while text is held
        (["\n"], [" Mars", "?\n"], " Mars?", "\n"),  # the part of a token before the stop stays
        (["\n", "Alice:"], [" Alice", "!"], " Alice!", None),
        (["ZZZ"], list("用中文"), "用中文", None),
        (["aab"], ["a", "a", "a", "b"], "a", "aab"),  # overlapping beginnings
        (["abcd", "c"], ["abcd"], "ab", "c"),  # the match that ends first
        (["bc", "abc"], ["ab", "cd"], "", "abc"),  # of those, the one that begins first
    ],
)
def test_stop_strings(stops: list[str], pieces: list[str], text: str, stop: str | None) -> None:
    deltas, found = shown(stops, pieces)
    assert ("".join(deltas), found) == (text, stop)


def test_text_that_cannot_begin_a_stop_is_shown_at_once() -> None:
    assert shown(["\nUser:"], ["ok", "\n", "Use", "ful"])[0] == ["ok", "", "", "\nUseful", ""]


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_the_outcome_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str]) -> None:
    deltas, found = shown(stops, pieces)
    assert ("".join(deltas), found) == brute_force(stops, "".join(pieces))


def test_a_match_inside_min_tokens_is_passed_over_for_good() -> None:
    output = TextOutput(ByteDecoder(), ["b", "abc"], min_tokens=2)
    assert [output.push(ord(c)) for c in "abx"] == [("", None), ("", None), ("abx", None)]
    assert output.push(ord("b")) == ("", "b")


def test_the_stop_string_is_shown_when_asked() -> None:
    output = TextOutput(ByteDecoder(), ["xy"], include_stop=True)
    assert [output.push(ord(c)) for c in "axy"] == [("a", None), ("", None), ("xy", "xy")]


def test_an_incomplete_character_is_shown_only_at_the_end() -> None:
    output = TextOutput(ByteDecoder(), ["ZZZ"])
    emoji = "😀".encode()
    assert [output.push(b)[0] for b in b"Z" + emoji] == ["", "", "", "", "Z😀"]
    assert [output.push(b)[0] for b in b"Z" + emoji[:2]] == ["", "", ""]
    assert output.finish() == "Z\ufffd"


def test_choices_have_their_own_text() -> None:
    first = TextOutput(ByteDecoder(), ["ab"])
    second = first.fork()
    assert first.push(ord("a")) == ("", None)
    assert second.push(ord("b")) == ("b", None)
    assert first.push(ord("b")) == ("", "ab")
