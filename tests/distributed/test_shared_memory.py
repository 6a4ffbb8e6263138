"""The memory that two workers share: its size is sealed before it is sent, and memory of which it is not is never mapped."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator

import pytest

from octavo.distributed import shm_transport
from octavo.distributed.shm_transport import ShmTransport
from octavo.distributed.stream_transport import TAKEN
from octavo.distributed.transport import Piece, TransferError
from tests.distributed.test_transports import HEAD, SECRET, WAIT_S, KeepingSink, contents

if sys.platform != "linux" or not shm_transport._HAS_SEALS:
    pytest.skip("this system seals no memory", allow_module_level=True)

SIZE = shm_transport._MEMORY_BYTES
SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def memory(num_bytes: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def plain_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        return os.dup(file.fileno())


def pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def received(ends: tuple[socket.socket, socket.socket], *fds: int) -> mmap.mmap:
    """What the receiver maps when these are sent. They are closed."""
    if fds:
        socket.send_fds(ends[0], [TAKEN], list(fds))
    else:
        ends[0].sendall(TAKEN)
    for fd in fds:
        os.close(fd)
    return shm_transport._receive_memory(ends[1])


def open_files() -> set[tuple[str, str]]:
    """Descriptors of this process with what they are of. Others may be closed at any time: a socket that nobody holds, by a thread."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def test_what_is_shared_keeps_its_size_whatever_either_end_does(ends: tuple[socket.socket, socket.socket]) -> None:
    fd = shm_transport._new_memory(SIZE)
    for num_bytes in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, num_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)  # no other seals either
    with mmap.mmap(fd, SIZE) as mine:
        mine[:5] = mine[-5:] = b"hello"
        with received(ends, os.dup(fd)) as theirs:
            assert len(theirs) == SIZE and theirs[:5] == theirs[-5:] == b"hello"
            with pytest.raises(TypeError):
                theirs[0] = 1  # it only reads
    os.close(fd)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: memory(SIZE, 0), "not sealed"),
        (lambda: memory(SIZE, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL), "not sealed"),
        (lambda: memory(SIZE, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW), "not sealed"),
        (plain_file, "not sealed"),
        (pipe, "not sealed"),
        (lambda: memory(SIZE - 1, SEALED), f"shares {SIZE - 1} bytes; {SIZE} are needed"),
        (lambda: memory(0, SEALED), f"shares 0 bytes; {SIZE} are needed"),
        (lambda: memory(SIZE + 4096, SEALED), f"shares {SIZE + 4096} bytes"),
    ],
)
def test_memory_that_could_be_cut_short_is_not_mapped(
    ends: tuple[socket.socket, socket.socket], make: Callable[[], int], reason: str
) -> None:
    before = open_files()
    with pytest.raises(TransferError, match=reason):
        received(ends, make())
    assert open_files() <= before, "a descriptor is left"


def test_a_sender_that_shares_nothing_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TransferError, match="shares no memory"):
        received(ends)


def test_a_transfer_with_unsealed_memory_fails_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole one, over a real socket."""
    sink = KeepingSink()
    listener = ShmTransport(SECRET, idle_s=60.0).listen("", sink)
    try:
        monkeypatch.setattr(shm_transport, "_new_memory", lambda num_bytes: memory(num_bytes, 0))
        out = ShmTransport(SECRET).connect(listener.address, HEAD)
        piece = Piece(0, 1, 0, 1)
        with pytest.raises(TransferError, match="not sealed|closed|reset|Broken"):
            data = out.buffer(1000)
            data[:] = contents(piece)
            out.send(piece, data)
            out.finish()
        out.close()
        assert sink.over.wait(WAIT_S) and "not sealed" in (sink.failure or "") and sink.pieces == []
    finally:
        listener.close()
