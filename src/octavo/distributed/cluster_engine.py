"""The engine behind a front end whose steps are made by workers: a ``ServingEngine`` without weights.

    server ─▶ submit ─▶ Flights ─▶ Control ─▶ workers
                           ▲          │ ready, lost, gone, loads, events
                           └──────────┘

Owns the model's text, the checks of requests, and the life of the cluster: it listens, has workers started, waits for them, and ends them.
Requests on their way are ``flights``', workers ``control``'s, processes the ``Launcher``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

from octavo.config import ConfigError, EngineConfig
from octavo.core.clock import WallClock
from octavo.core.request import Request, SamplingParams
from octavo.distributed.answers import MAX_WINDOW_S
from octavo.distributed.attempts import Loss
from octavo.distributed.attendance import Attendance, Presence, Seen
from octavo.distributed.channel import Address
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.cluster_reports import ClusterReports
from octavo.distributed.control import Control
from octavo.distributed.dispatcher import Dispatcher, QueueFull
from octavo.distributed.fleet import WorkerState
from octavo.distributed.flight import RoutedRequest
from octavo.distributed.flights import Flights
from octavo.distributed.handovers import Handovers
from octavo.distributed.journeys import Journeys
from octavo.distributed.launcher import GrowingLauncher, Launcher
from octavo.distributed.link import AskError, Link
from octavo.distributed.messages import Events, FromWorker, Keys, WorkerLimits
from octavo.distributed.operations import Operations
from octavo.distributed.outlook import Outlook
from octavo.distributed.recorded_cluster import front_end_of
from octavo.distributed.role_router import RoleRouter
from octavo.distributed.roles import RolePools
from octavo.distributed.router import create_router
from octavo.distributed.scaling import Scaling
from octavo.distributed.worker_sizes import WorkerSizes
from octavo.engine.engine import resolve_max_model_len
from octavo.engine.event_stream import EngineUnavailable, EventStream
from octavo.engine.params import PreparedRequest, RequestOptions, RequestPreparer, check_priority
from octavo.engine.serving import Health, Reports

if TYPE_CHECKING:
    from octavo.engine.replay_advice import Replayer
    from octavo.models.loaded import LoadedModel

WATCH_S = 0.25  # between two looks for requests that wait in vain


class ClusterEngine:
    """Life: ``start`` on the event loop, ``ready`` until workers are, ``submit`` and ``abort``, ``stop`` once.

    ``model``: its text is used, its weights are not read. ``config``: what workers run. ``address``: where they connect to; ``secret``:
    what they prove to know. ``launcher``: who starts them (None: somebody else does, with `octavo worker`). ``clean_up`` is called when
    all has ended. ``others_may_join``: workers that the launcher does not start may come as well; ``announce`` is told where
    to, once they can.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        address: Address,
        secret: bytes,
        options: ClusterOptions | None = None,
        launcher: Launcher | None = None,
        clean_up: Callable[[], None] | None = None,
        others_may_join: bool = True,
    ) -> None:
        self.model = model
        self.config = config
        self.options = options or ClusterOptions()
        self.launcher = launcher
        self.clock = WallClock()
        self.draining = False
        self.max_model_len = resolve_max_model_len(config, model.program.context)
        scale, wait_s = self.options.scale, self.options.worker_wait_s
        self.control = Control(config, model, secret, self, self.options.liveness, self.clock.now, bool(scale))
        self.journeys, self.attendance = Journeys(), Attendance(MAX_WINDOW_S)
        prompts = create_router(self.options.router, config.cache.block_size)
        pools = RolePools(prompts, None, config.cache.block_size, self.options.handover.may_borrow)
        router = RoleRouter(prompts, pools, lambda: [link.view for link in self.open_links()], self.clock.now)
        dispatcher = Dispatcher(router, self.options.backpressure)
        self.flights = Flights(dispatcher, self.options, self.open_links, self.clock.now, self.journeys)
        links, handover = self.open_links, self.options.handover
        self.handovers = Handovers(self.flights, router, links, lambda: self.control, handover, self.clock.now)
        self.flights.handovers = self.handovers
        self.cluster = Operations(self.control, self.flights, launcher, self.clock.now, scale)
        self.outlook = Outlook(self.control, self.flights, launcher, wait_s, others_may_join, bool(scale), self.clock.now)
        self.announce: Callable[[str], None] | None = None
        self._clean_up = clean_up
        self._address, self._others_may_join = address, others_may_join
        self._sizes = WorkerSizes(model, config)
        self._changed = asyncio.Event()  # something of the fleet
        self._tasks: list[asyncio.Task[None]] = []
        self._opening: asyncio.Task[None] | None = None
        self._stopped = False
        self._ended = asyncio.Event()

    # --- life ---------------------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.options.scale and not isinstance(self.launcher, GrowingLauncher):
            raise ConfigError("max_workers: whoever starts these workers cannot start more of them")
        self._opening = asyncio.create_task(self._open())
        self._tasks += [self._opening, asyncio.create_task(self._watch())]
        if self.options.scale and isinstance(self.launcher, GrowingLauncher):
            scaling = Scaling(self.options.scale, self.control, self.flights, self.cluster, self.launcher, self.clock.now)
            self._tasks.append(asyncio.create_task(scaling.run()))

    async def _open(self) -> None:
        await self.control.open(self._address)
        if self.announce is not None and self._others_may_join:
            what = "waiting for workers at" if self.launcher is None else "more workers may connect to"
            self.announce(f"{what} {self.control.address}")
        if self.announce is not None and self.options.handover.wire_dtype == "int8" and self.config.cache.kv_cache_dtype != "int8":
            self.announce("kv_wire_dtype int8: KV is rounded on its way between workers, and answers behind it may differ")
        if self.launcher is not None:
            await self.launcher.start(self.control.address)

    async def ready(self) -> None:
        """Wait until the launcher's workers are there, or, without one, any. Raises EngineUnavailable when they cannot be started, or are
        not ready in time; OSError when the address that they are to come to cannot be had."""
        assert self._opening is not None
        self.outlook.starter_waits = True  # and is told of a failure even when it comes to nothing: until all are there
        await self._opening
        try:
            async with asyncio.timeout(self.options.start_s):
                while not self._is_complete():
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), WATCH_S)
                    if self.launcher is not None and self.launcher.trouble is not None:
                        raise EngineUnavailable(f"the workers cannot be started: {self.outlook.last_words() or self.launcher.trouble}")
        except TimeoutError:
            there = ", ".join(f"{link.name} is {link.worker.state.value}" for link in self.control) or "none is there"
            words = f"; {last}" if (last := self.outlook.last_words()) else ""
            raise EngineUnavailable(f"the workers are not ready after {self.options.start_s or 0:g} s: {there}{words}") from None
        self.outlook.starter_waits = False

    def _is_complete(self) -> bool:
        ready = {link.name for link in self.open_links()}
        return bool(ready) and (self.launcher is None or ready.issuperset(self.launcher.names))

    async def stop(self, drain_s: float = 0.0) -> None:
        """See ServingEngine."""
        self.draining = True
        if self._opening is None and not self._stopped:
            self._stopped = True
            if self._clean_up is not None:
                self._clean_up()
        if self._stopped:
            return
        if len(self.flights) and drain_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.flights.idle(), drain_s)
        if self._stopped:
            await self._ended.wait()
            return
        self._stopped = True
        async with contextlib.AsyncExitStack() as ends:  # the last comes first, and each whatever became of those before
            ends.callback(self._ended.set)
            ends.callback(self.flights.faults.flush)
            if self._clean_up is not None:
                ends.callback(self._clean_up)
            if self.launcher is not None:
                ends.push_async_callback(self.launcher.stop)
            ends.callback(self.handovers.close)
            ends.callback(self.control.close)
            ends.push_async_callback(self._end_tasks)
            ends.push_async_callback(self.cluster.stop)
            self.flights.fail_all("the server is shutting down")

    async def _end_tasks(self) -> None:
        """Nothing is opened or started any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        """End requests that wait while no worker comes."""
        while True:
            await asyncio.sleep(WATCH_S)
            self._look()

    def _look(self) -> None:
        """Raises nothing: a fault in one duty ends neither the others nor the watch."""
        for duty in (self._see, self.handovers.tick, self.flights.tick, self.outlook.end_waiting, self.outlook.end_unheld):
            with self.flights.faults.guarded():
                duty()

    def _see(self) -> None:
        """Whom there is of the workers now."""
        self.attendance.look(filter(None, map(_seen, self.control)), self.clock.now())

    # --- what it is ---------------------------------------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        return self.config.model.served_model_name or self.model.name

    @property
    def fingerprint(self) -> str:
        """Of the workers; before the first one is ready, of the model."""
        found = self.control.fingerprint
        return self.model.fingerprint if found is None else found.removeprefix(f"{self.model.fingerprint}/")

    @property
    def limits(self) -> WorkerLimits:
        """Of the worker that holds least. Raises EngineUnavailable before any has been ready."""
        if self._sizes.least is None:
            raise EngineUnavailable("no worker has been ready yet")
        return self._sizes.least.limits

    def open_links(self) -> list[Link]:
        """Workers that take requests, by index."""
        return [link for link in self.control if link.takes_requests]

    def health(self) -> Health:
        """Ready while there is a worker that takes requests; live as long as one may come."""
        if self.draining:
            return Health(True, False, "the server is shutting down")
        if not self.open_links():
            states = ", ".join(f"{one.name} is {'draining' if one.draining else one.state.value}" for one in self.control.fleet)
            is_in_trouble = self.launcher is not None and self.launcher.trouble is not None and not len(self.control.fleet)
            what = "no worker takes requests" if self.outlook.hopeless() is None else "no worker can come any more"
            return Health(not is_in_trouble, False, f"{what}: {states or 'none is there'}")  # anybody may read it: no paths
        return Health(True, True, "ok")

    # --- requests -----------------------------------------------------------------------------------------------------------------------

    def check_params(self, params: SamplingParams) -> SamplingParams:
        """See ServingEngine."""
        return self._available().check(params)

    def prepare_checked(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str | None = None, **options: Unpack[RequestOptions]
    ) -> RoutedRequest:
        """See ServingEngine. The request has to have a name. What names its blocks is worked out here, and not on the event loop."""
        assert request_id is not None
        speculative = options.get("speculative")
        if speculative is not None:
            speculative.validate(self._sizes.methods)
        check_priority(options.get("priority", 0), self.config.scheduler.scheduling_policy)
        request = Request(request_id, prompt_token_ids, params, seed=0, arrival_s=self.clock.now(), **options)
        self._available()
        prepared = self._sizes.prepare(request, [link.view.lengths for link in self.open_links() if link.view.lengths is not None])
        return RoutedRequest.of(prepared, self._named_by(), self.flights.dispatcher.router.wants_keys)

    def _named_by(self) -> tuple[str, int]:
        """How workers name blocks: fingerprint and block size. Not before the first has been ready."""
        least, fingerprint = self._sizes.least, self.control.fingerprint
        assert least is not None and fingerprint is not None
        return fingerprint, least.limits.block_size

    def room(self, num_prompt_tokens: int) -> int:
        """See ServingEngine."""
        return self._available().limits.max_total_tokens - num_prompt_tokens

    def submit(self, prepared: Sequence[PreparedRequest]) -> EventStream:
        """See ServingEngine. Raises EngineUnavailable, also when too many wait."""
        self._available()
        named_by, wants_keys = self._named_by(), self.flights.dispatcher.router.wants_keys
        routed = [  # named anew where workers of other builds have taken the place of all meanwhile
            one if isinstance(one, RoutedRequest) and one.named_by == named_by else RoutedRequest.of(one, named_by, wants_keys)
            for one in prepared
        ]
        stream = EventStream([one.request for one in routed], self.options.stream_limit_bytes)
        try:
            self.flights.submit(routed, stream)
        except QueueFull as error:
            raise EngineUnavailable(str(error), error.retry_after_s) from error
        return stream

    def abort(self, stream: EventStream) -> None:
        """See ServingEngine."""
        self.flights.abort(stream.request_ids)

    def _available(self) -> RequestPreparer:
        if self.draining:
            raise EngineUnavailable("the server is shutting down")
        if self._sizes.preparer is None:
            raise EngineUnavailable("no worker has been ready yet")
        if (why := self.outlook.hopeless()) is not None:
            raise EngineUnavailable(why)
        return self._sizes.preparer

    # --- accounts -----------------------------------------------------------------------------------------------------------------------

    @property
    def num_remembered(self) -> int:
        return self.journeys.capacity

    def blocked(self, request_ids: Iterable[str], begin_s: float, end_s: float) -> None:
        """See ServingEngine."""
        self.journeys.blocked(request_ids, begin_s, end_s)

    def delivered(self, request_ids: Iterable[str], now_s: float) -> None:
        """See ServingEngine."""
        self.journeys.delivered(request_ids, now_s)

    def reports(self, shows_misses: bool, replayer: Replayer | None = None) -> Reports:
        """See ServingEngine."""
        told = self.journeys, self, self.clock, self.model_name, shows_misses, replayer, front_end_of(self.options), self.attendance
        return ClusterReports(*told)

    def roles(self) -> Mapping[str, str]:
        """See ``cluster_reports.Workers``: those that have an engine to ask."""
        return {link.name: link.worker.role for link in self.control if link.ready is not None}

    async def ask(self, worker: str, what: str, args: bytes) -> bytes:
        """See ``cluster_reports.Workers``."""
        link = self.control.find(worker)
        if link is None:
            raise AskError(f"worker {worker} is not here")
        return await self.control.ask(link, what, args)

    # --- what workers do (ControlHandler) ------------------------------------------------------------------------------------------------

    def worker_ready(self, link: Link) -> None:
        assert link.ready is not None
        link.view.lengths = self._sizes.take(link.ready)
        self._see()
        if self.launcher is not None:
            self.launcher.ready(link.name)
        self.cluster.joined(link)
        self.flights.returned(link)
        self._changed.set()
        with self.flights.faults.guarded():
            self.handovers.ready(link)
        self.flights.pump()

    def worker_lost(self, link: Link, loss: Loss) -> None:
        self._see()
        self.flights.lost(link, loss)
        with self.flights.faults.guarded():
            self.handovers.lost(link)
        self._changed.set()

    def worker_gone(self, link: Link) -> None:
        self.flights.dispatcher.gone(link.index)
        self._sizes.gone(other.ready for other in self.control if other.ready is not None)
        self._changed.set()

    def worker_leaves(self, link: Link) -> None:
        self._see()
        self.cluster.let_go(link, for_good=False)  # whoever keeps workers running starts another
        self._changed.set()

    def told(self, link: Link) -> None:
        with self.flights.faults.guarded():
            self.handovers.told(link)
        self.flights.pump()

    def told_keys(self, link: Link, message: Keys) -> None:
        router = self.flights.dispatcher.router
        if message.anew:
            router.gone(link.index)
        router.told(link.index, message.published, message.forgotten)

    def said(self, link: Link, message: FromWorker) -> None:
        if isinstance(message, Events):
            self.flights.take(link, message.events)
        else:
            with self.flights.faults.guarded(self.handovers.about(link, message)):
                self.handovers.said(link, message)

    def is_amid_answers(self) -> bool:
        return self.flights.is_amid_answers()

    def fault(self, error: Exception) -> None:
        self.flights.faults.found(error)


def _seen(link: Link) -> Seen | None:
    """None: it is not trusted with anything."""
    if link.ready is None or link.worker.state is not WorkerState.READY:
        return None
    presence, limits = Presence.OPEN if link.takes_requests else Presence.CLOSED, link.ready.limits
    return Seen(link.name, link.worker.role, link.worker.boot_id, presence, limits.num_kv_blocks, limits.max_model_len)

