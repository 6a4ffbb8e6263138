"""The KV cache on disk: what is written is what is read, to the bit, or nothing; limits, restarts, other processes, disks that fail."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import time
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.config import ConfigError
from octavo.core.kv_tiers import BlockRef
from octavo.core.prefix_index import block_key, pack_tokens
from octavo.engine import kv_disk, kv_files
from octavo.engine.kv_disk import DiskStore, StoreAbout, clear_store, list_stores

SIZE, BYTES = 4, 512
ABOUT = StoreAbout("toy/f32", SIZE, BYTES, "toy")
FILE_BYTES = kv_files.file_bytes(SIZE, BYTES)
LIMIT = 1000 * FILE_BYTES


def ref_of(number: int) -> BlockRef:
    parent, tokens = blake2b(b"%d" % number, digest_size=32).digest(), pack_tokens([number, 1, 2, 3])
    return BlockRef(block_key(parent, tokens), parent, tokens)


def payload_of(number: int) -> bytes:
    return random.Random(number).randbytes(BYTES)


def open_store(path: Path, limit: int = LIMIT, about: StoreAbout = ABOUT) -> DiskStore:
    return DiskStore(path, about, limit)


def file_of(store: DiskStore, number: int) -> Path:
    return store.folder / f"{ref_of(number).key.hex()}.kv"


def test_what_is_written_is_read_also_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(20):
        assert store.put(ref_of(number), payload_of(number))
    for again in (store, open_store(tmp_path)):
        assert len(again) == 20
        assert all(again.get(ref_of(number)) == payload_of(number) for number in range(20))
        assert ref_of(99).key not in again and again.get(ref_of(99)) is None
    assert file_of(store, 3).stat().st_size == FILE_BYTES == store.file_bytes
    assert file_of(store, 3).stat().st_mode & 0o077 == 0 == store.folder.stat().st_mode & 0o077  # tokens are nobody else's to read


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """One bit in each byte of header, tokens, payload and checksum."""
    store = open_store(tmp_path)
    store.put(ref_of(0), payload_of(0))
    whole = file_of(store, 0).read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        file_of(store, 0).write_bytes(damaged)
        again = open_store(tmp_path)
        assert again.get(ref_of(0)) is None, f"byte {at}"
        assert again.num_damaged == 1 and ref_of(0).key not in again and not file_of(store, 0).exists()


@pytest.mark.parametrize("size", [0, 1, 8, 119, 120, 136, FILE_BYTES - 17, FILE_BYTES - 1, FILE_BYTES + 1, 2 * FILE_BYTES])
def test_files_of_another_size_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int) -> None:
    store = open_store(tmp_path)
    store.put(ref_of(0), payload_of(0))
    whole = file_of(store, 0).read_bytes()
    file_of(store, 0).write_bytes((whole * 2)[:size])
    assert store.get(ref_of(0)) is None and not file_of(store, 0).exists()
    assert "is dropped" in caplog.text
    assert store.put(ref_of(0), payload_of(0)) and store.get(ref_of(0)) == payload_of(0)


def test_a_block_under_another_name_or_of_another_store_is_dropped(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(ref_of(0), payload_of(0))
    file_of(store, 0).rename(file_of(store, 1))
    other = open_store(tmp_path, about=StoreAbout("toy/bf16", SIZE, BYTES, "toy"))
    other.put(ref_of(2), payload_of(2))
    file_of(other, 2).rename(file_of(store, 2))
    again = open_store(tmp_path)
    assert len(again) == 2
    assert again.get(ref_of(1)) is None and again.get(ref_of(2)) is None and again.num_damaged == 2
    assert list(again.folder.glob("*.kv")) == []


def test_the_same_key_with_other_tokens_or_another_parent_is_no_hit(tmp_path: Path) -> None:
    for wrong in (ref_of(0)._replace(tokens=pack_tokens([9, 9, 9, 9])), ref_of(0)._replace(parent_key=bytes(32))):
        store = open_store(tmp_path)
        store.put(ref_of(0), payload_of(0))
        assert store.get(wrong) is None


def test_files_of_another_version_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    monkeypatch.setattr(kv_files, "VERSION", 99)
    store.put(ref_of(0), payload_of(0))
    monkeypatch.undo()
    assert store.get(ref_of(0)) is None and store.num_damaged == 1


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(moves=st.lists(st.tuples(st.sampled_from(["put", "put", "get", "restart", "damage", "remove"]), st.integers(0, 7)), max_size=25))
def test_a_store_is_a_dict_that_may_forget(tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[str, int]]) -> None:
    path = tmp_path_factory.mktemp("store")
    store, there = open_store(path), set()
    for move, number in moves:
        if move == "put":
            assert store.put(ref_of(number), payload_of(number))
            if file_of(store, number).exists() and number not in there:
                there.add(number)
        elif move == "get":
            assert store.get(ref_of(number)) == (payload_of(number) if number in there else None)
        elif move == "restart":
            store = open_store(path)
            assert len(store) == len(list(store.folder.glob("*.kv")))
        elif file_of(store, number).exists():
            if move == "damage":
                file_of(store, number).write_bytes(b"octavoKV" + bytes(number))
            else:
                file_of(store, number).unlink()
            there.discard(number)


def test_the_least_recently_used_go_when_the_limit_is_reached(tmp_path: Path) -> None:
    store = open_store(tmp_path, 20 * FILE_BYTES)
    for number in range(20):
        store.put(ref_of(number), payload_of(number), used_ns=10**18 + number)
    store.used([ref_of(number).key for number in (0, 2)])
    store.put(ref_of(20), payload_of(20))
    assert [number for number in range(21) if ref_of(number).key in store] == [0, 2, *range(5, 21)]  # nine tenths of the limit
    assert len(list(tmp_path.rglob("*.kv"))) == 18 and store.num_evicted == 3
    assert store.get(ref_of(0)) == payload_of(0) and store.get(ref_of(1)) is None


def test_a_child_is_evicted_before_its_parent(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(4):
        store.put(ref_of(number), payload_of(number))
    store.used([ref_of(number).key for number in range(4)])
    times = [file_of(store, number).stat().st_mtime_ns for number in range(4)]
    assert times == sorted(times, reverse=True) and len(set(times)) == 4


def test_the_limit_counts_what_other_stores_hold(tmp_path: Path) -> None:
    old = open_store(tmp_path, 10 * FILE_BYTES, StoreAbout("another", SIZE, BYTES, "another"))
    for number in range(9):
        old.put(ref_of(number), payload_of(number), used_ns=10**18)
    store = open_store(tmp_path, 10 * FILE_BYTES)
    for number in range(5):
        store.put(ref_of(number), payload_of(number))
    assert all(store.get(ref_of(number)) == payload_of(number) for number in range(5))
    assert len(list(tmp_path.rglob("*.kv"))) <= 10


def test_a_limit_that_holds_no_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"kv_disk_size: {FILE_BYTES - 1} is not allowed; at least {FILE_BYTES} bytes"):
        open_store(tmp_path, FILE_BYTES - 1)


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_disk_path: .* cannot be used"):
        open_store(tmp_path / "file")


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_is_left_alone_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    store, clock_s = open_store(tmp_path), [100.0]
    store.put(ref_of(0), payload_of(0))
    monkeypatch.setattr(time, "monotonic", lambda: clock_s[0])
    num_tried = 0

    def full(descriptor: int, data: bytes) -> int:
        nonlocal num_tried
        num_tried += 1
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "octavo.kv"):
        patch.setattr(os, "write", full)
        assert not store.put(ref_of(1), payload_of(1)) and not store.put(ref_of(2), payload_of(2))
        assert num_tried == 1
        clock_s[0] += kv_disk.RETRY_S
        assert not store.put(ref_of(1), payload_of(1))
        assert num_tried == 2
    assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1
    assert [p.name for p in store.folder.iterdir() if p.suffix == ".tmp"] == []
    assert store.get(ref_of(0)) == payload_of(0)
    clock_s[0] += kv_disk.RETRY_S
    assert store.put(ref_of(1), payload_of(1)) and store.get(ref_of(1)) == payload_of(1)


def test_a_folder_that_is_cleared_meanwhile_is_made_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(ref_of(0), payload_of(0))
    assert clear_store(list_stores(tmp_path)[0]) == (1, FILE_BYTES)
    assert list(tmp_path.iterdir()) == []
    assert store.get(ref_of(0)) is None
    assert not store.put(ref_of(1), payload_of(1))
    assert store.put(ref_of(1), payload_of(1)) and store.get(ref_of(1)) == payload_of(1)


CHILD = """
import sys
from pathlib import Path
from tests.engine.test_kv_disk import open_store, payload_of, ref_of
store = open_store(Path(sys.argv[1]))
print("ready", flush=True)
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    assert store.put(ref_of(number), payload_of(number))
    assert store.get(ref_of(number)) == payload_of(number)
