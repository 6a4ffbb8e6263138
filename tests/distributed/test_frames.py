"""Frames: any cut of the stream gives the same messages, and no length makes the reader take more than the limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.distributed.frames import HEADER_BYTES, FrameError, FrameReader, frame


@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_frames_come_out_whole_and_in_order_however_they_are_cut(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(frame, bodies))
    reader, got, at = FrameReader(limit_bytes=40), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        got += reader.feed(stream[at : at + size])
        at += size
    assert got == bodies
    assert reader.feed(b"") == []


def test_byte_by_byte() -> None:
    reader = FrameReader()
    got = [body for byte in frame(b"abc") + frame(b"") + frame(b"d") for body in reader.feed(bytes([byte]))]
    assert got == [b"abc", b"", b"d"]


def test_a_length_above_the_limit_is_refused_before_its_body_comes() -> None:
    reader = FrameReader(limit_bytes=10)
    assert reader.feed(frame(b"0123456789")) == [b"0123456789"]
    with pytest.raises(FrameError, match="at most 10"):
        reader.feed((11).to_bytes(HEADER_BYTES, "big"))
    with pytest.raises(FrameError, match="11 bytes"):
        frame(bytes(11), limit_bytes=10)


@given(st.lists(st.binary(min_size=1, max_size=20), max_size=20))
def test_noise_is_cut_or_refused_and_never_piles_up(pieces: list[bytes]) -> None:
    reader, num_in, num_out = FrameReader(limit_bytes=16), 0, 0
    try:
        for piece in pieces:
            num_in += len(piece)
            num_out += sum(HEADER_BYTES + len(body) for body in reader.feed(piece))
            assert num_in - num_out < HEADER_BYTES + 16
    except FrameError:
        pass
