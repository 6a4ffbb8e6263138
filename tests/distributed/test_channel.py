"""Channels on real sockets: messages both ways and in order, strangers turned away, faults that end in a reason and never in a hang."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from octavo.distributed import channel as channels
from octavo.distributed import messages
from octavo.distributed.channel import Address, Channel, Listener, connect
from octavo.distributed.frames import frame
from octavo.distributed.handshake import AuthenticationError
from octavo.distributed.messages import Beat, Copied, Events, FromWorker, MessageError, ToWorker
from octavo.distributed.unix_sockets import is_left

SECRET = b"a secret of the tests"


class Side:
    """What a started channel said."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.messages, self.closed_for = channel, [], ""  # type: ignore[var-annotated]
        self.changed = asyncio.Event()
        channel.start(self._take, self._closed)

    def _take(self, messages: list) -> None:
        self.messages += messages
        self.changed.set()

    def _closed(self, reason: str) -> None:
        self.closed_for = reason
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@contextlib.asynccontextmanager
async def listening(address: Address) -> AsyncIterator[tuple[Listener[FromWorker], asyncio.Queue[Side]]]:
    sides: asyncio.Queue[Side] = asyncio.Queue()
    listener = Listener(SECRET, messages.from_worker, lambda channel: sides.put_nowait(Side(channel)))
    await listener.open(address)
    try:
        yield listener, sides
    finally:
        listener.close()


@contextlib.asynccontextmanager
async def pair(address: Address) -> AsyncIterator[tuple[Side, Side]]:
    """(front end, worker)"""
    async with listening(address) as (listener, sides):
        worker = Side(await connect(listener.address, SECRET, messages.to_worker))
        front = await sides.get()
        yield front, worker
        worker.channel.close("the test is over")
        front.channel.close("the test is over")


LOOPBACK = Address("127.0.0.1", 0)


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Address:
    return LOOPBACK if request.param == "tcp" else Address(path=str(tmp_path / "socket"))


def test_messages_go_both_ways_in_order(address: Address) -> None:
    async def run() -> None:
        async with pair(address) as (front, worker):
            for key in range(100):
                worker.channel.send(Copied(key))
            front.channel.send(Beat())
            await front.until(lambda: len(front.messages) == 100)
            await worker.until(lambda: len(worker.messages) == 1)
            assert front.messages == [Copied(key) for key in range(100)] and worker.messages == [Beat()]

    asyncio.run(run())


def test_a_message_of_many_reads_arrives_whole() -> None:
    big = Events([messages.Event(1, text="x" * 3_000_000)])

    async def run() -> None:
        async with pair(LOOPBACK) as (front, worker):
            worker.channel.send(big)
            worker.channel.send(Copied(2))
            await front.until(lambda: len(front.messages) == 2)
            assert front.messages == [big, Copied(2)]

    asyncio.run(run())


def test_closing_sends_what_is_unsent_and_tells_the_peer() -> None:
    async def run() -> None:
        async with pair(LOOPBACK) as (front, worker):
            worker.channel.send(Copied(1))
            worker.channel.close("enough")
            worker.channel.send(Copied(2))
            await front.until(lambda: front.closed_for != "")
            await worker.until(lambda: worker.closed_for != "")
            assert front.messages == [Copied(1)]
            assert worker.closed_for == "enough" and "peer closed" in front.closed_for

    asyncio.run(run())


def test_a_worker_with_another_secret_is_turned_away() -> None:
    async def run() -> None:
        async with listening(LOOPBACK) as (listener, sides):
            with pytest.raises(ConnectionError):
                await connect(listener.address, b"another secret, longer", messages.to_worker)
            assert sides.empty()

    asyncio.run(run())


def test_a_listener_with_another_secret_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Liar(channels.ListenerHandshake):
        def prove(self, answer: bytes) -> bytes:
            return bytes(32)

    monkeypatch.setattr(channels, "ListenerHandshake", Liar)

    async def run() -> None:
        async with listening(LOOPBACK) as (listener, _):
            with pytest.raises(AuthenticationError, match="listener"):
                await connect(listener.address, SECRET, messages.to_worker)

    asyncio.run(run())


