"""One model on one backend with one scheduler: the engine, driven step by step by whoever owns the thread.

Owns the making of these parts from a configuration, the size of the KV pool, and what happens when a step fails.
It starts no thread (``async_engine`` and ``llm`` drive it) and knows nothing of HTTP.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO, Unpack

from octavo.backends.base import Backend
from octavo.config import ConfigError, EngineConfig
from octavo.core.clock import Clock, WallClock
from octavo.core.cost import StepShape
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import StepPlan
from octavo.costs.fitted import FittedCost
from octavo.costs.gap import GapModel
from octavo.costs.preemption import PreemptionModel
from octavo.costs.restore import RestoreModel
from octavo.engine.drafting import DraftModels
from octavo.engine.itl_warnings import ItlWarnings
from octavo.engine.loop import EngineLoop
from octavo.engine.memory_limits import check_memory
from octavo.engine.metrics import EngineMetrics
from octavo.engine.outputs import OutputEvent
from octavo.engine.params import PreparedRequest, RequestOptions, RequestPreparer, check_priority
from octavo.engine.step_costs import calibrated_cost
from octavo.engine.timeline import Timeline
from octavo.speculative.speculator import create_speculator

if TYPE_CHECKING:
    from octavo.engine.kv_tiering import KVTiering
    from octavo.engine.step_log import StepLog
    from octavo.models.loaded import LoadedModel
    from octavo.speculative.self_draft import SelfDraft

logger = logging.getLogger("octavo.engine")

MAX_DEFAULT_KV_BYTES = 4 << 30
DEFAULT_KV_SHARE = 0.25  # of the memory that is available when the engine starts
_LEARN_ONE_IN = 8  # steps that only decode, of which nobody asks what the next will take


class Engine:
    """Not thread-safe: one thread adds, aborts and steps."""

    def __init__(self, model: LoadedModel, config: EngineConfig, backend: Backend, clock: Clock | None = None) -> None:
        """Allocates the KV pool. Raises ConfigError for sizes the model cannot have, BackendError when memory is not to be had."""
        self.model, self.config, self.backend = model, config, backend
        self.clock = clock or WallClock()
        max_itl_ms = config.scheduler.max_itl_ms
        max_itl_s = math.inf if max_itl_ms is None else max_itl_ms / 1000
        self.metrics = EngineMetrics(max_itl_s)
        self.step_cost = FittedCost(calibrated_cost(backend))  # the one cost of steps: all that ask what a step takes share it
        self.step_log: StepLog | None = None  # told of every step, where somebody wants to know
        self.gap_model = None if max_itl_ms is None else GapModel(self.step_cost)
        self._itl_warnings = ItlWarnings(max_itl_s)
        self.num_failures_in_a_row = 0
        self.is_stuck = False  # there is work, and none of it can go on before somebody else lets go of blocks: see transfers
        self._recording: TextIO | None = None
        self.max_model_len = resolve_max_model_len(config, model.program.context)
        fingerprint = f"{model.fingerprint}/{backend.fingerprint()}"
        self._drafting = DraftModels(config, model)
        try:
            num_host_blocks, self_draft = self._allocate(fingerprint)
        except BaseException:
            self._drafting.close()
            raise
        backend = self.backend
        self.scheduler = self._recorded(model.name)(
            config.scheduler, config.cache, self.num_kv_blocks, self.max_model_len, fingerprint,
            gap_cost=self.gap_model, num_host_blocks=num_host_blocks,
            preemption_cost=self.preemption_model if config.scheduler.preemption == "auto" else None,  # where there is a choice
            tiers=None if self.tiering is None else self.tiering.tiers, layout=backend.kv_capacity(0).layout,
        )  # fmt: skip
        draft_model = self._drafting.draft_model(backend, self.scheduler)
        others = {one.name: one for one in (draft_model, self_draft) if one is not None}
        self.speculator = create_speculator(config.speculative, self.scheduler.limits.max_total_tokens, self.clock, others)
        if self.step_cost.base is not None:
            self.speculator.control.cost.expect(self._decode_prices(self.step_cost.base.max_rows))
        self.timeline = Timeline(self.scheduler, self.clock, self.step_cost, is_paced=self.gap_model is not None)
        self.loop = EngineLoop(self.scheduler, backend.vocab_size, model.tokenizer, self.gap_model, self.speculator, self.timeline)
        max_n = config.scheduler.max_num_seqs
        self._preparer = RequestPreparer(backend.vocab_size, self.scheduler.limits, max_n, model.eos_token_ids, model.tokenizer)
        self._request_numbers = itertools.count()

    def _allocate(self, fingerprint: str) -> tuple[int, SelfDraft | None]:
        """The KV pool, and all else that needs memory or threads: blocks of the host's memory, and what drafts with the model's own layers,
        if it does."""
        config, backend = self.config, self.backend
        lodges, draft_bytes = self._drafting.find_lodging(backend), self._drafting.kv_bytes_per_block
        self.num_kv_blocks = resolve_num_kv_blocks(config, backend, self.max_model_len, draft_bytes, lodges)
        backend.allocate_kv(self.num_kv_blocks)
        num_host_blocks = resolve_num_host_blocks(config, backend)
        block_bytes = backend.kv_capacity(0).bytes_per_block
        self.preemption_model = PreemptionModel(block_bytes, self.step_cost) if num_host_blocks else None
        self_draft = self._drafting.start(backend, self.num_kv_blocks)
        if config.speculative.spec_rule == "resample":
            from octavo.backends.resampling import ResamplingBackend

            self.backend = ResamplingBackend(backend)
        self.tiering = self._open_tiers(fingerprint, num_host_blocks)  # last: it starts threads
        return num_host_blocks, self_draft

    def _decode_prices(self, max_rows: int) -> list[tuple[int, float]]:
        """Seconds of steps that only decode or verify, by their rows, up to ``max_rows``, as calibrated."""
        most = min(max_rows, self.config.scheduler.max_num_batched_tokens)
        rows = [*range(1, min(most, 16) + 1), *(n for n in (20, 24, 32, 40, 48, 64, 96, 128, 192, 256) if n <= most)]
        return [(n, self.step_cost.seconds_of(StepShape(n, n, n, n, n))) for n in rows]

    def _recorded(self, model_name: str) -> Callable[..., Scheduler]:
        """What makes the scheduler: one that is recorded, if the configuration says so. ConfigError when there can be no such file."""
        if self.config.scheduler.record is None:
            return Scheduler
        from octavo.engine.recording import RecordedScheduler
        from octavo.engine.user_files import UserFileError, open_new

        try:
            self._recording = open_new(self.config.scheduler.record)  # closed with the engine
        except UserFileError as error:
            raise ConfigError(f"record: {self.config.scheduler.record!r} is not allowed; {error}") from None
        return functools.partial(RecordedScheduler, self._recording, model_name, self.clock)

    def _open_tiers(self, fingerprint: str, num_swap_blocks: int) -> KVTiering | None:
        """Allocate host memory: blocks for preempted sequences and, behind them, those of the tiers."""
        cache, backend = self.config.cache, self.backend
        if not cache.has_kv_tiers:
            if num_swap_blocks:
                backend.allocate_host_kv(num_swap_blocks)
            return None
        from octavo.engine.kv_tiering import StoreNames, open_tiering

        cost = RestoreModel(self.step_cost)
        return open_tiering(cache, backend, StoreNames(fingerprint, self.model.name), num_swap_blocks, self.num_kv_blocks, cost)

    @classmethod
    def load(cls, config: EngineConfig, beside: Callable[[], object] | None = None) -> Engine:
        """Open the model that ``config`` names and start its backend. ``beside`` is called while weights are packed on other threads."""
        from octavo.engine.loading import load_halves
        from octavo.models.catalog import ensure_model
        from octavo.models.loading import open_model

        config.validate()
        model, backend = load_halves(open_model(ensure_model(config.model.model)), config, beside)
        return cls._on(backend, model, config)

    @classmethod
    def from_loaded(cls, model: LoadedModel, config: EngineConfig) -> Engine:
        """Start the backend that ``config`` names for a model that is open; it is closed again when the engine cannot be made."""
        from octavo.backends.registry import create_backend

        return cls._on(create_backend(model, config), model, config)

    @classmethod
    def _on(cls, backend: Backend, model: LoadedModel, config: EngineConfig) -> Engine:
        try:
            return cls(model, config, backend)
        except BaseException:
            backend.close()
            raise

    def new_request_id(self) -> str:
        return f"request-{next(self._request_numbers)}"

    def prepare(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str | None = None, **options: Unpack[RequestOptions]
    ) -> PreparedRequest:
        """Check a request and resolve its parameters; raises ParameterError. Queues nothing, and may be called from any thread."""
        return self.prepare_checked(prompt_token_ids, self.check_params(params), request_id, **options)

    def check_params(self, params: SamplingParams) -> SamplingParams:
        """The half of ``prepare`` that needs no prompt; raises ParameterError."""
        return self._preparer.check(params)

    def prepare_checked(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str | None = None, **options: Unpack[RequestOptions]
    ) -> PreparedRequest:
        """The other half: ``params`` come from ``check_params``, and may since have got a ``max_tokens``."""
        speculative = options.get("speculative")
        if speculative is not None:
            speculative.validate(self.speculator.methods)
        check_priority(options.get("priority", 0), self.config.scheduler.scheduling_policy)
        request_id = request_id or self.new_request_id()
        return self._preparer.prepare(Request(request_id, prompt_token_ids, params, seed=0, arrival_s=self.clock.now(), **options))

    def room(self, num_prompt_tokens: int) -> int:
        """Output tokens that a prompt of this length leaves room for; 0 or less: none."""
        return self.scheduler.limits.max_total_tokens - num_prompt_tokens

    def add(self, prepared: PreparedRequest, output_token_ids: Sequence[int] = ()) -> None:
        """Queue it. ``output_token_ids``: see ``EngineLoop.add``."""
        self.loop.add(prepared.request, output_token_ids)
        self.metrics.request_added(prepared.request)

    def reserve(self, request: Request, num_tokens: int) -> list[int] | None:
        """Blocks for KV that comes from elsewhere, free to be written to at once: see ``Transfers.reserve``."""
        reservation = self.scheduler.transfers.reserve(request, num_tokens)
        if reservation is None:
            return None
        if reservation.saves:
            assert self.tiering is not None
            self.tiering.save(reservation.saves)
        return reservation.blocks

    def begin(self, request: Request, output_token_ids: list[int], exact: bool = True) -> None:
        """Go on with a request that another engine began: see ``EngineLoop.begin``."""
        self.loop.begin(request, output_token_ids, exact)
        self.metrics.request_begun(request, self.clock.now())

    def release(self, request_id: str) -> None:
        """Another engine goes on with a request that was offered: see ``EngineLoop.release``."""
        self.loop.release(request_id)
        self.metrics.request_left(request_id)

    def abort(self, request_id: str) -> list[OutputEvent]:
        """End a request; no further token of it is computed. Unknown and finished ids do nothing."""
        return self._made(self.loop.abort(request_id))

    def fail_all(self, message: str) -> list[OutputEvent]:
        """End every request with an error event."""
        return self._made(self.loop.fail_all(message))

    @property
    def has_work(self) -> bool:
        return self.loop.has_work

    def step(self) -> list[OutputEvent]:
        """Plan, execute and apply one step. When any of it fails, every request ends with an error event and the engine goes on."""
        started_s = self.clock.now()
        plan, self.is_stuck = None, False
        try:
            if self.tiering is not None:
                self.tiering.before_plan()
            plan = self.loop.begin_step(started_s)
            if plan is None:
                if self.tiering is not None:
                    self.tiering.wait()
                self.is_stuck = self.has_work and (self.tiering is None or not self.tiering.tiers.is_waiting)
                return []
            if self.tiering is not None:
                self.tiering.before_execute()
            result = self.backend.execute(plan)
            events = self.loop.finish_step(plan, result)
        except Exception as error:  # whatever a backend raises or returns, or a fault in planning: the engine must outlive it
            return self._failed(plan, error)
        self.num_failures_in_a_row = 0
        if self.tiering is not None:
            self.tiering.cost.step_done(plan, result)
        ended_s = self.clock.now()
        self.loop.end_step(plan, result, ended_s, events)
        one_in = _LEARN_ONE_IN if self.gap_model is None else 1
        self.step_cost.step_done(plan, result, one_in, self.timeline.last_shape)
        if self.preemption_model is not None:
            self.preemption_model.observe(plan, result)
        self.metrics.step_done(plan, ended_s - started_s)
        if self.step_log is not None:
            self.step_log.add(plan, result, started_s, ended_s, self.has_work)
        worst = self.metrics.events_made(events, ended_s)
        if worst.seconds > self._itl_warnings.bound_s:
            self._itl_warnings.broken(plan, result.seconds, worst.seconds, ended_s, self.timeline.find(worst.request_id))
        return events

    def idle(self) -> float | None:
        """Nothing is to be computed now: do a small piece of what can wait, a millisecond or so. Seconds until it is worth calling again;
        None: not before the next step."""
        return None if self.tiering is None else self.tiering.idle(self.scheduler)

    def close(self) -> None:
        """Keep what a restart can use, if there is a disk for it, and release threads and memory. Idempotent."""
        if self.tiering is not None:
            self.fail_all("the engine is closed")
            self.tiering.close(self.scheduler)
        self._drafting.close()
        if self._recording is not None:
            self._recording.close()
        self.backend.close()

    def _made(self, events: list[OutputEvent]) -> list[OutputEvent]:
        if events:
            self.metrics.events_made(events, self.clock.now())
        return events

    def _failed(self, plan: StepPlan | None, error: Exception) -> list[OutputEvent]:
        self.num_failures_in_a_row += 1
        self.metrics.num_failed_steps += 1
        if plan is None:
            logger.error("no step could be planned", exc_info=error)
        else:
            logger.error("step %d with %d tokens failed", plan.step_index, plan.num_tokens, exc_info=error)
        return self.fail_all(f"the step could not be computed: {type(error).__name__}: {error}")


def resolve_max_model_len(config: EngineConfig, trained_context: int) -> int:
    """The context limit: as configured, at most what the model was trained for."""
    asked = config.model.max_model_len
    if asked is not None and asked > trained_context:
        raise ConfigError(f"max_model_len: {asked} is not allowed; the model was trained for {trained_context} tokens")
    return asked if asked is not None else trained_context


def resolve_num_kv_blocks(
    config: EngineConfig, backend: Backend, max_model_len: int, draft_bytes_per_block: int = 0, draft_lodges: bool = False
) -> int:
    """Blocks of the KV pool. ``draft_bytes_per_block``: of a draft model, whose pool has as many blocks, or which lodges in this one.

    As configured in blocks or bytes; else what ``max_num_seqs`` sequences of full length can use, within a quarter of the
    available memory and 4 GiB. Raises ConfigError when the memory holds no block, or is more than the machine has.
    """
    cache = config.cache
    if cache.num_kv_blocks is not None:
        block_bytes = backend.kv_capacity(0).bytes_per_block + (0 if draft_lodges else draft_bytes_per_block)
        check_memory("num_kv_blocks", cache.num_kv_blocks, cache.num_kv_blocks * block_bytes)
        return cache.num_kv_blocks
    if cache.kv_cache_memory is not None:
        check_memory("kv_cache_memory", cache.kv_cache_memory, cache.kv_cache_memory)
        memory_bytes = cache.kv_cache_memory
        useful = None
    else:
        memory_bytes = default_kv_bytes()
        useful = config.scheduler.max_num_seqs * -(-max_model_len // cache.block_size)
    bytes_per_block = backend.kv_capacity(memory_bytes).bytes_per_block
    if draft_lodges and useful is not None:
        useful += -(-useful * draft_bytes_per_block // bytes_per_block)
    elif not draft_lodges:
        bytes_per_block += draft_bytes_per_block
    num_fitting = memory_bytes // bytes_per_block
    num_blocks = num_fitting if useful is None else min(num_fitting, useful)
    if num_blocks < 1:
        raise ConfigError(f"kv_cache_memory: {memory_bytes} bytes hold no block; one takes {bytes_per_block}")
    return num_blocks


def default_kv_bytes() -> int:
    """Memory of the KV pool where nobody says how much: a share of what is available now."""
    from octavo.backends.machine import available_memory_bytes

    return min(int(available_memory_bytes() * DEFAULT_KV_SHARE), MAX_DEFAULT_KV_BYTES)


def resolve_num_host_blocks(config: EngineConfig, backend: Backend) -> int:
    """Blocks of the host pool that ``swap_space`` holds. Raises ConfigError when it is some memory, but less than a block, or too much."""
    swap_space = config.cache.swap_space
    check_memory("swap_space", swap_space, swap_space)
    capacity = backend.kv_capacity(swap_space)
    if swap_space and not capacity.num_blocks:
        raise ConfigError(f"swap_space: {swap_space} bytes hold no block; one takes {capacity.bytes_per_block}")
    return capacity.num_blocks
