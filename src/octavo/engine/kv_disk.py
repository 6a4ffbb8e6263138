"""KV blocks on a disk: one file per block, named by its key, in one folder per model and layout.

    PATH/<store>/about.json         what the blocks of this folder belong to: fingerprint, model, block size, bytes of a block
    PATH/<store>/<key in hex>.kv    one block (kv_files)
    PATH/<store>/.<key>.<pid>.<n>.tmp    a block being written; renamed when it is whole

Owns these files: what is there, how a damaged one is dropped, which go when the size limit is reached. A file per block rather than
segments: a block has tens to hundreds of kilobytes, beside which opening a file is little; dropping one is an unlink, with nothing to
compact, no index can disagree with the data, and several processes can share the folder, because a rename is atomic and two writers of
a key write the same bytes, or, where blocks are rounded (``kv_host_dtype``), equally good ones. A file's modification time is its last
use, so that the order of eviction survives a restart and is the same for all processes.

Nothing here raises for what the disk does: an error ends in a block that is not there. Thread-safe for one writer and one reader.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path

from octavo.config import ConfigError
from octavo.core.kv_tiers import BlockRef
from octavo.engine import kv_files

logger = logging.getLogger("octavo.kv")

SUFFIX, ABOUT = ".kv", "about.json"
RETRY_S = 60.0  # after an error the disk is left alone for so long
_STALE_S = 900.0  # a temporary file of this age belongs to nobody
_KEEP = 0.9  # eviction goes down to this share of the limit
_RESCAN = 0.1  # what others wrote is looked at when this share of the limit was written
_numbers = count()


@dataclass(frozen=True, slots=True)
class StoreAbout:
    """What a folder's blocks belong to. Blocks are found again only under an equal one, ``model`` apart, which is for people."""

    fingerprint: str
    block_size: int  # tokens
    block_bytes: int  # of the payload
    model: str
    byteorder: str = sys.byteorder

    @property
    def store_id(self) -> bytes:
        text = f"{kv_files.VERSION}/{self.byteorder}/{self.block_size}/{self.block_bytes}/{self.fingerprint}"
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32, person=b"octavo-kvstore").digest()

    @property
    def folder_name(self) -> str:
        return self.store_id[:12].hex()


