"""How often what an engine would evict next is going to be asked for again, from what it has told. Pure.

    published, forgotten, sent ─▶ when each of its keys was last used, how many come ─▶ how long it keeps a block unused ─▶ uses lost

An engine evicts what was used least recently. So when it forgets a block, all that was last used before is gone, and what goes next has
waited about as long. Many engines whose next blocks to go are equally old evict as one cache of all their blocks would; whoever
sends more to the one that keeps them longest brings that about.

An engine that has forgotten nothing will, when it is full: what begins there comes back and grows, and once it has grown it is too late to
send it elsewhere. So how long such an engine will keep a block is foreseen from how fast it fills: what is there at a time is what comes
times how long it stays (Little, A proof for the queuing formula L = λW, 1961).

What is asked for again is counted whether it was still there or not: where everything is evicted too soon nothing would seem to be of use,
and nothing would be done about it (the ghost entries of ARC, Megiddo and Modha, FAST 2003).

Time is counted in requests that were sent: nothing is evicted while nothing comes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import inf

from octavo.distributed.published_keys import short_keys

_DECAY = 0.99  # of what was seen of uses and of what came to engines, with each request


@dataclass(slots=True)
class _Cache:
    """What is known of one engine's. What it had when it was first heard of counts as held, and not as having come."""

    used: dict[bytes, int] = field(default_factory=dict)  # key that it has -> when it was last used or published there
    gone_until: int | None = None  # when the most recently used block that it forgot was last used
    num_come: float = 0.0  # keys that it did not have, less of older ones
    num_sent: float = 0.0  # requests that were sent meanwhile, wherever, counted alike


class Reuse:
    """``most_keys``: of one engine, as in ``PublishedKeys``; what it publishes beyond is not followed. So many are remembered as well of
    all that was used, the last used ones."""

    def __init__(self, most_keys: int = 1 << 18) -> None:
        if most_keys < 0:
            raise ValueError(f"most_keys: {most_keys!r} is not allowed; at least 0")
        self._most_keys = most_keys
        self._now = 0  # requests that were sent
        self._caches = dict[int, _Cache]()  # by engine
        self._seen = OrderedDict[bytes, int]()  # key -> when it was last used or published anywhere, evicted or not
        self._num_blocks = 0.0  # of requests, less of older ones: prompts and answers
        self._num_found = 0.0  # of these, blocks that had been used before
        self._waited = 0.0  # requests that came between two uses, of these in all

    def told(self, engine: int, published: Iterable[bytes], forgotten: Iterable[bytes]) -> None:
        """Engine has come to offer these keys, and has lost those."""
        cache = self._caches.setdefault(engine, _Cache())
        used = cache.used
        for key in short_keys(forgotten):
            when = used.pop(key, None)
            if when is not None:
                cache.gone_until = max(when, cache.gone_until or 0)
        for key in short_keys(published):
            if key not in used and len(used) < self._most_keys:
                used[key] = self._now
                cache.num_come += 1.0 if cache.num_sent else 0.0
            self._seen.pop(key, None)
            self._seen[key] = self._now
        self._trim()

    def gone(self, engine: int) -> None:
        """``engine`` has nothing any more."""
        self._caches.pop(engine, None)

    def sent(self, engine: int, keys: Seq[bytes], num_blocks: float) -> None:
        """A request whose prompt has these ``keys`` went to ``engine``; with its answer it comes to ``num_blocks`` blocks, of which one at
        least is no full block of the prompt."""
        self._now += 1
        now, seen, used = self._now, self._seen, self._caches.setdefault(engine, _Cache()).used
        num_found = waited = 0
        for key in short_keys(keys):
            when = seen.pop(key, None)
            if when is not None:
                num_found += 1
                waited += now - when
            seen[key] = now  # the last of all
            if key in used:
                used[key] = now
        self._trim()
        self._num_blocks = _DECAY * self._num_blocks + max(num_blocks, len(keys) + 1)
        self._num_found = _DECAY * self._num_found + num_found
        self._waited = _DECAY * self._waited + waited
        for cache in self._caches.values():
            cache.num_come *= _DECAY
            cache.num_sent = _DECAY * cache.num_sent + 1.0

    def _trim(self) -> None:
        while len(self._seen) > self._most_keys:
            self._seen.popitem(last=False)

    def kept(self, engine: int, num_blocks: int) -> float:
        """How many requests are sent between the last use of a block at ``engine``, which has ``num_blocks``, and its eviction: of what it
        evicted last, else as far as can be foreseen; infinity where nothing comes. One that holds more than it has blocks (it keeps some
        elsewhere) has as many as it holds."""
        cache = self._caches.get(engine)
        if cache is None:
            return inf
        if cache.gone_until is not None:
            return self._now - cache.gone_until
        return max(num_blocks, len(cache.used)) * cache.num_sent / cache.num_come if cache.num_come else inf

    def uses_lost(self, engine: int, num_blocks: int) -> float:
        """How often a block that ``engine``, of ``num_blocks``, evicts next would have been used again. Where a share q of all blocks is
        used again, each is q / (1 - q) times, on average; one that has waited as long as those that are used again do is half as good as
        that, and one that has waited many times as long so many times worse (a power law: use is bursty, and what is left alone for long
        goes on to be)."""
        if not self._num_found:
            return 0.0
        usual = self._waited / self._num_found
        return self._num_found / (self._num_blocks - self._num_found) * usual / (usual + self.kept(engine, num_blocks))

    def num_keys(self, engine: int) -> int:
        """Keys of ``engine`` that are followed."""
        return len(self._caches[engine].used) if engine in self._caches else 0

    def check_invariants(self) -> None:
        """AssertionError where a bound is broken, or a use lies ahead."""
        assert len(self._seen) <= self._most_keys
        for engine, cache in self._caches.items():
            assert len(cache.used) <= self._most_keys
            assert all(when <= self._now for when in cache.used.values()) and (cache.gone_until or 0) <= self._now
            assert cache.num_sent or not cache.num_come, "something came before anything was sent"
            assert all(0.0 <= self.uses_lost(engine, num_blocks) < inf for num_blocks in (0, 1, 1000))
