"""The engine loop: begin_step makes a plan, finish_step turns its result into events with text. The only loop, real or simulated.

Between the two the caller has the plan executed, by a backend or by a cost model. The loop owns the text of running requests and the
token masks of constrained ones; queues, blocks and endings are the scheduler's. It reads no clock, runs no thread and does no I/O.
When the gaps of streams are bounded, ``end_step`` tells the cost model what the step took.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.limits import StopRule
from octavo.core.request import FinishReason, Request, Sequence, SequenceStatus
from octavo.core.step import StepPlan, StepResult, TokenEvent
from octavo.engine.causes import Cause
from octavo.engine.outputs import CacheMatch, OutputEvent
from octavo.engine.text_output import TextOutput

if TYPE_CHECKING:
    from octavo.core.scheduler import Scheduler
    from octavo.costs.gap import GapModel
    from octavo.engine.step_hooks import StepHooks
    from octavo.engine.timeline import Timeline
    from octavo.models.tokenizer import Tokenizer
    from octavo.speculative.speculator import Speculator

logger = logging.getLogger("octavo.engine")

Key = tuple[str, int]  # (request id, choice)


@dataclass(slots=True)
class _RunningText:
    """What the loop keeps of a request: the text of each choice, and what ends one by its tokens."""

    texts: list[TextOutput]
    rule: StopRule
    include_stop: bool
    mask: array[int] | None  # packed bits, uint32
    num_open: int  # choices whose last event has not come
    speculates: bool = False


class EngineLoop:
    """Scheduler plus text. ``tokenizer`` None: events carry no text (simulation) and stop strings cannot be used.

    ``gap_model``: the one that the scheduler plans with, when it has one. ``speculator``: drafts for the requests that want some.
    ``timeline`` is told of everything, and takes the time in between.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        gap_model: GapModel | None = None,
        speculator: Speculator | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.timeline = timeline
        self.speculator = speculator
        self.step_hooks: StepHooks | None = None
        self._gap_model = gap_model
        self._num_speculating = 0  # while nobody does, nothing is spent on it
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._running: dict[str, _RunningText] = {}  # by request id
        self._num_masked = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request, output_token_ids: Seq[int] = ()) -> None:
        """Queue a request whose parameters are resolved (``max_tokens`` a number, limits checked).

        ``output_token_ids`` were made elsewhere, and their text has been sent: see ``Scheduler.add``. What comes is what comes after them.
        """
        running = self._open(request, output_token_ids)
        self.scheduler.add(request, output_token_ids)
        if self.timeline is not None:
            self.timeline.added(request)
        self._keep(request.request_id, running)

    def offer(self, request_id: str) -> list[int]:
        """Hold a request back for another engine: see ``Transfers.offer``. Its text is not made here any more."""
        output_token_ids = self.scheduler.transfers.offer(request_id)
        self._drop(request_id)
        if self.timeline is not None:
            self.timeline.offered(request_id)
        return output_token_ids

    def release(self, request_id: str) -> None:
        """Another engine goes on with a request that was offered: see ``Transfers.release``."""
        self.scheduler.transfers.release(request_id)
        if self.timeline is not None:
            self.timeline.released(request_id)

    def resume(self, request: Request, output_token_ids: list[int]) -> None:
        """A request that was offered runs on here: see ``Transfers.resume``."""
        running = self._open(request, output_token_ids)
        self.scheduler.transfers.resume(request.request_id)
        if self.timeline is not None:
            self.timeline.resumed(request.request_id)
        self._keep(request.request_id, running)

    def begin(self, request: Request, output_token_ids: list[int], exact: bool = True) -> None:
        """A request that another engine began runs on here, where blocks are reserved and filled: see ``Transfers.begin``.

        The text of ``output_token_ids`` has been sent; what comes is the text of the tokens after them.
        """
        running = self._open(request, output_token_ids)
        self.scheduler.transfers.begin(request.request_id, output_token_ids, exact)
        if self.timeline is not None:
            self.timeline.added(request, is_begun=True)
        self._keep(request.request_id, running)

    def _open(self, request: Request, output_token_ids: Seq[int] = ()) -> _RunningText:
        """What the loop keeps of a request; ``output_token_ids`` of its only choice are there already."""
        params = request.params
        assert params.max_tokens is not None, "parameters are resolved before a request is queued"
        mask = None
        if params.allowed_token_ids is not None:
            from octavo.sampling.structured import mask_from_ids

            mask = mask_from_ids(params.allowed_token_ids, self._vocab_size)
        decoder = None
        if self._tokenizer is not None:
            decoder = self._tokenizer.stream(request.prompt_token_ids, params.skip_special_tokens)
        first = TextOutput(decoder, params.stop, params.min_tokens, params.include_stop_str_in_output)
        texts = [first, *(first.fork() for _ in range(params.n - 1))]
        rule = StopRule.of(request, params.max_tokens)
        speculates = self.speculator is not None and params.beam is None and (request.speculative or self.speculator.default).enabled
        running = _RunningText(texts, rule, params.include_stop_str_in_output, mask, params.n, speculates)
        _read_tokens(running, first, output_token_ids)
        return running

    def _keep(self, request_id: str, running: _RunningText) -> None:
        self._running[request_id] = running
        self._num_masked += running.mask is not None
        self._num_speculating += running.speculates

    def _drop(self, request_id: str) -> None:
        running = self._running.pop(request_id)
        self._num_masked -= running.mask is not None
        self._num_speculating -= running.speculates

    def abort(self, request_id: str) -> list[OutputEvent]:
        """End a request; its blocks are free at the next plan. Unknown or finished ids do nothing."""
        return self._ended(self._with_text(self.scheduler.abort(request_id), {}, {}))

    def fail_all(self, message: str) -> list[OutputEvent]:
        """End every request with an error event: a step could not be executed, so what the backend holds is unknown."""
        events = self._ended(self._with_text(self.scheduler.fail_all(message), {}, {}))
        return events if self.step_hooks is None else events + self.step_hooks.failed(message)

    def _ended(self, events: list[OutputEvent]) -> list[OutputEvent]:
        if self.timeline is not None:
            self.timeline.ended(events)
        return events

    def begin_step(self, now_s: float) -> StepPlan | None:
        """The next step's plan, or None when there is nothing to do now."""
        timeline = self.timeline
        if timeline is not None:
            timeline.begin_step(now_s)
        drafts = self._drafts() if self._num_speculating else {}
        if timeline is not None and self._num_speculating:
            timeline.mark(Cause.DRAFTS)
        plan = self.scheduler.plan(now_s, drafts)
        if plan is not None and self.step_hooks is not None:
            self.step_hooks.planned(plan)
        if timeline is not None:
            timeline.mark(Cause.SCHEDULING)
        if plan is not None and self._num_masked:
            self._fill_masks(plan)
        if plan is not None and drafts:
            self._fill_drafts(plan)
            if timeline is not None:
                timeline.mark(Cause.DRAFTS)
        if timeline is not None:
            timeline.planned(plan)
        return plan

    def _fill_masks(self, plan: StepPlan) -> None:
        for piece, seq in zip(plan.slices, self.scheduler.in_flight_sequences, strict=True):
            if piece.num_samples:
                piece.mask = self._running[seq.request.request_id].mask
        if self.timeline is not None:
            self.timeline.mark(Cause.MASKS)

    def _drafts(self) -> dict[int, list[int]]:
        if self.speculator is None:
            return {}
        scheduler = self.scheduler
        try:
            return self.speculator.drafts(scheduler.running_sequences, scheduler.max_num_batched_tokens, scheduler.num_admissible_tokens)
        except Exception as error:  # a draft model's backend may fail as any other; the target needs it not
            self._stop_speculating(error)
            return {}

    def _fill_drafts(self, plan: StepPlan) -> None:
        try:
            if self.speculator is not None:
                self.speculator.fill(plan)
        except Exception as error:  # places that were not filled do not come true
            self._stop_speculating(error)

    def _stop_speculating(self, error: Exception) -> None:
        logger.error("drafting failed; requests go on without drafts", exc_info=error)
        self.speculator = None

    def finish_step(self, plan: StepPlan, result: StepResult) -> list[OutputEvent]:
        """Text first, so that nothing past a stop string is counted or published; then the scheduler takes the tokens."""
        timeline = self.timeline
        if timeline is not None:
            timeline.executed()
        stops: dict[Key, tuple[int, str]] = {}
        shown: dict[Key, str] = {}
        for seq, drawn in zip(self.scheduler.in_flight_sequences, result.slices, strict=False):
            if seq.request.params.beam is not None:  # its text is made when the search has ended
                continue
            if drawn.token_ids and seq.status is not SequenceStatus.FINISHED:  # finished: aborted since the plan was made
                self._read_slice(seq, drawn.token_ids, stops, shown)
        if timeline is not None:
            timeline.mark(Cause.DETOKENISE)
        num_speculating = self._num_speculating
        events = self._with_text(self.scheduler.apply(result, stops), stops, shown)
        if num_speculating and self.speculator is not None:
            if timeline is not None:
                timeline.mark(Cause.SCHEDULING)
            try:
                self.speculator.observe(plan, result)
            except Exception as error:
                self._stop_speculating(error)
            if timeline is not None:
                timeline.mark(Cause.DRAFTS)
        return events

    def num_repeats(self) -> int:
        """How many of the coming steps need nothing that only a step can do; 0 wherever text, masks, drafts or a timeline are made."""
        if self._tokenizer is not None or self.timeline is not None or self._num_masked or self._num_speculating:
            return 0
        return self.scheduler.num_repeats()

    def repeat(self, num_steps: int, token_ids: Seq[int]) -> list[tuple[int, int]]:
        """Take so many of these steps at once: see ``Scheduler.repeat``. No events are made."""
        used = self.scheduler.repeat(num_steps, token_ids)
        for seq in self.scheduler.running_sequences:
            self._running[seq.request.request_id].texts[seq.choice].num_tokens += num_steps
        return used

    def end_step(self, plan: StepPlan, result: StepResult, now_s: float, events: Seq[OutputEvent] = ()) -> None:
        """The events of the step, which ``finish_step`` gave, go out at ``now_s``, on the clock of ``begin_step``."""
        if self.timeline is not None:
            self.timeline.end_step(plan, result, events, now_s)
        if self._gap_model is not None:
            self._gap_model.end(plan, result, now_s)

    def _read_slice(self, seq: Sequence, token_ids: list[int], stops: dict[Key, tuple[int, str]], shown: dict[Key, str]) -> None:
        request_id = seq.request.request_id
        running = self._running[request_id]
        if seq.num_choices == 1:
            choices: list[tuple[int, Seq[int]]] = [(seq.choice, token_ids)]
        else:  # the prompt's end: a first token for each choice
            choices = [(seq.choice + i, (token,)) for i, token in enumerate(token_ids)]
        for choice, drawn in choices:
            key = (request_id, choice)
            shown[key], stop = _read_tokens(running, running.texts[choice], drawn)
            if stop is not None:
                stops[key] = stop

    def _with_text(self, events: list[TokenEvent], stops: dict[Key, tuple[int, str]], shown: dict[Key, str]) -> list[OutputEvent]:
        out = []
        for event in events:
            key = (event.request_id, event.choice)
            part = shown.pop(key, None)  # once: a choice may end by another's error after it got its tokens
            text = part or ""
            if event.token_ids and part is None:  # a whole hypothesis of a beam search
                running = self._running[event.request_id]
                text, _ = _read_tokens(running, running.texts[event.choice], event.token_ids)
            if event.finish_reason is not None:
                running = self._running[event.request_id]
                if key not in stops:
                    text += running.texts[event.choice].finish()
                running.num_open -= 1
                if running.num_open == 0:
                    self._drop(event.request_id)
            out.append(OutputEvent.of(event, text))
            if event.match_report is not None:
                out[-1].cache_match = CacheMatch.of(event.match_report, self._tokenizer)
        return out


def _read_tokens(running: _RunningText, text: TextOutput, token_ids: Seq[int]) -> tuple[str, tuple[int, str] | None]:
    """Text of a step's tokens up to where the sequence ends; (tokens to keep, stop string) when one was completed.

    A token that ends the sequence by itself has no text, unless the request includes stops in the output.
    """
    shown = ""
    for count, token_id in enumerate(token_ids, 1):
        ending = running.rule.test(token_id, text.num_tokens + 1)
        if ending is not None and ending[0] is FinishReason.STOP and not running.include_stop:
            text.skip()
            break
        part, stop = text.push(token_id)
        shown += part
        if stop is not None:
            return shown, (count, stop)
        if ending is not None:
            break
    return shown, None
