"""Has as many workers run as the load needs: asks the autoscaler once a second, and does what it says.

    START: one more process      DRAIN: nothing new      KEEP: it gets requests again      STOP: it has drained, and ends for good

Owns what the autoscaler is told: the seconds of work that come with requests, and those that wait, by what a token takes of a worker whose
steps are full (``full_step``): a worker with one stream is at work all the time, and could have many more. What
it does is the launcher's, the fleet's and the operations' to carry out; no request fails of it, since only empty workers end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from octavo.distributed.autoscale import Autoscaler, ScaleAction, ScaledWorker, ScaleLimits
from octavo.distributed.control import Control, Link
from octavo.distributed.flights import Flights
from octavo.distributed.operations import Operations

logger = logging.getLogger("octavo.cluster")

ASK_S = 1.0


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
        num_coming = len(set(self._launcher.names) - {link.name for link in links.values()})
        workers += [ScaledWorker(-1 - i, "starting") for i in range(num_coming)]
        held_back_s = flights.num_waiting_tokens * prompt_s + flights.num_waiting * answer_s
        for step in self._scaler.decide(workers, held_back_s, self._now()):
            link = None if step.index is None else links.get(step.index)
            if step.action is ScaleAction.START:
                logger.info("worker %s is started: there is more to do", self._launcher.add("both"))
            elif link is not None:
                self._change(step.action, link)

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
