"""Transfers by shared memory and over TCP, between threads and between processes: whole and right, or failed on both sides."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from octavo.distributed import shm_transport, stream_transport
from octavo.distributed.handshake import HELLO_BYTES
from octavo.distributed.shm_transport import ShmTransport
from octavo.distributed.tcp_transport import TcpTransport
from octavo.distributed.throttle import Throttle
from octavo.distributed.transport import MAX_PIECE_BYTES, Piece, TransferError, TransferHead, Transport, TransportListener

SECRET = b"a secret of the tests"
WAIT_S = 120.0  # hangs are found, slow machines are forgiven
HEAD = TransferHead(7, "model", 100)
MAKERS: dict[str, Callable[..., Transport]] = {"tcp": TcpTransport}
if shm_transport.is_available():
    MAKERS["shm"] = ShmTransport


class KeepingSink:
    """Keeps what comes; a byte of each piece is its layer."""

    def __init__(self) -> None:
        self.pieces: list[tuple[Piece, bytes]] = []
        self.over = threading.Event()
        self.failure: str | None = None
        self.finished = False
        self.refusal: str | None = None
        self.heads: list[TransferHead] = []
        self.piece_bytes = 1000

    def open(self, head: TransferHead) -> None:
        self.heads.append(head)
        if self.refusal is not None:
            raise TransferError(self.refusal)

    def num_bytes(self, key: int, piece: Piece) -> int:
        return self.piece_bytes * piece.num_blocks

    def put(self, key: int, piece: Piece, data: memoryview) -> None:
        if self.refusal is not None:
            raise TransferError(self.refusal)
        self.pieces.append((piece, bytes(data)))

    def finish(self, key: int) -> None:
        if self.refusal is not None:
            raise TransferError(self.refusal)
        self.finished = True
        self.over.set()

    def failed(self, key: int, reason: str) -> None:
        self.failure = reason
        self.over.set()


@pytest.fixture(params=sorted(MAKERS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def sink() -> KeepingSink:
    return KeepingSink()


@pytest.fixture
def listener(name: str, sink: KeepingSink) -> Iterator[TransportListener]:
    listener = MAKERS[name](SECRET, idle_s=60.0).listen("127.0.0.1", sink)
    yield listener
    listener.close()


def contents(piece: Piece) -> bytes:
    return bytes((piece.layer + i * 7) % 251 for i in range(1000)) * piece.num_blocks


def send_all(transport: Transport, address: str, pieces: list[Piece], head: TransferHead = HEAD) -> None:
    out = transport.connect(address, head)
    try:
        for piece in pieces:
            data = out.buffer(len(contents(piece)))
            data[:] = contents(piece)
            out.send(piece, data)
            out.keep_alive()
        out.finish()
    finally:
        out.close()


@pytest.mark.parametrize("checksum", ["none", "crc32", "blake2b"])
def test_pieces_arrive_whole_and_in_order(name: str, checksum: str, listener: TransportListener, sink: KeepingSink) -> None:
    pieces = [Piece(layer, 1, block, count) for layer in range(5) for block, count in ((0, 3), (3, 1), (4, 60))]
    send_all(MAKERS[name](SECRET), listener.address, pieces, replace(HEAD, checksum=checksum))
    assert sink.finished and sink.failure is None
    assert sink.pieces == [(piece, contents(piece)) for piece in pieces]


def test_many_transfers_at_a_time(name: str, listener: TransportListener, sink: KeepingSink) -> None:
    pieces = [Piece(layer, 1, 0, 20) for layer in range(10)]
    transport = MAKERS[name](SECRET)
    threads = [threading.Thread(target=send_all, args=(transport, listener.address, pieces, replace(HEAD, key=i))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(sink.pieces) == 80 and all(data == contents(piece) for piece, data in sink.pieces)
    assert sorted(head.key for head in sink.heads) == list(range(8))


def test_a_stranger_is_turned_away(name: str, listener: TransportListener, sink: KeepingSink) -> None:
    with pytest.raises(TransferError):
        MAKERS[name](b"another secret, not theirs").connect(listener.address, HEAD)
    assert sink.heads == [] and sink.failure is None, "nothing was said before the proof"
    send_all(MAKERS[name](SECRET), listener.address, [Piece(0, 1, 0, 1)])
    assert sink.finished, "and others are served"


def test_bytes_without_a_handshake_do_nothing(name: str, listener: TransportListener, sink: KeepingSink) -> None:
    if name == "tcp":
        host, port = listener.address.split(":")
        sock: socket.socket = socket.create_connection((host, int(port)))
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\0" + listener.address[1:] if listener.address.startswith("@") else listener.address)
    with sock:
        sock.recv(HELLO_BYTES, socket.MSG_WAITALL)
        sock.sendall(b"\xff" * 4096)
        sock.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(100) == b""
    assert sink.heads == []


def test_a_refused_transfer_says_why(name: str, listener: TransportListener, sink: KeepingSink) -> None:
    sink.refusal = "nothing is expected here"
    with pytest.raises(TransferError, match="nothing is expected here"):
        MAKERS[name](SECRET).connect(listener.address, HEAD)
    assert sink.failure is None, "what was never open cannot fail"


def test_pieces_that_are_not_wanted_end_it(name: str, listener: TransportListener, sink: KeepingSink) -> None:
    out = MAKERS[name](SECRET).connect(listener.address, HEAD)
    sink.piece_bytes = 999
    with pytest.raises(TransferError, match="1000 bytes are sent; 999 are expected|closed|reset|Broken"):
        out.send(Piece(0, 1, 0, 1), out.buffer(1000))
        out.finish()
    out.close()
    assert sink.over.wait(WAIT_S) and sink.failure is not None and "999 are expected" in sink.failure


def test_a_wrong_checksum_ends_it(name: str, listener: TransportListener, sink: KeepingSink, monkeypatch: pytest.MonkeyPatch) -> None:
    out = MAKERS[name](SECRET).connect(listener.address, replace(HEAD, checksum="crc32"))
    monkeypatch.setattr(out, "_checksum", lambda data: bytes(16))
    with pytest.raises(TransferError):
        data = out.buffer(1000)
        data[:] = contents(Piece(0, 1, 0, 1))
        out.send(Piece(0, 1, 0, 1), data)
        out.finish()
    out.close()
    assert sink.over.wait(WAIT_S) and "crc32 checksum is wrong" in (sink.failure or "") and sink.pieces == []


def test_a_sink_that_gives_up_stops_the_sender(name: str, listener: TransportListener, sink: KeepingSink) -> None:
    out = MAKERS[name](SECRET).connect(listener.address, HEAD)
    sink.refusal = "it was cancelled"
    with pytest.raises(TransferError):
        for _ in range(200):
            out.send(Piece(0, 1, 0, 1), out.buffer(1000))
        out.finish()
    out.close()
    assert sink.over.wait(WAIT_S) and not sink.finished


def test_a_sender_that_closes_early_has_failed(name: str, listener: TransportListener, sink: KeepingSink) -> None:
    out = MAKERS[name](SECRET).connect(listener.address, HEAD)
    out.send(Piece(0, 1, 0, 1), out.buffer(1000))
    out.close()
    out.close()
    assert sink.over.wait(WAIT_S) and sink.failure is not None and not sink.finished


def test_silence_ends_it(name: str, sink: KeepingSink) -> None:
    listener = MAKERS[name](SECRET, idle_s=0.2).listen("127.0.0.1", sink)
    try:
        out = None
        while not sink.heads:  # a busy machine may keep this end silent before it has said what it brings
            with contextlib.suppress(TransferError):
                out = MAKERS[name](SECRET).connect(listener.address, HEAD)
        assert sink.over.wait(WAIT_S) and sink.failure is not None
        if out is not None:
            out.close()
    finally:
        listener.close()


def test_closing_a_listener_ends_what_is_on_its_way(name: str, listener: TransportListener, sink: KeepingSink) -> None:
    out = MAKERS[name](SECRET).connect(listener.address, HEAD)
    listener.close()
    listener.close()
    assert sink.over.wait(WAIT_S) and not sink.finished
    with pytest.raises(TransferError):
        MAKERS[name](SECRET).connect(listener.address, HEAD)
    out.close()


def test_a_piece_has_a_greatest_size(name: str, listener: TransportListener) -> None:
    out = MAKERS[name](SECRET).connect(listener.address, HEAD)
    with pytest.raises(TransferError, match=f"at most {MAX_PIECE_BYTES}"):
        out.buffer(MAX_PIECE_BYTES + 1)
    out.close()


_CHILD = """
import sys, time
from octavo.distributed.shm_transport import ShmTransport
from octavo.distributed.tcp_transport import TcpTransport
from octavo.distributed.transport import Piece, TransferHead
out = {"tcp": TcpTransport, "shm": ShmTransport}[sys.argv[1]](sys.argv[3].encode()).connect(sys.argv[2], TransferHead(7, "model", 100))
out.send(Piece(0, 1, 0, 1), out.buffer(1000))
print("sent", flush=True)
time.sleep(60)
"""


def test_a_sender_that_is_killed_leaves_nothing(name: str, listener: TransportListener, sink: KeepingSink) -> None:
    child = subprocess.Popen([sys.executable, "-c", _CHILD, name, listener.address, SECRET.decode()], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"sent\n"
        os.kill(child.pid, signal.SIGKILL)
        assert sink.over.wait(WAIT_S) and sink.failure is not None and not sink.finished
    finally:
        child.kill()
        child.wait()
        child.stdout.close()  # type: ignore[union-attr]
    assert not [one for one in os.listdir("/dev/shm") if one.startswith("octavo")] if os.path.isdir("/dev/shm") else True


def test_a_throttle_holds_back_what_is_more_than_its_burst() -> None:
    now, slept = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    throttle = Throttle(1000.0, burst_bytes=100, clock=lambda: now[0], sleep=sleep)
    for _ in range(10):
        throttle.take(500)
    assert sum(slept) == pytest.approx(5.0)
    now[0] += 100.0
    slept.clear()
    throttle.take(100)
    throttle.take(500)
    assert slept == [pytest.approx(0.5)], "a rest saves up a burst, and no more"
    with pytest.raises(ValueError, match="bytes_per_s: 0 is not allowed"):
        Throttle(0)


def test_too_many_connections_are_closed(
    name: str, listener: TransportListener, sink: KeepingSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_transport, "MAX_CONNECTIONS", 1)
    first = MAKERS[name](SECRET).connect(listener.address, HEAD)
    with pytest.raises(TransferError):
        MAKERS[name](SECRET).connect(listener.address, HEAD)
    first.close()
    assert sink.over.wait(WAIT_S)
    deadline_s = time.monotonic() + WAIT_S
    while not sink.finished:  # its place is free when its thread has ended
        assert time.monotonic() < deadline_s
        with contextlib.suppress(TransferError):
            sink.over.clear()
            send_all(MAKERS[name](SECRET), listener.address, [Piece(0, 1, 0, 1)])
