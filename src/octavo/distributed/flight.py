"""A request on its way through a cluster, and who may look on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.core.request import FinishReason, Request
from octavo.distributed.attempts import Attempts
from octavo.distributed.views import RouteRequest
from octavo.engine.event_stream import EventStream

if TYPE_CHECKING:
    from octavo.distributed.control import Link


@dataclass(slots=True, eq=False)
class Flight:
    """One request. ``link``: the worker that has its attempt (None: it waits)."""

    request: Request
    attempts: Attempts
    stream: EventStream
    route: RouteRequest
    link: Link | None = None


class Watcher(Protocol):
    """Who keeps account of where requests were when, on the clock of the flights."""

    def opened(self, request: Request) -> None: ...

    def placed(self, request_id: str, worker: str, name: str, now: float) -> None: ...

    def handed_over(self, request_id: str, worker: str, name: str, now: float) -> None: ...

    def lost(self, request_id: str, now: float) -> None: ...

    def tokens(self, request_id: str, num_tokens: int, now: float) -> None: ...

    def ended(self, request_id: str, reason: FinishReason, now: float) -> None: ...
