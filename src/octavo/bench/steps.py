"""Runs an engine in the caller's thread until it has nothing left to do; a request that fails ends the measurement."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.engine.engine import Engine
from octavo.engine.outputs import OutputEvent


def steps_to_end(engine: Engine) -> Iterator[list[OutputEvent]]:
    """The events of each step. Raises RuntimeError with the message of the first request that ends with an error."""
    while engine.has_work:
        events = engine.step()
        for event in events:
            if event.error is not None:
                raise RuntimeError(event.error)
        yield events
