"""Moves KV blocks between host memory and the disk, beside the steps, as the scheduler's books of the tiers say.

    before_plan: what the disk has read goes to host memory      before_execute: what the plan will overwrite there goes to the disk
    [the plan moves blocks between the pool and host memory]     idle, close: what pool and host memory offer goes to the disk

Owns the disk tier and the order of these moves. Which block goes where is decided in ``core/kv_tiers``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from octavo.backends.base import Backend
from octavo.config import CacheConfig, ConfigError
from octavo.core.kv_tiers import BlockRef, KVTiers
from octavo.core.scheduler import Scheduler
from octavo.core.step import BlockMove, StepPlan
from octavo.costs.restore import RestoreModel
from octavo.engine.kv_disk import DiskStore, StoreAbout
from octavo.engine.kv_disk_io import DiskTier
from octavo.engine.kv_flush import DEFAULT_INTERVAL_S, FlushStats, IdleFlush
from octavo.engine.memory_limits import check_memory

logger = logging.getLogger("octavo.kv")

DEFAULT_DISK_BYTES = 10 << 30
MIN_HOST_BLOCKS, HOST_SHARE = 32, 8  # host blocks that a disk without kv_host_memory gets: a share of the pool, at least so many
POLL_BLOCKS = 64  # taken from the disk before one step, so that none waits long for it
IDLE_WAIT_S = 0.002  # of the engine when all sequences wait for the disk: then it looks for new requests
STAGING_BLOCKS = 64  # host blocks through which the pool goes to disk at the end
FLUSH_S = 30.0  # at most, at the end


class StoreNames(NamedTuple):
    """What a store on disk is found by, and is called."""

    fingerprint: str
    model: str


class KVTiering:
    """``disk`` None: host memory is the last tier. ``flush`` None: nothing is done while the engine is idle."""

    def __init__(
        self, backend: Backend, tiers: KVTiers, cost: RestoreModel, block_bytes: int, disk: DiskTier | None = None,
        flush: IdleFlush | None = None,
    ) -> None:  # fmt: skip
        self.tiers, self.cost, self.disk = tiers, cost, disk
        self._flush = flush
        self.block_bytes = block_bytes
        self._backend = backend
        self._seen_blocks, self._seen_s = 0, 0.0  # of the disk's reads, as told to the cost model
        self._closed = False

    def before_plan(self) -> None:
        """Fill host blocks with what the disk has read since the last step."""
        if self.disk is None:
            return
        for read in self.disk.poll(POLL_BLOCKS):
            if read.payload is None:
                self.tiers.read_failed(read.ref)
                continue
            host_block = self.tiers.arrived(read.ref)
            self._spill()
            if host_block is not None:
                self._fill(host_block, read.ref, read.payload)
        traffic = self.disk.read_traffic
        self.cost.blocks_read(traffic.num_blocks - self._seen_blocks, traffic.seconds - self._seen_s)
        self._seen_blocks, self._seen_s = traffic.num_blocks, traffic.seconds

    def _fill(self, host_block: int, ref: BlockRef, payload: bytes) -> None:
        try:
            self._backend.write_host_block(host_block, payload)
        except Exception:  # whatever a backend raises: a block that is not restored is computed
            logger.exception("a KV block could not be put into host memory")
            self.tiers.discard(ref)

    def before_execute(self) -> None:
        """Give the disk what is about to be overwritten in host memory, and ask it for what sequences wait for."""
        self._spill()
        if self.disk is not None:
            for refs in self.tiers.take_reads():
                self.disk.read(refs)

    def save(self, saves: Sequence[BlockMove]) -> None:
        """Copy blocks of the pool to host memory now: they are about to be written to, and not by a plan."""
        self.before_execute()
        try:
            if saves:
                self._backend.execute(StepPlan(0, block_saves=list(saves)))
        except Exception:  # whatever a backend raises: what is not saved is computed again
            logger.exception("evicted KV blocks could not be put into host memory")
            self.tiers.lost(saves)

    def _spill(self) -> None:
        for ref, host_block in self.tiers.take_spills():
            if self.disk is None:
                continue
            try:
                self.disk.write(ref, self._backend.read_host_block(host_block))
            except Exception:  # whatever a backend raises, such as a lack of memory for the copy
                logger.exception("a KV block of host memory is lost on its way to disk")

    def wait(self) -> None:
        """All that is left to do waits for the disk: wait for it too, for a moment."""
        self.before_execute()
        if self.disk is not None and self.tiers.is_waiting:
            self.disk.wait(IDLE_WAIT_S)

    @property
    def flush_stats(self) -> FlushStats:
        return FlushStats() if self._flush is None else self._flush.stats

    def idle(self, scheduler: Scheduler) -> float | None:
        """No step is to be made now: do a piece of what can wait. Seconds until it is worth calling again; None: not before a step."""
        if self._flush is None or self._closed:
            return None
        try:
            self.before_execute()
            return self._flush.run(scheduler)
        except Exception:  # whatever a backend raises: the end may still write
            logger.exception("KV blocks are no more written to disk meanwhile")
            self._flush = None
            return None

    # --- the end ------------------------------------------------------------------------------------------------------------------------

    def close(self, scheduler: Scheduler) -> None:
        """Write to disk what a restart can use, and end the disk's threads. No request may be left. Idempotent."""
        if self.disk is None or self._closed:
            return
        self._closed = True
        began_s = time.monotonic()
        try:
            self.save(self.tiers.take_late_saves())  # of plans that came to nothing
            self._flush_all(scheduler, began_s + FLUSH_S)
        except Exception:  # whatever a backend raises: the cache is lost, the end goes on
            logger.exception("KV blocks could not be written to disk")
        self.disk.close(max(1.0, began_s + FLUSH_S - time.monotonic()))
        written = self.disk.write_traffic
        logger.info("%d KV blocks (%d bytes) were written to %s", written.num_blocks, written.num_bytes, self.disk.store.folder)

    def _flush_all(self, scheduler: Scheduler, deadline_s: float) -> None:
        """The most recently used first, parents before children, as far as size and time allow. A parent counts as used later."""
        assert self.disk is not None
        num_left = self.disk.store.num_wanted_blocks
        used_ns = time.time_ns()
        for ref, payload in self._kept(scheduler):
            wait_s = deadline_s - time.monotonic()
            if num_left == 0 or wait_s <= 0.0 or not self.disk.write(ref, payload, wait_s, used_ns):
                logger.warning("the KV cache is not on disk as a whole: it is larger than kv_disk_size, or the disk is slow")
                return
            num_left -= 1
            used_ns -= 1000

    def _kept(self, scheduler: Scheduler) -> Iterator[tuple[BlockRef, bytes]]:
        """What is not on disk: the pool's blocks, through a part of host memory, then those of host memory, which were evicted earlier."""
        assert self.disk is not None
        read = self._backend.read_host_block
        staging, vacated = self.tiers.vacate(STAGING_BLOCKS)
        last = [(entry.ref, read(entry.host_block)) for entry in reversed(vacated) if entry.windowed and entry.ref.key not in self.disk]
        pool = [(ref, block) for ref, block in reversed(scheduler.evictable_blocks()) if ref.key not in self.disk]
        for i in range(0, len(pool), len(staging)):
            batch = list(zip(pool[i : i + len(staging)], staging, strict=False))
            self._backend.execute(StepPlan(0, block_saves=[scheduler.block_save(block, host_block) for (_, block), host_block in batch]))
            for (ref, _), host_block in batch:
                yield ref, read(host_block)
        for entry in reversed(self.tiers.entries()):
            if entry.windowed and entry.ref.key not in self.disk:
                yield entry.ref, read(entry.host_block)
        yield from last


