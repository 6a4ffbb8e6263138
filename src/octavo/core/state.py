"""What planner and scheduler share: requests, queues, and the books they are kept in. Records only; no decisions.

The life of a sequence:

    add ─▶ waiting ──admit──▶ running ──finish / abort──▶ gone
              ▲                  │
              └────preempt───────┘   (all tokens kept; KV given back, or saved in host memory)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import MappingProxyType

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.beam_group import BeamGroup
from octavo.core.cost import GapCost, PreemptionCost
from octavo.core.kv_pages import PageNeeds
from octavo.core.limits import StopRule
from octavo.core.policies.order import Rank, queue_order
from octavo.core.request import Request, Sequence, SequenceStatus
from octavo.core.reservation import kv_of
from octavo.core.slots import SlotTable
from octavo.core.step import StepPlan, TokenLogprobs
from octavo.core.swapping import SwapSpace

Guesses = Mapping[int, Seq[int]]
"""seq_id -> drafts: tokens that may follow the known ones of a decoding sequence."""

Arrival = tuple[int, float, int]
"""A request's place among those of equal rank: its number, or that of one that it comes before; in the latter case when it came; its
number."""

NO_GUESSES: Guesses = MappingProxyType({})


@dataclass(slots=True)
class SchedulerStats:
    """Counters: they only grow. Gauges are read from the scheduler itself, so that no number is kept twice."""

    num_steps: int = 0  # results applied
    num_computed_tokens: int = 0  # rows that backends computed, recomputation included
    num_output_tokens: int = 0  # drawn and kept
    num_requests: int = 0  # accepted
    num_started: int = 0  # requests that left the queue for the first time
    queue_s: float = 0.0  # time from arrival to that moment, summed over started requests
    num_finished: int = 0  # choices that ended by stop or length
    num_aborted: int = 0  # requests that ended because their client left
    num_failed: int = 0  # requests that ended by an engine error
    num_preemptions: int = 0
    num_swap_preemptions: int = 0  # of these, those whose blocks went to host memory
    num_blocks_saved: int = 0  # to host memory
    num_blocks_loaded: int = 0  # from it
    move_s: float = 0.0  # time of both
    num_draft_tokens: int = 0  # verified
    num_accepted_tokens: int = 0  # of these, equal to what was drawn
    prefix_query_tokens: int = 0  # prompt tokens of started requests that were looked up in the prefix cache
    prefix_hit_tokens: int = 0  # of these, found there before the first output token; what is found after a preemption does not count
    prefix_tail_tokens: int = 0  # of these, found in a block that matched in part and was copied
    num_tail_copies: int = 0  # copies of such blocks, after preemptions too


@dataclass(slots=True)
class RequestState:
    """What the scheduler keeps per request. ``sequences``: its unfinished ones."""

    request: Request
    arrival: Arrival
    stop_rule: StopRule
    sequences: list[Sequence] = field(default_factory=list)
    started: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # collected chunk by chunk until the first event
    rank: Rank = ()  # by the queue order; lower comes first
    beams: BeamGroup | None = None  # with beam search

    def choices_of(self, seq: Sequence) -> range:
        """The choices whose last event ``seq`` owes. Beams are no choices: the request's first sequence stands for all of these."""
        if self.beams is None:
            return range(seq.choice, seq.choice + seq.num_choices)
        return range(self.request.params.n if seq is self.sequences[0] else 0)

    def num_known(self, seq: Sequence) -> int:
        """Known tokens of ``seq``; of a trunk of beams, those of each beam behind it."""
        if self.beams is None or not self.beams.collapsed:
            return len(seq.token_ids)
        return seq.num_prompt_tokens + self.beams.num_output_tokens


@dataclass(slots=True)
class Draft:
    """A plan being made, and then in flight: the sequences of its slices, the budget left, and who waits for others' blocks."""

    plan: StepPlan
    budget: int
    guesses: Guesses = field(default_factory=lambda: NO_GUESSES)
    sequences: list[Sequence] = field(default_factory=list)  # in the order of plan.slices
    num_pending: dict[int, int] = field(default_factory=dict)  # seq_id -> blocks it waits for


