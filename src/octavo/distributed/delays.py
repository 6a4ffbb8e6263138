"""Requests that wait for an engine that takes no more now, though others do, because that is where their router wants them. Pure.

An engine with a prompt's beginning in its cache may be worth waiting for (delay scheduling: Zaharia et al., EuroSys 2010). There tasks skip
a number of turns; here the router predicts both ends (``Router.waits_for``): what waits at that engine and what is left to compute there,
against computing it all where there is room. Others pass meanwhile, and no engine is idle that would have it done sooner.

It ends when the engine takes more, when the prediction has turned, and at the latest when the request would have been done elsewhere, by
what was predicted first: so whatever comes of predictions, a request takes at most twice as long for waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from octavo.distributed.views import EngineView, Router, RouteRequest

RECHECK_S = 0.05  # between two predictions for a request while nothing has come up
MANY = 8  # who wait are each asked about less often where there are more: a prediction takes half a millisecond for a long prompt


@dataclass(slots=True)
class _Delayed:
    """``until_s``: it waits no longer; ``engine``: index of the one that it waits for; ``look``: at the engines, when this was predicted
    last, at ``checked_s``."""

    until_s: float
    engine: int = -1
    look: int = 0
    checked_s: float = 0.0


class Delays:
    """``most``: requests that wait so at a time. Who comes when so many do goes at once: each is asked about again and again."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._delayed: dict[str, _Delayed] = {}
        self._engines: Seq[int] = ()
        self._open, self._idle = frozenset[int](), frozenset[int]()  # of these
        self._look = 0  # how often there was a reason to ask about all

    def __len__(self) -> int:
        return len(self._delayed)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._delayed

    def __iter__(self) -> Iterator[str]:
        return iter(self._delayed)

    def see(self, engines: Seq[EngineView], open_places: AbstractSet[int]) -> None:
        """Which engines take more now, and which are idle. All who wait are asked about again when one has become idle, or others are
        there. That one takes more, or no more, is news to those who wait for it alone: with many engines that happens all the time."""
        if not self._delayed:
            return
        indexes = [engine.index for engine in engines]
        idle = frozenset(engine.index for engine in engines if not engine.num_sequences)
        if not idle <= self._idle or indexes != self._engines:
            self._look += 1
        self._engines, self._idle, self._open = indexes, idle, frozenset(indexes[place] for place in open_places)

    def rests(self, request_id: str, now: float) -> bool:
        """It waits, and nothing has come up since it was asked about that could let it go."""
        delayed = self._delayed.get(request_id)
        if delayed is None or delayed.engine in self._open or delayed.look != self._look:
            return False
        return now < min(delayed.until_s, delayed.checked_s + RECHECK_S * max(1.0, len(self) / MANY))

    def waits(self, request: RouteRequest, engines: Seq[EngineView], open_places: AbstractSet[int], router: Router, now: float) -> bool:
        """Whether it is to wait, of ``engines``, which could hold it, for one that is in none of ``open_places``."""
        delayed = self._delayed.get(request.request_id)
        if len(open_places) == len(engines) or (len(self) >= self._most if delayed is None else now >= delayed.until_s):
            return False
        if self.rests(request.request_id, now):
            return True
        found = router.waits_for(request, engines, open_places)
        if found is None:
            return False
        if delayed is None:
            delayed = self._delayed[request.request_id] = _Delayed(now + found.elsewhere_s)
        delayed.engine, delayed.look, delayed.checked_s = engines[found.place].index, self._look, now
        return True

    def forget(self, request_id: str) -> None:
        """It goes, or does not want to wait any more."""
        self._delayed.pop(request_id, None)