def open_tiering(
    cache: CacheConfig, backend: Backend, store: StoreNames, num_swap_blocks: int, num_kv_blocks: int, cost: RestoreModel
) -> KVTiering:
    """The tiers that ``cache`` asks for, over host blocks that are allocated here, behind ``num_swap_blocks`` for preempted sequences.

    Raises ConfigError for a path that cannot be used and for memory that holds no block, BackendError when it is not to be had.
    """
    kv_dtype = backend.kv_capacity(0).dtype
    packed = cache.packs_kv_tiers(kv_dtype)
    if cache.kv_host_dtype == "int8" and not packed:
        logger.warning("kv_host_dtype: int8 changes nothing: the KV cache is int8, and its blocks are kept as they are")
    if packed:
        logger.info("kv_host_dtype int8: blocks that come back from host memory or disk are rounded, and answers behind them may differ")
    num_tier_blocks = _num_tier_blocks(cache, backend, num_kv_blocks, packed)
    flush_s = DEFAULT_INTERVAL_S if cache.kv_disk_flush_seconds is None else cache.kv_disk_flush_seconds
    flushes = cache.kv_disk_path is not None and flush_s > 0
    num_blocks = num_tier_blocks + flushes
    if packed:
        backend.allocate_host_kv(num_swap_blocks, num_blocks)
    else:
        backend.allocate_host_kv(num_swap_blocks + num_blocks)
    block_bytes = len(backend.read_host_block(num_swap_blocks))
    if cache.kv_disk_path is None:
        return KVTiering(backend, KVTiers(num_tier_blocks, cache.block_size, cost, None, num_swap_blocks, packed), cost, block_bytes)
    about = StoreAbout(store.fingerprint, cache.block_size, block_bytes, store.model)
    disk = DiskTier(DiskStore(cache.kv_disk_path, about, cache.kv_disk_size or DEFAULT_DISK_BYTES))
    tiers = KVTiers(num_tier_blocks, cache.block_size, cost, disk, num_swap_blocks, packed)
    flush = IdleFlush(backend, tiers, disk, num_swap_blocks + num_tier_blocks, flush_s) if flushes else None
    return KVTiering(backend, tiers, cost, block_bytes, disk, flush)


def _num_tier_blocks(cache: CacheConfig, backend: Backend, num_kv_blocks: int, packed: bool) -> int:
    """Host blocks that the tiers which ``cache`` asks for are to have. ConfigError for memory that holds no block, or is too much."""
    if cache.kv_host_memory is None:
        return max(MIN_HOST_BLOCKS, num_kv_blocks // HOST_SHARE)
    check_memory("kv_host_memory", cache.kv_host_memory, cache.kv_host_memory)
    block_bytes = backend.packed_block_bytes() if packed else backend.kv_capacity(0).bytes_per_block
    if cache.kv_host_memory < block_bytes:
        raise ConfigError(f"kv_host_memory: {cache.kv_host_memory} bytes hold no block; one takes {block_bytes}")
    return cache.kv_host_memory // block_bytes
