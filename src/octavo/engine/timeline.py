"""The timeline: where the time of every request goes, from time stamps that the engine loop takes.

    received ─▶ arrival ─▶ queued ─▶ in steps ⇄ out (preempted, waiting for blocks) ─▶ ended ─▶ sent

A record is in one of these states (``RecordState``), and every moment is charged to one ``Cause``. Time in steps is the same for all that
take part in them, so it is summed once per step (``_steps_s``), and a record takes over the difference when it leaves; only what differs,
its own share of a step, is added to it one by one. The queue is summed by what blocks its head in the same way. So a step costs a few
additions and, for each sequence, one more. What is the request's own part of a step is ``step_split``'s rule.

Owns the records, those of the last ``capacity`` ended requests among them, and nothing that grows with tokens. Written by the thread that
runs steps (``delivered`` by the server's); a lock makes reading from others exact. Reads the clock that it is given and changes nothing
that the engine does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from octavo.core.cost import StepShape
from octavo.core.recorded_window import block_keys
from octavo.core.request import FinishReason, Request, Sequence
from octavo.core.step import SequenceSlice, StepPlan, StepResult
from octavo.engine.causes import BOTTLENECK_OF, NUM_CAUSES, Bottleneck, Cause
from octavo.engine.ended_records import CAPACITY, EndedRecords
from octavo.engine.foresight import Foresight
from octavo.engine.queue_sums import QUEUE_CAUSES, QueueSums, why_queued
from octavo.engine.request_record import RecordState, RequestRecord
from octavo.engine.step_charges import Gaps, StepCharges, charge_arrival, charge_call, charge_decoding, lost_seconds
from octavo.engine.step_samples import StepSamples
from octavo.engine.step_split import StepPrice, split_step, weights_of
from octavo.engine.step_window import LastSteps, StepParts, StepWindow, in_order

if TYPE_CHECKING:
    from octavo.core.clock import Clock
    from octavo.core.scheduler import Scheduler
    from octavo.engine.outputs import OutputEvent

_NO_STEP = -2  # no record has taken part in it, not even one that has in none
_IN_STEP, _ENDED = RecordState.IN_STEP, RecordState.ENDED
_DECODE, _OTHERS_DECODE, _OTHERS_PREFILL = int(Cause.DECODE), int(Cause.OTHERS_DECODE), int(Cause.OTHERS_PREFILL)
_SCHEDULING, _BETWEEN_STEPS = int(Cause.SCHEDULING), int(Cause.BETWEEN_STEPS)
_SWAPPED, _RESTORED = int(Cause.SWAPPED), int(Cause.RESTORED)
_MARKS = (Cause.SCHEDULING, Cause.DETOKENISE, Cause.SAMPLING, Cause.MASKS, Cause.DRAFTS, Cause.SWAPPED, Cause.RESTORED)
_MARKED = tuple(map(int, _MARKS))  # what a step's marks may be of


class Timeline:
    """``price``: what steps are split by; somebody else has it learn. ``is_paced``: under ``max_itl_ms``."""

    def __init__(
        self, scheduler: Scheduler, clock: Clock, price: StepPrice, is_paced: bool = False, capacity: int = CAPACITY
    ) -> None:
        self.window = StepWindow()
        self.ended_records = EndedRecords(capacity)
        self.samples = StepSamples()
        self.foresight = Foresight()
        self.last_shape: StepShape | None = None  # of the step that ended last, if it was more than single tokens
        self.lock = threading.RLock()
        self._scheduler = scheduler
        self._clock = clock
        self._price = price
        self._is_paced = is_paced
        self._live: dict[str, RequestRecord] = {}
        self._new: list[RequestRecord] = []
        self._in_step: dict[str, RequestRecord] = {}
        self._out: dict[str, RequestRecord] = {}
        self._untold: dict[str, RequestRecord] = {}  # no token yet
        self._num_queued_tokens = 0
        self._queue = QueueSums()
        self._steps_s = [0.0] * NUM_CAUSES  # sums of the steps' time, as for a request without an own part
        self._summed_s = 0.0  # up to here
        self._marks = [0.0] * NUM_CAUSES  # of the step being made
        self._mark_s = self._planned_s = self._executed_s = 0.0
        self._begun_s = self._since_s = 0.0
        self._last_end_s = -1.0  # of a step
        self._num_preemptions = 0
        self._slices: list[RequestRecord | None] = []  # of the plan in flight, in its order
        self._prompts: list[tuple[int, int, int]] = []  # of these, slices of prompts: (place, recomputed rows, missed rows)
        self._num_in_plan = 0  # requests
        self._has_drafts = False

    # --- requests -----------------------------------------------------------------------------------------------------------------------

    def added(self, request: Request, is_begun: bool = False) -> None:
        """A request was queued; ``is_begun``: it runs from now on, after tokens that another engine made."""
        record = RequestRecord.of(request, self._clock.now() if is_begun else None)
        with self.lock:
            running = self._scheduler.running_sequences
            record.num_ahead = max(0, self._scheduler.num_waiting - 1)
            record.num_tokens_ahead = self._num_queued_tokens + sum(len(s.token_ids) - s.num_computed for s in running)
            self._num_queued_tokens += record.num_prompt_tokens
            self._live[record.request_id] = self._untold[record.request_id] = record
            self._new.append(record)

    def ended(self, events: Iterable[OutputEvent]) -> None:
        """These events end requests, or choices of them, outside a step: aborts and failures."""
        now_s = self._clock.now()
        with self.lock:
            for event in events:
                record = self._live.get(event.request_id)
                if record is not None and event.finish_reason is not None:
                    self._end_choice(record, event.finish_reason, now_s)

    def offered(self, request_id: str) -> None:
        """A running request was taken out of the steps, between two of them, for another engine to go on with."""
        with self.lock:
            if (record := self._in_step.pop(request_id, None)) is not None:
                record.seconds, record.decode_s = self._taken_over(record), 0.0
                record.state, record.out_cause, record.since_s = RecordState.OUT, Cause.HAND_OFF, self._summed_s

    def resumed(self, request_id: str) -> None:
        """Nobody went on with it: it takes part in steps again, as soon as there is room."""
        with self.lock:
            if (record := self._live.get(request_id)) is not None and record.state is RecordState.OUT:
                self._out[request_id] = record

    def released(self, request_id: str) -> None:
        """Another engine goes on with it: here it has ended, for no reason of its own."""
        with self.lock:
            if (record := self._live.get(request_id)) is not None:
                record.num_open = 1
                self._end_choice(record, None, self._clock.now())

    def blocked(self, request_ids: Iterable[str], begin_s: float, end_s: float) -> None:
        """A write for these requests was held up by their client from ``begin_s`` to ``end_s``."""
        with self.lock:
            for record in filter(None, map(self.find, request_ids)):
                record.hold_up(begin_s, end_s)
            self.window.add_gap(end_s, end_s - begin_s, in_order({Bottleneck.CLIENT: end_s - begin_s}))

    def delivered(self, request_ids: Iterable[str], now_s: float) -> None:
        """See ``EndedRecords.delivered``."""
        with self.lock:
            self.ended_records.delivered(request_ids, now_s)

    # --- reading ------------------------------------------------------------------------------------------------------------------------

    def find(self, request_id: str) -> RequestRecord | None:
        """The record of a running request or one of the last that ended."""
        return self._live.get(request_id) or self.ended_records.find(request_id)

    def last_steps(self) -> LastSteps:
        """As they are now."""
        with self.lock:
            return LastSteps(tuple(self.window.steps))

    def records(self) -> list[RequestRecord]:
        """Ended ones, oldest first, then those that go on, in the order of their arrival."""
        with self.lock:
            return [*self.ended_records.records(), *self._live.values()]

    def seconds_of(self, record: RequestRecord, now_s: float) -> list[float]:
        """Seconds by cause up to ``now_s``, [NUM_CAUSES]; of a running request the time since the last step's end is not in them."""
        with self.lock:
            seconds = self._taken_over(record)
            if record.state is RecordState.OUT:
                seconds[record.out_cause] += max(0.0, now_s - record.since_s)
            elif record.state is RecordState.QUEUED and self._queue.cause is not None:
                seconds[self._queue.cause] += max(0.0, now_s - self._queue.since_s)
            return seconds

    def _taken_over(self, record: RequestRecord) -> list[float]:
        """A copy of the record's seconds, with its part of the sums that go on."""
        seconds = record.seconds[:]
        if record.state is RecordState.QUEUED:
            for cause in QUEUE_CAUSES:
                seconds[cause] += self._queue.seconds[cause] - record.snapshot[cause]
        elif record.state is _IN_STEP:
            for i, (now, then) in enumerate(zip(self._steps_s, record.snapshot, strict=True)):
                seconds[i] += now - then
            seconds[_DECODE] += record.decode_s
            seconds[_OTHERS_DECODE] -= record.decode_s
        return seconds

    # --- a step: begin_step, mark ..., planned, executed, mark ..., end_step -------------------------------------------------------------

    def begin_step(self, now_s: float) -> None:
        """Planning begins."""
        with self.lock:
            self._since_s = self._summed_s if self._in_step else now_s
            if now_s > self._summed_s:
                self._steps_s[_BETWEEN_STEPS] += now_s - self._summed_s
            self._queue.advance(now_s)
            self._begun_s = self._mark_s = now_s
            for cause in _MARKED:
                self._marks[cause] = 0.0
            if self._new:
                for record in self._new:
                    if record.state is RecordState.NEW:
                        self._enter_queue(record, now_s)
                self._new.clear()
            self._summed_s = now_s

    def _enter_queue(self, record: RequestRecord, now_s: float) -> None:
        """A newcomer meets its first plan: until here it waited for the step in flight, and then for its turn to be taken in."""
        charge_arrival(record, self.window.last, now_s)
        record.state, record.snapshot = RecordState.QUEUED, self._queue.seconds[:]

    def mark(self, cause: Cause) -> None:
        """What was done since the last mark is charged to ``cause``."""
        now_s = self._clock.now()
        self._marks[cause] += now_s - self._mark_s
        self._mark_s = now_s

    def planned(self, plan: StepPlan | None) -> None:
        """The plan is made, or there is none; its execution begins."""
        with self.lock:
            self._slices, self._prompts, self._num_in_plan, self._has_drafts = [], [], 0, False
            sequences: Seq[Sequence] = self._scheduler.in_flight_sequences
            if plan is not None:
                self._see_slices(plan, sequences)
            running = self._scheduler.running_sequences
            if self._num_in_plan != len(self._in_step) or self._out or len(running) != len(sequences):
                self._sort_out(_NO_STEP if plan is None else plan.step_index, running)
            has_preempted = self._scheduler.stats.num_preemptions > self._num_preemptions
            self._queue.blocked_by(why_queued(self._scheduler, plan, self._prompts, has_preempted))
            self._num_preemptions = self._scheduler.stats.num_preemptions
        self._planned_s = self._mark_s

    def _see_slices(self, plan: StepPlan, sequences: Seq[Sequence]) -> None:
        live, step, out = self._live, plan.step_index, self._slices
        for piece, seq in zip(plan.slices, sequences, strict=True):
            record = live.get(seq.request.request_id)
            out.append(record)
            if record is None:
                continue
            if record.step_index != step:
                record.step_index = step
                self._num_in_plan += 1
                if record.state is not _IN_STEP:
                    self._join(record)
                    if record.sequence is None and seq.choice == 0:  # one that another engine began has no piece of a prompt here
                        record.sequence = seq
            if piece.num_drafts:
                self._has_drafts = True
            if piece.start < record.num_prompt_tokens or len(piece.token_ids) - piece.num_drafts != 1:
                self._see_prompt(record, piece, seq)

    def _see_prompt(self, record: RequestRecord, piece: SequenceSlice, seq: Sequence) -> None:
        """A slice of known tokens: which of its rows were computed before, and which would have been cached."""
        if seq.choice == 0:
            record.sequence = seq
        if seq.match_report is not None:
            record.match = seq.match_report
        record.num_cached = max(record.num_cached, seq.num_cached)
        end, computed = piece.start + len(piece.token_ids), record.num_prefilled
        if seq.num_preemptions and seq.num_output_tokens:
            computed = len(seq.token_ids) - 1
        was_put_out = seq.num_preemptions > seq.is_moved  # what another engine had computed and lost is a prompt to this one
        num_recomputed = max(0, min(end, computed) - piece.start) if was_put_out else 0
        begin = piece.start + num_recomputed
        num_missed = max(0, min(end, record.missed_end) - begin)
        record.num_recomputed += num_recomputed
        record.num_prefilled = max(record.num_prefilled, min(end, record.num_prompt_tokens))
        self._prompts.append((len(self._slices) - 1, num_recomputed, num_missed))

    def _join(self, record: RequestRecord) -> None:
        """Takes part in steps from the plan being made on."""
        self._leave_state(record)
        record.state, record.snapshot = _IN_STEP, self._steps_s[:]
        self._in_step[record.request_id] = record

    def _leave_state(self, record: RequestRecord) -> None:
        """Charge a record for its time up to the beginning of the step being planned, and take it out of its state."""
        if record.state is RecordState.OUT:
            self._charge_out(record, self._begun_s)
            self._out.pop(record.request_id, None)
            return
        record.seconds, record.decode_s = self._taken_over(record), 0.0
        if record.state is _IN_STEP:
            del self._in_step[record.request_id]
        elif record.admitted_s is None:
            record.admitted_s = self._begun_s
            self._num_queued_tokens -= record.num_prompt_tokens

    def _charge_out(self, record: RequestRecord, now_s: float) -> None:
        seconds = max(0.0, now_s - record.since_s)
        record.charge(record.out_cause, seconds)
        record.note_away(BOTTLENECK_OF[record.out_cause], seconds)
        record.note_out(seconds)
        record.since_s = now_s

    def _sort_out(self, step: int, running: Seq[Sequence]) -> None:
        """Find those that have a place and no slice, and those that have lost their place."""
        seated = {seq.request.request_id: seq for seq in running}
        for request_id in [*self._in_step, *self._out, *(seated.keys() - self._in_step.keys() - self._out.keys())]:
            record = self._live.get(request_id)
            if record is None or record.step_index == step:
                continue
            seq, was_out = seated.get(request_id), record.state is RecordState.OUT
            cause = Cause.PREEMPTED if seq is None else self._why_out(seq)
            if was_out:
                self._charge_out(record, self._begun_s)
            else:
                self._leave_state(record)
                record.state, record.since_s = RecordState.OUT, self._begun_s
                self._out[request_id] = record
            if cause is Cause.PREEMPTED and not (was_out and record.out_cause is cause):
                record.num_preemptions += 1
            record.out_cause = cause

    def _why_out(self, seq: Sequence) -> Cause:
        wait = self._scheduler.why_waiting(seq)
        if wait is not None:
            return Cause.RESTORED if wait == "tier" else Cause.PREFIX_WAIT
        return Cause.PACED if self._is_paced else Cause.OTHERS_PREFILL

    def executed(self) -> None:
        """The backend has returned."""
        self._executed_s = self._mark_s = self._clock.now()

    def end_step(self, plan: StepPlan, result: StepResult, events: Iterable[OutputEvent], now_s: float) -> None:
        """The events of the step go out at ``now_s``."""
        with self.lock:
            marks, sums = self._marks, self._steps_s
            if now_s > self._mark_s:
                marks[_SCHEDULING] += now_s - self._mark_s
            device_s = charge_call(marks, self._executed_s - self._planned_s, plan, result, self._scheduler.tiers)
            for cause in _MARKED:
                sums[cause] += marks[cause]
            self._summed_s = now_s
            if self._prompts or self._has_drafts or self._num_in_plan != len(plan.slices):
                self._end_mixed(plan, result, device_s, now_s)
            else:
                self._end_decoding(plan, device_s, now_s)
            self._last_end_s = now_s
            self._take_events(events, now_s)

    def _end_decoding(self, plan: StepPlan, device_s: float, now_s: float) -> None:
        num, since_s = len(plan.slices), self._since_s
        found = charge_decoding(plan, self._slices, weights_of(self._price), device_s, self._last_end_s, now_s)
        kv_s = self._marks[_SWAPPED] + self._marks[_RESTORED]
        step = StepParts(plan.step_index, since_s, self._begun_s, now_s, 0.0, device_s, kv_s, 0, num, num, found.fixed_s)
        self._steps_s[_OTHERS_DECODE] += device_s
        self._note_gaps(found.num_whole_gaps, found.other_gaps, step)
        self.last_shape = None
        self.samples.decoding(plan, found.num_positions, now_s - since_s - self._marks[_SWAPPED])

    def _end_mixed(self, plan: StepPlan, result: StepResult, device_s: float, now_s: float) -> None:
        sums = self._steps_s
        split = split_step(plan, weights_of(self._price), [place for place, _, _ in self._prompts], device_s)
        again_s, missed_s = lost_seconds(plan, split, self._prompts)
        kv_s = self._marks[_SWAPPED] + self._marks[_RESTORED]
        step = StepParts(
            plan.step_index, self._since_s, self._begun_s, now_s, split.prefill_s, split.decode_s, kv_s, split.num_prompt_tokens,
            plan.num_tokens, len(plan.slices), split.fixed_s, again_s, missed_s,
        )  # fmt: skip
        sums[Cause.RECOMPUTED] += again_s
        sums[Cause.CACHE_MISS] += missed_s
        sums[_OTHERS_PREFILL] += split.prefill_s - again_s - missed_s
        sums[_OTHERS_DECODE] += split.decode_s
        charges = StepCharges(plan, result, split, step, self._last_end_s)
        charges.mixed(self._slices, self._prompts)
        self._note_gaps(charges.num_whole_gaps, charges.other_gaps, step)
        self.last_shape = StepShape.of(plan)
        self.samples.mixed(self.last_shape, now_s - self._since_s - self._marks[_SWAPPED])

    def _note_gaps(self, num_whole: int, others: Gaps, step: StepParts) -> None:
        self.window.add_step(step, num_whole, [(since_s, record.take_away()) for record, since_s in others])

    def _take_events(self, events: Iterable[OutputEvent], now_s: float) -> None:
        for event in events:
            if self._untold and event.token_ids and event.request_id in self._untold:
                record = self._untold.pop(event.request_id)
                record.first_token_s, record.ttft_seconds, record.away = now_s, self._taken_over(record), None
            if event.finish_reason is not None and event.request_id in self._live:
                self._end_choice(self._live[event.request_id], event.finish_reason, now_s)

    def _end_choice(self, record: RequestRecord, reason: FinishReason | None, now_s: float) -> None:
        record.num_open -= 1
        if record.num_open:
            return
        failed = Cause.FAILED_STEP if reason is FinishReason.ERROR else Cause.BETWEEN_STEPS
        if record.state is RecordState.OUT:
            self._charge_out(record, now_s)
        elif record.state is RecordState.NEW:
            record.charge(failed, max(0.0, now_s - record.arrival_s))
        else:
            record.seconds = self._taken_over(record)
            waited = record.state is RecordState.QUEUED and self._queue.cause is not None
            since_s = self._queue.since_s if waited else self._summed_s
            record.charge(self._queue.cause if waited and self._queue.cause is not None else failed, max(0.0, now_s - since_s))
        if record.admitted_s is None:
            self._num_queued_tokens -= record.num_prompt_tokens
        for book in (self._live, self._untold, self._in_step, self._out):
            book.pop(record.request_id, None)
        record.state, record.ended_s, record.finish_reason, record.snapshot = _ENDED, now_s, reason, []
        if record.sequence is not None:
            token_ids, record.sequence = record.sequence.token_ids, None
            record.keys = block_keys(token_ids, self._scheduler.limits.block_size)
            self.foresight.see(token_ids, record.num_prompt_tokens)
        self.ended_records.add(record)
