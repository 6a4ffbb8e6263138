"""The proxy of the tests does what its switches say, and no more."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from tests.cluster.proxy import Proxy, Sink

TIMEOUT_S = 60.0


@pytest.fixture
def sink() -> Iterator[Sink]:
    with Sink() as made:
        yield made


@pytest.fixture
def proxy(sink: Sink) -> Iterator[Proxy]:
    with Proxy((sink.host, sink.port)) as made:
        yield made


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection((proxy.host, proxy.port), TIMEOUT_S)


def is_gone(connection: socket.socket) -> bool:
    """Whether the other end has closed or reset it; waits for that."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def is_turned_away(proxy: Proxy) -> bool:
    with contextlib.suppress(ConnectionResetError), connect(proxy) as client:  # a reset may be there before the connection is
        return is_gone(client)
    return True


def test_bytes_pass_both_ways_in_order() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, Proxy(server.getsockname()) as proxy, connect(proxy) as client:
        there, _ = server.accept()
        sent = bytes(range(256)) * 5000
        with there:
            client.settimeout(TIMEOUT_S)
            client.sendall(sent[: 1 << 18])
            assert there.makefile("rb").read(1 << 18) == sent[: 1 << 18]
            there.sendall(sent[:1000])
            assert client.makefile("rb").read(1000) == sent[:1000]
            client.shutdown(socket.SHUT_WR)
            assert is_gone(there)  # one direction has ended; the other goes on
            there.sendall(b"last words")
            there.close()
            assert client.makefile("rb").read() == b"last words"


def test_delay(proxy: Proxy, sink: Sink) -> None:
    proxy.delay_s = 0.3
    with connect(proxy) as client:
        started_s = time.monotonic()
        client.sendall(b"x" * 10)
        assert sink.wait_for(10) and time.monotonic() - started_s >= 0.3
        proxy.delay_s = 0.0
        client.sendall(b"x" * 10)
        assert sink.wait_for(20)


def test_a_stall_holds_bytes_back_and_loses_none(proxy: Proxy, sink: Sink) -> None:
    with connect(proxy) as client:
        client.sendall(b"x")
        assert sink.wait_for(1)
        proxy.stall()
        client.sendall(b"x" * 999)
        time.sleep(0.2)
        assert sink.num_bytes == 1
        proxy.resume()
        assert sink.wait_for(1000) and sink.num_connections == 1


def test_a_cut_resets_what_is_open_and_takes_new_connections(proxy: Proxy, sink: Sink) -> None:
    with connect(proxy) as client:
        client.sendall(b"x")
        assert sink.wait_for(1)
        proxy.cut()
        assert is_gone(client)
    with connect(proxy) as client:
        client.sendall(b"x")
        assert sink.wait_for(2) and proxy.num_connections == 2


def test_refusing(proxy: Proxy, sink: Sink) -> None:
    proxy.refuse(True)
    assert is_turned_away(proxy)
    proxy.refuse(False)
    with connect(proxy) as client:
        client.sendall(b"x")
        assert sink.wait_for(1) and proxy.num_connections == 1


def test_a_dead_target_is_a_reset(proxy: Proxy) -> None:
    with Proxy(("127.0.0.1", 1)) as to_nobody:
        assert is_turned_away(to_nobody)
