"""A router for workers with roles: ``RolePools`` says who computes a prompt and who goes on with it. Pure but for the clock it is given.

Dispatchers ask it as any router, and get the worker of the prompt; ``receiver_of`` has the other half. Where all workers do both, it
chooses as the router that it wraps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet

from octavo.distributed.roles import RolePools
from octavo.distributed.views import EngineView, Router, RouteRequest, Wait


class RoleRouter(Router):
    """``prompts`` chooses among those that compute prompts. ``views``: all workers that take requests, busy ones too."""

    def __init__(self, prompts: Router, pools: RolePools, views: Callable[[], Seq[EngineView]], clock: Callable[[], float]) -> None:
        self.wants_keys = prompts.wants_keys
        self.pools = pools
        self._prompts, self._views, self._clock = prompts, views, clock

    def entries(self, engines: Seq[EngineView]) -> list[int]:
        """Places in ``engines`` of those that may be given prompts now: decode workers only when they are borrowed, or may have to be."""
        able = [place for place, view in enumerate(engines) if self.pools.computes_prompts(view.index)]
        if not able:  # they answer whole requests, rather than nobody
            return list(range(len(engines)))
        is_pressed = self.pools.may_borrow and all(engines[place].pending_s > self.pools.limits.borrow_s for place in able)
        return list(range(len(engines))) if is_pressed else able

    def choose(self, request: RouteRequest, engines: Seq[EngineView]) -> int:
        places = {view.index: place for place, view in enumerate(engines)}
        others = [view for view in self._views() if view.index not in places and self.pools.role_of(view.index) == "decode"]
        placed = self.pools.place(request, [*engines, *others], self._clock())
        if placed is not None and placed.prefill in places:
            return places[placed.prefill]
        self.pools.ended(request.request_id)
        return self._prompts.choose(request, engines)

    def waits_for(self, request: RouteRequest, engines: Seq[EngineView], open_places: AbstractSet[int]) -> Wait | None:
        """Of those whose role it is to compute prompts. When others are borrowed for that, because these have too much to do, nobody
        waits for one of them."""
        own = [place for place, view in enumerate(engines) if self.pools.role_of(view.index) != "decode"] or list(range(len(engines)))
        is_open = {i for i, place in enumerate(own) if place in open_places}
        found = self._prompts.waits_for(request, [engines[place] for place in own], is_open) if is_open else None
        return None if found is None else found._replace(place=own[found.place])

    def num_cached(self, request_id: str) -> int:
        return self._prompts.num_cached(request_id)

    def receiver_of(self, request_id: str) -> int | None:
        """Who goes on with it after its prompt; None: whoever computes that."""
        placed = self.pools.placement(request_id)
        return placed.decode if placed is not None and placed.is_split else None

    def told(self, index: int, published: Iterable[bytes], forgotten: Iterable[bytes]) -> None:
        self._prompts.told(index, published, forgotten)

    def gone(self, index: int) -> None:
        self._prompts.gone(index)

    def lost(self, request_id: str) -> None:
        self.pools.ended(request_id)
        self._prompts.lost(request_id)

    def ended(self, request_id: str, num_output: int | None) -> None:
        self.pools.ended(request_id, num_output)
        self._prompts.ended(request_id, num_output)
