"""Keeps the workers of a front end running on Ray: places them, hears when they end, and puts others in their place.

    start ──▶ placed ──run──▶ running ──ended, died, node lost──▶ (pause) ──▶ placed ...
                                 └── released: it is not replaced

One of the two files that import Ray. Ray places and ends processes; it carries no request, no token and no KV. Pauses double with each
worker that ends soon after its start, so that a model which cannot be loaded is not tried many times a second; its reason is logged each
time, and ``trouble`` has it for whoever waits for the first worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reads it when it is imported and when it starts

import ray  # noqa: E402
import ray.exceptions  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

from octavo.config import ConfigError  # noqa: E402
from octavo.distributed.cluster_file import WorkerGroup  # noqa: E402
from octavo.distributed.ray_worker import WorkerActor, WorkerPost  # noqa: E402

logger = logging.getLogger("octavo.distributed")

PLACE_S = 60.0  # after which a worker without a place is spoken of
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 30.0
STEADY_S = 30.0  # a worker that has run so long ends the doubling of pauses
OBJECT_STORE_BYTES = 80 << 20  # of a Ray of our own: nothing is kept in it


class RayError(RuntimeError):
    """Ray cannot be reached or started, or has no place for a worker; the message says which."""


@dataclass(slots=True)
class _Placed:
    """One worker that is kept running."""

    post: WorkerPost
    group: WorkerGroup
    actor: Any = None
    node: str | None = None
    num_starts: int = 0
    released: bool = False
    keeper: asyncio.Task[None] | None = None
    pause_s: float = field(default=FIRST_PAUSE_S)


def connect_ray(address: str | None) -> bool:
    """Join the Ray at ``address`` ("auto": a running one), or with None a running one or else one of this process's own; whether it is.

    Signals are left as they were: Ray takes SIGTERM for itself. Raises RayError.
    """
    quiet: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False}
    with _signals_kept():
        try:
            ray.init(address=address or "auto", **quiet)
            return False
        except ConnectionError as error:
            if address is not None:
                raise RayError(f"ray.address: {address!r} is not allowed; no Ray answers there: {error}") from None
        except (ValueError, RuntimeError) as error:
            raise RayError(f"ray.address: {address!r} is not allowed; {error}") from None
        try:
            ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
        except Exception as error:
            raise RayError(f"Ray could not be started on this machine: {type(error).__name__}: {error}") from error
    return True


def own_address() -> str:
    """By which Ray's other nodes know this one."""
    return str(ray.util.get_node_ip_address())


