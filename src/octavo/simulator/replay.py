"""Replay: a recorded run told again to a scheduler of the same make, which must make the same plans.

What comes of it: the proof that the plans are the same, the requests as a workload for other settings, and each step with its measured
seconds, to fit a cost model on or to judge one by.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core import recording
from octavo.core.clock import MAX_SECONDS
from octavo.core.cost import StepShape
from octavo.core.recording import RecordingError
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.step import StepPlan, StepResult
from octavo.core.words import as_written
from octavo.costs.coefficients import Coefficients, coefficients_of
from octavo.costs.fitted import FittedCost
from octavo.costs.window_fit import Sample, fit_window
from octavo.workload.requests import WorkloadRequest

_WRONG = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, AssertionError)
"""What a line that is not what it should be may raise on its way through the scheduler."""

MAX_STEP_S = 1e6
_MOVES = {
    "offer": "offered", "release": "released", "resume": "resumed", "reserve": "reserved", "begin": "begun", "cancel": "cancelled",
}  # fmt: skip
"""Lines of sequences that go to or come from another engine, and what is then done with these."""
_MAX_FITTED = 20_000  # steps; of more, some in equal distances tell as much

StepObserver = Callable[[StepPlan, StepResult], None]


@dataclass(slots=True)
class Replay:
    """What a recorded run held. ``requests``: by arrival, with as many output tokens as they made, those made elsewhere before among them;
    ``num_left_out`` others made none, had not ended when the recording did, or left for another engine: ``num_handed_over`` of them.
    ``num_taken_over`` came from one; they arrived when room was reserved for them.

    ``device_s``: what the steps took, ``first_s`` and ``last_s``: when the first and the last were planned. ``samples``: of each step, its
    seconds up to the plan of the next one where that followed at once, so that what was done beside the device is in them.
    """

    header: dict[str, Any]
    base: Coefficients | None = None  # what was known of the seconds of steps beforehand
    num_plans: int = 0
    num_aborts: int = 0
    num_preemptions: int = 0
    prefix_hit_tokens: int = 0
    device_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    samples: list[Sample] = field(default_factory=list)
    requests: list[WorkloadRequest] = field(default_factory=list)
    num_left_out: int = 0
    num_handed_over: int = 0
    num_taken_over: int = 0

    def left_out(self) -> str:
        """Why requests of the run are not among ``requests``, with how many; empty where all are."""
        num_others = self.num_left_out - self.num_handed_over
        parts = [f"{num_others} made no token, or had not ended when it did"] if num_others else []
        return "; ".join(parts + ([f"{self.num_handed_over} left for another worker"] if self.num_handed_over else []))

    def coefficients(self) -> Coefficients:
        """The cost model that the steps of this run teach: together they took what it says, those that were held up apart. Raises FitError
        for too few."""
        some = self.samples[:: -(-len(self.samples) // _MAX_FITTED) or 1]
        return fit_window(some, self.base, f"replayed run of {self.header.get('about') or 'an engine'}")


class ReplayedGapCost:
    """A GapCost in the states that a recorded one was in. ``base``: what was known beforehand."""

    def __init__(self, base: Coefficients | None) -> None:
        self.max_trusted_rows = 0
        self._device = FittedCost(base)
        self._fixed_s, self._factor = 0.0, 1.0

    def set(self, state: list[Any]) -> None:
        factors, self._fixed_s, self._factor, self.max_trusted_rows = state
        for one in (*factors, self._fixed_s, self._factor):
            _seconds("costs", one)
        self._device.factors[:] = factors

    def begin(self, now: float) -> None:
        """The state was set already."""

    def gap_seconds(self, shape: StepShape) -> float:
        return self._fixed_s + self._factor * self._device.seconds_of(shape)


class ReplayedPreemptionCost:
    """A PreemptionCost in the states that a recorded one was in. ``base``: what was known beforehand."""

    def __init__(self, base: Coefficients | None) -> None:
        self._device = FittedCost(base)
        self._seconds_per_block = 0.0

    def set(self, state: list[Any]) -> None:
        factors, self._seconds_per_block = state
        for one in (*factors, self._seconds_per_block):
            _seconds("costs", one)
        self._device.factors[:] = factors

    def recompute_seconds(self, num_tokens: int) -> float:
        shape = StepShape(num_sequences=1)
        return self._device.seconds_of(shape.plus(0, num_tokens, 0)) - self._device.seconds_of(StepShape(num_sequences=2))

    def swap_seconds(self, num_blocks: int) -> float:
        return num_blocks * self._seconds_per_block


class _LiveRequest:
    """A request on its way: output tokens by choice, and how many choices have not ended. ``num_made``: tokens that it came with."""

    def __init__(self, request: Request, num_made: int = 0) -> None:
        self.request = request
        self.num_output = [num_made] * request.params.n
        self.num_open = request.params.n


class Replayer:
    """Tells a scheduler the lines of a recording, one by one."""

    def __init__(self, head: dict[str, Any], on_step: StepObserver | None = None) -> None:
        base = None if head.get("step_cost") is None else coefficients_of(head["step_cost"])
        self.replay = Replay(head, base)
        self._gap = ReplayedGapCost(base) if head["scheduler"]["max_itl_ms"] is not None else None
        self._preemption = ReplayedPreemptionCost(base) if head["prices_preemption"] else None
        self.scheduler = Scheduler(
            SchedulerConfig(**head["scheduler"]), CacheConfig(**head["cache"]), head["num_blocks"], head["max_model_len"],
            head["fingerprint"], self._gap, head["num_host_blocks"], self._preemption, layout=recording.layout_of(head["layout"]),
        )  # fmt: skip
        self._on_step = on_step
        self._plan: StepPlan | None = None
        self._last: tuple[StepShape, float, float, float] | None = None  # step: shape, planned at, device, moves; no sample yet
        self._live: dict[str, _LiveRequest] = {}
        self._coming: dict[str, Request] = {}  # that room is reserved for
        self._now = 0.0  # of the last line that tells the time

    def take(self, kind: str, step: int, data: list[Any]) -> None:
        """One line. Raises RecordingError when the scheduler does something else than the recorded one."""
        if kind == "add":
            request = _request_of(data[0])
            self.scheduler.add(request, *data[1:])
            self._live[request.request_id] = _LiveRequest(request, sum(map(len, data[1:])))
        elif kind == "abort":
            self.replay.num_aborts += 1
            self._ended(self.scheduler.abort(data[0]))
        elif kind == "fail":
            self._ended(self.scheduler.fail_all(data[0]))
            self.replay.num_left_out += len(self._live)  # on their way to another engine: of these the scheduler tells no end
            self._live.clear()
            self._coming.clear()
        elif kind == "plan":
            self._make_plan(step, *data)
        elif kind == "result":
            self._apply(step, data)
        elif kind in _MOVES:
            self._move(kind, step, *data)
        else:
            raise RecordingError(f"{as_written(kind)} is no kind of line")
        if not self.scheduler.has_work:
            self._sample(None)  # idleness follows: when the next plan was made tells nothing

    def _goes_on(self, kind: str, done: str, step: int, now: float) -> None:
        """It is ``now``, and no earlier than it was."""
        _seconds(f"time of the {kind}", now, MAX_SECONDS)
        if now < self._now:
            raise RecordingError(f"step {step}: it is {done} at {now!r} s, before the one above it at {self._now!r} s")
        self._now = now

    def _move(self, kind: str, step: int, now: float, *data: Any) -> None:
        """A sequence goes to, or comes from, another engine."""
        self._goes_on(kind, _MOVES[kind], step, now)
        transfers = self.scheduler.transfers
        if kind == "reserve":
            self._reserve(step, *data)
        elif kind == "begin":
            request_id, output_token_ids, exact = data
            transfers.begin(request_id, output_token_ids, exact)
            self._live[request_id] = _LiveRequest(self._coming.pop(request_id), len(output_token_ids))
            self.replay.num_taken_over += 1
        else:
            (request_id,) = data
            getattr(transfers, kind)(request_id)
            if kind == "cancel":
                del self._coming[request_id]
            elif kind == "release":
                del self._live[request_id]
                self.replay.num_handed_over += 1
                self.replay.num_left_out += 1

    def _reserve(self, step: int, fields: dict[str, Any], num_tokens: int, had_room: bool) -> None:
        request = _request_of(fields)
        has_room = self.scheduler.transfers.reserve(request, num_tokens) is not None
        if has_room is not had_room:
            found = "room, and the recorded run found none" if has_room else "no room, and the recorded run found some"
            raise RecordingError(f"step {step}: for {as_written(request.request_id)} there is {found}")
        if has_room:
            self._coming[request.request_id] = request

    def _make_plan(self, step: int, now: float, digest: str | None, drafts: list[Any], costs: list[Any]) -> None:
        self._goes_on("plan", "planned", step, now)
        self._sample(now)
        for cost, state in zip((self._gap, self._preemption), costs, strict=True):
            if cost is not None:
                cost.set(state)
        plan = self._plan = self.scheduler.plan(now, {seq_id: guess for seq_id, guess in drafts})
        made = None if plan is None else recording.plan_digest(plan, self.replay.header["cache"]["block_size"])
        if made != digest:
            why = "" if self.replay.header["version"] > 1 else "; version 1 tells nothing of requests that go from one worker to another"
            raise RecordingError(f"step {step}: the plan is another than the recorded one ({made} instead of {digest}){why}")
        if plan is not None:
            self.replay.num_plans += 1
            self.replay.first_s = now if self.replay.first_s is None else self.replay.first_s
            self.replay.last_s = now

    def _apply(self, step: int, data: list[Any]) -> None:
        plan = self._plan
        if plan is None:
            raise RecordingError(f"step {step}: a result without a plan")
        result, stops = recording.result_of(plan.step_index, data)
        _seconds("seconds", result.seconds, MAX_STEP_S)
        _seconds("move_seconds", result.move_seconds, result.seconds)
        self.replay.device_s += result.seconds
        self._last = (StepShape.of(plan), self.replay.last_s or 0.0, result.seconds - result.move_seconds, result.move_seconds)
        if self._on_step is not None:
            self._on_step(plan, result)
        self._ended(self.scheduler.apply(result, stops))

    def _sample(self, now: float | None) -> None:
        """The last step has taken until ``now``, or (None) what its device took at least."""
        if self._last is None:
            return
        shape, planned_s, device_s, move_s = self._last
        took_s = device_s if now is None else max(device_s, now - planned_s - move_s)
        counts = (shape.num_rows, shape.num_sequences, shape.num_logit_rows, shape.num_context, shape.num_pairs)
        self.replay.samples.append((*counts, took_s))
        self._last = None

    def _ended(self, events: list[Any]) -> None:
        """Count tokens; of a request whose choices have all ended, note what it was."""
        for event in events:
            live = self._live[event.request_id]
            live.num_output[event.choice] += len(event.token_ids)
            live.num_open -= event.finish_reason is not None
            if live.num_open == 0:
                request, num_output = self._live.pop(event.request_id).request, max(live.num_output)
                if num_output:
                    self.replay.requests.append(WorkloadRequest(request.arrival_s, request.prompt_token_ids, num_output))
                else:
                    self.replay.num_left_out += 1

    def end(self) -> Replay:
        """The recording is over."""
        self._sample(None)
        self.replay.num_left_out += len(self._live)
        self.replay.requests.sort(key=lambda work: work.arrival_s)
        self.replay.num_preemptions = self.scheduler.stats.num_preemptions
        self.replay.prefix_hit_tokens = self.scheduler.stats.prefix_hit_tokens
        return self.replay


def _request_of(fields: dict[str, Any]) -> Request:
    request = recording.request_of(fields)
    _seconds("arrival_s", request.arrival_s, MAX_SECONDS, -MAX_SECONDS)  # of one handed over: before this engine's clock began
    return request


def _seconds(name: str, value: object, most: float = MAX_SECONDS, least: float = 0.0) -> None:
    """Raise RecordingError for what is no number of seconds from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise RecordingError(f"{name}: {as_written(value)} is not allowed; a number from {least:g} to {most:g}")


