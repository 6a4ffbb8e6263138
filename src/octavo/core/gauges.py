"""What may be read of a scheduler between its moves: counts of sequences and blocks, the orders of its queues, the books of its pool.

Changes nothing. Metrics, tiers, drafting and whoever else looks on from outside read these and not the state behind them.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.core.cost import StepShape
from octavo.core.kv_manager import KVManager
from octavo.core.kv_tiers import BlockRef, KVTiers
from octavo.core.limits import LengthLimits
from octavo.core.occupancy import KVOccupancy
from octavo.core.planner import wants_prompt_logprobs
from octavo.core.request import Sequence, SequenceStatus
from octavo.core.state import Draft, SchedulerState, SchedulerStats
from octavo.core.step import BlockMove
from octavo.core.waiting import Block, Wait, admission_block, why_waiting


class SchedulerGauges:
    _state: SchedulerState
    _in_flight: Draft | None

    @property
    def has_work(self) -> bool:
        """Whether a plan or a result is due."""
        return bool(self._state.running or self._state.waiting or self._in_flight)

    @property
    def limits(self) -> LengthLimits:
        return self._state.limits

    @property
    def stats(self) -> SchedulerStats:
        return self._state.stats

    @property
    def kv(self) -> KVManager:
        """The books of the KV pool, for who borrows pages of it."""
        return self._state.kv

    @property
    def num_running(self) -> int:
        """Choices that hold a place: a sequence that will split into n choices counts n times."""
        return self._state.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue, preempted ones included."""
        return len(self._state.waiting)

    @property
    def num_offered(self) -> int:
        """Sequences that wait to be taken over by another engine: see ``transfers``."""
        return self._state.num_held

    @property
    def num_reserved(self) -> int:
        """Places of sequences that come from another engine."""
        return self._state.num_reserved

    @property
    def num_blocks(self) -> int:
        return self._state.kv.pool.num_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that a running sequence references."""
        return self._state.kv.pool.num_used

    @property
    def num_table_blocks(self) -> int:
        """Blocks in the tables of running sequences, a shared one once for each table: what these would take without sharing."""
        return self._state.kv.num_table_blocks(self._state.running)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody references but the prefix cache offers; evicted when room is needed."""
        return self._state.kv.pool.num_cached

    @property
    def num_free_blocks(self) -> int:
        return self._state.kv.pool.num_free

    def kv_occupancy(self) -> KVOccupancy:
        """What the slots of the KV pool are used for once the step in flight is done. O(running sequences)."""
        limits, dropped = self._state.limits, [seq for seq in self.in_flight_sequences if seq.status is SequenceStatus.FINISHED]
        return self._state.kv.occupancy((seq, limits.final_tokens(seq.request)) for seq in (*self._state.running, *dropped))

    @property
    def tiers(self) -> KVTiers | None:
        restorer = self._state.kv.restorer
        return None if restorer is None else restorer.tiers

    def evictable_blocks(self) -> list[tuple[BlockRef, int]]:
        """The blocks that ``num_cached_blocks`` counts, the next to be evicted first."""
        return self._state.kv.evictable_blocks()

    def block_save(self, block: int, host_block: int) -> BlockMove:
        """A move of one of these blocks to host memory."""
        return BlockMove(block, host_block, pages=self._state.kv.pool.pages_of(block))

    def cached_blocks(self) -> list[int]:
        """All blocks that ``num_cached_blocks`` counts, as ``evictable_blocks`` but part-filled ones too."""
        return self._state.kv.pool.eviction_order()

    def offered_block(self, block: int) -> BlockRef | None:
        """What ``block`` holds, if it is full and offered by the prefix cache: then nobody writes to it before the next plan."""
        return self._state.kv.offered_block(block)

    @property
    def num_swapped(self) -> int:
        """Waiting sequences whose blocks are in host memory."""
        return self._state.swaps.num_saved

    @property
    def num_host_blocks(self) -> int:
        return self._state.swaps.pool.num_blocks

    @property
    def num_used_host_blocks(self) -> int:
        """Blocks in host memory that preempted sequences hold, or that the step in flight reads."""
        return self._state.swaps.pool.num_used

    @property
    def in_flight_sequences(self) -> list[Sequence]:
        """Sequences of the plan in flight, in the order of its slices (none between steps). FINISHED ones were aborted meanwhile."""
        return [] if self._in_flight is None else self._in_flight.sequences

    @property
    def max_num_batched_tokens(self) -> int:
        return self._state.config.max_num_batched_tokens

    @property
    def num_admissible_tokens(self) -> int:
        """Known tokens of the head of the queue if there are places and blocks for it, else 0: prompt rows that the next step may hold."""
        state = self._state
        if not state.waiting:
            return 0
        seq = state.waiting[0]
        has_place = seq.num_choices <= state.config.max_num_seqs - state.num_running
        return len(seq.token_ids) if has_place and state.kv.num_missing(seq) <= state.kv.pool.num_available else 0

    def admission_block(self, num_planned: int, has_preempted: bool) -> Block | None:
        """What keeps the head of the queue out of a plan just made; see ``waiting``."""
        return admission_block(self._state, num_planned, has_preempted)

    def why_waiting(self, seq: Sequence) -> Wait | None:
        """What a running sequence that the plan in flight passes over waits for; see ``waiting``."""
        return why_waiting(self._state, self._in_flight, seq)

    def pending_shape(self) -> StepShape:
        """What is to be computed of all known tokens, as if it were one step. What the prefix cache has of a prompt, or is about to have
        since another sequence computes it, is not."""
        shape = StepShape()
        for queue in (self._state.running, self._state.waiting):
            for seq in queue:
                start = self._num_ahead(seq)
                shape.add(start, len(seq.token_ids) - start, 1)
        return shape

    def _num_ahead(self, seq: Sequence) -> int:
        """Leading tokens that need not be computed."""
        start, state = seq.num_computed, self._state
        if len(seq.token_ids) - start <= 1:
            return start
        start = max(start, state.swaps.num_computed(seq))
        return start if wants_prompt_logprobs(seq) else max(start, state.kv.num_found(seq))

    @property
    def running_sequences(self) -> list[Sequence]:
        """In the order of planning; not to be changed."""
        return self._state.running

    @property
    def waiting_sequences(self) -> Iterable[Sequence]:
        """In the order of admission; not to be changed."""
        return self._state.waiting

    @property
    def decoding_sequences(self) -> list[Sequence]:
        """Running sequences that lack the KV of their last token alone, in the order of planning: those that drafts may be offered for."""
        running = (seq for seq in self._state.running if seq.num_choices == 1 and seq.request.params.beam is None)
        return [seq for seq in running if len(seq.token_ids) - seq.num_computed == 1]
