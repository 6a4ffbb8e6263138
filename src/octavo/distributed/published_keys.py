"""Which engine has which beginnings of prompts in its prefix cache, from what the engines tell. Pure.

    told(engine, published, forgotten)      the truth, as far as it has been told
    expect(request, engine, keys)           on its way: a request that was sent there will publish these
    matched(keys) ─▶ {engine: blocks}       the longest leading run of keys that each has, or is about to have

Block keys are chained (``core.prefix_index``): a key stands for all tokens up to it. They are cut to ``SHORT_KEY_BYTES``, enough to
route by: two keys that meet there make a worse choice and never a wrong answer, since the engine looks up the whole key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

SHORT_KEY_BYTES = 8


def short_key(key: bytes) -> bytes:
    return key[:SHORT_KEY_BYTES]


class PublishedKeys:
    """``most_keys``: of one engine; what it publishes beyond is not remembered (but counted in ``num_left_out``), and an engine is never
    taken to have more than it said. ``most_expected``: requests whose keys are expected at a time; the oldest are dropped."""

    def __init__(self, most_keys: int = 1 << 18, most_expected: int = 4096) -> None:
        for name, value in (("most_keys", most_keys), ("most_expected", most_expected)):
            if value < 0:
                raise ValueError(f"{name}: {value!r} is not allowed; at least 0")
        self._most_keys = most_keys
        self._most_expected = most_expected
        self._holders: dict[bytes, int] = {}  # key -> engines that have it, one bit each
        self._counts: dict[int, int] = {}  # engine -> number of its keys
        self._expected: dict[bytes, dict[str, int]] = {}  # key -> engine, by the request that will publish it
        self._requests: OrderedDict[str, tuple[bytes, ...]] = OrderedDict()  # expected keys of each
        self.num_left_out = 0

    def num_keys(self, engine: int) -> int:
        """Keys that ``engine`` is known to have."""
        return self._counts.get(engine, 0)

    @property
    def num_expected(self) -> int:
        """Requests whose keys are expected."""
        return len(self._requests)

    # --- the truth ----------------------------------------------------------------------------------------------------------------------

    def told(self, engine: int, published: Iterable[bytes], forgotten: Iterable[bytes]) -> None:
        """First what is forgotten goes, so that what is new has room. A key that was not known, or is known already, changes nothing."""
        bit = 1 << engine
        for key in map(short_key, forgotten):
            holders = self._holders.get(key, 0)
            if holders & bit:
                self._counts[engine] -= 1
                if holders == bit:
                    del self._holders[key]
                else:
                    self._holders[key] = holders & ~bit
        for key in map(short_key, published):
            holders, count = self._holders.get(key, 0), self._counts.get(engine, 0)
            if holders & bit:
                continue
            if count >= self._most_keys:
                self.num_left_out += 1
                continue
            self._holders[key] = holders | bit
            self._counts[engine] = count + 1

    def gone(self, engine: int) -> None:
        """``engine`` has nothing any more, and nothing is expected of it."""
        if self._counts.pop(engine, 0):
            bit = 1 << engine
            self._holders = {key: rest for key, holders in self._holders.items() if (rest := holders & ~bit)}
        for request_id in [one for one, keys in self._requests.items() if keys and self._expected[keys[0]][one] == engine]:
            self.ended(request_id)

    # --- what is on its way -------------------------------------------------------------------------------------------------------------

    def expect(self, request_id: str, engine: int, keys: Iterable[bytes]) -> None:
        """A request with these keys was sent to ``engine``."""
        self.ended(request_id)
        mine = tuple(dict.fromkeys(map(short_key, keys)))
        if not mine:
            return
        self._requests[request_id] = mine
        for key in mine:
            self._expected.setdefault(key, {})[request_id] = engine
        while len(self._requests) > self._most_expected:
            self.ended(next(iter(self._requests)))

    def ended(self, request_id: str) -> None:
        """Nothing more is expected of a request: what it published has been told."""
        for key in self._requests.pop(request_id, ()):
            requests = self._expected[key]
            del requests[request_id]
            if not requests:
                del self._expected[key]

    # --- questions ----------------------------------------------------------------------------------------------------------------------

    def matched(self, keys: Seq[bytes]) -> dict[int, int]:
        """Leading blocks of a prompt with these ``keys`` that engines have or will have; engines with none are not in it.

        Takes time for the longest run of all, however many engines there are.
        """
        found = dict[int, int]()
        alive = -1  # engines that had every key so far
        for num_blocks, key in enumerate(map(short_key, keys)):
            now = alive & self._having(key)
            _note(found, alive & ~now if num_blocks else 0, num_blocks)
            alive = now
            if not alive:
                break
        else:
            _note(found, alive if keys else 0, len(keys))
        return found

    def _having(self, key: bytes) -> int:
        holders = self._holders.get(key, 0)
        for engine in self._expected.get(key, {}).values():
            holders |= 1 << engine
        return holders

    def check_invariants(self) -> None:
        """AssertionError unless counts and sets agree, and no bound is broken."""
        counts = dict[int, int]()
        for holders in self._holders.values():
            assert holders > 0, "a key without holders is kept"
            _note_each(counts, holders)
        assert counts == {engine: count for engine, count in self._counts.items() if count}
        assert all(count <= self._most_keys for count in self._counts.values())
        assert len(self._requests) <= self._most_expected
        pairs = {(key, request_id) for key, requests in self._expected.items() for request_id in requests}
        assert pairs == {(key, request_id) for request_id, keys in self._requests.items() for key in keys}
        assert all(self._expected.values()), "a key that nobody is expected to publish is kept"


def _note(found: dict[int, int], engines: int, num_blocks: int) -> None:
    while engines:
        lowest = engines & -engines
        found[lowest.bit_length() - 1] = num_blocks
        engines ^= lowest


def _note_each(counts: dict[int, int], engines: int) -> None:
    while engines:
        lowest = engines & -engines
        engine = lowest.bit_length() - 1
        counts[engine] = counts.get(engine, 0) + 1
        engines ^= lowest
