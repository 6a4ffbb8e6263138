"""Flights that have lost their worker: whose turn it is to go on, and which of them are suspected of having been the cause.

    add ─▶ lost, in order ──next: its turn, and somebody may have it──▶ gone from here

Turns are paced (``attempts.Pacer``). A *suspect* (``Attempts.is_suspect``) goes only to a worker that has no other, past the queue, so that
one that kills workers is told from those that ran beside it. Owns no attempt, and sends nothing: ``wake`` is called when a turn has come.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from octavo.distributed.attempts import Pacer
from octavo.distributed.dispatcher import able_first

if TYPE_CHECKING:
    from octavo.distributed.flight import Flight
    from octavo.distributed.link import Link


class LostFlights:
    """``wake``: called by the event loop when ``next`` may have another."""

    def __init__(self, pacer: Pacer, wake: Callable[[], None]) -> None:
        self._pacer, self._wake = pacer, wake
        self._lost: deque[Flight] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._suspects: dict[Link, Flight] = {}  # by the worker that has one

    def __len__(self) -> int:
        return len(self._lost)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._lost)

    def add(self, flight: Flight) -> None:
        self._lost.append(flight)

    def remove(self, flight: Flight) -> bool:
        """It goes on no more. False: it is not here."""
        if flight not in self._lost:
            return False
        self._lost.remove(flight)
        return True

    def next(self, links: Sequence[Link], spare: Sequence[Link], now: float) -> tuple[Flight, Sequence[Link]] | None:
        """Whose turn it is, and those of the links that are to have it, past the queue; none: into the queue. Ask until None.
        ``spare``: for what none of ``links`` could ever hold, as in ``Dispatcher.next``."""
        if self._timer is not None:
            return None
        for flight in self._lost:
            if flight.attempts.is_held:
                continue
            able = self._able(flight, links, spare) if flight.attempts.is_suspect else []
            if flight.attempts.is_suspect and not able:
                continue
            if not self._pacer.take(now):
                self._timer = asyncio.get_running_loop().call_later(self._pacer.wait_s(), self._timed_out)
                return None
            self._lost.remove(flight)
            return flight, able
        return None

    def _able(self, flight: Flight, links: Sequence[Link], spare: Sequence[Link]) -> list[Link]:
        """Those that have no suspect and can hold it; see ``able_first``."""
        first, others = ([link for link in some if link not in self._suspects] for some in (links, spare))
        return able_first(links, first, others, lambda link: flight.fits(link.view))

    def _timed_out(self) -> None:
        self._timer = None
        self._wake()

    # --- suspects -----------------------------------------------------------------------------------------------------------------------

    def runs_alone(self, flight: Flight, link: Link) -> None:
        """A suspect goes to ``link``, which gets no other."""
        self._suspects[link] = flight

    def cleared(self, flight: Flight) -> None:
        """It has left its worker, or got further there. One that is no suspect changes nothing."""
        if flight.link is not None and self._suspects.get(flight.link) is flight:
            del self._suspects[flight.link]

    def forget(self, flight: Flight) -> None:
        """Wherever it is here, it is not afterwards."""
        self.remove(flight)
        for link in [link for link, suspect in self._suspects.items() if suspect is flight]:
            del self._suspects[link]

    def went_on(self, flight: Flight) -> None:
        """It has got tokens: a suspect may be none any more."""
        if self._suspects and not flight.attempts.is_suspect:
            self.cleared(flight)

    def check_invariants(self) -> None:
        """AssertionError unless suspects are where they are said to be. For tests."""
        assert all(flight.link is link for link, flight in self._suspects.items())
