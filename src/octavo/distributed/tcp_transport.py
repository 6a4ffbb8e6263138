"""KV over TCP: pieces go from a buffer at the sender, by the kernel, to a buffer at the receiver, allocated once for a transfer.

Who connects is authenticated (``handshake``); what is sent is neither encrypted nor signed.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from pathlib import Path

from octavo.distributed.stream_transport import IDLE_S, StreamListener, StreamOutgoing, StreamReader, open_transfer, recv_exactly, send_all
from octavo.distributed.throttle import Throttle
from octavo.distributed.transport import MAX_PIECE_BYTES, Outgoing, Sink, TransferError, TransferHead, TransportListener

_SOCKET_BYTES = 4 << 20  # asked for in the kernel, so that the next piece is exported while this one is on its way
_WMEM_MAX, _TCP_WMEM = Path("/proc/sys/net/core/wmem_max"), Path("/proc/sys/net/ipv4/tcp_wmem")


def buffer_to_ask_for(most_asked: int, most_tuned: int) -> int | None:
    """Bytes of a socket's send buffer; None: whatever the kernel makes of it.

    A buffer that is asked for is there at once: on a link with a short way the kernel's own would grow to little more than what is on its
    way, and the link would rest while a piece is exported. But it is cut to ``most_asked`` (net.core.wmem_max), never grows, and so limits
    what is on its way to itself: where the kernel's own may grow beyond it (``most_tuned``: the last of net.ipv4.tcp_wmem), as on hosts
    that are set up for long fast links and on those that let nobody ask for much, that is the better one. Linux takes twice what is asked.
    """
    return _SOCKET_BYTES if 2 * min(_SOCKET_BYTES, most_asked) >= most_tuned else None


def _ask_for_buffer(sock: socket.socket) -> None:
    try:
        asked = buffer_to_ask_for(int(_WMEM_MAX.read_text()), int(_TCP_WMEM.read_text().split()[-1]))
    except (OSError, ValueError, IndexError):  # another system, which tunes as it does
        return
    if asked is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, asked)


def num_unsent(sock: socket.socket) -> int:
    """Bytes that the kernel has and the peer's has not taken; 0 where the system does not tell."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])
    except OSError:
        return 0


class TcpTransport:
    """``throttle``: what all transfers of this object may send; for measurements. ``port``: to listen at (0: any)."""

    name = "tcp"

    def __init__(self, secret: bytes, throttle: Throttle | None = None, idle_s: float = IDLE_S, port: int = 0) -> None:
        self._secret, self._throttle, self._idle_s, self._port = secret, throttle, idle_s, port

    def listen(self, host: str, sink: Sink) -> TransportListener:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        takes_both = host == "::" and socket.has_dualstack_ipv6()
        listening = socket.create_server((host, self._port), family=family, backlog=64, dualstack_ipv6=takes_both)
        taken = listening.getsockname()[1]
        address = f"[{host}]:{taken}" if family == socket.AF_INET6 else f"{host}:{taken}"
        return StreamListener(listening, address, self._secret, sink, self._idle_s, _Reader)

    def connect(self, address: str, head: TransferHead) -> Outgoing:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise TransferError(f"address: {address!r} is not allowed; HOST:PORT is needed")
        host = host.removeprefix("[").removesuffix("]")
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _ask_for_buffer(sock)
        return open_transfer(
            sock, lambda: sock.connect((host, int(port))), self._secret, head, self._idle_s, lambda: _Outgoing(sock, head, self._throttle)
        )


class _Outgoing(StreamOutgoing):
    def __init__(self, sock: socket.socket, head: TransferHead, throttle: Throttle | None) -> None:
        super().__init__(sock, head, throttle)
        self._memory = bytearray()

    def buffer(self, num_bytes: int) -> memoryview:
        if num_bytes > MAX_PIECE_BYTES:
            raise TransferError(f"a piece of {num_bytes} bytes is not allowed; at most {MAX_PIECE_BYTES}")
        if num_bytes > len(self._memory):
            self._memory = bytearray(num_bytes)
        return memoryview(self._memory)[:num_bytes]

    def _offset(self, data: memoryview) -> int:
        return 0

    def _sent(self, data: memoryview) -> None:
        send_all(self._sock, data)

    def _drain(self) -> None:
        """Pieces are not answered one by one, and there may be megabytes of them in the kernel: a link that takes of them is none that has
        broken, however long they take together."""
        while True:
            num_left = num_unsent(self._sock)
            try:
                self._sock.recv(1, socket.MSG_PEEK)
                return  # the answer is there, or the end
            except TimeoutError:
                if num_unsent(self._sock) >= num_left:
                    raise


class _Reader(StreamReader):
    def __init__(self, connection: socket.socket, head: TransferHead, sink: Sink) -> None:
        super().__init__(connection, head, sink)
        self._memory = bytearray()

    def data_of(self, num_bytes: int, offset: int) -> memoryview:
        if num_bytes > len(self._memory):
            self._memory = bytearray(num_bytes)
        data = memoryview(self._memory)[:num_bytes]
        recv_exactly(self.connection, data)
        return data

    def taken(self) -> None:
        return None

    def close(self) -> None:
        self._memory = bytearray()