"""


def start_writer(path: Path, first: int, last: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", CHILD, str(path), str(first), str(last)], stdout=subprocess.PIPE)


def test_a_writer_that_is_killed_leaves_whole_blocks_alone(tmp_path: Path) -> None:
    writer = start_writer(tmp_path, 0, 10**9)
    assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
    while len(list(tmp_path.rglob("*.kv"))) < 50:
        pass
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    store = open_store(tmp_path)
    (store.folder / f".{ref_of(0).key.hex()}.{writer.pid}.0.tmp").write_bytes(b"half a block")  # should the kill have missed a write
    num_found = len(store)
    assert num_found >= 50
    numbers = range(num_found + 1)
    assert sum(store.get(ref_of(number)) == payload_of(number) for number in numbers) == num_found
    assert store.num_damaged == 0
    store.put(ref_of(10**9), payload_of(10**9))  # the first write counts, and clears what a dead process left
    assert list(store.folder.glob(".*.tmp")) == []


def test_two_processes_may_share_a_folder(tmp_path: Path) -> None:
    writers = [start_writer(tmp_path, 0, 150), start_writer(tmp_path, 50, 200)]
    assert [writer.wait() for writer in writers] == [0, 0]
    store = open_store(tmp_path)
    assert len(store) == 200
    assert all(store.get(ref_of(number)) == payload_of(number) for number in range(200))


def test_two_processes_at_the_limit(tmp_path: Path) -> None:
    """Each evicts what the other wrote: blocks come and go, and none is ever wrong."""
    stores = [open_store(tmp_path, 12 * FILE_BYTES) for _ in range(2)]
    rng = random.Random(0)
    num_hits = 0
    for _ in range(400):
        store, number = rng.choice(stores), rng.randrange(30)
        if rng.random() < 0.5:
            store.put(ref_of(number), payload_of(number))
        else:
            found = store.get(ref_of(number))
            assert found in (None, payload_of(number))
            num_hits += found is not None
        assert len(list(tmp_path.rglob("*.kv"))) <= 12 + 4  # each may be two blocks late
    assert num_hits > 20


def test_stores_are_listed_and_cleared(tmp_path: Path) -> None:
    assert list_stores(tmp_path / "nowhere") == []
    (tmp_path / "somebody's").mkdir()
    (tmp_path / "0123456789abcdef01234567").mkdir()  # named like a store, but nobody knows of what
    old = open_store(tmp_path, about=StoreAbout("old", SIZE, BYTES, "old"))
    old.put(ref_of(0), payload_of(0), used_ns=10**18)
    store = open_store(tmp_path)
    for number in range(3):
        store.put(ref_of(number), payload_of(number), used_ns=2 * 10**18 + number * 10**9)
    first, second, third = list_stores(tmp_path)
    assert (first.about, first.num_blocks, first.num_bytes, first.oldest_s, first.newest_s) == (ABOUT, 3, 3 * FILE_BYTES, 2e9, 2e9 + 2)
    assert second.about is not None and second.about.model == "old" and third.about is None
    assert clear_store(first, unused_since_s=2e9 + 1.5) == (2, 2 * FILE_BYTES)
    assert [ref_of(number).key in open_store(tmp_path) for number in range(3)] == [False, False, True]
    assert clear_store(second) == (1, FILE_BYTES) and not old.folder.exists()
    assert (tmp_path / "somebody's").exists()


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b'{"model": "x"}', None])
def test_a_damaged_description_is_written_anew(tmp_path: Path, text: bytes | None) -> None:
    store = open_store(tmp_path)
    store.put(ref_of(0), payload_of(0))
    file = store.folder / "about.json"
    whole = file.read_bytes()
    file.unlink() if text is None else file.write_bytes(text)
    assert list_stores(tmp_path)[0].about is None
    again = open_store(tmp_path)
    assert file.read_bytes() == whole and list_stores(tmp_path)[0].about == ABOUT and again.get(ref_of(0)) == payload_of(0)
