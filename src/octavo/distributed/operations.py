"""What is done to a cluster while it serves: taking a worker out, replacing all of them one after another, saying how it stands.

    drain:     no new requests ─▶ those that it has are done ─▶ told to end ─▶ not replaced      (never the last one)
    restart:   for each worker: no new requests ─▶ done ─▶ told to end ─▶ another process ─▶ ready ─▶ the next worker

No request fails of either: while a worker is drained the others take what comes, and a last one that is drained alone leaves requests
waiting at the front end until its successor is ready. Owns which workers are on their way out, and the restart that is going on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Container
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.distributed.control import Control, Link
from octavo.distributed.flights import Flights
from octavo.engine.serving import UnknownWorker

if TYPE_CHECKING:
    from octavo.distributed.cluster_engine import Launcher

logger = logging.getLogger("octavo.cluster")

LOOK_S = 0.05


class _CannotRun(RuntimeError):
    """A worker will not come; the message says why."""


class Operations:
    """A ``serving.Cluster``. ``clock`` as the fleet's. ``grows``: roles of which somebody starts workers when there are too few."""

    def __init__(
        self, control: Control, flights: Flights, launcher: Launcher | None, clock: Callable[[], float], grows: Container[str] = ()
    ) -> None:
        self._control, self._flights, self._launcher, self._now, self._grows = control, flights, launcher, clock, grows
        self._leaving: dict[Link, asyncio.Task[None]] = {}
        self._restart: asyncio.Task[None] | None = None
        self._done = self._of = 0
        self._restart_error: str | None = None  # of the last one

    # --- status -------------------------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """See Cluster."""
        restart = {"done": self._done, "of": self._of} if self._restart is not None else None
        workers = [self._entry(link) for link in self._control]
        return {"workers": workers, "waiting": self._flights.num_waiting, "restart": restart, "restart_error": self._restart_error}

    def _entry(self, link: Link) -> dict[str, Any]:
        worker, load, limits = link.worker, link.load, None if link.ready is None else link.ready.limits
        shown = None
        if limits is not None:
            shown = {
                "running": load.num_running,
                "waiting": load.num_waiting,
                "pending_tokens": load.pending_tokens,
                "used_blocks": load.num_used_blocks,
                "kv_blocks": limits.num_kv_blocks,
                "offered": load.num_offered,
                "reserved": load.num_reserved,
                "steps": load.num_steps,
            }
        return {
            "name": worker.name,
            "role": worker.role,
            "state": worker.state.value,
            "draining": worker.draining,
            "reason": worker.reason,
            "host": worker.host,
            "pid": worker.pid,
            "boot_id": worker.boot_id,
            "attempts": len(link.keys),
            "age_s": round(self._now() - worker.since_s, 3),
            "load": shown,
        }

    @property
    def is_restarting(self) -> bool:
        return self._restart is not None

    def is_leaving(self, link: Link) -> bool:
        """It has been told, or is about to be told, to end."""
        return link in self._leaving or link.is_leaving

    # --- taking workers out -------------------------------------------------------------------------------------------------------------

    async def drain(self, worker: str) -> dict[str, Any]:
        """See Cluster."""
        link = self._control.find(worker)
        if link is None:
            there = ", ".join(one.name for one in self._control) or "none"
            raise UnknownWorker(f"{worker!r} is not here; there are: {there}")
        if self._restart is not None:
            raise ValueError("a restart is going on; it ends by itself")
        is_followed = link.worker.role in self._grows
        if link.takes_requests and not is_followed and sum(one.takes_requests for one in self._control) == 1:
            raise ValueError(f"{worker} is the last worker that takes requests: those that wait would fail; end the server, or the process")
        if not is_followed and (number := self._num_only_here(link)):
            who = f"{number} waiting {'request' if number == 1 else 'requests'} that no other worker can hold"
            raise ValueError(f"{worker} is needed for {who}; drain it when none waits, or end its process")
        self.let_go(link)
        return self._entry(link)

    def _num_only_here(self, link: Link) -> int:
        """Waiting requests that this worker can hold and no other one that takes requests: without it they would wait in vain."""
        dispatcher, others = self._flights.dispatcher, [one.view for one in self._control if one.takes_requests and one is not link]
        if not link.takes_requests:
            return 0
        waiting = dispatcher.waiting_requests()
        return sum(dispatcher.holds(route, link.view) and not any(dispatcher.holds(route, view) for view in others) for route in waiting)

    def let_go(self, link: Link, for_good: bool = True) -> None:
        """Give a worker nothing more, and have it end when what it has is done; ``for_good``: without another in its place."""
        if link not in self._leaving:
            if for_good and self._launcher is not None and link.name in self._launcher.names:
                self._launcher.release(link.name)
            self._control.fleet.drain(link.worker)
            self._leaving[link] = asyncio.create_task(self._let_go(link))

    async def _let_go(self, link: Link) -> None:
        try:
            await self._empty(link)
            self._control.shut_down(link)
        finally:
            del self._leaving[link]

    async def _empty(self, link: Link) -> None:
        """Drain a worker, and wait until it has nothing, or is gone."""
        self._control.fleet.drain(link.worker)
        while link.keys and self._control.find(link.name) is link:
            await asyncio.sleep(LOOK_S)

    # --- replacing all of them ------------------------------------------------------------------------------------------------------------

    async def restart(self) -> dict[str, Any]:
        """See Cluster."""
        if self._launcher is None:
            raise ValueError("the workers were started elsewhere, and can only be replaced there")
        if self._restart is not None:
            raise ValueError("a restart is going on already")
        names = list(self._launcher.names)
        if not names:
            raise ValueError("all workers have been drained for good, and there is none to replace")
        self._done, self._of, self._restart_error = 0, len(names), None
        self._restart = asyncio.create_task(self._replace_all(self._launcher, names))
        return self.status()

    async def _replace_all(self, launcher: Launcher, names: list[str]) -> None:
        name = ""
        try:
            for name in names:
                before = None
                if launcher.trouble_of(name) is None:
                    before = await self._comes(launcher, name, partial(self._control.find, name))
                    await self._empty(before)
                    self._control.shut_down(before)
                await launcher.replace(name)
                await self._comes(launcher, name, partial(self._successor, name, before))
                self._done += 1
                logger.info("worker %s has been replaced", name)
        except Exception as error:
            expected = isinstance(error, _CannotRun)
            why = f"worker {name}: {str(error) if expected else f'{type(error).__name__}: {error}'}"
            self._restart_error = f"the restart has ended early, after {self._done} of {self._of} workers: {why}"
            logger.error("%s; those that are there serve on", self._restart_error, exc_info=None if expected else error)
        finally:
            self._restart = None

    async def _comes(self, launcher: Launcher, name: str, find: Callable[[], Link | None]) -> Link:
        """Wait for a worker: one that is being started is not ended before it could be told to. Raises _CannotRun when it never comes."""
        while (link := find()) is None:
            if (trouble := launcher.trouble_of(name)) is not None:
                raise _CannotRun(self._control.last_words.get(name, trouble))
            await asyncio.sleep(LOOK_S)
        return link

    def _successor(self, name: str, before: Link | None) -> Link | None:
        """The worker of that name that takes requests in place of ``before``, if there was one."""
        link = self._control.find(name)
        return link if link is not None and link is not before and link.takes_requests else None

    async def stop(self) -> None:
        """Leave off whatever is going on."""
        tasks = [*self._leaving.values(), *([] if self._restart is None else [self._restart])]
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
