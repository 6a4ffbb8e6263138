"""Keeps the workers of a front end running on Ray: has them placed, hears when they end, and puts others in their place.

    start ──▶ placed ──run──▶ running ── ended, died, node lost ──▶ pause ──▶ placed ...
                                 └────── released ──▶ (kept again) ──▶ placed ...

A ``GrowingLauncher``, and one of the two files that import Ray. Ray places and ends processes; it carries no request, no token and no KV.
Pauses double with each worker that ends soon after its start, so that a model which cannot be loaded is not tried many times a second. A
worker that says that it can never work is not tried again; that, and one that fails again and again, is ``trouble``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Ray reads these when it starts: by default it would tell of its use, and give its workers what others leave of the processors.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")

import ray  # noqa: E402
import ray.exceptions  # noqa: E402
import ray.util  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

from octavo.distributed.channel import Address  # noqa: E402
from octavo.distributed.cluster_file import WorkerGroup  # noqa: E402
from octavo.distributed.launcher import FIRST_PAUSE_S, LONGEST_PAUSE_S, MAX_FAILED, KeptWorker, KeptWorkers, cancelled  # noqa: E402
from octavo.distributed.placing import Node, alive, check_fits, demand, equal_share, find_node, named, shown  # noqa: E402
from octavo.distributed.ray_worker import WorkerActor, WorkerEnd  # noqa: E402
from octavo.distributed.worker import WorkerOptions, WorkerPost  # noqa: E402

logger = logging.getLogger("octavo.cluster")

PLACE_S = 60.0  # after which a worker without a place is spoken of
END_S = 15.0  # for a worker that was told to end
STEADY_S = 30.0  # a worker that has run so long ends the doubling of pauses
OBJECT_STORE_BYTES = 80 << 20  # of a Ray of our own, which keeps nothing in it; Ray asks for 75 MiB at least


class RayUnavailable(RuntimeError):
    """Ray can neither be reached nor started; the message says why."""


@dataclass(eq=False)
class _Worker(KeptWorker):
    """One of ``group``. ``wanted``: another one at once, after this. ``num_failed``: starts in a row that ended by the worker's own
    error."""

    group: WorkerGroup = field(kw_only=True)
    actor: Any = None
    node: str | None = None
    wanted: bool = False

    @classmethod
    def of(cls, name: str, group: WorkerGroup) -> _Worker:
        return cls(name, group.role, group=group)

    def begin_anew(self) -> None:
        super().begin_anew()
        self.wanted = False


def connect_ray(address: str | None) -> bool:
    """Join the Ray at ``address`` ("auto": a running one). With None that at $RAY_ADDRESS; without such a running one, or else one that is
    started. Whether one was started.

    Signals are left as they were: Ray takes SIGTERM for itself. Raises RayUnavailable, also for a $RAY_ADDRESS where there is none: all
    workers would be on this machine, and nobody know.
    """
    quiet: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False}
    with _signals_kept():
        try:
            ray.init(address=address or "auto", **quiet)
            return False
        except (ConnectionError, ValueError, RuntimeError) as error:
            said = os.environ.get("RAY_ADDRESS")
            if address is not None or said or not isinstance(error, ConnectionError):
                name, value = ("$RAY_ADDRESS", said) if address is None and said else ("ray.address", address or "auto")
                raise RayUnavailable(f"{name}: {value!r} is not allowed; no Ray can be joined there: {error}") from error
        try:
            ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
        except Exception as error:
            raise RayUnavailable(f"Ray could not be started on this machine: {type(error).__name__}: {error}") from error
    return True


def disconnect_ray() -> None:
    """Leave Ray, and end it where it was started by ``connect_ray``. Idempotent."""
    with _signals_kept():
        ray.shutdown()


def own_address() -> str:
    """By which Ray's other nodes know this machine."""
    return str(ray.util.get_node_ip_address())


