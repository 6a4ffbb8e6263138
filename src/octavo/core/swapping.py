"""Preemption by swapping: the blocks of preempted sequences go to host memory and come back when these run again.

    running ──save──▶ saved (host blocks held) ──load──▶ running, loading ──end_loads──▶ running
                        │                                    (until the plan's result is there, its host blocks stay held)
                        └──drop (abort)──▶ gone

All computed blocks are saved, the part-filled last one included, so that no token is computed twice; a block that several choices of a
request share is saved once, and shared again when they return. What the prefix cache still offers then is not loaded. Sampling state is
not saved: a backend rebuilds it from the tokens. Of a block that all of a group have passed (``kv_groups``) the window part is neither
saved nor loaded.

Owns the records of saved sequences. Decides neither who is preempted nor whether by swapping.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from octavo.core.host_pool import HostPool
from octavo.core.kv_manager import KVManager
from octavo.core.request import Sequence, SequenceStatus
from octavo.core.step import BlockMove


@dataclass(slots=True)
class SavedSequence:
    """``host_blocks[i]`` holds what block i of the table held; ``num_computed`` tokens are in them."""

    host_blocks: array[int]
    num_computed: int


class SwapSpace:
    """``num_host_blocks`` 0: nothing is ever saved."""

    def __init__(self, num_host_blocks: int, kv: KVManager) -> None:
        self.pool = HostPool(num_host_blocks)
        self._kv = kv
        self._saved: dict[int, SavedSequence] = {}  # by seq_id
        self._loading: list[Sequence] = []  # their loads are in the plan being made or in flight
        self._read: list[int] = []  # host blocks that go with them, one entry per record
        self._loaded: dict[int, int] = {}  # host block -> pool block that the same plan loads it into

    @property
    def num_saved(self) -> int:
        """Sequences whose blocks are in host memory."""
        return len(self._saved)

    def holds(self, seq: Sequence) -> bool:
        return seq.seq_id in self._saved

    def num_computed(self, seq: Sequence) -> int:
        """Tokens of ``seq`` whose KV is saved."""
        saved = self._saved.get(seq.seq_id)
        return 0 if saved is None else saved.num_computed

    def full_blocks(self, seq: Sequence) -> list[int]:
        """The host blocks of a saved sequence that are full, in their order: what may be shared when it comes back."""
        saved = self._saved[seq.seq_id]
        return list(saved.host_blocks[: saved.num_computed // self._kv.block_size])

    @staticmethod
    def num_to_save(group: Iterable[Sequence]) -> int:
        """Host blocks that saving these sequences takes."""
        return len({block for seq in group for block in seq.block_table})

    def save(self, group: Seq[Sequence], saves: list[BlockMove]) -> None:
        """Save sequences that hold computed blocks alone, before these are released. IndexError when host blocks are short."""
        host_of: dict[int, int] = {}
        windowed = {block for seq in group for block in seq.block_table[self._kv.num_passed(seq) :]}
        for seq in group:
            host_blocks = array("i")
            for block in seq.block_table:
                if block in host_of:
                    self.pool.acquire(host_of[block])
                else:
                    host_block = host_of[block] = self.pool.allocate()
                    pages = self._kv.pool.pages_of(block, block in windowed)
                    saves.append(BlockMove(block, host_block, pages=pages))
                host_blocks.append(host_of[block])
            self._saved[seq.seq_id] = SavedSequence(host_blocks, seq.num_computed)
            if self._kv.restorer is not None and self._kv.restorer.tiers.rounds:  # it shares no block from now on: another's may be rounded
                self._kv.withhold(seq)

    def load(self, seq: Sequence, loads: list[BlockMove], num_copies: int) -> None:
        """Give ``seq``, which has adopted what the prefix cache offers, the rest of its saved blocks. The caller has seen to the room.

        ``num_copies``: block copies of the plan so far.
        """
        saved = self._saved.pop(seq.seq_id)
        self._read += saved.host_blocks
        if saved.num_computed <= seq.num_computed:  # others have computed as much since
            return
        num_adopted, seq.num_computed = len(seq.block_table), saved.num_computed
        num_full, num_passed, pool = saved.num_computed // self._kv.block_size, self._kv.num_passed(seq), self._kv.pool
        for i in range(num_adopted, len(saved.host_blocks)):
            host_block, windowed = saved.host_blocks[i], i >= num_passed
            shared = self._loaded.get(host_block) if i < num_full else None  # the part-filled one is about to be written
            block = self._kv.append_block(seq, shared, windowed)
            if shared is None:
                self._loaded[host_block] = block
                loads.append(BlockMove(block, host_block, num_copies, pool.pages_of(block)))
            elif windowed and not pool.is_whole(block):
                loads.append(BlockMove(block, host_block, num_copies, self._kv.add_window(block)))
        self._loading.append(seq)
        self._kv.loading.add(seq.seq_id)

    def end_loads(self, succeeded: bool) -> None:
        """The plan with the loads is done: offer the full blocks for reuse if it ``succeeded``, and free the host blocks."""
        for seq in self._loading:
            self._kv.loading.discard(seq.seq_id)
            if succeeded and seq.status is SequenceStatus.RUNNING:
                self._kv.publish(seq)
        for host_block in self._read:
            self.pool.release(host_block)
        self._loading, self._read = [], []
        self._loaded.clear()

    def drop(self, seq: Sequence) -> None:
        """``seq`` ends: its saved blocks, if any, are free."""
        saved = self._saved.pop(seq.seq_id, None)
        if saved is not None:
            for host_block in saved.host_blocks:
                self.pool.release(host_block)

    def check_invariants(self, waiting: Iterable[Sequence]) -> None:
        """AssertionError unless host blocks are named by the records and nothing else, and only waiting sequences are saved."""
        self.pool.check_invariants()
        counts = [0] * self.pool.num_blocks
        for host_block in self._read:
            counts[host_block] += 1
        for saved in self._saved.values():
            assert len(saved.host_blocks) == self._kv.blocks_for(saved.num_computed) > 0, "a saved sequence lacks blocks"
            for host_block in saved.host_blocks:
                counts[host_block] += 1
        assert counts == self.pool.ref_counts, f"records name host blocks {counts}, the pool counts {self.pool.ref_counts}"
        assert self._saved.keys() <= {seq.seq_id for seq in waiting}, "a sequence is saved that does not wait"
