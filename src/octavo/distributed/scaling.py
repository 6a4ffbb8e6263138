"""Has as many workers run as the load needs: asks the scalers once a second, and does what they say.

    START: one more process      DRAIN: nothing new      KEEP: it gets requests again      STOP: it has drained, and ends for good

Owns what the scalers are told of a cluster: what waits, what came, and what it takes of workers whose steps are full (``full_step``): a
worker with one stream is at work all the time, and could have many more. Whose work it is, ``pool_scaling`` knows. Workers of a role that
cannot run are given up while others of it serve, and another is started in place after a pause, which doubles with each; the other roles'
go on. What the scalers say is the launcher's, the fleet's and the operations' to carry out; no request fails of it, since only empty
workers end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.distributed.autoscale import ScaleAction, ScaleLimits
from octavo.distributed.control import Control
from octavo.distributed.flights import Flights
from octavo.distributed.link import Link
from octavo.distributed.operations import Operations
from octavo.distributed.pool_scaling import ClusterLoad, PoolScaling, PoolWorker

if TYPE_CHECKING:
    from octavo.distributed.handovers import Handovers
    from octavo.distributed.launcher import GrowingLauncher

logger = logging.getLogger("octavo.cluster")

ASK_S = 1.0
FIRST_REST_S = 10.0  # after a worker that cannot run: another would hardly fare better
LONGEST_REST_S = 300.0


@dataclass(slots=True)
class _Starts:
    """Of one role. ``added``: workers that were started here and have not been ready."""

    added: set[str] = field(default_factory=set)
    has_served: bool = False
    rest_s: float = 0.0
    rests_until_s: float = 0.0


class Scaling:
    """``run`` for as long as the cluster serves. ``limits`` by role; ``clock`` as the fleet's."""

    def __init__(
        self,
        limits: Mapping[str, ScaleLimits],
        control: Control,
        flights: Flights,
        operations: Operations,
        launcher: GrowingLauncher,
        clock: Callable[[], float],
    ) -> None:
        self._pools = PoolScaling(limits)
        self._control, self._flights, self._operations, self._launcher, self._now = control, flights, operations, launcher, clock
        self._starts = {role: _Starts() for role in limits}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(ASK_S)
            try:
                self.look()
            except Exception as error:  # a fault of ours must not end the scaling for good
                logger.error("the number of workers could not be looked after", exc_info=error)

    def look(self) -> None:
        """Ask what to do now, and do it. Not while a restart goes on, which takes workers out by itself. Workers that the launcher does
        not keep running are counted on, and left alone: who has started them would have them back, or wonder."""
        links = {link.index: link for link in self._control if not self._operations.is_leaving(link)}  # those come and go without it
        kept = set(self._launcher.names)
        workers, load, now = [self._worker(link, link.name in kept) for link in links.values()], self._load(), self._now()
        if self._operations.is_restarting:
            self._pools.came(workers, load, now)
            return
        for role in self._starts:
            workers += [PoolWorker(-1 - i, role, "starting") for i in range(self._num_coming(role, links.values()))]
        for role, step in self._pools.decide(workers, load, now):
            link = None if step.index is None else links.get(step.index)
            if step.action is ScaleAction.START:
                self._start(role)
            elif link is not None:
                self._change(step.action, link)

    # --- what the scalers are told --------------------------------------------------------------------------------------------------------

    def _load(self) -> ClusterLoad:
        flights, handovers = self._flights, self._flights.handovers
        num_without_room, without_room_s = (0, 0.0) if handovers is None else handovers.desk.without_room(self._now())
        return ClusterLoad(
            flights.num_prompt_tokens,
            flights.num_output_tokens,
            flights.begun.num,
            flights.num_ended,
            len(flights) - flights.num_waiting,
            flights.num_waiting,
            flights.num_waiting_tokens,
            num_without_room,
            without_room_s,
            flights.begun.num_tokens,
            flights.begun.num_cached_tokens,
        )

    def _worker(self, link: Link, is_own: bool) -> PoolWorker:
        handovers, load, view = self._flights.handovers, link.load, link.view
        num_coming, num_foreign, is_mixed = (0, 0, False) if handovers is None else _borrowed(handovers, link)
        state = "draining" if link.worker.draining else "ready" if link.takes_requests else "starting"
        prices = load.prompt_token_s, load.output_token_s
        there = (len(link.keys), num_coming, load.num_waiting, num_foreign)
        return PoolWorker.of(link.index, view, view.num_blocks, link.worker.role, state, *there, is_mixed, prices, is_own)

    def _num_coming(self, role: str, links: Collection[Link]) -> int:
        """Workers of a role that are being started. While others of it serve, or have, those that cannot run are given up: they would be
        counted on for ever. That of the first none can run is the launcher's to tell whoever waits for them."""
        starts, serving = self._starts[role], {link.name: link.worker.role for link in links if link.takes_requests}
        serving_so = {name for name, its in serving.items() if its == role}
        starts.has_served |= bool(serving_so)
        if serving_so & starts.added:
            starts.added -= serving_so
            starts.rest_s = 0.0
        there = {link.name for link in links}
        coming = {name for name in self._launcher.names if name not in there and self._launcher.role_of(name) == role}
        if serving and starts.has_served:
            for name in sorted(coming):
                if (trouble := self._launcher.trouble_of(name)) is not None:
                    coming.remove(name)
                    self._give_up(role, name, trouble)
        return len(coming)

    # --- what is done ---------------------------------------------------------------------------------------------------------------------

    def _give_up(self, role: str, name: str, trouble: str) -> None:
        starts = self._starts[role]
        starts.rest_s = min(max(FIRST_REST_S, 2.0 * starts.rest_s), LONGEST_REST_S)
        starts.rests_until_s = self._now() + starts.rest_s
        which = "" if role == "both" else f" {role}"
        logger.error("%s; it is given up, and no other%s worker is started within %g s", trouble, which, starts.rest_s)
        starts.added.discard(name)
        self._launcher.release(name)

    def _start(self, role: str) -> None:
        if self._now() >= self._starts[role].rests_until_s:
            name = self._launcher.add(role)
            self._starts[role].added.add(name)
            logger.info("worker %s is started: there is more to do", name)

    def _change(self, action: ScaleAction, link: Link) -> None:
        logger.info("worker %s: %s", link.name, action.value)
        if action is ScaleAction.DRAIN:
            self._control.fleet.drain(link.worker)
        elif action is ScaleAction.KEEP:
            self._control.fleet.keep(link.worker)
        elif action is ScaleAction.STOP:
            self._operations.let_go(link)


def _borrowed(handovers: Handovers, link: Link) -> tuple[int, int, bool]:
    """(hand-offs on their way to it, requests of another role there, whether it is borrowed)"""
    pools = handovers.pools
    return handovers.desk.num_coming(link.index), pools.num_foreign(link.index), pools.is_mixed(link.index)
