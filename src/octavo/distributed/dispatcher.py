"""Who goes to which engine when: requests wait at the front end while no engine should take more, and go by fair order. Pure.

    submit ─▶ FairQueue ──next: an engine takes more──▶ router.choose ─▶ sent ──ended──▶ gone
       └──▶ QueueFull (bounded)      └──▶ set aside, and passed: a busy engine alone can hold it, or is worth waiting for

Held back here a request can still go to whichever engine is free first, and those of others can pass it fairly; in an engine's queue it can
not. So engines get what keeps them busy until they speak again, and not more (``Backpressure``). Owns what waits and what was sent. Sends
nothing, reads no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TypeVar

from octavo.distributed.delays import Delays
from octavo.distributed.fair_queue import FairQueue
from octavo.distributed.fair_ring import MayGo
from octavo.distributed.router import Router
from octavo.distributed.views import EngineView, RouteRequest, waiting_s

T = TypeVar("T")


class QueueFull(RuntimeError):
    """No engine takes more, and as many requests wait as may. ``retry_after_s``: a guess at when the queue has moved; None: none."""

    def __init__(self, field_name: str, value: int, limit: int, retry_after_s: float | None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"{field_name}: {value} is not allowed; at most {limit} wait for a worker, and all workers are busy")


class Unroutable(RuntimeError):
    """The router could not choose for this request; the cause says why. It is known here no more."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(f"request {request_id} could not be routed")


@dataclass(frozen=True, slots=True)
class Backpressure:
    """When an engine is to be left alone. ``most_pending_s``: predicted seconds of work that it may have waiting; ``most_sequences``:
    waiting and running there (None: any number). An engine with nothing to do always takes one: nothing waits beside idle engines. The
    token that each sequence is at does not wait: where a step takes longer than ``most_pending_s``, requests still share steps.

    ``most_waiting``: requests held back at a time; ``most_waiting_tokens``: prompt tokens of these (None: any number). ``most_delayed``:
    beside them, those that wait for an engine that takes no more though others do, since they are better off there (``delays``). 0: nobody.
    """

    most_pending_s: float = 0.5
    most_sequences: int | None = None
    most_waiting: int = 4096
    most_waiting_tokens: int | None = None
    most_delayed: int = 32

    def __post_init__(self) -> None:
        if not self.most_pending_s >= 0.0:
            raise ValueError(f"most_pending_s: {self.most_pending_s!r} is not allowed; at least 0 seconds")
        for name in ("most_sequences", "most_waiting_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value!r} is not allowed; at least 1")
        for name in ("most_waiting", "most_delayed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not allowed; at least 0")

    def takes_more(self, engine: EngineView) -> bool:
        if not engine.num_sequences:
            return True
        if self.most_sequences is not None and engine.num_sequences >= self.most_sequences:
            return False
        return waiting_s(engine) <= self.most_pending_s


def able_first(first: Iterable[T], open_first: Iterable[T], open_spare: Seq[T], holds: Callable[[T], bool]) -> list[T]:
    """Those that can hold a request: of the open ones of ``first``; of ``open_spare`` only if none of all ``first`` ever can."""
    able = [one for one in open_first if holds(one)]
    if able or not open_spare or any(map(holds, first)):
        return able
    return [one for one in open_spare if holds(one)]


