"""Whether requests that wait for a worker wait in vain, and for how long they may.

    a worker takes requests, or follows one that drains ─▶ they wait as long as it takes
    none is there, and one may come                     ─▶ for ``wait_s``
    none is there, and none can come any more           ─▶ not at all: they end, and new ones are refused, with the reason

Time is counted only while this process looks: a front end that was itself stopped for a while, and whose workers have left it meanwhile,
waits for them as long as any.

None can come when the launcher has given up all that it kept running (or keeps none), and nobody else may join. Ends requests of the
flights; starts nobody, and owns nothing but the moment since when nobody has been there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container
from typing import TYPE_CHECKING

from octavo.distributed.control import Control
from octavo.distributed.fleet import WorkerState
from octavo.distributed.flights import Flights
from octavo.distributed.link import Link

if TYPE_CHECKING:
    from octavo.distributed.launcher import Launcher

logger = logging.getLogger("octavo.cluster")

CANNOT_RUN = "no worker can run; the server's log says why"
MAX_LOOK_S = 1.0  # between two looks; what is longer was this process's own pause
ALL_DRAINED = "all workers have been drained; `octavo cluster undrain` brings one back"


class Outlook:
    """``wait_s``: how long a request may wait while there is no worker. ``others_may_join``: workers that ``launcher`` does not start.
    ``grows``: somebody has it start more of them. ``clock`` as the fleet's."""

    def __init__(
        self,
        control: Control,
        flights: Flights,
        launcher: Launcher | None,
        wait_s: float,
        others_may_join: bool,
        grows: bool,
        clock: Callable[[], float],
    ) -> None:
        self.wait_s = wait_s
        self.starter_waits = False  # somebody waits for the first workers, and is told what they said: no second time in the log
        self._control, self._flights, self._now = control, flights, clock
        self._launcher = None if others_may_join else launcher  # that alone can bring workers
        self._kept, self._grows = launcher, grows
        self._logged: str | None = None  # why none could come, at the last look
        self._none_since_s = 0.0  # no worker takes requests
        self._looked_s = math.inf

    def hopeless(self) -> str | None:
        """Why no worker can come any more; None: one is there, or may come. Any thread may ask. Clients read it: what workers said, which
        may name paths of their hosts, is for the log and for ``GET /v1/cluster``."""
        if self._launcher is None or not self._launcher.is_at_end:
            return None
        if any(not (link.worker.draining or link.is_leaving) for link in self._control):
            return None
        if not self._launcher.names:
            return None if self._grows else ALL_DRAINED
        return CANNOT_RUN

    def _log(self, why: str | None) -> None:
        """For whoever looks after the workers: what they said, once each time that it comes to that."""
        if self.starter_waits:
            return
        if why == CANNOT_RUN != self._logged and self._launcher is not None:
            logger.error("no worker can run: %s", self.last_words(self._launcher.names) or self._launcher.trouble)
        self._logged = why

    def last_words(self, names: Container[str] | None = None) -> str:
        """What workers, or those of ``names``, said before they ended, each thing once."""
        found = dict[str, list[str]]()
        for name, words in list(self._control.last_words.items()):
            if names is None or name in names:
                found.setdefault(words, []).append(name)
        return "; ".join(f"{', '.join(said_by)}: {words}" for words, said_by in found.items())

    def end_waiting(self) -> None:
        """End requests that wait while there is no worker: at once where none can come."""
        now = self._now()
        self._none_since_s += max(0.0, now - self._looked_s - MAX_LOOK_S)
        self._looked_s = now
        why = self.hopeless()
        self._log(why)
        if why is not None:
            self._flights.fail_waiting(why, math.inf)
        elif self._worth_waiting_for():
            self._none_since_s = now
        elif now - self._none_since_s > self.wait_s:
            self._flights.fail_waiting(f"no worker has been there for {self.wait_s:g} s", now - self.wait_s)

    def end_unheld(self) -> None:
        """End requests that no worker that is there, or is to be there again, could ever hold."""
        there = [link.view.lengths for link in self._worth_waiting_for()]
        self._flights.fail_unheld([lengths for lengths in there if lengths is not None], self.wait_s)

    def _worth_waiting_for(self) -> list[Link]:
        """Workers that take requests, or that others follow which do."""
        return [link for link in self._control if link.takes_requests or self.has_successor(link)]

    def has_successor(self, link: Link) -> bool:
        """It is done with what it has before another takes its place: however long that takes, what waits does not wait in vain."""
        is_kept = self._kept is not None and link.name in self._kept.names
        return is_kept and link.worker.state is WorkerState.READY and link.worker.draining and not link.is_leaving
