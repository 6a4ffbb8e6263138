"""KV tiers: where blocks go that the pool evicts, and which of them come back.

    pool ──evicted: save──▶ host memory ──evicted: spill──▶ disk
     ▲                        │     ▲                        │
     └───load, in a plan──────┘     └──read, beside the steps┘

A block that the pool evicts is *saved* to a host block by the same plan that reuses its place; where it is reused outside a plan, as for KV
that comes from elsewhere, by itself and before (``take_late_saves``). A host block that is needed again is
*spilled* to disk before the plan that overwrites it runs. On the way back, host blocks are *loaded* into newly allocated pool blocks by a
plan and offered when it has run; blocks on disk are *read* into host blocks while other sequences go on, and their sequence waits, for no
longer than computing them would take (so that a slow disk at most doubles the time). A copy stays behind on the way up: evicting it again
is free.

Pure bookkeeping of keys and block numbers: the caller moves the bytes. A hit needs the same key, parent key and tokens, in every tier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from octavo.core.cost import RestoreCost
from octavo.core.step import BlockMove, StepPlan


class BlockRef(NamedTuple):
    """Names a block in any tier: what it holds follows from it and the fingerprint."""

    key: bytes
    parent_key: bytes
    tokens: bytes  # int32 token ids


class DiskIndex(Protocol):
    """Which blocks are on disk, as far as known: a read may still fail."""

    def __contains__(self, key: bytes) -> bool: ...


@dataclass(slots=True, eq=False)
class HostEntry:
    ref: BlockRef
    host_block: int
    from_disk: bool = False  # it was read and has not been used since
    num_awaited: int = 0  # sequences that wait for the rest of their blocks
    windowed: bool = True  # it has the part of window layers


@dataclass(slots=True)
class TierStats:
    """Counters: they only grow. Saves and loads are between pool and host memory, spills and reads between that and the disk."""

    num_saved_blocks: int = 0
    num_loaded_blocks: int = 0
    num_read_blocks: int = 0
    num_spilled_blocks: int = 0
    num_lost_blocks: int = 0  # evicted with no host block to be had
    move_s: float = 0.0  # time of saves and loads
    num_given_up: int = 0  # waits for the disk that failed or took too long
    host_hit_tokens: int = 0  # of prompts, before their first token, as prefix_hit_tokens, in which they are contained
    disk_hit_tokens: int = 0


@dataclass(slots=True)
class _Wait:
    """A sequence waits for the disk. ``given_up``: it does not any more, nor will it again before it is released."""

    deadline_s: float
    missing: set[bytes] = field(default_factory=set)
    entries: list[HostEntry] = field(default_factory=list)  # kept for it
    given_up: bool = False


@dataclass(slots=True)
class TierMatch:
    """What the tiers have for a sequence after what it shares. ``waits``: it is to sit out, since blocks are on their way from the disk."""

    entries: list[HostEntry] = field(default_factory=list)  # to load
    refs: list[BlockRef] = field(default_factory=list)  # to read
    waits: bool = False

    def __bool__(self) -> bool:
        return self.waits or bool(self.entries) or bool(self.refs)


class KVTiers:
    """``num_host_blocks`` from ``first_host_block`` on are its own; those below are others'. ``disk`` None: there is no tier below.

    ``rounds``: what comes back is not, to the bit, what went.
    """

    def __init__(
        self, num_host_blocks: int, block_size: int, cost: RestoreCost, disk: DiskIndex | None = None, first_host_block: int = 0,
        rounds: bool = False,
    ) -> None:  # fmt: skip
        if num_host_blocks < 1:
            raise ValueError(f"num_host_blocks: {num_host_blocks} is not allowed; at least 1")
        self.stats = TierStats()
        self.block_size, self.rounds = block_size, rounds
        self.first_host_block, self.num_host_blocks = first_host_block, num_host_blocks
        self._disk, self.cost = disk, cost
        self._free = list(range(first_host_block + num_host_blocks - 1, first_host_block - 1, -1))
        self._entries: OrderedDict[bytes, HostEntry] = OrderedDict()  # least recently used first
        self._busy: set[int] = set()  # host blocks that the plan being made, or in flight, saves to or loads from
        self._saves: dict[int, tuple[BlockMove, bytes]] = {}  # host block -> (its save, key): not in a plan yet
        self._saving: list[bytes] = []  # keys that the plan in flight saves
        self._spills: list[tuple[BlockRef, int]] = []
        self._reads: list[list[BlockRef]] = []
        self._reading: set[bytes] = set()
        self._waits: dict[int, _Wait] = {}  # by seq_id
        self._now_s = 0.0

    @property
    def num_used_host_blocks(self) -> int:
        """Host blocks that hold a block of the cache."""
        return len(self._entries)

    @property
    def is_waiting(self) -> bool:
        """Whether a sequence waits for the disk."""
        return any(not wait.given_up for wait in self._waits.values())

    def is_reading(self, seq_id: int) -> bool:
        """Whether this sequence waits for the disk."""
        wait = self._waits.get(seq_id)
        return wait is not None and not wait.given_up

    # --- down ---------------------------------------------------------------------------------------------------------------------------

    def save(self, ref: BlockRef, block: int, pages: Sequence[int] = ()) -> None:
        """The pool evicts ``block``, in ``pages``: keep its contents, by the plan being made, unless host memory has them or no room."""
        entry, windowed = self._entries.get(ref.key), -1 not in pages
        if entry is not None:
            self._entries.move_to_end(ref.key)
            if entry.windowed or not windowed or entry.host_block in self._busy:
                return
            entry.windowed = True  # it is saved again, whole
            self._save(entry, block, pages)
            return
        host_block = self._take_host_block()
        if host_block is None:
            self.stats.num_lost_blocks += 1
            return
        entry = self._entries[ref.key] = HostEntry(ref, host_block, windowed=windowed)
        self._save(entry, block, pages)

    def _save(self, entry: HostEntry, block: int, pages: Sequence[int]) -> None:
        self._saves[entry.host_block] = (BlockMove(block, entry.host_block, pages=pages), entry.ref.key)
        self._busy.add(entry.host_block)
        self.stats.num_saved_blocks += 1

    def _take_host_block(self) -> int | None:
        """A free host block, or that of the least recently used entry which nobody needs right now; None when there is neither."""
        if self._free:
            return self._free.pop()
        for entry in self._entries.values():
            if entry.num_awaited == 0 and entry.host_block not in self._busy:
                break
        else:
            return None
        del self._entries[entry.ref.key]
        if self._disk is not None and entry.windowed and entry.ref.key not in self._disk:
            self._spills.append((entry.ref, entry.host_block))
            self.stats.num_spilled_blocks += 1
        return entry.host_block

    def take_spills(self) -> list[tuple[BlockRef, int]]:
        """(block, host block) to be read from host memory and written to disk before the plan runs, or anything is written there."""
        spills, self._spills = self._spills, []
        return spills

    # --- up -----------------------------------------------------------------------------------------------------------------------------

    def match(self, seq_id: int, refs: Iterator[BlockRef], start: int) -> TierMatch:
        """Which of ``refs``, the blocks that follow ``start`` tokens, one after the other, are to be restored. Changes nothing."""
        wait = self._waits.get(seq_id)
        if wait is not None and wait.missing:
            return TierMatch(waits=True)
        may_read = self._disk is not None and (wait is None or not wait.given_up)
        match = TierMatch()
        for ref in refs:
            entry = self._entries.get(ref.key)
            if entry is not None and not match.refs:
                if entry.ref != ref:
                    break
                match.entries.append(entry)
            elif entry is None and not match.entries and may_read and self._is_readable(ref.key, len(match.refs)):
                match.refs.append(ref)
            else:
                break
        num_host, num_disk = len(match.entries), len(match.refs)
        if not self.cost.restoring_pays(start, (num_host + num_disk) * self.block_size, num_host, num_disk):
            return TierMatch()
        return match

    def _is_readable(self, key: bytes, num_before: int) -> bool:
        """Half of host memory may be kept for blocks on their way from the disk, so that saving goes on."""
        assert self._disk is not None
        num_kept = len(self._reading) + sum(len(wait.entries) for wait in self._waits.values())  # given up or not: a disk may hang
        return num_kept + num_before < max(1, self.num_host_blocks // 2) and (key in self._disk or key in self._reading)

    def begin_read(self, seq_id: int, refs: Sequence[BlockRef], start: int) -> None:
        """``seq_id`` waits for these blocks, which ``match`` has found on disk."""
        self.leave(seq_id)
        wait = self._waits[seq_id] = _Wait(self._now_s + self.cost.recompute_s(start, len(refs) * self.block_size))
        wait.missing = {ref.key for ref in refs}
        new = [ref for ref in refs if ref.key not in self._reading]
        self._reading.update(ref.key for ref in new)
        if new:
            self._reads.append(new)

    def take_reads(self) -> list[list[BlockRef]]:
        """Batches of blocks that are to be read from disk; each ends with ``arrived`` or ``read_failed``."""
        reads, self._reads = self._reads, []
        return reads

    def arrived(self, ref: BlockRef) -> int | None:
        """A block has been read: the host block where it goes, at once; spills come before. None: there is no room for it."""
        self._reading.discard(ref.key)
        if ref.key in self._entries:  # computed and evicted again meanwhile
            self._settle(ref.key, self._entries[ref.key])
            return None
        host_block = self._take_host_block()
        if host_block is None:
            self._settle(ref.key, None)
            return None
        entry = self._entries[ref.key] = HostEntry(ref, host_block, from_disk=True)
        self.stats.num_read_blocks += 1
        self._settle(ref.key, entry)
        return host_block

    def discard(self, ref: BlockRef) -> None:
        """What ``arrived`` made room for could not be put there."""
        entry = self._entries.pop(ref.key)
        self._free.append(entry.host_block)
        for wait in self._waits.values():
            if entry in wait.entries:
                self._give_up(wait)

    def read_failed(self, ref: BlockRef) -> None:
        """A block could not be read."""
        self._reading.discard(ref.key)
        self._settle(ref.key, None)

    def _settle(self, key: bytes, entry: HostEntry | None) -> None:
        """Who waits for a block has it now, or, when there is none, waits no more: what comes after it is of no use."""
        for wait in self._waits.values():
            if key not in wait.missing:
                continue
            if entry is None:
                self._give_up(wait)
            else:
                wait.missing.discard(key)
                wait.entries.append(entry)
                entry.num_awaited += 1

    def _give_up(self, wait: _Wait) -> None:
        for entry in wait.entries:
            entry.num_awaited -= 1
        wait.missing.clear()
        wait.entries.clear()
        if not wait.given_up:
            wait.given_up = True
            self.stats.num_given_up += 1

    def load(self, seq_id: int, entries: Sequence[HostEntry]) -> None:
        """The plan being made loads these entries for ``seq_id``, whose wait, if it had one, is over."""
        for entry in entries:
            self._busy.add(entry.host_block)
            self._entries.move_to_end(entry.ref.key)
        for entry in reversed(entries):  # a parent is to be evicted after its children
            self._entries.move_to_end(entry.ref.key)
        self.end_wait(seq_id)

    def end_wait(self, seq_id: int) -> None:
        """``seq_id`` goes on: what was kept for it need not be any more."""
        wait = self._waits.get(seq_id)
        if wait is not None and not wait.given_up:
            self.leave(seq_id)

    def leave(self, seq_id: int) -> None:
        """``seq_id`` gives back its place: it waits for nothing, and may wait again when it comes back."""
        wait = self._waits.pop(seq_id, None)
        if wait is not None:
            for entry in wait.entries:
                entry.num_awaited -= 1

    # --- plans --------------------------------------------------------------------------------------------------------------------------

    def begin_plan(self, now_s: float) -> None:
        """A plan is being made at ``now_s``. Who has waited too long for the disk gives up."""
        self._now_s = now_s
        for wait in self._waits.values():
            if wait.missing and now_s >= wait.deadline_s:
                self._give_up(wait)

    def take_saves(self) -> list[BlockMove]:
        """What the plan, which is going to be executed, copies before anything else."""
        saves = [move for move, _ in self._saves.values()]
        self._saving = [key for _, key in self._saves.values()]
        self._saves.clear()
        return saves

    def take_late_saves(self) -> list[BlockMove]:
        """Saves of what was evicted outside a plan. They are to be made now, before anything is written to these blocks; ``lost`` when that
        fails."""
        saves = [move for move, _ in self._saves.values()]
        self._saves.clear()
        self._busy.difference_update(move.host_block for move in saves)
        return saves

    def lost(self, saves: Sequence[BlockMove]) -> None:
        """Nobody knows what late saves have left in host memory."""
        host_blocks = {move.host_block for move in saves}
        for entry in self.entries():
            if entry.host_block in host_blocks:
                self._free.append(self._entries.pop(entry.ref.key).host_block)

    def num_moves(self, plan: StepPlan) -> int:
        """Saves and loads of ``plan`` that are of the tiers."""
        return sum(move.host_block >= self.first_host_block for move in (*plan.block_saves, *plan.block_loads))

    def end_plan(self, failed: bool = False) -> None:
        """The plan in flight has run, or failed: then nobody knows what was saved."""
        if failed:
            for key in self._saving:
                self._free.append(self._entries.pop(key).host_block)
        self._saving.clear()
        self._busy = set(self._saves)

    def holds(self, entry: HostEntry) -> bool:
        """Whether host memory still has ``entry``, and has it already: one that the next plan saves is not there yet."""
        return self._entries.get(entry.ref.key) is entry and entry.host_block not in self._busy

    # --- the end ------------------------------------------------------------------------------------------------------------------------

    def entries(self) -> list[HostEntry]:
        """What host memory holds, least recently used first."""
        return list(self._entries.values())

    def vacate(self, num_blocks: int) -> tuple[list[int], list[HostEntry]]:
        """At most ``num_blocks`` host blocks for the caller's own use until the end, and the entries that they hold: free blocks first,
        then the least recently used. Nothing may be in flight and nobody waiting.
        """
        assert not self._busy and not self._waits, "host blocks are in use"
        free, self._free = self._free[:num_blocks], self._free[num_blocks:]
        entries = self.entries()[: num_blocks - len(free)]
        for entry in entries:
            del self._entries[entry.ref.key]
        return free + [entry.host_block for entry in entries], entries

    def sources(self) -> set[int]:
        """Blocks of the pool that the next plan saves: nothing may be written there before it runs."""
        return {move.pool_block for move, _ in self._saves.values()}

    def check_invariants(self, waiting: set[int]) -> None:
        """AssertionError unless the books balance. ``waiting``: ids of sequences that may wait for the disk."""
        blocks = [entry.host_block for entry in self._entries.values()]
        ids = range(self.first_host_block, self.first_host_block + self.num_host_blocks)
        assert sorted([*blocks, *self._free]) == list(ids), "a host block is neither free nor of one entry"
        assert self._busy <= set(blocks), "a plan uses a host block that holds nothing"
        assert set(self._waits) <= waiting, "a sequence waits that holds no place"
        awaited: dict[int, int] = {}
        for wait in self._waits.values():
            assert not (wait.given_up and (wait.missing or wait.entries)), "a sequence has given up and still waits"
            for entry in wait.entries:
                assert self._entries.get(entry.ref.key) is entry, "a block that is waited for was evicted"
                awaited[id(entry)] = awaited.get(id(entry), 0) + 1
            assert wait.missing <= self._reading, "a sequence waits for a block that nobody reads"
        for key, entry in self._entries.items():
            assert key == entry.ref.key
            assert entry.num_awaited == awaited.get(id(entry), 0), "a block is kept for nobody"
        for host_block, (_, key) in self._saves.items():
            assert self._entries[key].host_block == host_block, "a block is saved for an entry that is gone"
