"""The scheduler: from requests to step plans, and from step results to tokens.

    add ─▶ queue        plan() ─▶ StepPlan ─▶ [a backend] ─▶ StepResult ─▶ apply() ─▶ TokenEvents

One step is in flight at a time. The scheduler owns the life of requests: it takes them in, has ``Planner`` make a plan, takes over results,
splits a request into its choices, and ends sequences. What may be read of it from outside is in ``gauges``. It never touches text,
clocks or devices.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import MappingProxyType

from octavo.config import SCHEDULING_POLICIES, CacheConfig, SchedulerConfig
from octavo.core import repeats
from octavo.core.beam import BeamSearch
from octavo.core.beam_group import BeamGroup
from octavo.core.cost import GapCost, PreemptionCost
from octavo.core.gauges import SchedulerGauges
from octavo.core.kv_pages import PageLayout
from octavo.core.kv_tiers import KVTiers
from octavo.core.limits import StopEnd, StopRule, check_outputs
from octavo.core.planner import Planner
from octavo.core.prefix_index import PrefixIndex
from octavo.core.request import FinishReason, ParameterError, Request, Sequence, SequenceStatus, num_places
from octavo.core.result_checks import StepProtocolError, TextStops, check_result
from octavo.core.state import NO_GUESSES, Draft, Guesses, RequestState, SchedulerState
from octavo.core.step import NO_TOKEN_ALLOWED, SequenceSlice, SliceResult, StepPlan, StepResult, TokenEvent, TokenLogprobs
from octavo.core.swapping import SwapSpace
from octavo.core.transfers import Transfers

_NO_TEXT_STOPS: TextStops = MappingProxyType({})


class Scheduler(SchedulerGauges):
    """``num_blocks``: the KV pool. ``max_model_len``: most tokens of a sequence. ``fingerprint``: what KV depends on besides tokens.
    ``gap_cost``: prices steps for ``config.max_itl_ms``, and is needed with it. ``num_host_blocks``: blocks in host memory for preempted
    sequences; ``preemption_cost`` lets ``config.preemption`` auto choose between these and recomputing, else it takes them while there are.
    ``tiers``: where evicted blocks of the prefix cache go. ``layout``: the pages of a block, where the backend keeps blocks in pages.

    A sequence may reach min(max_model_len, pool tokens + 1) tokens: the last one needs no KV. An explicit max_tokens above what is
    left is clamped to it; ``clamped_max_tokens`` tells, so that the response can say so.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        num_blocks: int,
        max_model_len: int,
        fingerprint: str = "",
        gap_cost: GapCost | None = None,
        num_host_blocks: int = 0,
        preemption_cost: PreemptionCost | None = None,
        tiers: KVTiers | None = None,
        layout: PageLayout | None = None,
    ) -> None:
        if config.scheduling_policy not in SCHEDULING_POLICIES:
            raise ValueError(f"scheduling_policy: {config.scheduling_policy!r} is not allowed; one of {', '.join(SCHEDULING_POLICIES)}")
        if (config.max_itl_ms is None) != (gap_cost is None):
            raise ValueError(f"gap_cost: {gap_cost!r} is not allowed with max_itl_ms {config.max_itl_ms}; both are needed, or neither")
        max_chunk = max(config.max_num_batched_tokens, 0 if config.enable_chunked_prefill else max_model_len)
        needs = None if layout is None else layout.needs(cache.block_size, max_chunk)
        self._state = SchedulerState(config, cache, num_blocks, max_model_len, fingerprint, needs)
        self._state.gap_cost = gap_cost
        self._state.swaps = SwapSpace(num_host_blocks, self._state.kv)
        self._state.preemption_cost = preemption_cost
        if tiers is not None:
            self._state.kv.attach_tiers(tiers)
        self._planner = Planner(self._state)
        self.transfers = Transfers(self._state)
        self._in_flight: Draft | None = None
        self._num_plans = 0

    @property
    def prefix_index(self) -> PrefixIndex | None:
        """Of the KV pool; None without a prefix cache."""
        return self._state.kv.index

    # --- requests -----------------------------------------------------------------------------------------------------------------------

    def add(self, request: Request, output_token_ids: Seq[int] = ()) -> None:
        """Queue a request. ParameterError when it can never run: empty or too long prompt, n above max_num_seqs, an id in use.

        ``output_token_ids``: tokens that it made elsewhere and goes on after, as a sequence does that was preempted. None of them ends it;
        it has one choice and no beams.
        """
        state, n = self._state, num_places(request.params)
        if request.request_id in state.requests:
            raise ParameterError("request_id", request.request_id, "a request with this id is not finished yet")
        state.limits.check_prompt(request)
        if n > state.config.max_num_seqs:
            limit = f"at most max_num_seqs ({state.config.max_num_seqs}), since all of them run together"
            raise ParameterError("n" if request.params.beam is None else "beam_width", n, limit)
        rule = StopRule.of(request, state.limits.max_output_tokens(request))
        if output_token_ids:
            check_outputs(request, len(output_token_ids), rule)
        tokens = [*request.prompt_token_ids, *output_token_ids]
        seq = Sequence(state.next_seq_id(), request, num_choices=n, token_ids=tokens, num_prompt_tokens=len(request.prompt_token_ids))
        if output_token_ids:
            seq.num_preemptions, seq.is_moved = 1, True  # its KV was lost with the engine that made it
        owner = state.requests[request.request_id] = RequestState(request, state.arrival_of(request), rule, [seq])
        if request.params.beam is not None:
            owner.beams = BeamGroup(BeamSearch.of(request, rule))
        state.order.added(request)
        owner.rank = state.order.rank(request, owner.sequences, rule.max_tokens)
        state.enqueue(seq)
        state.stats.num_requests += 1

    def clamped_max_tokens(self, request: Request) -> int | None:
        """The number that the request's explicit max_tokens is reduced to by context or pool; None when it stands as asked."""
        return self._state.limits.clamped_max_tokens(request)

    def abort(self, request_id: str) -> list[TokenEvent]:
        """End a request; an event with ABORT for each unfinished choice. Nothing for an id that is not known (any more).

        Its blocks are free at once, or, when the step in flight computes some of it, with that step's ``apply``. What was computed
        stays in the prefix cache.
        """
        owner = self._state.requests.get(request_id)
        if owner is None:
            return []
        self._state.forget(owner)
        self._state.stats.num_aborted += 1
        return self._drop(owner, FinishReason.ABORT)

    def fail_all(self, message: str) -> list[TokenEvent]:
        """End everything after an engine error; an event with ERROR and ``message`` for each unfinished choice.

        A step in flight, or half planned, is forgotten: nothing of it is counted or offered for reuse.
        """
        draft, self._in_flight = self._in_flight, None
        if draft is not None:
            self._state.slots.close_again(draft.plan.slot_closes)
            for seq in draft.sequences:
                if seq.status is SequenceStatus.FINISHED:
                    seq.num_scheduled = seq.num_drafts = 0
                    self._state.release(seq)
        self._state.swaps.end_loads(succeeded=False)
        self._state.end_restores(failed=True)
        self.transfers.drop_all()
        owners = list(self._state.requests.values())
        for owner in owners:
            self._state.forget(owner)
            for seq in owner.sequences:  # of the step in flight, or of a plan that was never finished
                seq.num_scheduled = seq.num_drafts = 0
        self._state.stats.num_failed += len(owners)
        events = [event for owner in owners for event in self._drop(owner, FinishReason.ERROR, message)]
        self._state.kv.plan_ended()
        return events

    def _fail(self, owner: RequestState, outcome: SliceResult) -> list[TokenEvent]:
        """End one request, all its choices, because a row of it allowed no answer."""
        self._state.forget(owner)
        self._state.stats.num_failed += 1
        return self._drop(owner, FinishReason.ERROR, outcome.error, outcome.error_code)

    def _drop(self, owner: RequestState, reason: FinishReason, error: str | None = None, code: str | None = None) -> list[TokenEvent]:
        events = []
        for seq in owner.sequences:
            for choice in owner.choices_of(seq):
                event = TokenEvent(owner.request.request_id, choice, [], finish_reason=reason, error=error, error_code=code)
                event.num_cached_tokens = seq.num_cached
                event.match_report, seq.match_report = seq.match_report, None
                events.append(event)
            if seq.status is SequenceStatus.WAITING:
                self._state.waiting.remove(seq)
            else:
                self._state.running.remove(seq)
            seq.status, seq.finish_reason = SequenceStatus.FINISHED, reason
            if seq.num_scheduled == 0:
                self._state.release(seq)
        return events

    # --- plan ---------------------------------------------------------------------------------------------------------------------------

    def plan(self, now: float = 0.0, drafts: Guesses = NO_GUESSES) -> StepPlan | None:
        """The next step, or None when there is nothing to do. ``now``: seconds on the clock of ``Request.arrival_s``.

        ``drafts`` of ``decoding_sequences`` are verified as far as budget, blocks and the sequence's limits allow; others are ignored.
        """
        if self._in_flight is not None:
            raise StepProtocolError(f"step {self._in_flight.plan.step_index} is still in flight; apply its result before planning another")
        draft = self._planner.plan(self._num_plans, now, drafts)
        if draft is None:
            return None
        self._num_plans += 1
        self._in_flight = draft
        return draft.plan

    def num_repeats(self) -> int:
        """How many of the coming steps only decode all running sequences: see ``repeats.num_repeats``."""
        return repeats.num_repeats(self._state) if self._in_flight is None else 0

    def repeat(self, num_steps: int, token_ids: Seq[int]) -> list[tuple[int, int]]:
        """Take so many of these steps at once, planned, run and applied: see ``repeats.repeat``."""
        self._num_plans += num_steps
        return repeats.repeat(self._state, num_steps, token_ids)

    # --- apply --------------------------------------------------------------------------------------------------------------------------

    def apply(self, result: StepResult, text_stops: TextStops = _NO_TEXT_STOPS) -> list[TokenEvent]:
        """Take over what the step in flight computed; one event per choice that got tokens or ended.

        A slice with an ``error`` ends its request, all choices, with ERROR events; nothing that slice computed is offered for reuse.
        ``text_stops``: the stop strings that the engine found in the text of this result; nothing past one is kept. Raises
        StepProtocolError, and changes nothing, when ``result`` or ``text_stops`` do not belong to the plan in flight.
        """
        draft = self._end_plan(result, text_stops)
        state, events = self._state, list[TokenEvent]()
        for piece, outcome, seq in zip(draft.plan.slices, result.slices, draft.sequences, strict=True):
            seq.num_computed += seq.num_scheduled
            state.stats.num_computed_tokens += seq.num_scheduled + seq.num_drafts
            seq.num_scheduled = seq.num_drafts = 0
            if outcome.error is None:
                state.kv.publish(seq)
            else:
                state.kv.withhold(seq)
            if seq.status is SequenceStatus.FINISHED:  # aborted while in flight
                state.release(seq)
                continue
            owner = state.requests[seq.request.request_id]
            if outcome.error is not None:
                events += self._fail(owner, outcome)
                continue
            if outcome.prompt_logprobs:
                owner.prompt_logprobs += outcome.prompt_logprobs
            if piece.num_samples and owner.beams is not None:
                events += self._take_beam_row(owner, owner.beams, seq, outcome)
            elif piece.num_samples:
                self._take_samples(owner, seq, piece, outcome, text_stops, events)
            elif seq.num_computed == len(seq.token_ids) and owner.beams is not None:
                owner.beams.expand(state, owner)
            elif seq.num_computed == len(seq.token_ids):  # max_tokens 0: computed is done
                events += [self._event(owner, choice, [], None, (FinishReason.LENGTH, None)) for choice in self._fork(owner, seq)]
        state.stats.num_steps += 1
        if any(event.finish_reason is not None for event in events):
            state.running[:] = [seq for seq in state.running if seq.status is SequenceStatus.RUNNING]
        return events

    def _end_plan(self, result: StepResult, text_stops: TextStops) -> Draft:
        """The plan was in flight, and what it moved is where it was to be. Raises StepProtocolError."""
        draft, state = self._in_flight, self._state
        if draft is None:
            raise StepProtocolError("there is no step in flight")
        check_result(draft, result, text_stops)
        self._in_flight = None
        state.kv.plan_ended()
        state.swaps.end_loads(succeeded=True)
        state.count_moves(draft.plan, result.move_seconds)
        state.end_restores()
        return draft

    def _take_samples(
        self,
        owner: RequestState,
        seq: Sequence,
        piece: SequenceSlice,
        outcome: SliceResult,
        text_stops: TextStops,
        events: list[TokenEvent],
    ) -> None:
        request_id = owner.request.request_id
        for i, choice in enumerate((seq,) if seq.num_choices == 1 else self._fork(owner, seq)):
            token_ids = outcome.token_ids[:] if piece.num_drafts else [outcome.token_ids[i]]
            logprobs = None if outcome.logprobs is None else outcome.logprobs[:] if piece.num_drafts else [outcome.logprobs[i]]
            text_stop = text_stops.get((request_id, choice.choice)) if text_stops else None
            end = owner.stop_rule.append_tokens(choice, token_ids, text_stop)
            if piece.num_drafts:
                self._settle_drafts(choice, piece, len(outcome.token_ids) - 1)
            self._state.stats.num_output_tokens += len(token_ids)
            self._state.order.drew(owner.request, len(token_ids))
            events.append(self._event(owner, choice, token_ids, logprobs and logprobs[: len(token_ids)], end))

    def _settle_drafts(self, seq: Sequence, piece: SequenceSlice, num_accepted: int) -> None:
        """The KV of accepted drafts that were kept counts as computed; blocks behind it are given back."""
        seq.num_computed = min(seq.num_computed + num_accepted, len(seq.token_ids))
        self._state.kv.truncate(seq)
        self._state.kv.publish(seq)
        self._state.stats.num_draft_tokens += piece.num_drafts
        self._state.stats.num_accepted_tokens += num_accepted

    def _event(
        self, owner: RequestState, seq: Sequence, token_ids: list[int], logprobs: list[TokenLogprobs] | None, end: StopEnd | None
    ) -> TokenEvent:
        event = TokenEvent(owner.request.request_id, seq.choice, token_ids, logprobs, None, None, None, seq.num_cached)
        event.match_report, seq.match_report = seq.match_report, None
        if owner.prompt_logprobs:
            event.prompt_logprobs, owner.prompt_logprobs = owner.prompt_logprobs, []
        if end is not None:
            event.finish_reason, event.stop_reason = end
            self._finish(owner, seq, end[0])
        return event

    def _fork(self, owner: RequestState, seq: Sequence) -> list[Sequence]:
        """Split a sequence whose prompt is computed into its choices, which share all its blocks and follow it in the running order."""
        choices = [seq]
        for i, slot in enumerate(self._state.slots.split(seq), 1):
            child = self._state.fork(seq)
            child.choice, child.slot = seq.choice + i, slot
            choices.append(child)
        seq.num_choices = 1
        place = self._state.running.index(seq)
        self._state.running[place : place + 1] = choices
        owner.sequences += choices[1:]
        return choices

    def _finish(self, owner: RequestState, seq: Sequence, reason: FinishReason) -> None:
        seq.status, seq.finish_reason = SequenceStatus.FINISHED, reason
        self._state.release(seq)
        self._state.stats.num_finished += 1
        owner.sequences.remove(seq)
        if not owner.sequences:
            self._state.forget(owner)

    def _take_beam_row(self, owner: RequestState, beams: BeamGroup, seq: Sequence, outcome: SliceResult) -> list[TokenEvent]:
        if not beams.take_row(self._state, owner, seq, outcome):
            return []
        return beams.finish(self._state, owner) or self._fail(owner, SliceResult(error=beams.shortage(owner), error_code=NO_TOKEN_ALLOWED))

    def check_invariants(self) -> None:
        """AssertionError unless queues, requests, slots and the KV books agree. For tests and idle debug runs: slow."""
        restorer = self._state.kv.restorer
        restored = [] if restorer is None else restorer.sequences
        self._state.check_invariants([*self.in_flight_sequences, *restored], self.transfers.sequences)
        self.transfers.check_invariants()
