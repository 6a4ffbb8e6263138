"""Faults of the front end's own: they are told, end the request that they strike, and go no further."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from octavo.distributed.flood_log import FloodLog

if TYPE_CHECKING:
    from octavo.distributed.flight import Flight

logger = logging.getLogger("octavo.cluster")


class Faults:
    """``end(flight, message)``: ends a request of which the books may be half written, unless it is over."""

    def __init__(self, end: Callable[[Flight, str], None]) -> None:
        self._end = end
        self._log = FloodLog(logger, "a fault of the front end's own", logging.CRITICAL)

    @contextlib.contextmanager
    def guarded(self, flight: Flight | None = None) -> Iterator[None]:
        """A fault of ours in there ends ``flight``, if it is about one, and goes no further."""
        try:
            yield
        except Exception as error:
            self.found(error, flight)

    def found(self, error: BaseException, flight: Flight | None = None) -> None:
        """Ours, and no worker's: it is told in the log, and ends ``flight``."""
        what = f"{type(error).__name__}: {error}"
        try:
            if flight is not None:
                self._end(flight, f"the server could not go on with this request: {what}")
        finally:
            self._log.say(what, "" if flight is None else f"ends request {flight.request.request_id}", error)

    def flush(self) -> None:
        """Tell in the log what was only counted."""
        self._log.flush()
