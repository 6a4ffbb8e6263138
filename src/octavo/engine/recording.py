"""Recording: a scheduler that writes down all it is told, for `octavo simulate --replay` and for bug reports that can be run again.

Decides nothing: plans are those of the scheduler that it is. What is written is ``core.recording``'s business.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, TextIO

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core import recording
from octavo.core.clock import Clock
from octavo.core.cost import GapCost, PreemptionCost
from octavo.core.request import Request
from octavo.core.result_checks import TextStops
from octavo.core.scheduler import Scheduler
from octavo.core.state import NO_GUESSES, Guesses, SchedulerState
from octavo.core.step import StepPlan, StepResult, TokenEvent
from octavo.core.transfers import Reservation, Transfers
from octavo.costs.gap import GapModel
from octavo.costs.preemption import PreemptionModel


class RecordedScheduler(Scheduler):
    """``file`` gets the lines, a header first; it stays the caller's to close. ``about``: what is recorded. ``clock``: that of the plans,
    for what is told between them. ``options``: all else that ``Scheduler`` takes, by its names."""

    def __init__(
        self,
        file: TextIO,
        about: str,
        clock: Clock,
        config: SchedulerConfig,
        cache: CacheConfig,
        num_blocks: int,
        max_model_len: int,
        fingerprint: str,
        **options: Any,
    ) -> None:
        super().__init__(config, cache, num_blocks, max_model_len, fingerprint, **options)
        self._file, self._clock = file, clock
        self.transfers = RecordedTransfers(self._state, self._write_move)
        gap, preemption = self._state.gap_cost, self._state.preemption_cost
        head = recording.header(
            config, cache, num_blocks, max_model_len, fingerprint, options.get("num_host_blocks", 0),
            isinstance(preemption, PreemptionModel), options.get("layout"), about, _known_beforehand(gap, preemption),
        )  # fmt: skip
        file.write(recording.dump(head))

    def add(self, request: Request, output_token_ids: Seq[int] = ()) -> None:
        super().add(request, output_token_ids)  # what is refused leaves no trace
        more = [list(output_token_ids)] if output_token_ids else []
        self._write("add", recording.request_fields(request), *more)

    def abort(self, request_id: str) -> list[TokenEvent]:
        self._write("abort", request_id)
        return super().abort(request_id)

    def fail_all(self, message: str) -> list[TokenEvent]:
        self._write("fail", message)
        self._file.flush()
        return super().fail_all(message)

    def plan(self, now: float = 0.0, drafts: Guesses = NO_GUESSES) -> StepPlan | None:
        step = self._num_plans
        plan = super().plan(now, drafts)
        digest = None if plan is None else recording.plan_digest(plan, self._state.kv.block_size)
        guesses = [[seq_id, list(guess)] for seq_id, guess in drafts.items()]
        self._file.write(recording.dump(["plan", step, now, digest, guesses, self._costs()]))
        if plan is None:
            self._file.flush()
        return plan

    def apply(self, result: StepResult, text_stops: TextStops = recording.NO_TEXT_STOPS) -> list[TokenEvent]:
        line = ["result", self._num_plans, *recording.result_fields(result, text_stops)]
        events = super().apply(result, text_stops)
        self._file.write(recording.dump(line))
        if not self.has_work:
            self._file.flush()
        return events

    def _write(self, kind: str, *data: object) -> None:
        self._file.write(recording.dump([kind, self._num_plans, *data]))

    def _write_move(self, kind: str, *data: object) -> None:
        self._write(kind, self._clock.now(), *data)
        if not self.has_work:
            self._file.flush()

    def _costs(self) -> list[Any]:
        """What the plan was priced with: both cost models, as far as there are any."""
        gap, preemption = self._state.gap_cost, self._state.preemption_cost
        return [
            gap.state() if isinstance(gap, GapModel) else None,
            preemption.state() if isinstance(preemption, PreemptionModel) else None,
        ]


class RecordedTransfers(Transfers):
    """``write`` takes a line, kind first. What is refused leaves no trace; that there was no room does: it may have cost cached blocks."""

    def __init__(self, state: SchedulerState, write: Callable[..., None]) -> None:
        super().__init__(state)
        self._write = write

    def offer(self, request_id: str) -> list[int]:
        output_token_ids = super().offer(request_id)
        self._write("offer", request_id)
        return output_token_ids

    def release(self, request_id: str) -> None:
        super().release(request_id)
        self._write("release", request_id)

    def resume(self, request_id: str) -> None:
        super().resume(request_id)
        self._write("resume", request_id)

    def reserve(self, request: Request, num_tokens: int) -> Reservation | None:
        reservation = super().reserve(request, num_tokens)
        self._write("reserve", recording.request_fields(request), num_tokens, reservation is not None)
        return reservation

    def begin(self, request_id: str, output_token_ids: Seq[int], exact: bool = True) -> None:
        super().begin(request_id, output_token_ids, exact)
        self._write("begin", request_id, list(output_token_ids), exact)

    def cancel(self, request_id: str) -> None:
        super().cancel(request_id)
        self._write("cancel", request_id)


def _known_beforehand(*costs: GapCost | PreemptionCost | None) -> dict[str, Any] | None:
    """The calibrated cost that these correct, if there is one."""
    for cost in costs:
        if isinstance(cost, (GapModel, PreemptionModel)) and cost.device.base is not None:
            return cost.device.base.to_dict()
    return None
