"""Transfers over stream sockets: the handshake, the frames and the threads that ``tcp_transport`` and ``shm_transport`` have in common.

    connector                                   listener
      ◀───────── handshake (``handshake``), both ways ────────▶
      head ──────────────────────────────────────▶
           ◀──────────────────────────── taken | refused, why
      piece, its bytes (tcp) or where they are (shm) ... ─▶
           ◀─────────────── taken, for each, by shm alone ...
      end ───────────────────────────────────────▶
           ◀─────────────────────────── taken | refused, why

One connection is one transfer, one thread at each end. Whatever a peer says is checked against what the sink expects before a byte of a
piece is read. A socket that neither moves nor answers for ``idle_s`` ends the transfer. Who has not proven the secret yet takes nothing
from those who have: strangers are counted apart, and of too many the oldest goes, since whoever knows the secret is through at once.

Owns sockets and threads; the bytes of pieces are its subclasses', blocks the sink's.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict

import msgspec

from octavo.distributed.flood_log import FloodLog
from octavo.distributed.handshake import ANSWER_BYTES, HELLO_BYTES, PROOF_BYTES, ConnectorHandshake, ListenerHandshake
from octavo.distributed.throttle import Throttle
from octavo.distributed.transport import CHECKSUM_BYTES, MAX_PIECE_BYTES, Outgoing, Piece, Sink, TransferError, TransferHead, checksum_of

logger = logging.getLogger("octavo.distributed")

PURPOSE = b"kv"  # as the handshake names it
IDLE_S = 10.0
CONNECT_S = 5.0
MAX_UNPROVEN = 64  # connections of a listener whose handshake is not through
MAX_CONNECTIONS = 1024  # that are through: transfers, of which there are as many as sequences may come at a time
MAX_TEXT_BYTES = 4096

PIECE, END, NOTHING = 1, 2, 3
FRAME = struct.Struct(f"<BIIIIQQ{CHECKSUM_BYTES}s")  # kind, layer, layers, first block, blocks, bytes, offset of them, checksum
TAKEN, REFUSED = b"\x01", b"\x02"


def recv_exactly(sock: socket.socket, buffer: memoryview) -> None:
    """Fill ``buffer``. TransferError when the peer closes before."""
    while len(buffer):
        count = sock.recv_into(buffer)
        if not count:
            raise TransferError("the peer closed the connection")
        buffer = buffer[count:]


def recv_bytes(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    recv_exactly(sock, memoryview(data))
    return bytes(data)


def recv_within(sock: socket.socket, num_bytes: int, seconds: float) -> bytes:
    """So many bytes, all of them within ``seconds``, however they trickle in. TimeoutError, ConnectionError."""
    data, deadline_s = b"", time.monotonic() + seconds
    while len(data) < num_bytes:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0.0:
            raise TimeoutError(f"the peer has not proven itself within {seconds:g} s")
        sock.settimeout(left_s)
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise ConnectionError("the peer closed the connection")
        data += part
    return data


def send_all(sock: socket.socket, data: memoryview) -> None:
    """As ``sendall``, whose time limit is for all of it: here it is for each time that something is taken, so that a slow link is none that
    has broken."""
    while len(data):
        data = data[sock.send(data) :]


def send_text(sock: socket.socket, text: bytes, before: bytes = b"") -> None:
    sock.sendall(before + len(text).to_bytes(4, "little") + text)


def recv_text(sock: socket.socket) -> bytes:
    size = int.from_bytes(recv_bytes(sock, 4), "little")
    if size > MAX_TEXT_BYTES:
        raise TransferError(f"the peer wants to say {size} bytes; at most {MAX_TEXT_BYTES} are allowed")
    return recv_bytes(sock, size)


def expect_taken(sock: socket.socket) -> None:
    """Wait for the listener's answer. TransferError with its reason when it refuses."""
    answer = recv_bytes(sock, 1)
    if answer == REFUSED:
        raise TransferError(recv_text(sock).decode("utf-8", "replace"))
    if answer != TAKEN:
        raise TransferError("the receiver answers what is no answer")