def replay_recording(path: str | Path, on_step: StepObserver | None = None) -> Replay:
    """Tell the run recorded in ``path`` again. ``on_step`` sees each plan with its result. Raises RecordingError, OSError.

    A last line that was cut off, as a crash leaves it, ends the recording.
    """
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise RecordingError(f"{path}: the file is empty")
    head = first[1]
    if not isinstance(head, dict) or head.get("format") != recording.FORMAT or head.get("version") not in recording.READ_VERSIONS:
        versions = " or ".join(map(str, recording.READ_VERSIONS))
        raise RecordingError(f'{path}: line 1: "format": "{recording.FORMAT}" and "version": {versions} are needed')
    try:
        replayer = Replayer(head, on_step)
    except _WRONG as error:
        raise RecordingError(f"{path}: line 1: {type(error).__name__}: {error}") from None
    for number, line in lines:
        try:
            kind, step, *data = line
            replayer.take(kind, step, data)
        except RecordingError as error:
            raise RecordingError(f"{path}: line {number}: {error}") from error
        except _WRONG as error:
            raise RecordingError(f"{path}: line {number}: {type(error).__name__}: {error}") from error
    return replayer.end()


def _lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith("\n"):
                return
            try:
                yield number, json.loads(text)
            except ValueError as error:
                raise RecordingError(f"{path}: line {number}: it is no JSON: {error}") from None
