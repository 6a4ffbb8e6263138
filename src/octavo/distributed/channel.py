"""A channel: an authenticated connection that carries messages both ways, on asyncio. One end listens, the other connects.

Owns the socket, the time limits of the handshake and of what follows it, framing, and what waits to be sent. It knows no message's meaning
and never retries: a channel that fails is closed, with a reason, and whoever wants another one makes it.

What is sent within one round of the event loop goes out in one write. Nothing that is sent blocks: a peer that does not read is cut off
when ``MAX_UNSENT_BYTES`` wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from octavo.distributed import unix_sockets
from octavo.distributed.flood_log import FloodLog
from octavo.distributed.frames import FrameError, FrameReader, frame
from octavo.distributed.handshake import (
    ANSWER_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    AuthenticationError,
    ConnectorHandshake,
    ListenerHandshake,
)
from octavo.distributed.messages import Message, MessageError, encode

logger = logging.getLogger("octavo.distributed")

CONTROL = b"control"  # the purpose of these channels, as the handshake names it
HANDSHAKE_S = 5.0
MAX_UNPROVEN = 64  # connections of a listener whose handshake is not through
MAX_UNSENT_BYTES = 160 << 20

Said = TypeVar("Said", bound=Message)


class ChannelClosed(ConnectionError):
    """The channel is closed; the message says why."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a listener is: ``path`` of a unix socket, or ``host`` and ``port``."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """HOST:PORT, [IPV6]:PORT, or unix:PATH. Raises ValueError."""
        if text.startswith("unix:") and len(text) > len("unix:"):
            return cls(path=text.removeprefix("unix:"))
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            colon = ""
        if not colon or not host or not (port.isascii() and port.isdigit()):
            raise ValueError(f"address: {text!r} is not allowed; HOST:PORT, [IPV6]:PORT or unix:PATH is needed")
        if len(port) > 9 or int(port) > 65535:
            raise ValueError(f"address: {text[:200]!r} is not allowed; ports are from 0 to 65535")
        return cls(host, int(port))

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Channel(asyncio.Protocol, Generic[Said]):
    """One end. ``decode`` makes messages of the peer's bytes. Not thread-safe: all of it happens on the event loop's thread."""

    def __init__(self, handshake: ListenerHandshake | ConnectorHandshake, decode: Callable[[bytes], Said]) -> None:
        self.peer = ""
        self.heard_s = 0.0  # when the last bytes came, on the event loop's clock
        self.closed_for: str | None = None  # the reason, once it is closed
        self.is_peers_doing = False  # it was closed for what the peer had said, which cannot be
        self.was_left_unsaid = False  # the peer closed it before it said anything
        self._loop = asyncio.get_running_loop()
        self._handshake: ListenerHandshake | ConnectorHandshake | None = handshake
        self._decode = decode
        self._proven: asyncio.Future[None] = self._loop.create_future()
        self._proven.add_done_callback(lambda proven: proven.cancelled() or proven.exception())  # somebody has looked at it
        self._early = bytearray()  # of the handshake
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._held: list[Said] | None = []  # what came before ``start``
        self._on_messages: Callable[[list[Said]], None] | None = None
        self._on_closed: Callable[[str], None] | None = None
        self._deadline = self._loop.call_later(HANDSHAKE_S, self.close, f"no handshake within {HANDSHAKE_S:g} s")

    # --- for its owner ------------------------------------------------------------------------------------------------------------------

    def start(
        self, on_messages: Callable[[list[Said]], None], on_closed: Callable[[str], None], first_s: float | None = None
    ) -> None:
        """From now on messages go to ``on_messages``, as many at a time as came at once; ``on_closed`` is called once, with the reason.
        ``first_s``: the time that the peer has for its first message (None: any)."""
        self._on_messages = on_messages
        held, self._held = self._held, None
        if held:
            self._hand_over(held)
        self._on_closed = on_closed
        if self.closed_for is not None:
            self._loop.call_soon(on_closed, self.closed_for)
        elif first_s is not None and not held:
            self._deadline = self._loop.call_later(first_s, self.abort, f"no message within {first_s:g} s of the handshake")

    def send(self, message: Message) -> None:
        """Send a message with the others of this round of the event loop; nothing when the channel is closed. Raises MessageError for one
        that cannot be written or is too long."""
        if self._transport is None or self.closed_for is not None:
            return
        try:
            data = frame(encode(message))
        except FrameError as error:
            raise MessageError(f"{type(message).__name__}: {error}") from error
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(data)

    def close(self, reason: str) -> None:
        """Send what is unsent as far as the peer takes it now, and close. Idempotent."""
        if self.closed_for is not None:
            return
        self._flush()
        self._ended(reason)
        if self._transport is not None:
            self._transport.close()
            self._loop.call_later(HANDSHAKE_S, self._transport.abort)  # a peer that reads nothing does not keep it

    def abort(self, reason: str) -> None:
        """Close at once; what is unsent is lost."""
        self._ended(reason)
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_open(self) -> bool:
        return self.closed_for is None and self._handshake is None

    @property
    def local_host(self) -> str | None:
        """The address that the peer reaches this end's host by; None where both are on one host, and for a channel that is not open."""
        name = None if self._transport is None else self._transport.get_extra_info("sockname")
        return name[0] if isinstance(name, tuple) else None

    @property
    def peer_host(self) -> str | None:
        """The address that the peer is seen at; None as for ``local_host``."""
        name = None if self._transport is None else self._transport.get_extra_info("peername")
        return name[0] if isinstance(name, tuple) else None

    async def proven(self) -> None:
        """Wait for the handshake. Raises AuthenticationError, or ChannelClosed with the reason."""
        await asyncio.shield(self._proven)

    # --- for the event loop -------------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self.closed_for is not None:
            transport.abort()
            return
        self.peer = _peer_name(transport)
        self.heard_s = self._loop.time()
        if isinstance(self._handshake, ListenerHandshake):
            transport.write(self._handshake.hello)

    def data_received(self, data: bytes) -> None:
        if self.closed_for is not None:
            return
        self.heard_s = self._loop.time()
        try:
            if self._handshake is not None:
                data = self._prove(data)
            bodies = self._frames.feed(data)
            messages = list(map(self._decode, bodies))
        except (AuthenticationError, FrameError, MessageError) as error:
            if not self._proven.done():
                self._proven.set_exception(error)
            self.is_peers_doing = True
            self.abort(str(error))
            return
        if messages:
            self._hand_over(messages)

    def connection_lost(self, error: Exception | None) -> None:
        self.was_left_unsaid = self.closed_for is None and self._handshake is not None and not self._early
        self._ended("the peer closed the connection" if error is None else f"the connection was lost: {error}")

    def _prove(self, data: bytes) -> bytes:
        """Take a piece of the handshake; what lies behind it."""
        assert self._transport is not None
        self._early += data
        if isinstance(self._handshake, ListenerHandshake):
            if len(self._early) < ANSWER_BYTES:
                return b""
            self._transport.write(self._handshake.prove(bytes(self._early[:ANSWER_BYTES])))
            return self._end_handshake(ANSWER_BYTES)
        assert self._handshake is not None
        if len(self._early) >= HELLO_BYTES and not self._handshake.has_answered:
            self._transport.write(self._handshake.answer(bytes(self._early[:HELLO_BYTES])))
        if len(self._early) < HELLO_BYTES + PROOF_BYTES:
            return b""
        self._handshake.check(bytes(self._early[HELLO_BYTES : HELLO_BYTES + PROOF_BYTES]))
        return self._end_handshake(HELLO_BYTES + PROOF_BYTES)

    def _end_handshake(self, size: int) -> bytes:
        rest, self._early = bytes(self._early[size:]), bytearray()
        self._handshake = None
        self._deadline.cancel()
        if not self._proven.done():
            self._proven.set_result(None)
        return rest

    def _hand_over(self, messages: list[Said]) -> None:
        if self._held is not None:
            self._held += messages
            return
        assert self._on_messages is not None
        self._deadline.cancel()
        try:
            self._on_messages(messages)
        except Exception as error:  # a fault of ours must not leave a channel that says nothing any more
            logger.error("what %s said could not be dealt with", self.peer, exc_info=error)
            self.is_peers_doing = isinstance(error, MessageError)
            self.abort(f"what the peer said could not be dealt with: {type(error).__name__}: {error}")

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if not unsent or self._transport is None or self._transport.is_closing():
            return
        self._transport.write(b"".join(unsent))
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.abort(f"the peer left more than {MAX_UNSENT_BYTES} bytes unread")

    def _ended(self, reason: str) -> None:
        if self.closed_for is not None:
            return
        self.closed_for = reason
        self._deadline.cancel()
        if not self._proven.done():
            self._proven.set_exception(ChannelClosed(reason))
        if self._on_closed is not None:
            self._loop.call_soon(self._on_closed, reason)