class StreamOutgoing(ABC):
    """The sender's end over a proven socket. Subclasses: buffers, and how a piece's bytes get across."""

    def __init__(self, sock: socket.socket, head: TransferHead, throttle: Throttle | None) -> None:
        self._sock = sock
        self._checksum = checksum_of(head.checksum)
        self._throttle = throttle

    @abstractmethod
    def buffer(self, num_bytes: int) -> memoryview: ...

    @abstractmethod
    def _offset(self, data: memoryview) -> int:
        """Where the receiver finds ``data``; 0 where it is sent."""

    @abstractmethod
    def _sent(self, data: memoryview) -> None:
        """The frame of ``data`` has gone out."""

    def send(self, piece: Piece, data: memoryview) -> None:
        if self._throttle is not None:
            self._throttle.take(len(data))
        frame = FRAME.pack(
            PIECE, piece.layer, piece.num_layers, piece.first_block, piece.num_blocks, len(data), self._offset(data), self._checksum(data)
        )
        with as_transfer_errors():
            self._sock.sendall(frame)
            self._sent(data)

    def keep_alive(self) -> None:
        with as_transfer_errors():
            self._sock.sendall(_bare_frame(NOTHING))

    def finish(self) -> None:
        with as_transfer_errors():
            self._sock.sendall(_bare_frame(END))
            self._drain()
            expect_taken(self._sock)

    @abstractmethod
    def _drain(self) -> None:
        """Read answers that are due before the last."""

    def close(self) -> None:
        close_socket(self._sock)


