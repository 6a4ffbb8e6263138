"""What is done to a cluster while it serves: taking a worker out, replacing all of them one after another, saying how it stands.

    drain:     no new requests ─▶ those that it has are done ─▶ told to end ─▶ not replaced      (never the last one)
    undrain:       └────────── it takes requests again            └─────────────────┴─▶ started again, by whoever had started it
    restart:   for each worker: no new requests ─▶ done ─▶ told to end ─▶ another process ─▶ ready ─▶ the next worker

No request fails of either: while a worker is drained the others take what comes, and a last one that is drained alone leaves requests
waiting at the front end until its successor is ready. Owns which workers are on their way out, which processes are not to take requests any
more though they may connect again, and the restart that is going on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.distributed.control import Control
from octavo.distributed.flights import Flights
from octavo.distributed.link import Link
from octavo.engine.serving import UnknownWorker

if TYPE_CHECKING:
    from octavo.distributed.autoscale import ScaleLimits
    from octavo.distributed.launcher import Launcher

logger = logging.getLogger("octavo.cluster")

LOOK_S = 0.05
MAX_REMEMBERED = 256  # processes that were told to go
RESTARTING = "a restart is going on; it ends by itself"


class _CannotRun(RuntimeError):
    """A worker will not come; the message says why."""


class Operations:
    """A ``serving.Cluster``. ``clock`` as the fleet's. ``scale``: roles of which somebody starts workers when there are too few."""

    def __init__(
        self, control: Control, flights: Flights, launcher: Launcher | None, clock: Callable[[], float], scale: Mapping[str, ScaleLimits]
    ) -> None:
        self._control, self._flights, self._launcher, self._now, self._scale = control, flights, launcher, clock, scale
        self._leaving: dict[Link, asyncio.Task[None]] = {}
        self._coming: dict[str, asyncio.Task[None]] = {}  # workers that are started again once their process has ended
        self._sent_away: OrderedDict[str, tuple[str, bool]] = OrderedDict()  # by boot id: name, and whether for good
        self._by_hand: dict[str, None] = {}  # the launcher's workers that were drained by ``drain``, and not undrained
        self._is_stopped = False
        self._restart: asyncio.Task[None] | None = None
        self._done = self._of = 0
        self._restart_error: str | None = None  # of the last one

    # --- status -------------------------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """See Cluster."""
        restart = {"done": self._done, "of": self._of} if self._restart is not None else None
        workers = [self._entry(link) for link in sorted(self._control, key=lambda link: _in_order(link.name))]
        return {
            "workers": workers,
            "absent": self._absent(),
            "waiting": self._flights.num_waiting,
            "restart": restart,
            "restart_error": self._restart_error,
        }

    def _absent(self) -> list[dict[str, Any]]:
        """Workers that the launcher keeps running, or did until they were drained by hand, and that are not here. Where a role's
        number goes by load another has taken the place of a drained one, which is not lacking."""
        launcher = self._launcher
        if launcher is None:
            return []
        found = []
        drained = [name for name in launcher.released if name in self._by_hand and launcher.role_of(name) not in self._scale]
        for name in (*launcher.names, *drained):
            if self._control.find(name) is None:
                trouble = launcher.trouble_of(name)
                state = "drained" if name in self._by_hand else "starting" if trouble is None else "failed"
                reason = self._control.last_words.get(name, trouble or "")
                found.append({"name": name, "state": state, "reason": reason})
        return found

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
        if link is None and worker in self._by_hand:
            raise ValueError(f"{worker} has been drained already, and has ended")
        if link is None:
            raise UnknownWorker(f"{worker!r:.200} is not here; there are: {self._there()}")
        if self._restart is not None:
            raise ValueError(RESTARTING)
        is_followed = link.worker.role in self._scale
        if link.takes_requests and not is_followed and sum(one.takes_requests for one in self._control) == 1:
            raise ValueError(f"{worker} is the last worker that takes requests: those that wait would fail; end the server, or the process")
        if not is_followed and (number := self._num_only_here(link)):
            who = f"{number} waiting {'request' if number == 1 else 'requests'} that no other worker can hold"
            raise ValueError(f"{worker} is needed for {who}; drain it when none waits, or end its process")
        self.let_go(link)
        released = () if self._launcher is None else self._launcher.released
        self._by_hand = {name: None for name in (*self._by_hand, worker) if name in released}  # others cannot be had back from here
        return self._entry(link)

    def _there(self) -> str:
        return ", ".join(link.name for link in self._control) or "none"

    def _num_only_here(self, link: Link) -> int:
        """Waiting requests that this worker can hold and no other one that takes requests: without it they would wait in vain."""
        dispatcher, others = self._flights.dispatcher, [one.view for one in self._control if one.takes_requests and one is not link]
        if not link.takes_requests:
            return 0
        waiting = dispatcher.waiting_requests()
        return sum(dispatcher.holds(route, link.view) and not any(dispatcher.holds(route, view) for view in others) for route in waiting)

    def let_go(self, link: Link, for_good: bool = True) -> None:
        """Give a worker nothing more, and have it end when what it has is done; ``for_good``: without another in its place."""
        if for_good and self._launcher is not None and link.name in self._launcher.names:
            self._launcher.release(link.name)
        _, was_for_good = self._sent_away.pop(link.worker.boot_id, ("", False))
        self._sent_away[link.worker.boot_id] = link.name, for_good or was_for_good
        if len(self._sent_away) > MAX_REMEMBERED:
            self._sent_away.popitem(last=False)
        if link not in self._leaving:
            self._control.fleet.drain(link.worker)
            self._leaving[link] = asyncio.create_task(self._let_go(link))

    def joined(self, link: Link) -> None:
        """A worker is ready. The process of one that was sent away, and whose connection was cut before it had ended, goes on leaving."""
        if (sent := self._sent_away.get(link.worker.boot_id)) is not None:
            self.let_go(link, sent[1])

    async def _let_go(self, link: Link) -> None:
        try:
            await self._empty(link)
            self._control.shut_down(link)
            if self._launcher is not None:
                self._launcher.told_to_end(link.name, link.worker.pid)
        finally:
            if self._leaving.get(link) is asyncio.current_task():  # it may have been kept, and sent away again
                del self._leaving[link]

    async def _empty(self, link: Link) -> None:
        """Drain a worker, and wait until it has nothing and nothing is on its way to it, or it is gone."""
        self._control.fleet.drain(link.worker)
        while self._control.find(link.name) is link and (link.keys or self._num_coming(link)):
            await asyncio.sleep(LOOK_S)

    def _num_coming(self, link: Link) -> int:
        """Hand-offs whose KV it has room for: it is half over, maybe, and would be for nothing."""
        handovers = self._flights.handovers
        return 0 if handovers is None else handovers.desk.num_coming(link.index)

    # --- having them back ---------------------------------------------------------------------------------------------------------------

    async def undrain(self, worker: str) -> dict[str, Any]:
        """See Cluster."""
        if self._restart is not None:
            raise ValueError(RESTARTING)
        if self._is_stopped:
            raise ValueError("the server is shutting down")
        link = self._control.find(worker)
        if link is None or link.is_leaving or worker in self._coming:
            return self._start_again(worker, link)
        if not link.worker.draining:
            raise ValueError(f"{worker} is not being drained; it is {link.worker.state.value}")
        if link.wants_to_leave:
            after = "another takes its place" if self._is_kept(worker) else "start it again where it runs"
            raise ValueError(f"{worker} ends of its own accord ({link.worker.reason or 'it said so'}): {after}")
        self._check_room(worker)
        self._keep(link)
        return self._entry(link)

    def _is_kept(self, name: str) -> bool:
        return self._launcher is not None and name in self._launcher.names

    def _check_room(self, name: str) -> None:
        """ValueError where others have taken its place: cores and memory are shared for so many."""
        launcher = self._launcher
        if launcher is None or name not in launcher.released or (limits := self._scale.get(role := launcher.role_of(name))) is None:
            return
        if sum(launcher.role_of(other) == role for other in launcher.names) >= limits.most:
            why = f"one {'worker' if role == 'both' else f'{role} worker'} more than --max-workers ({limits.most})"
            raise ValueError(f"{name} would be {why}: others have taken its place; drain one of them")

    def _keep(self, link: Link) -> None:
        """It drains, and takes requests again."""
        if (leaving := self._leaving.pop(link, None)) is not None:
            leaving.cancel()
        self._sent_away.pop(link.worker.boot_id, None)
        self._by_hand.pop(link.name, None)
        if self._launcher is not None and link.name in self._launcher.released:
            self._launcher.keep(link.name)
        self._control.fleet.keep(link.worker)
        logger.info("worker %s takes requests again", link.name)
        self._flights.pump()

    def _start_again(self, name: str, link: Link | None) -> dict[str, Any]:
        """It has ended, or (``link``) has been told to: have another process of its name, if its launcher can start one."""
        launcher = self._launcher
        if launcher is None or name not in launcher.released:
            raise self._not_drained(name, link)
        self._check_room(name)
        self._by_hand.pop(name, None)
        for boot_id, (known, _) in self._sent_away.items():
            if known == name:  # should that process connect once more, it goes on leaving, and does not take this back
                self._sent_away[boot_id] = name, False
        logger.info("worker %s is started again", name)
        if not launcher.keep(name) and name not in self._coming:  # whoever waits for its end looks then whether it is kept
            self._coming[name] = asyncio.create_task(self._follow(launcher, name))
        processes = [boot_id for boot_id, (known, _) in self._sent_away.items() if known == name]
        processes += [] if link is None else [link.worker.boot_id]
        return {
            "name": name, "role": launcher.role_of(name), "state": "starting", "draining": False, "reason": "it is started again",
            "host": None, "pid": None, "boot_id": None, "attempts": 0, "age_s": 0.0, "load": None,
            "follows": processes[-1] if processes else None,
        }  # fmt: skip

    def _not_drained(self, name: str, link: Link | None) -> ValueError:
        """Why a worker that takes no requests is not started again from here."""
        launcher = self._launcher
        if launcher is not None and name in launcher.names:
            trouble = launcher.trouble_of(name)
            what = "it is being started" if trouble is None else f"it cannot run: {self._control.last_words.get(name, trouble)}"
            return ValueError(f"{name} is not drained; {what}")
        if link is not None or any(name == known for known, _ in self._sent_away.values()):
            has = "has ended" if link is None else "has been told to end"
            how = f"start it there again (octavo worker --connect ... --name {name}): it joins by itself, and takes requests"
            return ValueError(f"{name} came from elsewhere and {has}; {how}")
        drained = ", ".join([one for one in self._by_hand if self._control.find(one) is None][-8:]) or "none"
        return UnknownWorker(f"{name!r:.200} is not here; there are: {self._there()}; drained: {drained}")

    async def _follow(self, launcher: Launcher, name: str) -> None:
        """Another process once the one that there is has ended."""
        try:
            await launcher.replace(name)
        except Exception as error:
            logger.error("worker %s could not be started again", name, exc_info=error)
        finally:
            del self._coming[name]

    # --- replacing all of them ------------------------------------------------------------------------------------------------------------

    async def restart(self) -> dict[str, Any]:
        """See Cluster."""
        if self._launcher is None:
            raise ValueError("the workers were started elsewhere, and can only be replaced there")
        if self._restart is not None:
            raise ValueError("a restart is going on already")
        if self._coming:
            raise ValueError(f"{', '.join(self._coming)} is being started again; a restart can begin when that is done")
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
                    self.let_go(before, for_good=False)  # also when it is cut off meanwhile and comes back: ``joined``
                    await self._leaving[before]
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
        self._is_stopped = True
        tasks = [*self._leaving.values(), *self._coming.values(), *([] if self._restart is None else [self._restart])]
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _in_order(name: str) -> list[tuple[int, str]]:
    """worker-2 before worker-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]
