"""A disk store behind two threads, so that nobody who gives blocks to it or asks for some ever waits for the disk.

    write ─▶ queue, bounded in bytes ─▶ writer ─▶ store          read ─▶ queue ─▶ reader ─▶ results ─▶ poll

A block counts as there from the moment it is taken for writing: the reader serves it from the queue until its file is whole. What finds the
queue full is dropped; it is a cache. Owns queues and threads; files are the store's, and who wants which block is the caller's business.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.core.kv_tiers import BlockRef
from octavo.engine.kv_disk import DiskStore

logger = logging.getLogger("octavo.kv")

QUEUE_BYTES = 256 << 20  # of blocks that wait to be written


@dataclass(slots=True)
class BlockRead:
    """``payload`` None: the block could not be had."""

    ref: BlockRef
    payload: bytes | None


class _Write(NamedTuple):
    ref: BlockRef
    payload: bytes
    used_ns: int | None
    is_flush: bool
    is_elsewhere: bool  # in memory too: it is not lost when it cannot be written


@dataclass(slots=True)
class DiskTraffic:
    """Counters; ``seconds`` are those that a thread was busy."""

    num_blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class DiskTier:
    """Not for use after ``close``, which is idempotent."""

    def __init__(self, store: DiskStore, queue_bytes: int = QUEUE_BYTES) -> None:
        self.store = store
        self.read_traffic, self.write_traffic = DiskTraffic(), DiskTraffic()
        self.num_dropped = 0  # blocks that found the queue full
        self.num_lost = 0  # blocks that memory gave up and the disk did not take: those with the queue full, and those not to be written
        self.num_flushed = 0  # blocks of an idle engine's sweeps that were written
        self._queue_bytes = queue_bytes
        self._queued: dict[bytes, _Write] = {}  # in order; a block leaves when its file is whole, or cannot be
        self._num_queued_bytes = 0
        self._batches: deque[list[BlockRef]] = deque()
        self._results: deque[BlockRead] = deque()
        self._closing = False
        lock = threading.Lock()
        self._to_write, self._written = threading.Condition(lock), threading.Condition(lock)
        self._to_read, self._have_read = threading.Condition(lock), threading.Condition(lock)
        self._threads = [
            threading.Thread(target=self._run_writer, name="octavo-kv-write", daemon=True),
            threading.Thread(target=self._run_reader, name="octavo-kv-read", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def __contains__(self, key: bytes) -> bool:
        return key in self._queued or key in self.store

    @property
    def num_queued_bytes(self) -> int:
        """Of blocks that wait to be written."""
        return self._num_queued_bytes

    # --- writing ------------------------------------------------------------------------------------------------------------------------

    def write(
        self, ref: BlockRef, payload: bytes, wait_s: float = 0.0, used_ns: int | None = None, is_flush: bool = False
    ) -> bool:  # fmt: skip
        """Take a block for writing; ``payload`` is not to change any more. False when after ``wait_s`` there is still no room for it.

        ``used_ns``: its last use, nanoseconds since the epoch; None: when it is written. ``is_flush``: memory keeps it meanwhile.
        """
        with self._to_write:
            if self._closing:
                return False
            queued = self._queued.get(ref.key)
            if queued is not None and not is_flush:
                self._queued[ref.key] = queued._replace(is_elsewhere=False)
            if ref.key in self:
                return True
            if wait_s > 0.0:
                self._written.wait_for(lambda: self._has_room(payload), wait_s)
            if not self._has_room(payload):
                self.num_dropped += 1
                self.num_lost += not is_flush
                return False
            self._queued[ref.key] = _Write(ref, payload, used_ns, is_flush, is_flush)
            self._num_queued_bytes += len(payload)
            self._to_write.notify()
        return True

    def _has_room(self, payload: bytes) -> bool:
        return not self._queued or self._num_queued_bytes + len(payload) <= self._queue_bytes

    def _run_writer(self) -> None:
        try:
            self.store.keep_limit()  # what is there may be more than this process is to keep
        except Exception:
            logger.exception("the KV blocks on disk could not be looked through")
        while True:
            with self._to_write:
                self._to_write.wait_for(lambda: self._queued or self._closing)
                if not self._queued:
                    return
                ref, payload, used_ns, is_flush, _ = next(iter(self._queued.values()))
            began_s = time.perf_counter()
            try:
                done = self.store.put(ref, payload, used_ns)
            except Exception:
                logger.exception("a KV block could not be written")
                done = False
            with self._written:
                write = self._queued.pop(ref.key, None)  # gone when close has given up
                if done:
                    _count(self.write_traffic, len(payload), began_s)
                    self.num_flushed += is_flush
                elif write is not None:
                    self.num_lost += not write.is_elsewhere
                self._num_queued_bytes -= len(payload)
                self._written.notify_all()

    # --- reading ------------------------------------------------------------------------------------------------------------------------

    def read(self, refs: Sequence[BlockRef]) -> None:
        """Ask for blocks of one chain, parents first. ``poll`` gives one answer for each; after one that is not to be had none is."""
        with self._to_read:
            self._batches.append(list(refs))
            self._to_read.notify()

    def poll(self, max_blocks: int) -> list[BlockRead]:
        """What has been read, at most ``max_blocks``. Never waits."""
        with self._have_read:
            return [self._results.popleft() for _ in range(min(max_blocks, len(self._results)))]

    def wait(self, timeout_s: float) -> bool:
        """Wait until ``poll`` has something; False when it took too long."""
        with self._have_read:
            return self._have_read.wait_for(lambda: bool(self._results), timeout_s)

    def _run_reader(self) -> None:
        while True:
            with self._to_read:
                self._to_read.wait_for(lambda: self._batches or self._closing)
                if self._closing:
                    return
                batch = self._batches.popleft()
            self._read_batch(batch)

    def _read_batch(self, batch: list[BlockRef]) -> None:
        num_read = 0
        for i, ref in enumerate(batch):
            began_s = time.perf_counter()
            payload = None if num_read < i or self._closing else self._read_block(ref)
            with self._have_read:
                if payload is not None:
                    num_read += 1
                    _count(self.read_traffic, len(payload), began_s)
                self._results.append(BlockRead(ref, payload))
                self._have_read.notify_all()
        if num_read:
            self.store.used([ref.key for ref in batch[:num_read]])

    def _read_block(self, ref: BlockRef) -> bytes | None:
        queued = self._queued.get(ref.key)
        if queued is not None:
            return queued.payload if queued.ref == ref else None
        try:
            return self.store.get(ref)
        except Exception:
            logger.exception("a KV block could not be read")
            return None

    # --- the end ------------------------------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what is queued, for at most ``timeout_s``, and end the threads."""
        with self._to_write:
            self._closing = True
            for condition in (self._to_write, self._to_read):
                condition.notify_all()
            if not self._written.wait_for(lambda: not self._queued, timeout_s):
                logger.warning("%d KV blocks are not written: the disk took more than %.0f s", len(self._queued), timeout_s)
                self._queued.clear()
        for thread in self._threads:
            thread.join(timeout_s)


def _count(traffic: DiskTraffic, num_bytes: int, began_s: float) -> None:
    traffic.num_blocks += 1
    traffic.num_bytes += num_bytes
    traffic.seconds += time.perf_counter() - began_s