class StreamListener:
    """Accepts on ``sock`` and serves each connection on a thread of its own, by ``serve(connection, head)``."""

    def __init__(self, sock: socket.socket, address: str, secret: bytes, sink: Sink, idle_s: float, reader: type[StreamReader]) -> None:
        self.address = address
        self._listening, self._secret, self._sink, self._idle_s, self._reader = sock, secret, sink, idle_s, reader
        self._lock = threading.Lock()
        self._unproven: dict[socket.socket, None] = {}  # the oldest first
        self._connections: set[socket.socket] = set()  # that have proven the secret
        self._closed = False
        self._turned_away = FloodLog(logger, "a transfer of KV was turned away")
        self._thread = threading.Thread(target=self._accept, name="octavo-kv-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = [*self._unproven, *self._connections]
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listening.close()
        for connection in connections:
            _shut_down(connection)
        self._thread.join(self._idle_s)
        self._turned_away.flush()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError as error:
                if self._closed:
                    return
                self._turned_away.say(f"it could not be accepted: {error}")
                time.sleep(0.1)  # of what is short there may be more then
                continue
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        """Have a thread of its own serve it, if there is one to be had."""
        oldest = None
        with self._lock:
            if self._closed:
                connection.close()
                return
            if len(self._unproven) >= MAX_UNPROVEN:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
            self._unproven[connection] = None
        if oldest is not None:
            _shut_down(oldest)  # its thread closes it
        try:
            threading.Thread(target=self._serve, args=(connection,), name="octavo-kv-in", daemon=True).start()
        except RuntimeError as error:  # no more threads, or no memory for one: there may be some for the next
            self._let_go(connection)
            self._turned_away.say(str(error))

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(CONNECT_S)
            prove_connector(connection, self._secret)
            has_room = self._proven(connection)
            connection.settimeout(self._idle_s)
            head = self._open(connection, has_room)
            try:
                connection.sendall(TAKEN)
                self._reader(connection, head, self._sink).run()
            except Exception as error:  # of the network, of a peer that says nonsense, of an engine that is being closed
                self._sink.failed(head.key, str(error) or type(error).__name__)
                self._refuse(connection, error)
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            self._turned_away.say(str(error) or type(error).__name__)
        finally:
            self._let_go(connection)

    def _proven(self, connection: socket.socket) -> bool:
        """It knows the secret: whether there is room for its transfer. TransferError when it was too slow."""
        with self._lock:
            if connection not in self._unproven:
                raise TransferError("too many connections are still in their handshake")
            del self._unproven[connection]
            self._connections.add(connection)
            return len(self._connections) <= MAX_CONNECTIONS

    def _let_go(self, connection: socket.socket) -> None:
        with self._lock:
            self._unproven.pop(connection, None)
            self._connections.discard(connection)
        close_socket(connection)

    def _open(self, connection: socket.socket, has_room: bool) -> TransferHead:
        head = msgspec.msgpack.decode(recv_text(connection), type=TransferHead)
        checksum_of(head.checksum)
        try:
            if not has_room:
                raise TransferError(f"{MAX_CONNECTIONS} connections are there already")
            self._sink.open(head)
        except TransferError as error:
            send_text(connection, str(error).encode()[:MAX_TEXT_BYTES], REFUSED)
            raise
        return head

    def _refuse(self, connection: socket.socket, error: Exception) -> None:
        """Say why, if anybody listens still."""
        with contextlib.suppress(OSError):
            send_text(connection, str(error).encode()[:MAX_TEXT_BYTES], REFUSED)


class StreamReader(ABC):
    """Reads the pieces of one transfer from a connection. Subclasses: where their bytes are."""

    def __init__(self, connection: socket.socket, head: TransferHead, sink: Sink) -> None:
        self.connection, self._head, self._sink = connection, head, sink
        self._checksum = checksum_of(head.checksum)

    @abstractmethod
    def data_of(self, num_bytes: int, offset: int) -> memoryview:
        """The bytes of the piece whose frame has just been read."""

    @abstractmethod
    def taken(self) -> None:
        """The piece has been taken over."""

    @abstractmethod
    def close(self) -> None:
        """Give buffers back."""

    def run(self) -> None:
        try:
            self._read_pieces()
            self._sink.finish(self._head.key)
        finally:
            self.close()
        self.connection.sendall(TAKEN)

    def _read_pieces(self) -> None:
        key = self._head.key
        while True:
            frame = FRAME.unpack(recv_bytes(self.connection, FRAME.size))
            kind, layer, num_layers, first_block, num_blocks, num_bytes, offset, checksum = frame
            if kind == NOTHING:
                continue
            if kind == END:
                return
            if kind != PIECE:
                raise TransferError(f"the sender says what is no frame: {kind}")
            piece = Piece(layer, num_layers, first_block, num_blocks)
            wanted = self._sink.num_bytes(key, piece)
            if num_bytes != wanted or num_bytes > MAX_PIECE_BYTES:
                raise TransferError(f"{piece}: {num_bytes} bytes are sent; {wanted} are expected, and at most {MAX_PIECE_BYTES} allowed")
            data = self.data_of(num_bytes, offset)
            if self._checksum(data) != checksum:
                raise TransferError(f"{piece}: its {self._head.checksum} checksum is wrong")
            self._sink.put(key, piece, data)
            self.taken()


def prove_connector(sock: socket.socket, secret: bytes) -> None:
    """The listener's side of the handshake. Raises AuthenticationError, OSError."""
    handshake = ListenerHandshake(secret, PURPOSE)
    sock.sendall(handshake.hello)
    sock.sendall(handshake.prove(recv_within(sock, ANSWER_BYTES, CONNECT_S)))


def open_transfer(
    sock: socket.socket, connect: Callable[[], None], secret: bytes, head: TransferHead, idle_s: float, out: Callable[[], Outgoing]
) -> Outgoing:
    """Connect, prove and say ``head``; then what ``out`` makes. TransferError, and ``sock`` closed, when any of it fails."""
    try:
        with as_transfer_errors():
            sock.settimeout(CONNECT_S)
            connect()
            handshake = ConnectorHandshake(secret, PURPOSE)
            sock.sendall(handshake.answer(recv_bytes(sock, HELLO_BYTES)))
            handshake.check(recv_bytes(sock, PROOF_BYTES))
            sock.settimeout(idle_s)
            send_text(sock, msgspec.msgpack.encode(asdict(head)))
            expect_taken(sock)
            return out()
    except BaseException:
        close_socket(sock)
        raise


def _bare_frame(kind: int) -> bytes:
    return FRAME.pack(kind, 0, 0, 0, 0, 0, 0, bytes(CHECKSUM_BYTES))


def close_socket(sock: socket.socket) -> None:
    _shut_down(sock)
    sock.close()


def _shut_down(sock: socket.socket) -> None:
    """Wakes whoever waits for it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def as_transfer_errors() -> Iterator[None]:
    """What goes wrong with a socket is a TransferError."""
    try:
        yield
    except TransferError:
        raise
    except OSError as error:
        raise TransferError(f"{type(error).__name__}: {error}") from error
