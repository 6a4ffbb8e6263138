"""Attempts that workers have: whose each is, and where.

    begin ─▶ at a worker ──moved──▶ at another ──left──▶ nowhere

Owns their keys, and that ``Flight.link`` and ``Link.keys`` agree. Sends nothing, and tells nobody.
"""

from __future__ import annotations

import itertools
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.distributed.flight import Flight
    from octavo.distributed.link import Link


class RunningAttempts:
    """Of all flights. An attempt's key is ``flight.attempts.key``."""

    def __init__(self) -> None:
        self._flights: dict[int, Flight] = {}  # by key
        # No front end before this one has used these: a worker may outlive that, and still be at a step with attempts of it.
        self._keys = itertools.count(1 + (secrets.randbits(30) << 32))

    def __len__(self) -> int:
        return len(self._flights)

    def find(self, key: int) -> Flight | None:
        return self._flights.get(key)

    def at(self, link: Link) -> list[Flight]:
        """Those that a worker has, in the order in which they began."""
        return [self._flights[key] for key in sorted(link.keys)]

    def begin(self, flight: Flight, link: Link, now: float) -> list[int]:
        """An attempt of ``flight`` begins at ``link``; returns the tokens that it is to go on after."""
        key = next(self._keys)
        made = flight.attempts.begin(key)
        flight.placed(link, now)
        self._flights[key] = flight
        link.keys.add(key)
        return made

    def moved(self, flight: Flight, link: Link) -> None:
        """The attempt goes on at ``link``."""
        assert flight.link is not None
        flight.link.keys.discard(flight.attempts.key)
        flight.link = link
        link.keys.add(flight.attempts.key)

    def left(self, flight: Flight) -> None:
        """Its worker has the attempt no longer, or is not to have it."""
        assert flight.link is not None
        del self._flights[flight.attempts.key]
        flight.link.keys.discard(flight.attempts.key)
        flight.link = None

    def forget(self, flight: Flight) -> Link | None:
        """Wherever it may be by books that are half written, it is not afterwards. The worker that may have it."""
        link, flight.link = flight.link, None
        self._flights.pop(flight.attempts.key, None)
        if link is not None:
            link.keys.discard(flight.attempts.key)
        return link

    def check_invariants(self) -> None:
        """AssertionError unless every key leads to its flight, and both to its worker. For tests."""
        for key, flight in self._flights.items():
            assert flight.attempts.key == key and flight.link is not None and key in flight.link.keys
