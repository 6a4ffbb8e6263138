"""Who connects and lets its bytes trickle in is given up when the handshake's time is over, however often it says something; and so is
who proves the secret and then says nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import pytest

from octavo.distributed import channel as channels
from octavo.distributed import control, stream_transport
from octavo.distributed.channel import Address, Channel, Listener, connect
from octavo.distributed.handshake import ANSWER_BYTES, GREETING, HELLO_BYTES
from octavo.distributed.messages import PROTOCOL, Hello, ToWorker, from_worker, to_worker
from octavo.distributed.tcp_transport import TcpTransport
from tests.distributed.test_stub_worker import front_end, until
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


def test_who_proves_the_secret_and_never_says_hello_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "HELLO_S", 0.1)

    async def run() -> None:
        engine = await front_end()
        loop = asyncio.get_running_loop()

        async def come() -> Channel[ToWorker]:
            channel = await connect(engine.control.address, SECRET, to_worker)
            channel.start(lambda messages: None, lambda reason: None)
            return channel

        async def come_politely() -> Channel[ToWorker]:
            channel = await come()
            channel.send(Hello(PROTOCOL, "polite", "both", "here", 1, "boot"))  # once: a second one is a lie, and costs the channel
            await until(lambda: channel.closed_for is not None or engine.control.find("polite") is not None)
            return channel

        polite = await come_politely()
        while polite.closed_for is not None:  # a busy machine has held it up for too long
            polite = await come_politely()
        silent = await come()
        begun_s = loop.time()
        await until(lambda: silent.closed_for is not None and not engine.control._strangers)
        while loop.time() < begun_s + 0.2:  # past the limit
            await asyncio.sleep(0.01)
        assert polite.closed_for is None and engine.control.find("polite") is not None, "whoever has said Hello may load its model"
        polite.abort("the test is over")
        await engine.stop()

    asyncio.run(run())
