"""Who connects and lets its bytes trickle in is given up when the handshake's time is over, however often it says something."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import pytest

from octavo.distributed import channel as channels
from octavo.distributed import stream_transport
from octavo.distributed.channel import Address, Listener
from octavo.distributed.handshake import ANSWER_BYTES, GREETING, HELLO_BYTES
from octavo.distributed.messages import from_worker
from octavo.distributed.tcp_transport import TcpTransport
from tests.distributed.test_transports import KeepingSink

SECRET = b"a secret of the tests"
TRICKLE = GREETING + bytes(ANSWER_BYTES)


def trickle(address: tuple[str, int]) -> int:
    """Bytes that were taken before the connection ended, one every few milliseconds. There are fewer than a handshake has."""
    with socket.create_connection(address, timeout=60.0) as sock:
        assert len(sock.recv(HELLO_BYTES)) == HELLO_BYTES
        sock.settimeout(0.002)
        for sent in range(ANSWER_BYTES - 1):
            try:
                sock.send(TRICKLE[sent : sent + 1])
                if sock.recv(1) == b"":
                    return sent
            except TimeoutError:
                time.sleep(0.003)
            except ConnectionError:
                return sent
        sock.settimeout(60.0)
        with contextlib.suppress(ConnectionError):
            assert sock.recv(1) == b""
        return ANSWER_BYTES - 1


def test_a_control_connection_that_trickles_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "HANDSHAKE_S", 0.1)

    async def run() -> None:
        listener = Listener(SECRET, from_worker, lambda channel: pytest.fail("it has been let in"))
        await listener.open(Address("127.0.0.1", 0))
        try:
            await asyncio.to_thread(trickle, (listener.address.host, listener.address.port))
        finally:
            listener.close()

    asyncio.run(run())


def test_a_connection_for_kv_that_trickles_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_transport, "CONNECT_S", 0.1)
    sink = KeepingSink()
    listener = TcpTransport(SECRET, idle_s=60.0).listen("127.0.0.1", sink)
    try:
        host, _, port = listener.address.rpartition(":")
        trickle((host, int(port)))
        assert not sink.heads
    finally:
        listener.close()
