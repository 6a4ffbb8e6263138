"""Bringing blocks back from the tiers into a sequence's block table.

A sequence whose next blocks are in host memory gets new blocks of the pool, the plan loads them, and the sequence has no slice in that
plan; its ``num_scheduled`` covers what is being loaded, exactly as if it were being computed. When the plan has run, its blocks are
published like computed ones. Meanwhile, and while a sequence waits for the disk, it claims its blocks, so that equal prompts wait for it.

Owns which sequences are being restored. Blocks, tables and claims are KVManager's, host blocks are KVTiers'.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.kv_tiers import BlockRef, HostEntry, KVTiers, TierMatch
from octavo.core.request import Sequence
from octavo.core.step import BlockMove

if TYPE_CHECKING:
    from octavo.core.kv_manager import KVManager


@dataclass(slots=True)
class Restore:
    """What the plan being made, or in flight, loads for a sequence."""

    seq: Sequence
    loads: list[BlockMove]
    num_host_tokens: int
    num_disk_tokens: int


class Restorer:
    def __init__(self, kv: KVManager, tiers: KVTiers) -> None:
        self.tiers = tiers
        self._kv = kv
        self._restores: dict[int, Restore] = {}  # by seq_id
        self._num_loads_left: int | None = None  # in the plan being made; None: any number

    def begin_plan(self, now_s: float, limit_s: float | None) -> None:
        """A plan is being made at ``now_s``. ``limit_s``: the gap that running streams may see, of which loads may take half."""
        self.tiers.begin_plan(now_s)
        block_s = self.tiers.cost.load_s(1)
        self._num_loads_left = None if limit_s is None or block_s <= 0.0 else max(1, int(limit_s / 2 / block_s))

    @property
    def sequences(self) -> list[Sequence]:
        """Those that the plan being made, or in flight, loads blocks for."""
        return [restore.seq for restore in self._restores.values()]

    def num_loading(self, seq: Sequence) -> int:
        """Tokens of ``seq`` that the plan being made, or in flight, loads."""
        return seq.num_scheduled if seq.seq_id in self._restores else 0

    def match(self, seq: Sequence, refs: Iterator[BlockRef], depth: int) -> TierMatch:
        """What the tiers have after the first ``depth`` blocks of ``seq``, which it shares or is about to. Changes nothing."""
        if seq.seq_id in self._restores:
            return TierMatch(waits=True)
        return self.tiers.match(seq.seq_id, refs, depth * self._kv.block_size)

    def begin(self, seq: Sequence, match: TierMatch, num_kept: int = 0) -> bool:
        """Have the plan load what was matched, or the disk read it. True: ``seq`` sits this plan out.

        ``num_kept``: blocks that are to stay available, since others need them in this plan. Who finds none beyond them computes.
        """
        if match.waits:
            return True
        if match.refs:
            self.tiers.begin_read(seq.seq_id, match.refs, seq.num_computed)
            self._kv.claim(seq)
            return True
        if match.entries and self._num_loads_left == 0:  # others have all of this plan's: the next will do
            return True
        num_available = max(0, self._kv.pool.num_available - num_kept)
        entries = self._kv.usable_entries(seq, match.entries[:num_available][: self._num_loads_left])
        if not entries:
            self.tiers.end_wait(seq.seq_id)
            return False
        self.tiers.load(seq.seq_id, entries)  # before blocks are allocated: what that evicts is not to take their place in host memory
        size = self._kv.block_size
        num_disk_tokens = size * sum(entry.from_disk for entry in entries)
        loads = [self._load(seq, entry) for entry in entries]
        self.tiers.stats.num_loaded_blocks += len(loads)
        for entry in entries:
            entry.from_disk = False
        seq.num_scheduled = size * len(entries)
        if self._num_loads_left is not None:
            self._num_loads_left -= len(loads)
        self._restores[seq.seq_id] = Restore(seq, loads, seq.num_scheduled - num_disk_tokens, num_disk_tokens)
        self._kv.claim(seq)
        return True

    def _load(self, seq: Sequence, entry: HostEntry) -> BlockMove:
        block = self._kv.append_block(seq, None, entry.windowed)
        return BlockMove(block, entry.host_block, pages=self._kv.pool.pages_of(block))

    def loads(self) -> list[BlockMove]:
        """What the plan being made loads."""
        return [load for restore in self._restores.values() for load in restore.loads]

    def end(self, failed: bool = False) -> list[Restore]:
        """The plan in flight has run, or failed. Unless it failed, what it loaded is now computed and offered."""
        done, self._restores = list(self._restores.values()), {}
        self.tiers.end_plan(failed)
        for restore in done:
            seq = restore.seq
            if not failed:
                seq.num_computed += seq.num_scheduled
            seq.num_scheduled = 0
            if not failed:
                self._kv.publish(seq)
        return done

    def leave(self, seq: Sequence) -> None:
        """``seq`` gives its blocks back. What the plan being made was to load for it is not loaded."""
        self.tiers.leave(seq.seq_id)
        if self._restores.pop(seq.seq_id, None) is not None:
            seq.num_scheduled = 0
