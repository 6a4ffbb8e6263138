"""One engine of a simulation: the engine's loop and scheduler over a backend that only costs time.

    add ─▶ loop ──begin──▶ step in flight ──(its seconds pass)──▶ finish ─▶ events

Owns the step in flight and the figures of the engine. When anything happens is the simulation's business.

Where the coming steps only repeat (``core.repeats``) they are a *run*: one event at its end stands for all of them. Whoever looks closer
before (a request that comes, a router that asks for blocks) interrupts it: the steps that have ended by then are taken at once, and the
one in flight is planned as any other. So what is seen of an engine never depends on whether it jumps.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate, islice

from octavo.backends.sim import SimBackend
from octavo.core.clock import VirtualClock
from octavo.core.cost import StepShape
from octavo.core.key_changes import KeyChanges
from octavo.core.request import ParameterError, Request
from octavo.core.scheduler import Scheduler
from octavo.core.speculative_params import SpeculativeParams
from octavo.core.step import StepPlan, StepResult
from octavo.costs.gap import GapModel
from octavo.engine.loop import EngineLoop
from octavo.engine.outputs import OutputEvent
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.records import RequestLog
from octavo.speculative.simulated import SimulatedProposer, SimulatedText
from octavo.speculative.speculator import Speculator

_MOST_REPEATS = 256  # steps of a run: what is foreseen beyond an interruption is lost


@dataclass(slots=True)
class EngineStats:
    """``block_s``: used blocks times seconds, over busy time; divide by ``busy_s`` for the mean."""

    num_steps: int = 0
    num_jumped_steps: int = 0  # of these, taken many at a time
    num_rows: int = 0
    busy_s: float = 0.0
    block_s: float = 0.0
    most_blocks: int = 0
    num_requests: int = 0
    num_handed_over: int = 0
    num_taken_over: int = 0
    num_preemptions: int = 0  # before the engine last came back from an outage


@dataclass(slots=True)
class InFlight:
    plan: StepPlan
    result: StepResult
    end_s: float


@dataclass(slots=True)
class _Run:
    """Steps that only repeat, none of them taken yet. ``ends_s``, ``seconds``: of each."""

    begin_s: float
    ends_s: list[float]
    seconds: list[float]


@dataclass(slots=True)
class SimEngine:
    """An ``EngineView`` for routers. ``index``: its number in the simulation; ``clock``: the simulation's; ``events``: the simulation's
    heap of (end of a step, index, number of the event), of which the engine's last counts and others are stale. ``jumps``: whether steps
    that only repeat are taken at once."""

    index: int
    spec: EngineSpec
    clock: VirtualClock
    log: RequestLog
    events: list[tuple[float, int, int]]
    seed: int = 0
    jumps: bool = True
    stats: EngineStats = field(default_factory=EngineStats)
    there_from_s: float = 0.0  # when its start began
    there_to_s: float = math.inf
    in_flight: InFlight | None = None
    last_event: int = 0
    last_step_s: float = 0.0  # seconds of the last step that was not taken with others
    _ended_s: float = -math.inf  # when the last step did
    _run: _Run | None = None
    scheduler: Scheduler = field(init=False)
    backend: SimBackend = field(init=False)
    loop: EngineLoop = field(init=False)
    _known_load: tuple[int, int] | None = None  # until something changes
    _key_changes: KeyChanges | None = None  # where a router wants to hear of them
    on_repeats: Callable[[Seq[float]], None] | None = None  # hears when steps ended that only repeated, once they are taken

    def __post_init__(self) -> None:
        self._build()

    def _build(self) -> None:
        """The scheduler, the device and the loop, with nothing in them."""
        spec, config = self.spec, self.spec.scheduler
        gap_model = None if config.max_itl_ms is None else GapModel()
        if spec.make_scheduler is not None:
            self.scheduler = spec.make_scheduler()
        else:
            self.scheduler = Scheduler(
                config, spec.cache, spec.num_blocks, spec.max_model_len, "sim", gap_model, spec.num_host_blocks, layout=spec.layout
            )
        drafts = spec.speculation
        text = spec.text if drafts is None else SimulatedText(drafts.acceptance, self.seed)
        draft_s = 0.0 if drafts is None else drafts.draft_s
        self.backend = SimBackend(spec.cost, config.max_num_seqs, text, move_s=spec.move_s, draft_s=draft_s)
        speculator = None
        if drafts is not None:
            default = SpeculativeParams(drafts.spec, "simulated")
            proposers = {"simulated": SimulatedProposer()}
            speculator = Speculator(
                proposers, default, self.scheduler.limits.max_total_tokens, self.clock, auto_method="simulated"
            )
        self.loop = EngineLoop(self.scheduler, self.backend.vocab_size, None, gap_model, speculator)

    # --- what routers see ---------------------------------------------------------------------------------------------------------------

    @property
    def pending_tokens(self) -> int:
        """See ``EngineView``. Tokens of the step in flight count until it has ended."""
        return self._load()[0]

    @property
    def num_sequences(self) -> int:
        return self._load()[1]

    @property
    def num_unseen(self) -> int:
        return 0

    def _load(self) -> tuple[int, int]:
        """Pending tokens and number of sequences; steps that only repeat change neither."""
        if self._known_load is None:
            scheduler = self.scheduler
            self._known_load = scheduler.pending_shape().num_rows, scheduler.num_running + scheduler.num_waiting
        return self._known_load

    @property
    def num_blocks(self) -> int:
        return self.spec.num_blocks

    @property
    def num_available_blocks(self) -> int:
        self.interrupt()
        return self.scheduler.num_free_blocks + self.scheduler.num_cached_blocks

    @property
    def pending_s(self) -> float:
        """As one step of all pending tokens would take, by the cost model: a guess that orders engines of different speed."""
        num_sequences, pending = self.num_sequences, self.pending_tokens
        if not pending:
            return 0.0
        shape = StepShape()
        shape.add(0, pending, num_sequences)
        return self.backend.shape_seconds(shape)

    def load(self) -> tuple[int, float, int, int]:
        """(pending tokens, seconds that they are predicted to take, number of sequences, available blocks), as a worker tells them between
        two steps; of steps that repeat, as they began."""
        scheduler, shape = self.scheduler, self.scheduler.pending_shape()
        num_available = scheduler.num_free_blocks + scheduler.num_cached_blocks
        pending_s = self.backend.shape_seconds(shape) if shape.num_rows else 0.0
        return shape.num_rows, pending_s, shape.num_sequences, num_available

    def repeats_ended(self) -> list[float]:
        """When the steps of the run that goes on have ended which have; they are not taken yet."""
        return [] if self._run is None else self._run.ends_s[: bisect_right(self._run.ends_s, self.clock.now())]

    def next_repeat_s(self, told_s: float, at_s: float) -> float:
        """When the first step ends, from ``at_s`` on, of a run that began after ``told_s``; infinity: none does."""
        if self._run is None or told_s >= self._run.begin_s:
            return math.inf
        ends_s = self._run.ends_s
        place = bisect_left(ends_s, at_s)
        return ends_s[place] if place < len(ends_s) else math.inf

    def prompt_s(self, start: int, num_tokens: int) -> float:
        """As ``Costs`` of routers: seconds of a step that computes so many tokens of a prompt behind ``start`` of them."""
        shape = StepShape()
        shape.add(start, num_tokens, 1)
        return self.backend.shape_seconds(shape)

    def token_s(self, num_sequences: int, num_context: int) -> float:
        """As ``Costs`` of routers: seconds of a step in which so many sequences decode behind so many tokens each."""
        num_read = num_sequences * num_context
        return self.backend.shape_seconds(StepShape(num_sequences, num_sequences, num_sequences, num_read, num_read))

    def tell_keys(self) -> None:
        """Keep account of what the prefix cache offers from now on, for ``take_key_changes``."""
        index = getattr(self.scheduler, "prefix_index", None)  # other schedulers than the engine's have none
        if index is not None:
            index.changes = self._key_changes = KeyChanges()

    def take_key_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Block keys that the prefix cache has begun and ceased to offer since the last call."""
        self.interrupt()
        return self.told_key_changes()

    def told_key_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Likewise, of steps that repeat as they began."""
        return ([], []) if self._key_changes is None else self._key_changes.take()

    def add(self, request: Request) -> None:
        """Queue a request. Raises ParameterError when it can never run."""
        self.interrupt()
        self.loop.add(request)
        self._known_load = None
        self.stats.num_requests += 1

    # --- outages ------------------------------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Nothing runs or waits here, and no KV is on its way to here or from here."""
        self.interrupt()
        return not self.loop.has_work and not self.scheduler.num_used_blocks

    def fail(self) -> list[tuple[Request, list[int]]]:
        """It is gone, with all that it held, as if it had been killed now; it stays empty until requests come again.

        Returns the requests that ran or waited here, with their output tokens so far; those on their way to or from here are the desk's.
        """
        self.interrupt()
        sequences = (*self.scheduler.running_sequences, *self.scheduler.waiting_sequences)
        lost = [(seq.request, list(seq.output_token_ids)) for seq in sequences]
        self.in_flight = self._run = self._known_load = None
        self.last_event += 1  # what is in the heap of it is stale
        self.stats.num_preemptions += self.scheduler.stats.num_preemptions
        self._build()
        if self._key_changes is not None:
            self.tell_keys()
        return lost

    # --- hand-offs ----------------------------------------------------------------------------------------------------------------------

    def offer(self, request_id: str) -> list[int]:
        """See ``EngineLoop.offer``."""
        self._touch()
        self.stats.num_handed_over += 1
        return self.loop.offer(request_id)

    def release_offered(self, request_id: str) -> None:
        """See ``Transfers.release``."""
        self._touch()
        self.scheduler.transfers.release(request_id)

    def resume(self, request: Request, output_token_ids: list[int]) -> None:
        """See ``EngineLoop.resume``."""
        self._touch()
        self.stats.num_handed_over -= 1
        self.loop.resume(request, output_token_ids)

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """See ``Transfers.reserve``; whether there was room. False as well for a request that could never run here."""
        self._touch()
        try:
            return self.scheduler.transfers.reserve(request, num_tokens) is not None
        except ParameterError:
            return False

    def cancel_reserved(self, request_id: str) -> None:
        """See ``Transfers.cancel``."""
        self._touch()
        self.scheduler.transfers.cancel(request_id)

    def take_over(self, request: Request, output_token_ids: list[int], exact: bool = True) -> None:
        """See ``EngineLoop.begin``."""
        self._touch()
        self.stats.num_taken_over += 1
        self.loop.begin(request, output_token_ids, exact)

    def _touch(self) -> None:
        """Something changes between two steps of a run, and for routers."""
        self.interrupt()
        self._known_load = None

    # --- steps --------------------------------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> bool:
        """Begin a step, or a run of steps, if there is work and none in flight; whether it is a step."""
        if self.in_flight is not None or self._run is not None or not self.loop.has_work:
            return False
        may_jump = self.jumps and self.backend.says_one_token and not self._wake_s(now)
        num_steps = self.loop.num_repeats() if may_jump else 0
        if num_steps:
            self._begin_run(now, min(num_steps, _MOST_REPEATS))
        else:
            self._begin_step(now)
        return self.in_flight is not None

    def _begin_step(self, now: float) -> None:
        plan = self.loop.begin_step(now)
        if plan is not None:
            result = self.backend.execute(plan)
            result.seconds += self._wake_s(now)
            self.in_flight, self._known_load = InFlight(plan, result, now + result.seconds), None
            self._schedule(self.in_flight.end_s)

    def ends_at(self, end_s: float, seconds: float) -> None:
        """The step in flight will end then, after so many seconds: something outside of the engine holds it up."""
        assert self.in_flight is not None, "no step is in flight"
        self.in_flight.end_s, self.in_flight.result.seconds = end_s, seconds
        self._schedule(end_s)

    def _wake_s(self, now: float) -> float:
        """What a step takes more that begins now, for the idleness before it."""
        return self.spec.wake_s if now > self._ended_s else 0.0

    def _begin_run(self, now: float, num_steps: int) -> None:
        lengths = [len(seq.token_ids) for seq in self.scheduler.running_sequences]
        seconds = list(islice(self.backend.decode_seconds(lengths), num_steps))
        ends_s = list(accumulate(seconds, initial=now))[1:]
        self._run = _Run(now, ends_s, seconds)
        self._schedule(ends_s[-1])

    def _schedule(self, end_s: float) -> None:
        self.last_event += 1
        heapq.heappush(self.events, (end_s, self.index, self.last_event))

    def interrupt(self) -> None:
        """Be seen as one who does not jump: what has ended by now has, and a step is in flight, if one is."""
        run, now = self._run, self.clock.now()
        if run is None:
            return
        num_ended = bisect_right(run.ends_s, now)
        self._run = None
        self._take(run, num_ended)
        begin_s = self._ended_s = run.ends_s[num_ended - 1] if num_ended else run.begin_s
        if num_ended == len(run.ends_s) or (num_ended and begin_s == now):
            self._schedule(now)  # to begin with the next step, after all that happens now
        else:
            self._begin_step(begin_s)

    def _take(self, run: _Run, num_steps: int) -> None:
        """The first steps of a run have ended."""
        if not num_steps:
            return
        running = self.scheduler.running_sequences
        self.log.got_repeats([seq.request.request_id for seq in running], run.ends_s[:num_steps])
        used_at = dict(self.loop.repeat(num_steps, [self.backend.token_of(seq.slot) for seq in running]))
        stats, used = self.stats, 0
        for step, seconds in enumerate(run.seconds[:num_steps], 1):
            used = used_at.get(step, used)
            stats.busy_s += seconds
            stats.block_s += used * seconds
            stats.most_blocks = max(stats.most_blocks, used)
        stats.num_steps += num_steps
        stats.num_jumped_steps += num_steps
        stats.num_rows += num_steps * len(running)
        if self.on_repeats is not None:
            self.on_repeats(run.ends_s[:num_steps])

    def finish(self) -> list[OutputEvent]:
        """The step in flight has ended, or the run."""
        if self._run is not None or self.in_flight is not None:
            self._ended_s = self.clock.now()
        if self._run is not None:
            run, self._run = self._run, None
            self._take(run, len(run.ends_s))
            return []
        step = self.in_flight
        if step is None:  # interrupted between two steps
            return []
        self.in_flight, self._known_load = None, None
        self.last_step_s = step.result.seconds
        self._count(step)
        events = self.loop.finish_step(step.plan, step.result)
        self.loop.end_step(step.plan, step.result, step.end_s)
        return events

    def _count(self, step: InFlight) -> None:
        stats, used = self.stats, self.scheduler.num_used_blocks
        stats.num_steps += 1
        stats.num_rows += step.plan.num_tokens
        stats.busy_s += step.result.seconds
        stats.block_s += used * step.result.seconds
        stats.most_blocks = max(stats.most_blocks, used)