class DiskStore:
    """The folder of one model under ``path``. ``limit_bytes`` bounds all folders of ``path`` together.

    The limit holds up to what several processes write between two looks at the folder, a tenth of it each.
    """

    def __init__(self, path: str | Path, about: StoreAbout, limit_bytes: int) -> None:
        """Makes the folder and lists it. ConfigError when it cannot be made or written, or the limit holds no block."""
        self.path, self.about, self.limit_bytes = Path(path).expanduser(), about, limit_bytes
        self.file_bytes = kv_files.file_bytes(about.block_size, about.block_bytes)
        if self.file_bytes > limit_bytes:
            raise ConfigError(f"kv_disk_size: {limit_bytes} is not allowed; at least {self.file_bytes} bytes, which one block takes")
        self.folder = self.path / about.folder_name
        self._store_id = about.store_id
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if _read_about(self.folder) is None:  # missing, or damaged: the folder's name says what it has to be
                self._write_file(self.folder / ABOUT, [json.dumps(asdict(about), indent=1).encode()])
            if not os.access(self.folder, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(f"no permission to read and write {str(self.folder)!r}")
        except OSError as error:
            raise ConfigError(f"kv_disk_path: {str(path)!r} is not allowed; it cannot be used: {error}") from error
        self._keys = set(_keys_in(self.folder))
        self._total_bytes: int | None = None  # of all folders, as far as known; None: not counted yet
        self._written_bytes = 0  # since the last count
        self._off_until_s = -1.0
        self.num_damaged = self.num_errors = self.num_evicted = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def num_wanted_blocks(self) -> int:
        """Blocks that are worth writing at a time: with more of them the limit would drop some as soon as they are there."""
        return int(_KEEP * self.limit_bytes) // self.file_bytes

    # --- writing ------------------------------------------------------------------------------------------------------------------------

    def put(self, ref: BlockRef, payload: bytes, used_ns: int | None = None) -> bool:
        """Write a block, unless it is there. False when it could not be written; the disk is then left alone for a minute.

        ``used_ns``: its last use, nanoseconds since the epoch; None: now.
        """
        if ref.key in self._keys:
            return True
        if time.monotonic() < self._off_until_s:
            return False
        assert len(payload) == self.about.block_bytes, f"a block has {self.about.block_bytes} bytes, not {len(payload)}"
        head, tail = kv_files.encode(self._store_id, ref, payload)
        try:
            self._write_file(self._file(ref.key), [head, payload, tail], used_ns)
        except FileNotFoundError:  # somebody cleared the folder, or its temporary files, meanwhile
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            return False
        except OSError as error:
            self._failed("written", error)
            return False
        self._keys.add(ref.key)
        self._written_bytes += self.file_bytes
        self.keep_limit()
        return True

    def _write_file(self, file: Path, parts: Sequence[bytes], used_ns: int | None = None) -> None:
        """All or nothing: under another name first. Not synced: a file that a power cut left torn fails its checksum and is dropped."""
        temporary = file.with_name(f".{file.stem}.{os.getpid()}.{next(_numbers)}.tmp")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
            with open(descriptor, "wb", buffering=0) as out:
                for part in parts:
                    _write_all(out.fileno(), part)
            if used_ns is not None:
                os.utime(temporary, ns=(used_ns, used_ns))
            os.replace(temporary, file)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    # --- reading ------------------------------------------------------------------------------------------------------------------------

    def get(self, ref: BlockRef) -> bytes | None:
        """The payload of ``ref``, every bit of its file checked. A file that is not what it should be is deleted and logged."""
        if ref.key not in self._keys:
            return None
        file = self._file(ref.key)
        try:
            with open(file, "rb", buffering=0) as source:
                return kv_files.read(source, self._store_id, ref, self.about.block_bytes)
        except kv_files.BlockFileError as error:
            self.num_damaged += 1
            logger.warning("KV block %s is dropped: %s", file, error)
            with contextlib.suppress(OSError):
                file.unlink()
        except FileNotFoundError:  # another process evicted it
            pass
        except OSError as error:
            self._failed("read", error)
        self._keys.discard(ref.key)
        return None

    def used(self, keys: Sequence[bytes]) -> None:
        """These blocks, a parent before its children, were used now. A child counts as used a little earlier: it goes first."""
        now_ns = time.time_ns()
        for i, key in enumerate(keys):
            with contextlib.suppress(OSError):
                os.utime(self._file(key), ns=(now_ns - i, now_ns - i))

    def _file(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{SUFFIX}"

    def _failed(self, what: str, error: OSError) -> None:
        """One warning, then silence: what is written later is lost, which costs time and nothing else."""
        if self.num_errors == 0:
            logger.warning("KV blocks cannot be %s in %s (%s); goes on without, trying again every %d s", what, self.folder, error, RETRY_S)
        self.num_errors += 1
        self._off_until_s = time.monotonic() + RETRY_S

    # --- the size limit -----------------------------------------------------------------------------------------------------------------

    def keep_limit(self) -> None:
        """Delete the least recently used blocks of all folders if they are over the limit. Looks at them now and then; for the writer."""
        known = self._total_bytes
        if known is not None and known + self._written_bytes <= self.limit_bytes and self._written_bytes < _RESCAN * self.limit_bytes:
            return
        files = sorted(_block_files(self.path))
        total_bytes = sum(size for _, size, _ in files)
        if total_bytes > self.limit_bytes:
            for _, size, file in files:
                if total_bytes <= _KEEP * self.limit_bytes:
                    break
                with contextlib.suppress(OSError):
                    os.unlink(file)
                    self.num_evicted += 1
                total_bytes -= size
        self._total_bytes, self._written_bytes = total_bytes, 0
        self._keys = set(_keys_in(self.folder))
        _drop_stale(self.folder)


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """A folder of blocks. Times are seconds since the epoch of the last use of a block; None without blocks."""

    folder: Path
    about: StoreAbout | None  # None: its about.json is missing or unreadable
    num_blocks: int
    num_bytes: int
    oldest_s: float | None
    newest_s: float | None


def list_stores(path: str | Path) -> list[StoreInfo]:
    """All folders of blocks under ``path``, the most recently used first; empty when ``path`` is not there."""
    found = []
    for folder in _store_folders(Path(path)):
        files = list(_files_of(folder))
        times = [time_ns / 1e9 for time_ns, _, _ in files]
        about = _read_about(folder)
        num_bytes = sum(size for _, size, _ in files)
        found.append(StoreInfo(folder, about, len(files), num_bytes, min(times, default=None), max(times, default=None)))
    return sorted(found, key=lambda store: (-(store.newest_s or 0.0), store.folder.name))


def clear_store(store: StoreInfo, unused_since_s: float | None = None) -> tuple[int, int]:
    """Delete the blocks of a folder last used before ``unused_since_s`` (None: all); (blocks, bytes) deleted. An empty folder goes too."""
    num_blocks = num_bytes = 0
    for time_ns, size, file in _files_of(store.folder):
        if unused_since_s is None or time_ns / 1e9 < unused_since_s:
            os.unlink(file)
            num_blocks, num_bytes = num_blocks + 1, num_bytes + size
    _drop_stale(store.folder)
    if not any(_files_of(store.folder)):
        with contextlib.suppress(OSError):  # another process has begun to write there
            (store.folder / ABOUT).unlink(missing_ok=True)
            store.folder.rmdir()
    return num_blocks, num_bytes


def _read_about(folder: Path) -> StoreAbout | None:
    try:
        about = StoreAbout(**json.loads((folder / ABOUT).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    return about if about.folder_name == folder.name and isinstance(about.model, str) else None


def _store_folders(path: Path) -> Iterator[Path]:
    """Folders that are named like a store, so that nobody's other files are ever touched."""
    try:
        entries = list(os.scandir(path))
    except OSError:
        return
    for entry in entries:
        if len(entry.name) == 24 and _is_hex(entry.name) and entry.is_dir(follow_symlinks=False):
            yield Path(entry.path)


def _block_files(path: Path) -> Iterator[tuple[int, int, str]]:
    for folder in _store_folders(path):
        yield from _files_of(folder)


def _files_of(folder: Path) -> Iterator[tuple[int, int, str]]:
    """(last use in nanoseconds, bytes, path) of each block."""
    for entry in _entries(folder):
        if _key_of(entry.name) is not None:
            with contextlib.suppress(OSError):  # gone meanwhile
                status = entry.stat(follow_symlinks=False)
                yield status.st_mtime_ns, status.st_size, entry.path


def _keys_in(folder: Path) -> Iterator[bytes]:
    for entry in _entries(folder):
        key = _key_of(entry.name)
        if key is not None:
            yield key


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except OSError:
        return []


def _key_of(name: str) -> bytes | None:
    stem = name.removesuffix(SUFFIX)
    return bytes.fromhex(stem) if len(stem) == 64 and stem != name and _is_hex(stem) else None


def _is_hex(text: str) -> bool:
    return all(c in "0123456789abcdef" for c in text)


def _drop_stale(folder: Path) -> None:
    """Temporary files whose writer has died. One that still writes to so old a file finds it gone and loses one block."""
    for entry in _entries(folder):
        if entry.name.endswith(".tmp") and entry.name.startswith("."):
            with contextlib.suppress(OSError):
                pid = entry.name.split(".")[2]
                if time.time() - entry.stat().st_mtime > _STALE_S or not _is_alive(pid):
                    os.unlink(entry.path)


def _is_alive(pid: str) -> bool:
    if os.name != "posix":  # elsewhere signal 0 is a real one
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):
        return True
    return True


def _write_all(descriptor: int, part: bytes) -> None:
    view = memoryview(part)
    while view:
        view = view[os.write(descriptor, view) :]