def test_nothing_is_parsed_before_the_proof() -> None:
    """A stranger that sends frames at once is closed without an answer, and nobody hears of it."""

    async def run() -> None:
        async with listening(LOOPBACK) as (listener, sides):
            reader, writer = await asyncio.open_connection(listener.address.host, listener.address.port)
            writer.write(frame(messages.encode(Copied(1))) * 20)
            assert len(await reader.read()) == channels.HELLO_BYTES
            assert sides.empty()
            writer.close()

    asyncio.run(run())


def test_a_connection_without_a_handshake_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "HANDSHAKE_S", 0.05)

    async def run() -> None:
        async with listening(LOOPBACK) as (listener, _):
            reader, writer = await asyncio.open_connection(listener.address.host, listener.address.port)
            async with asyncio.timeout(60):
                assert len(await reader.read()) == channels.HELLO_BYTES  # then the end
            writer.close()

    asyncio.run(run())


def test_connections_in_their_handshake_are_limited_and_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of those that do not prove anything goes; a worker that knows the secret comes through."""
    monkeypatch.setattr(channels, "MAX_UNPROVEN", 2)

    async def run() -> None:
        async with listening(LOOPBACK) as (listener, opened):
            silent = [await asyncio.open_connection(listener.address.host, listener.address.port) for _ in range(2)]
            for reader, _writer in silent:
                assert len(await reader.readexactly(channels.HELLO_BYTES)) == channels.HELLO_BYTES
            channel = await connect(listener.address, SECRET, messages.to_worker)
            with contextlib.suppress(ConnectionError):
                assert await silent[0][0].read() == b""
            assert (await opened.get()).channel.is_open and channel.is_open
            channel.abort("the test ends")
            silent[1][1].close()

    asyncio.run(run())


def test_bytes_that_are_no_message_close_the_channel_with_a_reason() -> None:
    async def run() -> None:
        async with pair(LOOPBACK) as (front, worker):
            transport = worker.channel._transport
            assert transport is not None
            transport.write(frame(b"\xc1"))
            await front.until(lambda: front.closed_for != "")
            assert "no message of protocol" in front.closed_for

    asyncio.run(run())


def test_a_frame_above_the_limit_closes_the_channel() -> None:
    async def run() -> None:
        async with pair(LOOPBACK) as (front, worker):
            transport = worker.channel._transport
            assert transport is not None
            transport.write(b"\xff\xff\xff\xff")
            await front.until(lambda: front.closed_for != "")
            assert "not allowed; at most" in front.closed_for

    asyncio.run(run())


def test_a_message_that_is_too_long_is_refused_and_the_channel_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "frame", lambda body: frame(body, limit_bytes=100))

    async def run() -> None:
        async with pair(LOOPBACK) as (front, worker):
            with pytest.raises(MessageError, match="Events: a message of"):
                worker.channel.send(Events([messages.Event(1, text="x" * 200)]))
            worker.channel.send(Copied(1))
            await front.until(lambda: len(front.messages) == 1)

    asyncio.run(run())


def test_a_peer_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_UNSENT_BYTES", 1 << 20)

    async def run() -> None:
        async with pair(LOOPBACK) as (front, worker):
            transport = front.channel._transport
            assert transport is not None
            transport.pause_reading()
            chunk = Events([messages.Event(1, text="x" * (1 << 20))])
            for _ in range(64):  # more than the kernel keeps for a socket
                worker.channel.send(chunk)
                await asyncio.sleep(0)
            await worker.until(lambda: worker.closed_for != "")
            assert "unread" in worker.closed_for

    asyncio.run(run())


def test_a_fault_in_dealing_with_a_message_closes_the_channel() -> None:
    async def run() -> None:
        async with listening(LOOPBACK) as (listener, sides):
            worker: Channel[ToWorker] = await connect(listener.address, SECRET, messages.to_worker)
            closed: list[str] = []
            worker.start(lambda _: [][1], closed.append)
            front = await sides.get()
            front.channel.send(Beat())
            await front.until(lambda: front.closed_for != "")
            assert "IndexError" in closed[0]

    asyncio.run(run())


def test_a_channel_whose_first_messages_cannot_be_dealt_with_ends_once() -> None:
    async def run() -> None:
        async with listening(LOOPBACK) as (listener, sides):
            worker: Channel[ToWorker] = await connect(listener.address, SECRET, messages.to_worker)
            front = await sides.get()
            front.channel.send(Beat())
            async with asyncio.timeout(60):
                while not worker._held:
                    await asyncio.sleep(0.001)
            closed: list[str] = []
            worker.start(lambda _: [][1], closed.append)
            await front.until(lambda: front.closed_for != "")
            assert len(closed) == 1 and "IndexError" in closed[0]

    asyncio.run(run())


def test_a_socket_that_was_left_gives_way_and_a_file_does_not(tmp_path: Path) -> None:
    left, file = tmp_path / "left", tmp_path / "file"
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(str(left))
    file.write_text("precious")

    async def run() -> None:
        async with pair(Address(path=str(left))) as (_, worker):
            assert worker.channel.is_open
        with pytest.raises(OSError):
            async with listening(Address(path=str(file))):
                pass
        assert file.read_text() == "precious"

    asyncio.run(run())


def test_a_socket_at_which_somebody_listens_is_not_taken(tmp_path: Path) -> None:
    """As a port is not; who has it keeps it, and is found there afterwards."""
    address = Address(path=str(tmp_path / "socket"))

    async def run() -> None:
        async with listening(address):
            for _ in range(2):
                with pytest.raises(OSError) as refused:
                    async with listening(address):
                        pass
                assert refused.value.errno == errno.EADDRINUSE
            assert (await connect(address, SECRET, messages.to_worker)).is_open

    asyncio.run(run())


def test_who_asks_whether_anybody_listens_is_no_line_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As front ends do of the folders that others have, when they start. Who says what is no handshake is one."""
    path, opened, accept = str(tmp_path / "socket"), list[Channel](), Listener._accept

    def counted(listener: Listener) -> Channel:
        opened.append(accept(listener))
        return opened[-1]

    async def run() -> None:
        async with listening(Address(path=path)) as (listener, _):
            for _ in range(3):
                assert not is_left(path)
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(path)
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: nobody that knows the secret\r\n\r\n" * 3)
            while len(opened) < 4 or listener._unproven:
                await asyncio.sleep(0.01)
            stranger.close()

    monkeypatch.setattr(Listener, "_accept", counted)
    asyncio.run(run())
    assert len([record for record in caplog.records if "turned away" in record.getMessage()]) == 1


