"""Files whose names a user gave: whether one can be written, before work is done for it, and writing it whole or not at all.

Owns the rules: a name stands for a regular file, or for where there could be one, behind symbolic links too; devices, pipes and folders are
refused, and no folder is made on the way. Knows nothing of what is in the files.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TextIO


class UserFileError(ValueError):
    """A file cannot be written; the message names it as the user did, and says why."""


def check_writable(path: str | Path) -> Path:
    """The file that ``path`` stands for, symbolic links followed, which ``write_whole`` can write now. Raises UserFileError."""
    real = Path(os.path.realpath(path))
    if real.exists() and not real.is_file():
        raise UserFileError(f"{path}: it is {_kind(real.stat().st_mode)}; a regular file is needed")
    if not real.parent.is_dir():
        raise UserFileError(f"{path}: there is no folder {str(real.parent)!r}")
    try:
        with tempfile.TemporaryFile(dir=real.parent):
            pass
    except OSError as error:
        raise UserFileError(f"{path}: nothing can be written in {str(real.parent)!r}: {error.strerror}") from None
    return real


def write_whole(path: str | Path, text: str) -> None:
    """The file is there with all of ``text``, in UTF-8, or as it was: readers see the old one or the new one. Raises UserFileError."""
    real = check_writable(path)
    partial = real.with_name(f".{real.name[:200]}.{os.getpid()}.part")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
        if real.exists():
            shutil.copymode(real, partial)
        os.replace(partial, real)
    except OSError as error:
        raise UserFileError(f"{path}: it cannot be written: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)


def open_new(path: str | Path) -> TextIO:
    """A file to be written bit by bit: a new one, for its owner alone, or one that is there and empty. The caller's to close. One that has
    something in it is never emptied. Raises UserFileError."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        why = "a pipe" if error.errno == errno.ENXIO else error.strerror
        raise UserFileError(f"it cannot be written: {why}") from None
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(os.close, handle)
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise UserFileError(f"it is {_kind(about.st_mode)}; a regular file is needed")
        if about.st_size:
            raise UserFileError(f"it holds {about.st_size:,} bytes already, which would be lost; move it away, or give another name")
        on_failure.pop_all()
    return os.fdopen(handle, "w", encoding="utf-8")


def unused(path: str) -> str:
    """``path`` where nothing is there, or an empty file; else the first of ``path``.2, ``path``.3 and so on of which that is true."""
    names = itertools.chain([path], (f"{path}.{number}" for number in itertools.count(2)))
    return next(name for name in names if not os.path.lexists(name) or (os.path.isfile(name) and not os.path.getsize(name)))


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
