"""What the pool and host memory offer goes to disk while the engine is idle, so that a process that is killed loses little.

    idle ─▶ a sweep is due? ─▶ a piece of it ─▶ somebody has come? ─no─▶ the next piece ─▶ ... ─▶ done: nothing before the next step
                                                     └─yes─▶ steps; the sweep goes on when they are done

A sweep looks at every block once, the most recently used first, as many as the disk may hold, and writes those that are not there. A piece
takes about a millisecond of the thread that steps, however many blocks there are: who comes meanwhile waits no longer. The disk's queue is
kept short, so that the sweep goes at the disk's pace and what host memory evicts finds room.

Owns where a sweep is. Writes nothing itself: the disk tier's thread does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from octavo.backends.base import Backend
from octavo.core.kv_tiers import BlockRef, KVTiers
from octavo.core.scheduler import Scheduler
from octavo.core.step import BlockMove, StepPlan
from octavo.engine.kv_disk_io import DiskTier

DEFAULT_INTERVAL_S = 30.0
PIECE_S = 0.001  # a piece ends with the block that exceeds this
PAUSE_S = 0.02  # until the disk has written some of what it was given
QUEUE_BYTES = 16 << 20  # of blocks that wait to be written: above it a sweep pauses


@dataclass(slots=True)
class FlushStats:
    """``seconds``, and the ``longest_s`` at a time, are those of the thread that steps."""

    num_blocks: int = 0  # given to the disk's thread, which may not have written them
    num_pieces: int = 0
    num_sweeps: int = 0  # that came to their end
    seconds: float = 0.0
    longest_s: float = 0.0


class IdleFlush:
    """``staging_block``: a host block of its own, through which the pool is read. ``interval_s``: between the starts of sweeps."""

    def __init__(
        self, backend: Backend, tiers: KVTiers, disk: DiskTier, staging_block: int, interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.stats = FlushStats()
        self._backend, self._tiers, self._disk = backend, tiers, disk
        self._staging_block, self._interval_s = staging_block, interval_s
        self._clock = clock
        self._due_s = clock() + interval_s
        self._sweep: Iterator[tuple[BlockRef, Callable[[], bytes]]] | None = None
        self._num_steps = 0  # of the scheduler, when the last sweep began
        self._used_ns = 0

    def run(self, scheduler: Scheduler) -> float | None:
        """Do a piece of a sweep, if one is due. Seconds until it is worth calling again; None: not before the next step.

        No plan may be in flight. Raises what the backend raises; the sweep is then over.
        """
        began_s = self._clock()
        if self._sweep is None:
            if scheduler.stats.num_steps == self._num_steps:
                return None
            if began_s < self._due_s:
                return self._due_s - began_s
            self._num_steps, self._due_s, self._used_ns = scheduler.stats.num_steps, began_s + self._interval_s, time.time_ns()
            self._sweep = self._blocks(scheduler)
        if self._disk.num_queued_bytes > QUEUE_BYTES:
            return PAUSE_S
        try:
            ended = self._piece(began_s + PIECE_S)
        except BaseException:
            self._sweep = None
            raise
        held_s = self._clock() - began_s
        stats = self.stats
        stats.num_pieces, stats.seconds, stats.longest_s = stats.num_pieces + 1, stats.seconds + held_s, max(stats.longest_s, held_s)
        if ended:
            self._sweep = None
            stats.num_sweeps += 1
        return None if ended else 0.0

    def _piece(self, until_s: float) -> bool:
        """True when the sweep has come to its end."""
        assert self._sweep is not None
        for ref, read in self._sweep:
            self._used_ns -= 1000  # a child counts as used before its parent: it goes first
            if ref.key not in self._disk and self._disk.write(ref, read(), used_ns=self._used_ns, is_flush=True):
                self.stats.num_blocks += 1
            if self._clock() >= until_s or self._disk.num_queued_bytes > QUEUE_BYTES:
                return False
        return True

    def _blocks(self, scheduler: Scheduler) -> Iterator[tuple[BlockRef, Callable[[], bytes]]]:
        """Blocks and how to read them, those of the pool first. Steps may come between two: each is looked at when it is its turn."""
        num_left = self._disk.store.num_wanted_blocks
        for block in reversed(scheduler.cached_blocks()):
            ref = scheduler.offered_block(block)
            if ref is not None and num_left > 0:
                num_left -= 1
                yield ref, lambda block=block: self._read_pool(scheduler.block_save(block, self._staging_block))  # type: ignore[misc]
        for entry in reversed(self._tiers.entries()):
            if num_left > 0 and entry.windowed and self._tiers.holds(entry):
                num_left -= 1
                yield entry.ref, lambda entry=entry: self._backend.read_host_block(entry.host_block)  # type: ignore[misc]

    def _read_pool(self, save: BlockMove) -> bytes:
        self._backend.execute(StepPlan(0, block_saves=[save]))
        return self._backend.read_host_block(self._staging_block)
