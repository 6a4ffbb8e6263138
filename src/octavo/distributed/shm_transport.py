"""KV between workers of one host: the sender exports into memory that the receiver maps and imports from; a socket tells of it.

The memory has no name: it is a file that is gone from the file system, or never was in one, and whose descriptor travels over the unix
socket. So it goes when both ends are closed, however they end. It is a ring of slots, one for each piece on its way.

A file that is cut short while it is mapped ends whoever reads behind its end with a signal. So where the system has seals (Linux) the
sender seals its size, and the receiver maps nothing whose size is not sealed. It maps what it gets for reading alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import secrets
import socket
import sys
import tempfile
from pathlib import Path

from octavo.distributed.stream_transport import (
    IDLE_S,
    TAKEN,
    StreamListener,
    StreamOutgoing,
    StreamReader,
    as_transfer_errors,
    expect_taken,
    open_transfer,
)
from octavo.distributed.throttle import Throttle
from octavo.distributed.transport import MAX_PIECE_BYTES, Outgoing, Sink, TransferError, TransferHead, TransportListener

NUM_SLOTS = 3
_MEMORY_BYTES = NUM_SLOTS * MAX_PIECE_BYTES  # of address space; of memory, what pieces touch

_HAS_SEALS = sys.platform == "linux" and hasattr(fcntl, "F_ADD_SEALS") and hasattr(os, "memfd_create")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if _HAS_SEALS else 0  # its size is what it is, for good


def is_available() -> bool:
    """Whether this system has what it takes."""
    return hasattr(socket, "AF_UNIX") and hasattr(socket, "send_fds")


def is_near(address: str, other: str) -> bool:
    """Whether who listens at one address of this transport can be reached by who listens at the other. Hosts of one name may be two, and
    one host may have parts that do not see each other's sockets."""
    return address.rpartition("-")[0] == other.rpartition("-")[0]


def _place() -> str:
    """What processes have in common that reach each other: this start of this kernel, and the network namespace, which names that are in
    no file system belong to; elsewhere than on Linux the host's name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        place = f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        place = socket.gethostname()
    return hashlib.blake2b(place.encode(), digest_size=8).hexdigest()


class ShmTransport:
    """``throttle``: what all transfers of this object may send; for measurements."""

    name = "shm"

    def __init__(self, secret: bytes, throttle: Throttle | None = None, idle_s: float = IDLE_S) -> None:
        self._secret, self._throttle, self._idle_s = secret, throttle, idle_s

    def listen(self, host: str, sink: Sink) -> TransportListener:
        """On this host, whatever ``host`` is: at a name that leaves no file behind where the system has such names."""
        name = f"octavo-kv-{_place()}-{secrets.token_hex(8)}"
        address = f"@{name}" if sys.platform == "linux" else os.path.join(tempfile.gettempdir(), name)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(_bound_name(address))
            listening.listen(64)
        except OSError:
            listening.close()
            raise
        return _Listener(listening, address, self._secret, sink, self._idle_s, _Reader)

    def connect(self, address: str, head: TransferHead) -> Outgoing:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

        def connect() -> None:
            sock.connect(_bound_name(address))

        return open_transfer(sock, connect, self._secret, head, self._idle_s, lambda: _Outgoing(sock, head, self._throttle))


def _bound_name(address: str) -> str:
    """``@NAME`` stands for a name that is in no file system."""
    return "\0" + address[1:] if address.startswith("@") else address


class _Listener(StreamListener):
    def close(self) -> None:
        if not self.address.startswith("@"):
            with contextlib.suppress(OSError):
                os.unlink(self.address)
        super().close()


class _Outgoing(StreamOutgoing):
    def __init__(self, sock: socket.socket, head: TransferHead, throttle: Throttle | None) -> None:
        super().__init__(sock, head, throttle)
        fd = _new_memory(_MEMORY_BYTES)
        try:
            self._memory = mmap.mmap(fd, _MEMORY_BYTES)
            socket.send_fds(sock, [TAKEN], [fd])
        finally:
            os.close(fd)
        self._view = memoryview(self._memory)
        self._num_sent = self._num_taken = 0

    def buffer(self, num_bytes: int) -> memoryview:
        if num_bytes > MAX_PIECE_BYTES:
            raise TransferError(f"a piece of {num_bytes} bytes is not allowed; at most {MAX_PIECE_BYTES}")
        while self._num_sent - self._num_taken >= NUM_SLOTS:
            self._take_answer()
        begin = self._num_sent % NUM_SLOTS * MAX_PIECE_BYTES
        return self._view[begin : begin + num_bytes]

    def _take_answer(self) -> None:
        with as_transfer_errors():
            expect_taken(self._sock)
        self._num_taken += 1

    def _offset(self, data: memoryview) -> int:
        return self._num_sent % NUM_SLOTS * MAX_PIECE_BYTES

    def _sent(self, data: memoryview) -> None:
        self._num_sent += 1

    def _drain(self) -> None:
        while self._num_taken < self._num_sent:
            self._take_answer()

    def close(self) -> None:
        super().close()
        self._view.release()
        with contextlib.suppress(BufferError):  # a buffer that was never sent is still somebody's
            self._memory.close()


class _Reader(StreamReader):
    def __init__(self, connection: socket.socket, head: TransferHead, sink: Sink) -> None:
        super().__init__(connection, head, sink)
        self._memory = _receive_memory(connection)
        self._view = memoryview(self._memory)

    def data_of(self, num_bytes: int, offset: int) -> memoryview:
        if offset + num_bytes > _MEMORY_BYTES:
            raise TransferError(f"a piece at {offset} bytes of the shared memory, which has {_MEMORY_BYTES}")
        return self._view[offset : offset + num_bytes]

    def taken(self) -> None:
        self.connection.sendall(TAKEN)

    def close(self) -> None:
        self._view.release()
        with contextlib.suppress(BufferError):
            self._memory.close()


def _new_memory(num_bytes: int) -> int:
    """A descriptor of memory, its size sealed, or of a file that has been unlinked where the system has no such memory."""
    if _HAS_SEALS:
        fd = os.memfd_create("octavo-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, num_bytes)
        if _HAS_SEALS:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _receive_memory(connection: socket.socket) -> mmap.mmap:
    """Map what the sender shares. TransferError unless it is as large as it should be, and stays so."""
    data, fds, _, _ = socket.recv_fds(connection, 1, 1)
    try:
        if data != TAKEN or len(fds) != 1:
            raise TransferError("the sender shares no memory")
        if _HAS_SEALS and _seals(fds[0]) & _SEALS != _SEALS:  # before its size is looked at, which might change then
            raise TransferError("the sender shares memory whose size is not sealed")
        size = os.fstat(fds[0]).st_size
        if size != _MEMORY_BYTES:
            raise TransferError(f"the sender shares {size} bytes; {_MEMORY_BYTES} are needed")
        return mmap.mmap(fds[0], _MEMORY_BYTES, prot=mmap.PROT_READ)
    finally:
        for fd in fds:
            os.close(fd)


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # no memory of this kind: a file, a pipe
        return 0