def _same(some: Seq[EngineView], others: Seq[EngineView]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


@dataclass(slots=True)
class Dispatcher:
    """``queue``: the order of those who wait. Its ``cost`` of a request is its prompt and, where known, its output. ``holds``: whether an
    engine that has nothing else to do can hold a request to its end; others never get it. It is the same for as long as they live.

    Views have to count what was sent and is not seen by the engine yet (``told_load.ToldLoad`` does), or all would go to one.
    """

    router: Router
    limits: Backpressure = field(default_factory=Backpressure)
    queue: FairQueue = field(default_factory=FairQueue)
    holds: Callable[[RouteRequest, EngineView], bool] = lambda request, engine: True
    num_refused: int = 0
    _waiting: dict[str, RouteRequest] = field(default_factory=dict)
    _num_waiting_tokens: int = 0
    _aside: dict[str, RouteRequest] = field(default_factory=dict)  # of the waiting: their turn was, and they could not or had better not go
    _delays: Delays = field(init=False)  # of these: who had better not
    _struck: dict[str, Exception] = field(default_factory=dict)  # by request: what came of asking the router whether it had better wait
    _engines: Seq[EngineView] = ()  # of the last ``next``
    _spare: Seq[EngineView] = ()
    _tried: set[int] = field(default_factory=set)  # places among these where nobody of ``_aside`` can go
    _sent: dict[str, int] = field(default_factory=dict)  # request -> index of its engine

    def __post_init__(self) -> None:
        self._delays = Delays(self.limits.most_delayed)

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def num_sent(self) -> int:
        """Requests that were sent and have not ended."""
        return len(self._sent)

    def waiting_requests(self) -> Seq[RouteRequest]:
        """Those that wait, by arrival."""
        return tuple(self._waiting.values())

    def set_aside(self) -> Seq[RouteRequest]:
        """Of those that wait: whose turn has been, and who wait for an engine that can hold them."""
        return tuple(self._aside.values())

    def submit(self, request: RouteRequest, engines: Seq[EngineView], now: float) -> None:
        """A request comes. Raises QueueFull when it would have to wait beyond a limit; ValueError when its id is in use."""
        if request.request_id in self._waiting or request.request_id in self._sent:
            raise ValueError(f"request_id: {request.request_id!r} is not allowed; it is not over yet")
        limits, num_held = self.limits, len(self._waiting) - len(self._delays)
        if num_held or not any(map(limits.takes_more, engines)):  # whoever can go at once needs no room in the queue
            tokens = limits.most_waiting_tokens
            if num_held >= limits.most_waiting:
                self._refuse("waiting requests", num_held + 1, limits.most_waiting, engines)
            if tokens is not None and self._num_waiting_tokens + request.num_prompt > tokens:
                self._refuse("waiting prompt tokens", self._num_waiting_tokens + request.num_prompt, tokens, engines)
        self._enqueue(request, now)

    def resubmit(self, request: RouteRequest, arrived_s: float) -> None:
        """The engine that a request was sent to is lost, or lost it: it waits again, before all of its key that came after it first did.
        It was let in once, so it is not refused now."""
        if request.request_id in self._waiting:
            raise ValueError(f"request_id: {request.request_id!r} is not allowed; it waits already")
        self._lose(request.request_id)
        self._enqueue(request, arrived_s)

    def _lose(self, request_id: str) -> None:
        if self._sent.pop(request_id, None) is not None:
            self.router.lost(request_id)

    def send_alone(self, request: RouteRequest, engines: Seq[EngineView]) -> int:
        """The place in ``engines``, of which there is at least one, where a request that was let in before goes now, past all that wait."""
        self._lose(request.request_id)
        place = self.router.choose(request, engines)
        self._sent[request.request_id] = engines[place].index
        return place

    def _enqueue(self, request: RouteRequest, now: float) -> None:
        cost = request.num_prompt + (request.num_output or 0)
        self.queue.add(request.request_id, request.user, request.priority, max(1, cost), now)
        self._waiting[request.request_id] = request
        self._num_waiting_tokens += request.num_prompt

    def _refuse(self, what: str, value: int, limit: int, engines: Seq[EngineView]) -> None:
        self.num_refused += 1
        raise QueueFull(what, value, limit, min((engine.pending_s for engine in engines), default=None))

    def next(self, engines: Seq[EngineView], now: float, spare: Seq[EngineView] = ()) -> tuple[RouteRequest, int] | None:
        """The request that goes now, and the place in ``engines`` where; None: nobody waits, or no engine takes more. Ask until None.

        The first in the queue is never passed over for one that would fit better: it would wait for ever. It is set aside as long as no
        engine that takes more could hold it whatever else it had, or as ``Delays`` says, and goes by the order of the queue to one that
        can. ``spare``: engines for what none of ``engines`` could ever hold; places go on there. Raises Unroutable.
        """
        every = [*engines, *spare]
        open_places = [place for place, engine in enumerate(every) if self.limits.takes_more(engine)]
        if not (_same(engines, self._engines) and _same(spare, self._spare)):
            self._engines, self._spare, self._tried = tuple(engines), tuple(spare), set()
        self._delays.see(every, set(open_places))
        is_tried = self._tried.issuperset(open_places)  # nobody who is set aside and not delayed can go there

        def places_of(request_id: str) -> list[int]:
            return self._places(self._waiting[request_id], open_places, engines, every, now)

        def may_go(request_id: str) -> bool:
            if self._delays.rests(request_id, now):
                return False
            return (not is_tried or request_id in self._delays) and bool(places_of(request_id))

        is_open = any(place < len(engines) for place in open_places)
        may_some = self._aside and (not is_tried or (open_places and len(self._delays)))
        aside = MayGo(may_go, alone=not is_open, only=list(self._delays) if is_tried else None) if may_some else None
        while (is_open or aside is not None) and (request_id := self.queue.first(now, aside)) is not None:
            request = self._waiting[request_id]
            if places := places_of(request_id):
                return self._route(request, places, every)
            self.queue.set_aside(request_id)
            self._aside[request_id] = request
            if request_id not in self._delays:
                self._tried = {place for place in self._tried if not self._able(request, [place], engines, every)}
        self._tried.update(open_places)
        return None

    def _places(
        self, request: RouteRequest, open_places: list[int], engines: Seq[EngineView], every: Seq[EngineView], now: float
    ) -> list[int]:
        """Where it may go now."""
        places = self._able(request, open_places, engines, every)
        if not places or len(open_places) == len(every):
            return places
        able, among = self._able(request, list(range(len(every))), engines, every), set(places)
        try:
            is_open = {i for i, place in enumerate(able) if place in among}
            if self._delays.waits(request, [every[place] for place in able], is_open, self.router, now):
                return []
        except Exception as error:
            self._struck[request.request_id] = error  # told when its turn is
        return places

    def _able(self, request: RouteRequest, open_places: list[int], engines: Seq[EngineView], every: Seq[EngineView]) -> list[int]:
        """Places of engines that take more and can hold it; see ``able_first``."""
        num_first = len(engines)
        first, spare = [place for place in open_places if place < num_first], [place for place in open_places if place >= num_first]
        return able_first(range(num_first), first, spare, lambda place: self.holds(request, every[place]))

    def _route(self, request: RouteRequest, places: list[int], every: Seq[EngineView]) -> tuple[RouteRequest, int]:
        request_id = request.request_id
        self.queue.send(request_id)
        self._leave(request_id)
        struck = self._struck.pop(request_id, None)
        if struck is not None:
            raise Unroutable(request_id) from struck
        try:
            place = places[self.router.choose(request, [every[place] for place in places])]
        except Exception as error:
            raise Unroutable(request_id) from error
        self._sent[request_id] = every[place].index
        return request, place

    def withdraw(self, request_id: str) -> bool:
        """Its client is gone. True: it waited here; False: it had been sent, or is over."""
        if not self.queue.remove(request_id):
            return False
        self._leave(request_id)
        return True

    def drop(self, request_id: str) -> None:
        """Whatever is known of a request goes, wherever it is; of one that is not known, too."""
        if not self.withdraw(request_id):
            self._sent.pop(request_id, None)
            self.router.lost(request_id)

    def ended(self, request_id: str, num_output: int | None) -> None:
        """A request that was sent is over (see ``Router.ended``); one that was not, or was already, changes nothing."""
        if self._sent.pop(request_id, None) is not None:
            self.router.ended(request_id, num_output)

    def gone(self, index: int) -> list[str]:
        """Engine ``index`` is gone: returns the requests that were there, which may be submitted again."""
        lost = [request_id for request_id, engine in self._sent.items() if engine == index]
        for request_id in lost:
            self._lose(request_id)
        self.router.gone(index)
        return lost

    def _leave(self, request_id: str) -> RouteRequest:
        request = self._waiting.pop(request_id)
        self._aside.pop(request_id, None)
        self._delays.forget(request_id)
        self._num_waiting_tokens -= request.num_prompt
        return request

    def check_invariants(self) -> None:
        """AssertionError unless every request is in one place, and the sums are those of what waits."""
        self.queue.check_invariants()
        assert {request_id for request_id, _ in self.queue.waiting()} == set(self._waiting)
        assert set(self.queue.set_aside_ids()) == self._aside.keys()
        assert all(request_id in self._aside for request_id in self._delays), "who waits for an engine blocks others"
        assert not set(self._waiting) & set(self._sent)
        assert self._num_waiting_tokens == sum(request.num_prompt for request in self._waiting.values())