def test_a_listener_removes_its_own_socket_alone(tmp_path: Path) -> None:
    address = Address(path=str(tmp_path / "socket"))
    path = Path(address.path)

    async def run() -> None:
        async with listening(address):
            assert path.stat().st_mode & 0o777 == 0o600
            path.unlink()  # somebody has tidied up, and another has come in its place
            async with listening(address) as (second, _):
                second.close()
                assert not path.exists()
                path.touch()  # and the second time that is closed this is nobody's of this process
            assert path.exists()
            path.unlink()
            with socket.socket(socket.AF_UNIX) as others:
                others.bind(str(path))
        assert path.is_socket()

    asyncio.run(run())


def test_what_comes_before_the_start_is_kept() -> None:
    async def run() -> None:
        async with listening(LOOPBACK) as (listener, sides):
            worker = await connect(listener.address, SECRET, messages.to_worker)
            front = await sides.get()
            front.channel.send(Beat())
            front.channel.close("said all")
            async with asyncio.timeout(60):
                while worker.closed_for is None:
                    await asyncio.sleep(0.001)
            side = Side(worker)
            await side.until(lambda: side.closed_for != "")
            assert side.messages == [Beat()]

    asyncio.run(run())


@pytest.mark.parametrize("text", ["127.0.0.1:80", "host:0", "[::1]:8000", "unix:/tmp/x"])
def test_addresses_are_read_and_written_alike(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:x", "::1:80", "unix:", "host:²"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        Address.parse(text)


@pytest.mark.parametrize("text", ["host:65536", "[::1]:99999", "host:" + "9" * 5000])
def test_a_port_that_is_none_is_named_with_its_limit(text: str) -> None:
    with pytest.raises(ValueError, match="is not allowed; ports are from 0 to 65535"):
        Address.parse(text)


@pytest.mark.parametrize("host", ["a" * 70, "a..b", "x." + "b" * 64 + ".y"])
def test_a_name_that_no_host_can_have_is_an_error_like_any(host: str) -> None:
    """And ends no worker with one of an encoding: it says the field and the value."""
    with pytest.raises(OSError, match=f"host: '{host}' is not allowed"):
        asyncio.run(connect(Address.parse(f"{host}:7070"), SECRET, messages.to_worker))
