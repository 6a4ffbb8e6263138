"""The end of a transfer over a slow link: what is still in the kernel of the sender may take longer than an idle link is waited for."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable

import pytest

from octavo.distributed import tcp_transport
from octavo.distributed.tcp_transport import TcpTransport, num_unsent
from octavo.distributed.transport import Piece, TransferError, TransferHead

PIECE_BYTES = 1 << 12


class Sink:
    """Takes a piece when it may."""

    def __init__(self) -> None:
        self.may_take, self.outcome = threading.Event(), list[str]()

    def open(self, head: TransferHead) -> None:
        pass

    def num_bytes(self, key: int, piece: Piece) -> int:
        return PIECE_BYTES

    def put(self, key: int, piece: Piece, data: memoryview) -> None:
        assert self.may_take.wait(120.0)

    def finish(self, key: int) -> None:
        self.outcome.append("finished")

    def failed(self, key: int, reason: str) -> None:
        self.outcome.append(reason)


def finish(sink: Sink, unsent: Callable[[], int], patch: pytest.MonkeyPatch) -> None:
    """A transfer of a piece whose sender waits next to nothing for a link that does nothing. ``unsent``: bytes in its kernel."""
    patch.setattr(tcp_transport, "num_unsent", lambda sock: unsent())
    listener = TcpTransport(b"a secret", idle_s=120.0).listen("127.0.0.1", sink)
    out = TcpTransport(b"a secret", idle_s=120.0).connect(listener.address, TransferHead(1, "f", 10))
    try:
        out.send(Piece(0, 1, 0, 1), out.buffer(PIECE_BYTES))
        out._sock.settimeout(0.001)  # type: ignore[attr-defined]
        out.finish()
    finally:
        sink.may_take.set()
        out.close()
        listener.close()


def test_a_link_that_takes_bytes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, looks = Sink(), itertools.count()

    def unsent() -> int:
        if (look := next(looks)) == 20:
            sink.may_take.set()
        return (1 << 30) - look

    finish(sink, unsent, monkeypatch)
    assert sink.outcome == ["finished"] and next(looks) > 20


@pytest.mark.parametrize("num_left", [0, 1 << 20])
def test_a_link_that_takes_nothing_has_broken(num_left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or all is there, and nobody answers."""
    with pytest.raises(TransferError, match="TimeoutError"):
        finish(Sink(), lambda: num_left, monkeypatch)


def test_what_is_in_the_kernel_is_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as sock:
        peer, _ = listening.accept()
        with peer:
            assert num_unsent(sock) == 0
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                while True:
                    sock.send(bytes(1 << 20))
            assert num_unsent(sock) > 0
    with socket.socketpair()[0] as pair:
        assert num_unsent(pair) >= 0
