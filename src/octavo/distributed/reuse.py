"""How often what an engine would evict next is going to be asked for again, from what it has told. Pure.

    published, forgotten, sent ─▶ when each of its keys was last used ─▶ how old the last was that it forgot ─▶ uses lost

An engine evicts what was used least recently. So when it forgets a block, all that was last used before is gone, and what goes next has
waited about as long. Many engines whose next blocks to go are equally old evict as one cache of all their blocks would; whoever
sends more to the one that keeps them longest brings that about. An engine that has forgotten nothing has room.

What is asked for again is counted whether it was still there or not: where everything is evicted too soon nothing would seem to be of use,
and nothing would be done about it (the ghost entries of ARC, Megiddo and Modha, FAST 2003).

Time is counted in requests that were sent: nothing is evicted while nothing comes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from octavo.distributed.published_keys import short_key

_DECAY = 0.99  # of what was seen of uses, with each request


class Reuse:
    """``most_keys``: of one engine, as in ``PublishedKeys``; what it publishes beyond is not followed. So many are remembered as well of
    all that was used, the last used ones."""

    def __init__(self, most_keys: int = 1 << 18) -> None:
        if most_keys < 0:
            raise ValueError(f"most_keys: {most_keys!r} is not allowed; at least 0")
        self._most_keys = most_keys
        self._now = 0  # requests that were sent
        self._used = dict[int, dict[bytes, int]]()  # engine -> key that it has -> when it was last used or published there
        self._seen = OrderedDict[bytes, int]()  # key -> when it was last used or published anywhere, evicted or not
        self._gone_until = dict[int, int]()  # engine -> when the most recently used block that it forgot was last used
        self._num_blocks = 0.0  # of requests, less of older ones: prompts and answers
        self._num_found = 0.0  # of these, blocks that had been used before
        self._waited = 0.0  # requests that came between two uses, of these in all

    def told(self, engine: int, published: Iterable[bytes], forgotten: Iterable[bytes]) -> None:
        """Engine has come to offer these keys, and has lost those."""
        used = self._used.setdefault(engine, {})
        for key in map(short_key, forgotten):
            when = used.pop(key, None)
            if when is not None:
                self._gone_until[engine] = max(when, self._gone_until.get(engine, 0))
        for key in map(short_key, published):
            if key not in used and len(used) < self._most_keys:
                used[key] = self._now
            self._seen.pop(key, None)
            self._seen[key] = self._now
        self._trim()

    def gone(self, engine: int) -> None:
        """``engine`` has nothing any more."""
        self._used.pop(engine, None)
        self._gone_until.pop(engine, None)

    def sent(self, engine: int, keys: Seq[bytes], num_blocks: float) -> None:
        """A request whose prompt has these ``keys`` went to ``engine``; with its answer it comes to ``num_blocks`` blocks, of which one at
        least is no full block of the prompt."""
        self._now += 1
        now, seen, used = self._now, self._seen, self._used.get(engine, {})
        num_found = waited = 0
        for key in map(short_key, keys):
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

    def _trim(self) -> None:
        while len(self._seen) > self._most_keys:
            self._seen.popitem(last=False)

    def uses_lost(self, engine: int) -> float:
        """How often a block that ``engine`` evicts next would have been used again. Where a share q of all blocks is used again, each is
        q / (1 - q) times, on average; one that has waited as long as those that are used again do is half as good as that, and one that
        has waited many times as long so many times worse (a power law: use is bursty, and what is left alone for long goes on to be)."""
        if engine not in self._gone_until or not self._num_found:
            return 0.0
        usual = self._waited / self._num_found
        return self._num_found / (self._num_blocks - self._num_found) * usual / (usual + self._now - self._gone_until[engine])

    def num_keys(self, engine: int) -> int:
        """Keys of ``engine`` that are followed."""
        return len(self._used.get(engine, ()))

    def check_invariants(self) -> None:
        """AssertionError where a bound is broken, or a use lies ahead."""
        assert len(self._seen) <= self._most_keys
        assert all(len(used) <= self._most_keys for used in self._used.values())
        assert all(when <= self._now for used in self._used.values() for when in used.values())
        assert all(when <= self._now for when in self._gone_until.values())
        assert all(0.0 <= self.uses_lost(engine) < float("inf") for engine in self._used)
