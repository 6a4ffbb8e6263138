"""The threads before the disk: nobody waits for it, what is queued is served, what is too much is dropped, and the end is orderly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo.core.kv_tiers import BlockRef
from octavo.engine.kv_disk import DiskStore
from octavo.engine.kv_disk_io import DiskTier
from tests.engine.test_kv_disk import BYTES, open_store, payload_of, ref_of

WAIT_S = 120.0  # hangs are found, slow machines are forgiven


class Gate:
    """Holds a method of the store until it is opened, and counts who came."""

    def __init__(self, store: DiskStore, name: str) -> None:
        self.opened, self.entered, self.num_calls = threading.Event(), threading.Event(), 0
        method: Callable = getattr(store, name)

        def held(*args: object) -> object:
            self.num_calls += 1
            self.entered.set()
            assert self.opened.wait(WAIT_S)
            return method(*args)

        setattr(store, name, held)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(open_store(tmp_path), queue_bytes=3 * BYTES)
    yield tier
    tier.close()


def read(disk: DiskTier, refs: list[BlockRef]) -> list[bytes | None]:
    disk.read(refs)
    found: list[bytes | None] = []
    while len(found) < len(refs):
        assert disk.wait(WAIT_S)
        found += [block.payload for block in disk.poll(2)]
    return found


def test_a_block_is_there_from_the_moment_it_is_taken(disk: DiskTier) -> None:
    gate = Gate(disk.store, "put")
    assert disk.write(ref_of(0), payload_of(0))
    assert gate.entered.wait(WAIT_S) and ref_of(0).key in disk and ref_of(0).key not in disk.store
    assert read(disk, [ref_of(0)]) == [payload_of(0)]
    assert read(disk, [ref_of(0)._replace(parent_key=bytes(32))]) == [None]
    gate.opened.set()
    disk.close()
    assert ref_of(0).key in disk.store and disk.store.get(ref_of(0)) == payload_of(0)
    assert (disk.write_traffic.num_blocks, disk.write_traffic.num_bytes) == (1, BYTES)


def test_what_finds_the_queue_full_is_dropped(disk: DiskTier) -> None:
    gate = Gate(disk.store, "put")
    assert [disk.write(ref_of(number), payload_of(number)) for number in range(5)] == [True, True, True, False, False]
    assert disk.num_dropped == 2 and ref_of(4).key not in disk
    assert disk.write(ref_of(0), payload_of(0)), "what is queued is taken already"
    waiting = threading.Thread(target=disk.write, args=(ref_of(5), payload_of(5), WAIT_S))
    waiting.start()
    gate.opened.set()
    waiting.join(WAIT_S)
    disk.close()
    assert [ref_of(number).key in disk.store for number in range(6)] == [True, True, True, False, False, True]


def test_answers_come_in_order_and_end_with_the_first_that_fails(disk: DiskTier) -> None:
    for number in (0, 1, 3):
        assert disk.write(ref_of(number), payload_of(number), WAIT_S)
    assert read(disk, [ref_of(number) for number in range(4)]) == [payload_of(0), payload_of(1), None, None]
    assert disk.poll(9) == [] and not disk.wait(0.0)
    assert disk.read_traffic.num_blocks == 2


def test_a_store_that_raises_ends_no_thread(disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(disk.store, "put", lambda *_: 1 / 0)
        patch.setattr(disk.store, "get", lambda _: 1 / 0)
        assert disk.write(ref_of(0), payload_of(0))
        with disk._written:
            assert disk._written.wait_for(lambda: ref_of(0).key not in disk._queued, WAIT_S)
        assert read(disk, [ref_of(0)]) == [None]
    assert disk.write(ref_of(0), payload_of(0)) and read(disk, [ref_of(0)]) == [payload_of(0)]


def test_the_end_writes_what_is_queued_and_takes_no_more(disk: DiskTier) -> None:
    for number in range(3):
        disk.write(ref_of(number), payload_of(number))
    disk.close()
    disk.close()
    assert len(disk.store) == 3
    assert not disk.write(ref_of(3), payload_of(3))
    assert not any(thread.is_alive() for thread in disk._threads)


def test_the_end_does_not_wait_for_a_disk_that_hangs(disk: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(disk.store, "put")
    disk.write(ref_of(0), payload_of(0))
    assert gate.entered.wait(WAIT_S)
    disk.close(0.0)
    assert "1 KV blocks are not written" in caplog.text
    gate.opened.set()


def test_the_limit_is_kept_from_the_start(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(6):
        store.put(ref_of(number), payload_of(number), 10**18 + number)
    tier = DiskTier(open_store(tmp_path, limit=3 * store.file_bytes))
    tier.close()
    assert sorted(path.stem for path in tmp_path.rglob("*.kv")) == sorted(ref_of(number).key.hex() for number in (4, 5))
    assert len(tier.store) == 2 and tier.store.num_evicted == 4


def test_what_is_lost_and_what_is_flushed_is_counted_when_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory still has what a sweep gives, unless it gives it up before the disk has refused it."""
    tier = DiskTier(open_store(tmp_path))
    tier.write(ref_of(0), payload_of(0), is_flush=True)
    tier.write(ref_of(1), payload_of(1))
    with tier._written:
        assert tier._written.wait_for(lambda: not tier._queued, WAIT_S)
    assert (tier.num_lost, tier.num_flushed) == (0, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tier.store, "_write_file", full)
    gate = Gate(tier.store, "put")
    tier.write(ref_of(2), payload_of(2), is_flush=True)
    tier.write(ref_of(3), payload_of(3))
    tier.write(ref_of(4), payload_of(4), is_flush=True)
    tier.write(ref_of(4), payload_of(4))  # evicted meanwhile
    gate.opened.set()
    tier.close()
    assert (tier.num_lost, tier.num_flushed, tier.write_traffic.num_blocks) == (2, 1, 2)
