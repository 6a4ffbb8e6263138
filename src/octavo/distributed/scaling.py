"""Has as many workers run as the load needs: asks the autoscaler once a second, and does what it says.

    START: one more process      DRAIN: nothing new      KEEP: it gets requests again      STOP: it has drained, and ends for good

Owns what the autoscaler is told: the seconds of work that come with requests, and those that wait, by what a token takes of a worker whose
steps are full (``full_step``): a worker with one stream is at work all the time, and could have many more. A worker that cannot run is
given up while others serve, and another is started in its place after a pause, which doubles with each. What it does is the launcher's,
the fleet's and the operations' to carry out; no request fails of it, since only empty workers end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, runtime_checkable

from octavo.distributed.autoscale import Autoscaler, ScaleAction, ScaledWorker, ScaleLimits
from octavo.distributed.control import Control, Link
from octavo.distributed.flights import Flights
from octavo.distributed.operations import Operations

logger = logging.getLogger("octavo.cluster")

ASK_S = 1.0
FIRST_REST_S = 10.0  # after a worker that cannot run: another would hardly fare better
LONGEST_REST_S = 300.0


@runtime_checkable
class GrowingLauncher(Protocol):
    """A launcher that can start more workers."""

    @property
    def names(self) -> Sequence[str]:
        """Of the workers that it keeps running."""
        ...

    def add(self, role: str) -> str:
        """Start one more; returns its name."""
        ...

    def trouble_of(self, name: str) -> str | None:
        """Why it can never run, as far as is known."""
        ...

    def release(self, name: str) -> None:
        """It is not kept running any more."""
        ...


class Scaling:
    """``run`` for as long as the cluster serves. ``clock`` as the fleet's."""

    def __init__(
        self,
        limits: ScaleLimits,
        control: Control,
        flights: Flights,
        operations: Operations,
        launcher: GrowingLauncher,
        clock: Callable[[], float],
    ) -> None:
        self._scaler = Autoscaler(limits)
        self._control, self._flights, self._operations, self._launcher, self._now = control, flights, operations, launcher, clock
        self._num_prompt = self._num_output = 0  # tokens of all requests that came, when it was last asked
        self._added = set[str]()  # workers that were started here and have not been ready
        self._rest_s = self._rests_until_s = 0.0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(ASK_S)
            try:
                self.look()
            except Exception as error:  # a fault of ours must not end the scaling for good
                logger.error("the number of workers could not be looked after", exc_info=error)

    def look(self) -> None:
        """Ask what to do now, and do it. Not while a restart goes on, which takes workers out by itself."""
        flights, (prompt_s, output_s) = self._flights, self._prices()
        came_s = (flights.num_prompt_tokens - self._num_prompt) * prompt_s + (flights.num_output_tokens - self._num_output) * output_s
        self._scaler.arrived(came_s)
        self._num_prompt, self._num_output = flights.num_prompt_tokens, flights.num_output_tokens
        if self._operations.is_restarting:
            return
        links = {link.index: link for link in self._control if not self._operations.is_leaving(link)}  # those come and go without it
        answer_s = output_s * flights.num_output_tokens / max(1, flights.num_ended + len(flights) - flights.num_waiting)
        workers = [
            ScaledWorker(link.index, _state(link), link.view.pending_s + link.load.num_waiting * answer_s, len(link.keys))
            for link in links.values()
        ]
        workers += [ScaledWorker(-1 - i, "starting") for i in range(self._num_coming(links.values()))]
        held_back_s = flights.num_waiting_tokens * prompt_s + flights.num_waiting * answer_s
        for step in self._scaler.decide(workers, held_back_s, self._now()):
            link = None if step.index is None else links.get(step.index)
            if step.action is ScaleAction.START:
                self._start()
            elif link is not None:
                self._change(step.action, link)

    def _num_coming(self, links: Collection[Link]) -> int:
        """Workers that are being started. While others serve, those that cannot run are given up: they would be counted on for ever."""
        serving = {link.name for link in links if link.takes_requests}
        if serving & self._added:
            self._added -= serving
            self._rest_s = 0.0
        coming = set(self._launcher.names) - {link.name for link in links}
        if serving:
            for name in sorted(coming):
                if (trouble := self._launcher.trouble_of(name)) is not None:
                    coming.remove(name)
                    self._give_up(name, trouble)
        return len(coming)

    def _give_up(self, name: str, trouble: str) -> None:
        self._rest_s = min(max(FIRST_REST_S, 2.0 * self._rest_s), LONGEST_REST_S)
        self._rests_until_s = self._now() + self._rest_s
        logger.error("%s; it is given up, and no other is started within %g s", trouble, self._rest_s)
        self._added.discard(name)
        self._launcher.release(name)

    def _start(self) -> None:
        if self._now() >= self._rests_until_s:
            name = self._launcher.add("both")
            self._added.add(name)
            logger.info("worker %s is started: there is more to do", name)

    def _change(self, action: ScaleAction, link: Link) -> None:
        logger.info("worker %s: %s", link.name, action.value)
        if action is ScaleAction.DRAIN:
            self._control.fleet.drain(link.worker)
        elif action is ScaleAction.KEEP:
            self._control.fleet.keep(link.worker)
        elif action is ScaleAction.STOP:
            self._operations.let_go(link)

    def _prices(self) -> tuple[float, float]:
        """Seconds that a prompt token and an output token take of a worker whose steps are full, as the workers say; 0 before any has."""
        told = [link.load for link in self._control if link.load.prompt_token_s or link.load.output_token_s]
        num = max(1, len(told))
        return sum(load.prompt_token_s for load in told) / num, sum(load.output_token_s for load in told) / num


def _state(link: Link) -> str:
    if link.worker.draining:
        return "draining"
    return "ready" if link.takes_requests else "starting"
