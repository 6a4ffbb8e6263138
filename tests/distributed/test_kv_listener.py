"""Where KV comes in: strangers keep nobody out, what is short for a moment is short for that moment alone, and slow is not silent."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict

import msgspec
import pytest

from octavo.distributed import shm_transport, stream_transport
from octavo.distributed.handshake import HELLO_BYTES, PROOF_BYTES, ConnectorHandshake
from octavo.distributed.stream_transport import PURPOSE, StreamListener, recv_bytes, send_text
from octavo.distributed.tcp_transport import TcpTransport, _Outgoing, _Reader
from octavo.distributed.transport import Piece, TransferError, TransferHead, TransportListener
from tests.distributed.test_transports import HEAD, MAKERS, SECRET, WAIT_S, KeepingSink, send_all


@pytest.fixture(params=sorted(MAKERS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@contextlib.contextmanager
def listening(name: str, sink: KeepingSink) -> Iterator[TransportListener]:
    listener = MAKERS[name](SECRET, idle_s=WAIT_S).listen("127.0.0.1", sink)
    try:
        yield listener
    finally:
        listener.close()


def connected(name: str, address: str) -> socket.socket:
    if name == "tcp":
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)), WAIT_S)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WAIT_S)
    sock.connect(shm_transport._bound_name(address))
    return sock


def test_strangers_keep_no_worker_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not know the secret waits in vain: of too many the oldest are sent away, and the workers' are served."""
    monkeypatch.setattr(stream_transport, "CONNECT_S", WAIT_S)
    monkeypatch.setattr(stream_transport, "MAX_UNPROVEN", 8)
    monkeypatch.setattr(stream_transport, "MAX_CONNECTIONS", 8)
    sink = KeepingSink()
    with listening(name, sink) as listener, contextlib.ExitStack() as strangers:
        socks = [strangers.enter_context(connected(name, listener.address)) for _ in range(30)]
        assert isinstance(listener, StreamListener)
        for sock in socks[:22]:
            assert len(recv_bytes(sock, HELLO_BYTES)) == HELLO_BYTES
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b"", "it is sent away"
        assert len(listener._unproven) == 8
        send_all(MAKERS[name](SECRET), listener.address, [Piece(0, 1, 0, 1)])
        assert sink.finished


def test_one_transfer_too_many_hears_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_transport, "MAX_CONNECTIONS", 1)
    sink = KeepingSink()
    with listening(name, sink) as listener:
        first = MAKERS[name](SECRET).connect(listener.address, HEAD)
        with pytest.raises(TransferError, match="1 connections are there already"):
            MAKERS[name](SECRET).connect(listener.address, HEAD)
        assert len(sink.heads) == 1 and sink.failure is None
        first.close()


def test_a_thread_that_cannot_be_had_costs_one_transfer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def no_more(self: threading.Thread) -> None:
        if self.name == "octavo-kv-in":
            raise RuntimeError("can't start new thread")
        start(self)

    sink = KeepingSink()
    with listening(name, sink) as listener:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_more)
            with pytest.raises(TransferError):
                send_all(MAKERS[name](SECRET), listener.address, [Piece(0, 1, 0, 1)])
        assert isinstance(listener, StreamListener) and not listener._unproven and not listener._connections
        send_all(MAKERS[name](SECRET), listener.address, [Piece(0, 1, 0, 1)])
        assert sink.finished


def test_a_descriptor_that_cannot_be_had_is_a_line_of_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """And no traceback, ten times a second."""
    errors = iter([OSError(24, "Too many open files")] * 30)

    class Short(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            for error in errors:
                raise error
            return super().accept()

    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    sink, sock = KeepingSink(), Short(socket.AF_INET, socket.SOCK_STREAM)
    sock.bind(("127.0.0.1", 0))
    sock.listen(8)
    port = sock.getsockname()[1]
    listener = StreamListener(sock, f"127.0.0.1:{port}", SECRET, sink, WAIT_S, _Reader)
    try:
        send_all(TcpTransport(SECRET), listener.address, [Piece(0, 1, 0, 1)])
        assert sink.finished
    finally:
        listener.close()
    assert not any(record.exc_info for record in caplog.records)
    assert 0 < sum("Too many open files" in record.getMessage() for record in caplog.records) < 10


def test_a_transfer_that_was_opened_fails_also_when_its_sender_is_gone_before_it_hears_so() -> None:
    opened, gone, sink = threading.Event(), threading.Event(), KeepingSink()
    open_sink = sink.open

    def open_slowly(head: TransferHead) -> None:
        open_sink(head)
        opened.set()
        assert gone.wait(WAIT_S)

    sink.open = open_slowly  # type: ignore[method-assign]
    with listening("tcp", sink) as listener:
        with connected("tcp", listener.address) as sock:
            handshake = ConnectorHandshake(SECRET, PURPOSE)
            sock.sendall(handshake.answer(recv_bytes(sock, HELLO_BYTES)))
            handshake.check(recv_bytes(sock, PROOF_BYTES))
            send_text(sock, msgspec.msgpack.encode(asdict(HEAD)))
            assert opened.wait(WAIT_S)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # the sender dies: a reset
        gone.set()
        assert sink.over.wait(WAIT_S) and sink.failure is not None


class SlowSocket:
    """Takes a little at a time, each after nine tenths of its time limit. ``sendall`` has one for all of it, as Python's has."""

    LIMIT_S, MOST_BYTES = 10.0, 64 << 10

    def __init__(self) -> None:
        self.now_s, self.got = 0.0, bytearray()

    def send(self, data: memoryview) -> int:
        self.now_s += 0.9 * self.LIMIT_S
        self.got += data[: self.MOST_BYTES]
        return min(len(data), self.MOST_BYTES)

    def sendall(self, data: bytes) -> None:
        view, deadline_s = memoryview(data), self.now_s + self.LIMIT_S
        while len(view):
            view = view[self.send(view) :]
            if self.now_s > deadline_s:
                raise TimeoutError("timed out")


def test_a_link_that_moves_is_not_given_up_however_slow_it_is() -> None:
    sock = SlowSocket()
    out = _Outgoing(sock, HEAD, None)  # type: ignore[arg-type]
    data = out.buffer(2 << 20)
    data[:] = bytes(range(256)) * (8 << 10)
    out.send(Piece(0, 1, 0, 1), data)
    assert sock.got.endswith(data) and sock.now_s > 20 * sock.LIMIT_S