class SchedulerState:
    """Queues and books. A sequence is in exactly one of ``waiting`` and ``running``, both in order, until it finishes.

    The order is that of the requests' ranks, then arrival, then choice: so choices of a request are neighbours.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        num_blocks: int,
        max_model_len: int,
        fingerprint: str,
        needs: PageNeeds | None = None,
    ) -> None:
        self.config = config
        self.order = queue_order(config.scheduling_policy)
        self.preemption_cost: PreemptionCost | None = None
        self.gap_cost: GapCost | None = None  # there when config.max_itl_ms is
        self.limits, self.kv = kv_of(cache, num_blocks, max_model_len, fingerprint, needs)
        self.swaps = SwapSpace(0, self.kv)
        self.slots = SlotTable(config.max_num_seqs)
        self.stats = SchedulerStats()
        self.requests: dict[str, RequestState] = {}
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_held = 0  # sequences that are offered to another engine: see transfers
        self.reserved: dict[str, RequestState] = {}  # requests that come from another engine, and have blocks and a place here
        self._num_sequences = 0

    def next_seq_id(self) -> int:
        self._num_sequences += 1
        return self._num_sequences - 1

    def fork(self, seq: Sequence) -> Sequence:
        """A new running sequence of equal tokens that shares all blocks of ``seq``; it has no slot and is in no queue yet."""
        child = Sequence(self.next_seq_id(), seq.request, choice=seq.choice, token_ids=seq.token_ids[:])
        child.num_prompt_tokens, child.num_computed, child.num_cached = seq.num_prompt_tokens, seq.num_computed, seq.num_cached
        child.num_preemptions, child.num_tokens_at_return = seq.num_preemptions, seq.num_tokens_at_return
        child.status = SequenceStatus.RUNNING
        self.kv.fork(seq, child)
        return child

    @property
    def num_reserved(self) -> int:
        """Places of sequences that come from another engine."""
        return len(self.reserved)

    @property
    def num_running(self) -> int:
        """Places taken: a sequence that will split into n choices takes n."""
        return sum(seq.num_choices for seq in self.running) + self.num_reserved

    def place_of(self, seq: Sequence) -> tuple[Rank, Arrival, int]:
        """What both queues are sorted by."""
        owner = self.requests[seq.request.request_id]
        return owner.rank, owner.arrival, seq.choice

    def arrival_of(self, request: Request) -> Arrival:
        """The place of a request that comes now among those of equal rank: behind all, but for one that another engine has lost: that is
        before all that came after it had first come."""
        number = self.stats.num_requests
        if request.came_s is not None:
            later = [owner.arrival for owner in self.requests.values() if owner.request.queued_s > request.came_s]
            if later:
                return min(later)[0], request.came_s, number
        return number, math.inf, number

    def rank_anew(self) -> None:
        """Sort the queues where ranks have changed."""
        if self.order.dynamic:
            for owner in self.requests.values():
                owner.rank = self.order.rank(owner.request, owner.sequences, owner.stop_rule.max_tokens)
            self.running.sort(key=self.place_of)
            self.waiting = deque(sorted(self.waiting, key=self.place_of))

    def enqueue(self, seq: Sequence) -> None:
        """Put ``seq`` at its place among the waiting ones."""
        seq.status, place = SequenceStatus.WAITING, self.place_of(seq)
        if not self.waiting or self.place_of(self.waiting[-1]) < place:
            self.waiting.append(seq)
        else:
            self.waiting.insert(next(i for i, other in enumerate(self.waiting) if place < self.place_of(other)), seq)

    def start(self, seq: Sequence) -> None:
        """Put ``seq``, which waited, at its place among the running ones; that is mostly at the end."""
        self.waiting.remove(seq)
        self.insert_running(seq)

    def insert_running(self, seq: Sequence) -> None:
        seq.status, place, i = SequenceStatus.RUNNING, self.place_of(seq), len(self.running)
        while i > 0 and place < self.place_of(self.running[i - 1]):
            i -= 1
        self.running.insert(i, seq)

    def forget(self, owner: RequestState) -> None:
        """A request has ended."""
        del self.requests[owner.request.request_id]
        self.order.ended(owner.request)

    def num_tokens_left(self, seq: Sequence) -> int:
        """Output tokens that an unfinished sequence may still make."""
        return self.requests[seq.request.request_id].stop_rule.max_tokens - seq.num_output_tokens

    def release(self, seq: Sequence) -> None:
        """Give back everything that a finished sequence holds."""
        self.swaps.drop(seq)
        self.slots.give_back(seq)
        self.kv.release(seq, forget=True)

    def count_moves(self, plan: StepPlan, move_seconds: float) -> None:
        """The blocks that ``plan`` moved took so long: for swapping and, by their number, for the tiers."""
        tiers = None if self.kv.restorer is None else self.kv.restorer.tiers
        if tiers is not None and plan.num_moves:
            tier_s = move_seconds * tiers.num_moves(plan) / plan.num_moves
            tiers.stats.move_s += tier_s
            move_seconds -= tier_s
        self.stats.move_s += move_seconds

    def end_restores(self, failed: bool = False) -> None:
        """The plan in flight has run, or failed: what it loaded from the tiers counts as found in the prefix cache."""
        if self.kv.restorer is None:
            return
        for restore in self.kv.restorer.end(failed):
            seq = restore.seq
            if seq.status is SequenceStatus.FINISHED:  # aborted while in flight
                self.release(seq)
            elif not failed and seq.num_preemptions == 0 and seq.num_output_tokens == 0:
                tier_stats = self.kv.restorer.tiers.stats
                tier_stats.host_hit_tokens += restore.num_host_tokens
                tier_stats.disk_hit_tokens += restore.num_disk_tokens
                seq.num_cached += restore.num_host_tokens + restore.num_disk_tokens
                # What was said before it was restored is out of date, and nothing more may be left to look up.
                seq.match_report = self.kv.explain(seq, self.kv.find_prefix(seq))
                self.stats.prefix_hit_tokens += restore.num_host_tokens + restore.num_disk_tokens

    def check_invariants(self, in_flight: list[Sequence], transferred: Seq[Sequence] = ()) -> None:
        """AssertionError unless queues, requests, slots and the KV books agree. ``in_flight``: sequences of the plan in flight;
        ``transferred``: those that hold blocks for ``transfers``."""
        dropped = [seq for seq in in_flight if seq.status is SequenceStatus.FINISHED]
        self.kv.check_invariants([*self.running, *dropped, *transferred])
        assert len(transferred) == self.num_held + self.num_reserved, "transfers are lost"
        live = {id(seq) for state in self.requests.values() for seq in state.sequences}
        assert live == {id(seq) for seq in (*self.running, *self.waiting)}, "queues and requests disagree about a sequence"
        assert len(live) == len(self.running) + len(self.waiting), "a sequence is queued twice"
        for queue in (self.running, self.waiting):
            order = [self.place_of(seq) for seq in queue]
            assert order == sorted(order), "a queue is out of order"
        for seq in self.running:
            assert seq.status is SequenceStatus.RUNNING and seq.finish_reason is None
            waits = self.requests[seq.request.request_id].beams is not None and seq.num_computed == len(seq.token_ids)
            assert waits or seq.num_computed < len(seq.token_ids), f"sequence {seq.seq_id} has nothing left to compute"
            assert (seq.num_scheduled > 0) == any(seq is other for other in in_flight)
        for seq in self.waiting:
            assert seq.status is SequenceStatus.WAITING and seq.slot < 0 and not seq.block_table and seq.num_computed == 0
        for owner in self.requests.values():
            if owner.beams is not None:
                owner.beams.check_invariants(owner.sequences)
        self.swaps.check_invariants(self.waiting)
        assert self.num_running <= self.config.max_num_seqs, "more choices run than max_num_seqs"
        slots = [slot for seq in (*self.running, *dropped) for slot in self.slots.slots_of(seq)]
        assert len(slots) == len(set(slots)) == self.slots.num_open, "slots are lost or shared"
