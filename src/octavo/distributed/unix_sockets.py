"""Sockets at a path: in place of one that was left, never of one at which somebody listens, and removed by whoever made them alone.

Owns no socket: it makes them, and says whose a path is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

PROBE_S = 1.0
Mark = tuple[int, int]
"""(device, inode): which socket it is that a path leads to."""


def is_left(path: str) -> bool:
    """A socket is there at which nobody listens any more. Raises OSError for what is not there, or may not be asked."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:  # it is busy, or no stream: somebody has it
            return False
    return False


def listen_at(path: str, backlog: int = 100) -> tuple[socket.socket, Mark]:
    """Listen at ``path``, which this user alone may then connect to. Raises OSError, EADDRINUSE where somebody listens or a file is."""
    listening = socket.socket(socket.AF_UNIX)
    try:
        try:
            listening.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not is_left(path):
                raise
            os.unlink(path)
            listening.bind(path)
        os.chmod(path, 0o600)  # nobody can have come before it listens
        listening.listen(backlog)
        listening.setblocking(False)
        found = os.lstat(path)
    except BaseException:
        listening.close()
        raise
    return listening, (found.st_dev, found.st_ino)


def remove(path: str, mark: Mark) -> None:
    """Remove the socket that ``listen_at`` made, unless another is there by now. To be called before it is closed: its number is then free
    for others."""
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        if (found.st_dev, found.st_ino) == mark:
            os.unlink(path)