def _peer_name(transport: asyncio.Transport) -> str:
    name = transport.get_extra_info("peername")
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a process of this host"


class Listener(Generic[Said]):
    """Listens at ``address``, which has the port that was taken. ``on_open`` gets each channel that is proven, and starts it."""

    def __init__(self, secret: bytes, decode: Callable[[bytes], Said], on_open: Callable[[Channel[Said]], None]) -> None:
        self.address = Address()
        self._secret, self._decode, self._on_open = secret, decode, on_open
        self._unproven: dict[asyncio.Task[None], Channel[Said]] = {}  # the oldest first
        self._turned_away = FloodLog(logger, "a connection was turned away")
        self._server: asyncio.Server | None = None
        self._mark: unix_sockets.Mark | None = None  # of its socket

    async def open(self, address: Address) -> None:
        """Raises OSError when the address cannot be had, as when somebody listens there."""
        loop = asyncio.get_running_loop()
        if address.path:
            listening, self._mark = unix_sockets.listen_at(address.path)
            self._server = await loop.create_unix_server(self._accept, sock=listening)
            self.address = address
        else:
            self._server = await loop.create_server(self._accept, address.host, address.port)
            self.address = Address(address.host, self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """No more connections; the channels that there are stay."""
        if self._mark is not None:
            unix_sockets.remove(self.address.path, self._mark)
            self._mark = None
        if self._server is not None:
            self._server.close()
        for task in list(self._unproven):
            task.cancel()
        self._turned_away.flush()

    def _accept(self) -> Channel[Said]:
        channel = Channel(ListenerHandshake(self._secret, CONTROL), self._decode)
        if len(self._unproven) >= MAX_UNPROVEN:  # whoever knows the secret is through at once: who is not, waits in vain
            self._unproven.pop(next(iter(self._unproven))).abort("too many connections are still in their handshake")
        task = asyncio.get_running_loop().create_task(self._admit(channel))
        self._unproven[task] = channel
        task.add_done_callback(lambda done: self._unproven.pop(done, None))
        return channel

    async def _admit(self, channel: Channel[Said]) -> None:
        try:
            await channel.proven()
        except ConnectionError as error:
            if channel.was_left_unsaid and self.address.path:  # another front end, say, that asks whether anybody listens here
                return
            self._turned_away.say(str(error), f"from {channel.peer or 'somewhere'}")
            return
        except asyncio.CancelledError:
            channel.abort("the listener was closed")
            raise
        self._on_open(channel)


async def connect(address: Address, secret: bytes, decode: Callable[[bytes], Said], timeout_s: float = 10.0) -> Channel[Said]:
    """A proven channel to who listens at ``address``; it is to be started. Raises OSError (AuthenticationError, ChannelClosed and
    TimeoutError among them)."""
    loop = asyncio.get_running_loop()

    def made() -> Channel[Said]:
        return Channel(ConnectorHandshake(secret, CONTROL), decode)

    async with asyncio.timeout(timeout_s):
        try:
            if address.path:
                _, channel = await loop.create_unix_connection(made, address.path)
            else:
                _, channel = await loop.create_connection(made, address.host, address.port)
        except UnicodeError as error:  # of a name that no host can have
            raise OSError(f"host: {address.host!r} is not allowed; {error}") from error
        try:
            await channel.proven()
        except BaseException:
            channel.abort("the handshake failed")
            raise
    return channel
