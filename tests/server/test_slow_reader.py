"""A client that lets its answer lie is named as the cause. Times are ratios: no verdict depends on the pace of the machine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import sys
import termios
import threading
import time
from typing import Any

import pytest

from octavo.engine.explain import explain
from tests.engine.scripted import bigram_engine
from tests.server.harness import RunningServer, wait_until

BODY = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "logprobs": 20, "temperature": 0, "stream": True}  # some 400 kB

MORE_THAN_A_HEAD = 1000  # bytes


def read_all(connection: socket.socket) -> None:
    with contextlib.closing(connection):
        while connection.recv(1 << 16):
            pass


def num_unread(connection: socket.socket) -> int:
    """Bytes that lie at the client."""
    return int.from_bytes(fcntl.ioctl(connection, termios.FIONREAD, bytes(4)), sys.byteorder)


AT_ONCE = {"prompt": "abcdefgh", "echo": True, "max_tokens": 1, "n": 64}


@pytest.mark.parametrize("how", [{"stream": True}, {"stream": False}, AT_ONCE])
def test_slow_readers_are_named(how: dict[str, Any]) -> None:
    """Of streams, of plain answers, and where nearly all of a stream comes at once."""
    with RunningServer(bigram_engine(max_num_seqs=64)) as server:
        server.limit_buffers(4096)
        num = 20
        timeline, begun = server.engine.timeline, time.monotonic()
        slow = [server.send_raw("POST", "/v1/completions", json.dumps(BODY | how).encode(), 4096) for _ in range(20)]
        wait_until(lambda: len(timeline.records()) == num and all(record.ended_s is not None for record in timeline.records()))
        wait_until(lambda: all(num_unread(connection) >= MORE_THAN_A_HEAD for connection in slow))  # all have been made into text, too
        time.sleep(max(0.3, 2.0 * (time.monotonic() - begun)))  # twice as long as all of it took
        readers = [threading.Thread(target=read_all, args=(connection,)) for connection in slow]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        wait_until(lambda: all(record.sent_s is not None for record in timeline.records()))
        found = [explain(timeline, record, 0.0) for record in timeline.records()]
        assert sum(account.main.name == "SLOW_READER" for account in found) >= num - 1
        assert all(abs(account.remainder_s) <= 0.01 * account.wall_s for account in found)


def test_a_quick_reader_is_not() -> None:
    with RunningServer(bigram_engine()) as server:
        # So short that the kernel takes all of it, and a reader whom a busy machine holds up is none that lets it lie.
        read_all(server.open_stream("/v1/completions", BODY | {"max_tokens": 40}))
        (record,) = server.engine.timeline.records()
        wait_until(lambda: record.sent_s is not None)
        assert explain(server.engine.timeline, record, 0.0).main.name != "SLOW_READER"