class RayCluster:
    """``start``, then ``restart`` and ``release`` as wanted, ``stop`` once; all on one event loop. Ray is connected."""

    def __init__(self, posts: Sequence[tuple[WorkerPost, WorkerGroup]], place_s: float = PLACE_S) -> None:
        self._workers = {post.name: _Placed(post, group) for post, group in posts}
        self._place_s = place_s
        self.trouble: str | None = None  # why the last worker that ended did
        self.on_trouble: Callable[[str, str], None] = lambda name, reason: None

    @property
    def nodes(self) -> dict[str, str | None]:
        """Where each worker is; None: nowhere yet."""
        return {name: one.node for name, one in self._workers.items()}

    async def start(self) -> None:
        """Begin to place them, and wait for none. Raises ConfigError for one that no node of the cluster could hold."""
        nodes = await asyncio.to_thread(_alive_nodes)
        for one in self._workers.values():
            _check_fits(one, nodes)
        for one in self._workers.values():
            one.keeper = asyncio.create_task(self._keep(one), name=f"octavo-{one.post.name}")

    async def stop(self) -> None:
        """End all of them, whatever they do. Idempotent."""
        keepers = [one.keeper for one in self._workers.values() if one.keeper is not None]
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)

    def restart(self, name: str) -> None:
        """End a worker's process at once; another takes its place."""
        self._end(self._workers[name])

    def release(self, name: str) -> None:
        """A worker that ends from now on is not replaced."""
        self._workers[name].released = True

    async def _keep(self, one: _Placed) -> None:
        """One worker after another, until it is released or this task is cancelled."""
        while not one.released:
            started_s = time.monotonic()
            try:
                reason = await self._run_once(one)
            finally:
                self._end(one)
            if time.monotonic() - started_s >= STEADY_S:
                one.pause_s = FIRST_PAUSE_S
            if one.released:
                return
            self.trouble = reason
            logger.warning("worker %s has ended: %s; another is started in %.1f s", one.post.name, reason, one.pause_s)
            self.on_trouble(one.post.name, reason)
            await asyncio.sleep(one.pause_s)
            one.pause_s = min(2 * one.pause_s, LONGEST_PAUSE_S)

    async def _run_once(self, one: _Placed) -> str:
        """Place a worker, and wait for its end; why it ended."""
        one.num_starts += 1
        try:
            one.actor = await asyncio.to_thread(_new_actor, one)
            one.node = await self._placed(one)
            logger.info("worker %s runs at %s", one.post.name, one.node)
            return str(await one.actor.run.remote(one.post))
        except ray.exceptions.RayTaskError as error:  # what it raised itself
            return str(error.cause)
        except ray.exceptions.RayError as error:  # its process or its node is gone
            return _first_line(error)

    async def _placed(self, one: _Placed) -> str:
        """Where it is, once it is somewhere. Says so, once, when that takes long."""
        where = asyncio.ensure_future(_awaited(one.actor.where.remote()))
        done, _ = await asyncio.wait([where], timeout=self._place_s)
        if not done:
            what = ", ".join(f"{amount:g} {name}" for name, amount in _demand(one).items())
            message = f"Ray has found no place for worker {one.post.name} ({what}) within {self._place_s:g} s"
            logger.warning("%s", message)
            self.trouble = message
            self.on_trouble(one.post.name, message)
        return str(await where)

    def _end(self, one: _Placed) -> None:
        actor, one.actor, one.node = one.actor, None, None
        if actor is not None and ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor, no_restart=True)


async def _awaited(reference: Any) -> Any:
    return await reference


def _new_actor(one: _Placed) -> Any:
    """Asks Ray for an actor; whether and where it is placed is told later."""
    nodes = _alive_nodes()
    hinted = None if one.group.node is None else next((node for node in nodes if one.group.node in _names(node)), None)
    strategy = "SPREAD" if hinted is None else NodeAffinitySchedulingStrategy(hinted["NodeID"], soft=True)
    options: dict[str, Any] = {"num_cpus": _cpus(one), "resources": dict(one.group.resources), "scheduling_strategy": strategy}
    return ray.remote(WorkerActor).options(max_restarts=0, max_task_retries=0, **options).remote()


def _cpus(one: _Placed) -> int:
    return one.group.cpus or 1


def _demand(one: _Placed) -> dict[str, float]:
    return {"CPU": float(_cpus(one)), **one.group.resources}


def _alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _names(node: dict[str, Any]) -> set[str]:
    """What a hint may call a node."""
    return {str(node[key]) for key in ("NodeManagerAddress", "NodeManagerHostname", "NodeName", "NodeID") if node.get(key)}


def _check_fits(one: _Placed, nodes: list[dict[str, Any]]) -> None:
    """That some node could hold it if it were empty, and that its hint names one."""
    hint = one.group.node
    if hint is not None and not any(hint in _names(node) for node in nodes):
        there = ", ".join(sorted(str(node["NodeManagerAddress"]) for node in nodes))
        raise ConfigError(f"node: {hint!r} is not allowed; Ray has no such node, it has: {there}")
    for name, amount in _demand(one).items():
        most = max((node["Resources"].get(name, 0.0) for node in nodes), default=0.0)
        if amount > most:
            field_name = "cpus" if name == "CPU" else f"resources.{name}"
            raise ConfigError(f"{field_name}: {amount:g} is not allowed; the most that a node of this Ray has is {most:g}")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextlib.contextmanager
def _signals_kept() -> Any:
    """Handlers of SIGTERM as they were; elsewhere than in the main thread Ray leaves them alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
