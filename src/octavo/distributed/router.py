"""Which engine a request goes to. Pure: routers see numbers of engines and requests, and keep what they remember themselves.

The same objects route a simulation and real workers. A router never sends anything, and never reads a clock. Baselines are here, beside the
one that goes by its own memory of where beginnings of prompts went; ``soonest`` has the one that goes by what engines tell.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from octavo.distributed.homes import Homes
from octavo.distributed.soonest import SoonestDone
from octavo.distributed.views import Costs, EngineView, Router, RouteRequest

__all__ = [
    "ROUTERS", "Costs", "EngineView", "PrefixAffinity", "RoundRobin", "RouteRequest", "Router", "ShortestQueue", "SoonestDone",
    "create_router",
]  # fmt: skip


class RoundRobin(Router):
    """Each in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: RouteRequest, engines: Seq[EngineView]) -> int:
        place = self._next % len(engines)
        self._next = place + 1
        return place


class ShortestQueue(Router):
    """The engine with the least work ahead; of equals the one with fewer sequences, then the first.

    ``by_seconds``: work is counted in predicted seconds, which lets engines of different speed share a queue; else in pending tokens.
    """

    def __init__(self, by_seconds: bool = False) -> None:
        self._by_seconds = by_seconds

    def choose(self, request: RouteRequest, engines: Seq[EngineView]) -> int:
        best, least = 0, None
        for place, engine in enumerate(engines):
            work = (engine.pending_s if self._by_seconds else engine.pending_tokens, engine.num_sequences)
            if least is None or work < least:
                best, least = place, work
        return best


class PrefixAffinity(Router):
    """To where the longest beginning of the prompt has gone before, unless that engine has much more work ahead than the least busy one.

    Beginnings are known by session, or by the keys of their blocks. ``max_extra_tokens``: pending tokens that a hit may cost; a long
    match is worth its own length on top. ``num_remembered`` entries are kept, the last used ones.
    """

    wants_keys = True

    def __init__(self, block_size: int, max_extra_tokens: int = 2048, num_remembered: int = 1 << 16) -> None:
        self._block_size = block_size
        self._max_extra_tokens = max_extra_tokens
        self._homes: Homes[str | bytes] = Homes(num_remembered)  # of sessions and block keys
        self._fallback = ShortestQueue()

    def choose(self, request: RouteRequest, engines: Seq[EngineView]) -> int:
        place = self._fallback.choose(request, engines)
        home, num_matched = self._home(request)
        places = {engine.index: i for i, engine in enumerate(engines)}
        if home in places:
            extra = engines[places[home]].pending_tokens - engines[place].pending_tokens
            if extra <= self._max_extra_tokens + num_matched:
                place = places[home]
        self._remember(request, engines[place].index)
        return place

    def _home(self, request: RouteRequest) -> tuple[int, int]:
        """(engine index or -1, prompt tokens known there)."""
        for num_blocks in range(len(request.prefix_keys), 0, -1):
            home = self._homes.of(request.prefix_keys[num_blocks - 1])
            if home >= 0:
                return home, num_blocks * self._block_size
        return (-1, 0) if request.session is None else (self._homes.of(request.session), 0)

    def gone(self, index: int) -> None:
        self._homes.gone(index)

    def _remember(self, request: RouteRequest, index: int) -> None:
        names: tuple[str | bytes, ...] = (*request.prefix_keys, *(() if request.session is None else (request.session,)))
        for name in names:
            self._homes.remember(name, index)


ROUTERS = ("shortest-queue", "predicted-seconds", "round-robin", "prefix-affinity", "soonest")


def create_router(name: str, block_size: int = 16, costs: Costs | None = None) -> Router:
    """The router of that name. ``costs``: prices for "soonest", which learns them where there are none. ValueError lists those that there
    are."""
    if name == "shortest-queue":
        return ShortestQueue()
    if name == "predicted-seconds":
        return ShortestQueue(by_seconds=True)
    if name == "round-robin":
        return RoundRobin()
    if name == "prefix-affinity":
        return PrefixAffinity(block_size)
    if name == "soonest":
        return SoonestDone(block_size, costs)
    raise ValueError(f"router: {name!r} is not allowed; one of {', '.join(ROUTERS)}")
