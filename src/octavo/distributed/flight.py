"""A request on its way through a cluster, and who may look on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from octavo.core.limits import LengthLimits
from octavo.core.prefix_index import Namespace, prompt_keys
from octavo.core.request import FinishReason, Request
from octavo.distributed.attempts import Attempts
from octavo.distributed.messages import Event, MessageError
from octavo.distributed.told_load import ToldLoad
from octavo.distributed.views import EngineView, RouteRequest
from octavo.distributed.worker_account import WorkerAccount
from octavo.distributed.worker_sizes import lack
from octavo.engine.event_stream import EventStream
from octavo.engine.outputs import OutputEvent
from octavo.engine.params import PreparedRequest

if TYPE_CHECKING:
    from octavo.distributed.link import Link


@dataclass(slots=True, eq=False)
class Flight:
    """One request. ``link``: the worker that has its attempt (None: it waits). ``unheld_s``: since when no worker that is there could ever
    hold it (None: some can, as far as has been looked). ``placed_s``: when a worker got it first."""

    request: Request
    attempts: Attempts
    stream: EventStream
    route: RouteRequest
    link: Link | None = None
    unheld_s: float | None = None
    placed_s: float = 0.0
    _fits: dict[LengthLimits, bool] = field(default_factory=dict)  # sizes that have been asked about: workers are alike, mostly

    @property
    def num_tokens(self) -> int:
        """Known ones: its prompt, and what has been sent."""
        return len(self.request.prompt_token_ids) + self.attempts.num_sent_tokens

    def placed(self, link: Link, now: float) -> None:
        """``link`` gets its attempt, which has begun."""
        self.link, self.unheld_s = link, None
        if self.attempts.num_attempts == 1:
            self.placed_s = now

    def age_s(self, now: float) -> float:
        """How long ago a worker got it first, if that has lost it; 0: none has."""
        return now - self.placed_s if self.attempts.num_attempts > 1 else 0.0

    def fits(self, engine: EngineView) -> bool:
        """Whether a worker could hold it to its end if it had nothing else; one that has told no sizes is taken to."""
        lengths = engine.lengths if isinstance(engine, ToldLoad) else None
        return lengths is None or self._fits_in(lengths)

    def _fits_in(self, lengths: LengthLimits) -> bool:
        found = self._fits.get(lengths)
        if found is None:
            found = self._fits[lengths] = lack(self.request, lengths) is None
        return found

    def check(self, event: Event) -> None:
        """Raises MessageError for an event that no worker can make of its running attempt."""
        if event.choice >= self.request.params.n:
            raise MessageError(f"choice: {event.choice!r} is not allowed; the request has {self.request.params.n}")
        room = self.attempts.room(event.choice)
        if room is not None and len(event.token_ids) > room:
            raise MessageError(f"token_ids: {len(event.token_ids)} are not allowed; at most {room}, for the rest of max_tokens")

    def unheld_for(self, there: Sequence[LengthLimits], now: float, wait_s: float) -> str | None:
        """Why it has to end: for ``wait_s`` none of the workers, which have these sizes, could ever hold it. None: it may wait."""
        if not there or any(map(self._fits_in, there)):
            self.unheld_s = None
            return None
        self.unheld_s = now if self.unheld_s is None else self.unheld_s
        largest = max(there, key=lambda lengths: lengths.max_total_tokens)
        return str(lack(self.request, largest)) if now - self.unheld_s >= wait_s else None


@dataclass(slots=True)
class Begun:
    """Of all time, requests that have their first token: how many, the tokens of their prompts, and of these what was cached."""

    num: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0

    def add(self, request: Request, first: OutputEvent) -> None:
        num_prompt = len(request.prompt_token_ids)
        self.num += 1
        self.num_tokens += num_prompt
        self.num_cached_tokens += min(num_prompt, first.num_cached_tokens)


@dataclass(frozen=True, slots=True)
class RoutedRequest(PreparedRequest):
    """With what routers see of it. ``named_by``: the fingerprint and block size by which its blocks were named."""

    route: RouteRequest
    named_by: tuple[str, int]

    @classmethod
    def of(cls, prepared: PreparedRequest, named_by: tuple[str, int], wants_keys: bool) -> RoutedRequest:
        """Takes time for the prompt's length, 75 ns a token: the event loop is not the place for it."""
        return cls(prepared.request, prepared.warnings, route_of(prepared.request, *named_by, wants_keys), named_by)


def route_of(request: Request, fingerprint: str, block_size: int, wants_keys: bool) -> RouteRequest:
    """What routers see of it. ``fingerprint`` and block size of the workers name the blocks of prompts."""
    keys: Iterable[bytes] = ()
    if wants_keys:
        keys = prompt_keys(fingerprint, Namespace(request.cache_salt or None), request.prompt_token_ids, block_size)
    num_prompt = len(request.prompt_token_ids)
    most_output = request.params.max_tokens
    return RouteRequest(
        request.request_id, num_prompt, None, request.session, tuple(keys), request.priority, request.user, most_output
    )


class Watcher(Protocol):
    """Who keeps account of where requests were when, on the clock of the flights."""

    def opened(self, request: Request) -> None: ...

    def placed(self, request_id: str, worker: str, name: str, now: float) -> None: ...

    def found(self, request_id: str, now: float) -> None: ...

    def handed_over(self, request_id: str, worker: str, name: str, now: float) -> None: ...

    def lost(self, request_id: str, now: float) -> None: ...

    def told(self, worker: str, name: str, account: WorkerAccount) -> None: ...

    def tokens(self, request_id: str, num_tokens: int, now: float) -> None: ...

    def ended(self, request_id: str, reason: FinishReason, now: float) -> None: ...
