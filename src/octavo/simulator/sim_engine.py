"""One engine of a simulation: the engine's loop and scheduler over a backend that only costs time.

    add ─▶ loop ──begin──▶ step in flight ──(its seconds pass)──▶ finish ─▶ events

Owns the step in flight and the figures of the engine. When anything happens is the simulation's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.backends.sim import SimBackend
from octavo.core.clock import VirtualClock
from octavo.core.cost import StepShape
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.speculative_params import SpeculativeParams
from octavo.core.step import StepPlan, StepResult
from octavo.costs.gap import GapModel
from octavo.engine.loop import EngineLoop
from octavo.engine.outputs import OutputEvent
from octavo.simulator.engine_spec import EngineSpec
from octavo.speculative.simulated import SimulatedProposer, SimulatedText
from octavo.speculative.speculator import Speculator


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


@dataclass(slots=True)
class InFlight:
    plan: StepPlan
    result: StepResult
    end_s: float


@dataclass(slots=True)
class SimEngine:
    """An ``EngineView`` for routers. ``index``: its number in the simulation; ``clock``: the simulation's."""

    index: int
    spec: EngineSpec
    clock: VirtualClock
    seed: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    in_flight: InFlight | None = None
    scheduler: Scheduler = field(init=False)
    backend: SimBackend = field(init=False)
    loop: EngineLoop = field(init=False)
    _pending: int | None = None  # tokens, until something changes

    def __post_init__(self) -> None:
        spec, config = self.spec, self.spec.scheduler
        gap_model = None if config.max_itl_ms is None else GapModel()
        if spec.make_scheduler is not None:
            self.scheduler = spec.make_scheduler()
        else:
            self.scheduler = Scheduler(
                config, spec.cache, spec.num_blocks, spec.max_model_len, "sim", gap_model, num_host_blocks=spec.num_host_blocks
            )
        drafts = spec.speculation
        text = None if drafts is None else SimulatedText(drafts.acceptance, self.seed)
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
        if self._pending is None:
            scheduler = self.scheduler
            self._pending = sum(len(seq.token_ids) - seq.num_computed for seq in scheduler.running_sequences)
            self._pending += sum(len(seq.token_ids) for seq in scheduler.waiting_sequences)
        return self._pending

    @property
    def num_sequences(self) -> int:
        return self.scheduler.num_running + self.scheduler.num_waiting

    @property
    def num_available_blocks(self) -> int:
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

    # --- steps --------------------------------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        return self.in_flight is not None

    def add(self, request: Request) -> None:
        """Queue a request. Raises ParameterError when it can never run."""
        self.loop.add(request)
        self._pending = None
        self.stats.num_requests += 1

    def begin(self, now: float) -> float | None:
        """Begin a step if there is work and none in flight; when it ends, or None."""
        if self.in_flight is not None or not self.loop.has_work:
            return None
        plan = self.loop.begin_step(now)
        if plan is None:
            return None
        result = self.backend.execute(plan)
        self.in_flight = InFlight(plan, result, now + result.seconds)
        self._pending = None
        return self.in_flight.end_s

    def finish(self) -> list[OutputEvent]:
        """The step in flight has ended."""
        step = self.in_flight
        assert step is not None, "there is no step in flight"
        self.in_flight, self._pending = None, None
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
