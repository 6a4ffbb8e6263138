"""The router that asks where a request would be done soonest, by what each engine has cached and what waits there. Pure.

    seconds = what waits there + weight x (its prompt less what is cached there + what it displaces there) + its answer in steps of that
    engine's batch

Computing weighs more than waiting: a second of it is one that the request waits, and one that the engine has not for others; and what two
engines compute both keep, in place of something else. *Displaced* is what the engine has to evict for what the request adds to its cache,
as often as that would have been used again (``reuse``): somebody will have to compute it. The last term is what keeps a beginning
that everybody shares from drawing everybody to one engine: each more sequence there makes every step of all a little longer. Prices come
from a cost model where there is one (``Costs``), else they are learned from what engines tell (``learned_costs``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet

from octavo.distributed.homes import Homes
from octavo.distributed.learned_costs import LearnedCosts
from octavo.distributed.published_keys import PublishedKeys
from octavo.distributed.reuse import Reuse
from octavo.distributed.views import Costs, EngineView, Router, RouteRequest, Wait


class SoonestDone(Router):
    """``costs`` None: learned. ``stickiness``: a session stays where it was as long as that takes at most so much longer, as a share: what
    it published last may not have been told yet, and a tie is no reason to move.

    ``work_weight``: seconds of computing a prompt count so many times. Engines whose free KV blocks do not hold the prompt come after those
    whose do. ``num_remembered``: sessions, the last used ones. ``guess_output``: output tokens of a request, until
    some have ended; then a running mean.
    """

    wants_keys = True

    def __init__(
        self,
        block_size: int = 16,
        costs: Costs | None = None,
        keys: PublishedKeys | None = None,
        stickiness: float = 0.1,
        num_remembered: int = 1 << 16,
        guess_output: float = 128.0,
        work_weight: float = 2.0,
    ) -> None:
        if not 0.0 <= stickiness < float("inf"):
            raise ValueError(f"stickiness: {stickiness!r} is not allowed; a finite share from 0")
        if not 1.0 <= work_weight < float("inf"):
            raise ValueError(f"work_weight: {work_weight!r} is not allowed; a finite number from 1")
        self.keys = keys or PublishedKeys()
        self._reuse = Reuse()
        self._work_weight = work_weight
        self._learned = LearnedCosts() if costs is None else None
        self._costs: Costs = costs or self._learned or LearnedCosts()
        self._block_size = block_size
        self._stickiness = stickiness
        self._guess_output = guess_output
        self._homes: Homes[str] = Homes(num_remembered)  # of sessions
        self._cached: dict[str, int] = {}  # by request: tokens of its prompt that were found where it was sent

    def choose(self, request: RouteRequest, engines: Seq[EngineView]) -> int:
        if self._learned is not None:
            for engine in engines:
                self._learned.saw(engine)
        matched = self.keys.matched(request.prefix_keys)
        place = self._best(request, engines, matched)
        self._cached[request.request_id] = self._num_cached(request, matched.get(engines[place].index, 0))
        self._sent(request, engines[place].index)
        return place

    def waits_for(self, request: RouteRequest, engines: Seq[EngineView], open_places: AbstractSet[int]) -> Wait | None:
        """Beside engines that work, by the same reckoning as without limits: what they are spared counts. An idle one is spared nothing;
        beside it seconds count as the request has them."""
        matched = self.keys.matched(request.prefix_keys)
        place = self._best(request, engines, matched)
        if place in open_places:
            return None
        done_s = {i: self._done_s(request, engines[i], matched) for i in {place, *open_places}}
        if any(done_s[i] <= done_s[place] and not engines[i].num_sequences for i in open_places):
            return None
        return Wait(place, min(done_s[i] for i in open_places))

    def num_cached(self, request_id: str) -> int:
        return self._cached.get(request_id, 0)

    def _best(self, request: RouteRequest, engines: Seq[EngineView], matched: Mapping[int, int]) -> int:
        scores = [self._score(request, engine, matched.get(engine.index, 0)) for engine in engines]
        place = min(range(len(engines)), key=lambda i: (*scores[i], engines[i].num_sequences, i))
        home = -1 if request.session is None else self._homes.of(request.session)
        for i, engine in enumerate(engines):
            is_home = engine.index == home
            if is_home and scores[i][0] <= scores[place][0] and scores[i][1] <= (1.0 + self._stickiness) * scores[place][1]:
                place = i
        return place

    def _done_s(self, request: RouteRequest, engine: EngineView, matched: Mapping[int, int]) -> float:
        """Seconds until it would be done there."""
        num_cached = self._num_cached(request, matched.get(engine.index, 0))
        prompt_s = self._costs.prompt_s(engine, num_cached, request.num_prompt - num_cached)
        return engine.pending_s + prompt_s + self._answer_s(request, engine)

    def _num_cached(self, request: RouteRequest, num_blocks: int) -> int:
        return min(num_blocks * self._block_size, request.num_prompt - 1)

    def _answer_s(self, request: RouteRequest, engine: EngineView) -> float:
        return request.output_or(self._guess_output) * self._costs.token_s(engine, engine.num_sequences + 1, request.num_prompt)

    def _score(self, request: RouteRequest, engine: EngineView, num_blocks: int) -> tuple[bool, float]:
        """(whether the prompt has no room there now, seconds until it would be done, computing weighted)."""
        num_cached = self._num_cached(request, num_blocks)
        num_new = request.num_prompt - num_cached
        num_output = request.output_or(self._guess_output)
        work_s = self._costs.prompt_s(engine, num_cached, num_new)
        uses_lost = self._reuse.uses_lost(engine.index, engine.num_blocks)
        if uses_lost:
            work_s += uses_lost * self._costs.prompt_s(engine, 0, max(1, round(num_new + num_output)))
        seconds = engine.pending_s + self._work_weight * work_s + self._answer_s(request, engine)
        return num_new > engine.num_available_blocks * self._block_size, seconds

    def _sent(self, request: RouteRequest, index: int) -> None:
        num_blocks = (request.num_prompt + request.output_or(self._guess_output)) / self._block_size
        self._reuse.sent(index, request.prefix_keys, num_blocks)
        self.keys.expect(request.request_id, index, request.prefix_keys)
        if request.session is not None:
            self._homes.remember(request.session, index)

    def told(self, index: int, published: Iterable[bytes], forgotten: Iterable[bytes]) -> None:
        published, forgotten = list(published), list(forgotten)
        self._reuse.told(index, published, forgotten)
        self.keys.told(index, published, forgotten)

    def gone(self, index: int) -> None:
        self.keys.gone(index)
        self._reuse.gone(index)
        if self._learned is not None:
            self._learned.forget(index)
        self._homes.gone(index)

    def lost(self, request_id: str) -> None:
        self.keys.ended(request_id)
        self._cached.pop(request_id, None)

    def ended(self, request_id: str, num_output: int | None) -> None:
        self.keys.ended(request_id)
        self._cached.pop(request_id, None)
        if num_output is not None:  # what clients leave or what fails says nothing of how long answers are
            self._guess_output += 0.02 * (num_output - self._guess_output)