class RayLauncher(KeptWorkers[_Worker]):
    """The ``GrowingLauncher`` of workers on Ray, which is connected. ``groups``: as many workers as they say, named as ``placing.named``
    does; those that are added are as the first of their role. ``threads``: of each (None: as many as it has cores). ``most``: so many there
    may be, and an equal share of the cores is for so many."""

    def __init__(
        self, groups: Sequence[WorkerGroup], secret: bytes, threads: int | None = None, place_s: float = PLACE_S, most: int = 0
    ) -> None:
        super().__init__({name: _Worker.of(name, group) for name, group in named(groups).items()})
        self._groups, self._most = groups, most
        self._secret, self._threads = secret, threads
        self._place_s = place_s
        self._address = Address()
        self._share = 0  # cores of workers whose group does not say

    @property
    def nodes(self) -> Mapping[str, str | None]:
        """The address of each worker's node; None: it is nowhere."""
        return {worker.name: worker.node for worker in self._workers.values()}

    async def start(self, address: Address) -> None:
        """See Launcher. Raises PlacingError for a worker that no node could hold."""
        self._address = address
        nodes = await asyncio.to_thread(_alive_nodes)
        self._share = equal_share(nodes, max(self._most, len(self._workers)))
        for worker in self._workers.values():
            check_fits(worker.group, self._share, nodes)
        for worker in self._workers.values():
            self._begin(worker)

    def add(self, role: str) -> str:
        """See GrowingLauncher. It waits for a place, as all do."""
        group = next(group for group in self._groups if group.role == role)
        name = self._new_names.next(role)
        self._workers[name] = _Worker.of(name, group)
        self._begin(self._workers[name])
        return name

    def ready(self, name: str) -> None:
        """It works: should it end, another is placed soon."""
        if name in self._workers:
            worker = self._workers[name]
            worker.was_ready, worker.trouble, worker.is_hopeless = True, None, False

    async def replace(self, name: str) -> None:
        """See Launcher. A process that does not end by itself is ended after ``END_S``."""
        worker = self._workers[name]
        worker.wanted = True
        await self._end_keeper(worker, END_S)
        if not worker.released:
            self._begin_anew(worker)

    async def stop(self) -> None:
        """See Launcher. Workers that have been told to end get ``END_S`` for it."""
        keepers = [worker.keeper for worker in self._workers.values() if worker.keeper is not None]
        for worker in self._workers.values():
            worker.wanted = True  # no pause, and no other
            if worker.node is None and worker.keeper is not None:
                worker.keeper.cancel()  # it has no process, and none is to be waited for
        if keepers:
            await asyncio.wait(keepers, timeout=END_S)
        await asyncio.gather(*map(cancelled, keepers))
        await self._cancel_ends()

    async def _see_to_end(self, worker: _Worker) -> None:
        """See KeptWorkers. Its keeper hears of the end."""
        actor = worker.actor
        await asyncio.sleep(END_S)
        if actor is not None and worker.actor is actor:
            logger.warning("worker %s at %s does not end and is ended", worker.name, worker.node)
            _end(actor)

    async def _keep(self, worker: _Worker) -> None:
        """One process after another, until the worker is released or replaced, or this task is cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            started_s = time.monotonic()
            try:
                end = await self._run_once(worker)
            finally:
                _kill(worker)
            if worker.released or worker.wanted:
                return
            if worker.was_ready or time.monotonic() - started_s >= STEADY_S:
                worker.num_failed, worker.was_ready, pause_s = 0, False, FIRST_PAUSE_S
            if end.hopeless or worker.num_failed >= MAX_FAILED:
                worker.trouble = f"{worker.name}: {end.reason}"
            if end.hopeless:
                worker.is_hopeless = True
                logger.error("%s cannot run and is not tried again: %s", worker.name, end.reason)
                return
            logger.warning("%s has ended: %s; another is started in %.1f s", worker.name, end.reason, pause_s)
            await asyncio.sleep(pause_s)
            if worker.released:
                return
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _run_once(self, worker: _Worker) -> WorkerEnd:
        """From the asking for a place to the end of the process; why it ended."""
        cpus = int(demand(worker.group, self._share)["CPU"])
        options = WorkerOptions(worker.name, worker.group.role, threads=self._threads or max(1, cpus))
        try:
            worker.actor = await asyncio.to_thread(_new_actor, worker.group, cpus)
            worker.node = await self._placed(worker)
            logger.info("%s is at %s", worker.name, worker.node)
            end: WorkerEnd = await worker.actor.run.remote(WorkerPost(self._address, self._secret, options))
            return end
        except ray.exceptions.RayTaskError as error:  # its own error, or that of importing it
            worker.num_failed += 1
            return WorkerEnd(f"{type(error.cause).__name__}: {error.cause}")
        except ray.exceptions.RayError as error:  # its process or its node is gone
            worker.num_failed = 0
            return WorkerEnd(_first_line(error))
        except Exception as error:  # whatever else Ray's client may raise: a keeper that ended of it would end its worker for good
            worker.num_failed += 1
            return WorkerEnd(_first_line(error))

    async def _placed(self, worker: _Worker) -> str:
        """Where it is, once it is somewhere; says so when that takes long."""
        where = asyncio.ensure_future(_awaited(worker.actor.where.remote()))
        done, _ = await asyncio.wait([where], timeout=self._place_s)
        if not done:
            wanted = shown(demand(worker.group, self._share))
            logger.warning("Ray has found no place for %s (%s) within %g s; it goes on looking", worker.name, wanted, self._place_s)
        try:
            return str(await where)
        finally:
            where.cancel()


async def _awaited(reference: Any) -> Any:
    return await reference


def _new_actor(group: WorkerGroup, cpus: int) -> Any:
    """Asks Ray for an actor; whether and where it is placed is told later."""
    hinted = None if group.node is None else find_node(_alive_nodes(), group.node)
    strategy = "SPREAD" if hinted is None else NodeAffinitySchedulingStrategy(hinted["NodeID"], soft=True)
    remote = ray.remote(num_cpus=cpus, resources=dict(group.resources), max_restarts=0, max_task_retries=0)(WorkerActor)
    return remote.options(scheduling_strategy=strategy).remote()


def _kill(worker: _Worker) -> None:
    actor, worker.actor, worker.node = worker.actor, None, None
    if actor is not None:
        _end(actor)


def _end(actor: Any) -> None:
    if ray.is_initialized():
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(actor, no_restart=True)


def _alive_nodes() -> list[Node]:
    return alive(ray.nodes())


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """The handler of SIGTERM as it was; elsewhere than in the main thread Ray leaves it alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
