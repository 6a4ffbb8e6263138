"""Which engine has which beginnings of prompts in its prefix cache, from what the engines tell. Pure.

    told(engine, published, forgotten)      the truth, as far as it has been told
    expect(request, engine, keys)           on its way: a request that was sent there will publish these
    matched(keys) ─▶ {engine: blocks}       the longest leading run of keys that each has, or is about to have

Block keys are chained (``core.prefix_index``): a key stands for all tokens up to it. They are cut to ``SHORT_KEY_BYTES``, enough to
route by: two keys that meet there make a worse choice and never a wrong answer, since the engine looks up the whole key.

An engine that is gone may have had hundreds of thousands of keys. Its name is taken off at once, from then on nobody is told of it; what is
kept of its keys is swept away little by little, with what is told and expected afterwards, so that no caller ever waits for all of it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

SHORT_KEY_BYTES = 8
_NOBODY: dict[int, int] = {}
SWEEP = 64  # keys that each call looks at, beside as many as it adds


def short_keys(keys: Iterable[bytes]) -> list[bytes]:
    return [key[:SHORT_KEY_BYTES] for key in keys]


class PublishedKeys:
    """``most_keys``: of one engine; what it publishes beyond is not remembered (but counted in ``num_left_out``), and an engine is never
    taken to have more than it said. ``most_expected``: requests whose keys are expected at a time; the oldest are dropped."""

    def __init__(self, most_keys: int = 1 << 18, most_expected: int = 4096) -> None:
        for name, value in (("most_keys", most_keys), ("most_expected", most_expected)):
            if value < 0:
                raise ValueError(f"{name}: {value!r} is not allowed; at least 0")
        self._most_keys = most_keys
        self._most_expected = most_expected
        self._holders: dict[bytes, int] = {}  # key -> bits of the engines that have it, and of some that are gone
        self._unswept: dict[bytes, int] = {}  # the same, of other keys, which are still to be looked at
        self._bits: dict[int, int] = {}  # engine -> the bit that stands for it, until it is gone
        self._engines: dict[int, int] = {}  # and the other way round
        self._alive = 0  # bits of engines
        self._gone = 0  # bits that may be left in both tables, of engines that are gone
        self._sweeping = 0  # those of them that are swept away now: they are in ``_unswept`` alone
        self._counts: dict[int, int] = {}  # engine -> number of its keys
        self._expected: dict[bytes, dict[int, int]] = {}  # key -> engine -> how many times requests there will publish it
        self._requests: OrderedDict[str, tuple[int, list[bytes]]] = OrderedDict()  # engine and expected keys of each
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
        bit, old, new = self._bit(engine), short_keys(forgotten), short_keys(published)
        self._sweep(len(old) + len(new) + SWEEP)
        for key in old:
            holders = self._settled(key)
            if holders & bit:
                self._counts[engine] -= 1
                self._settle(key, holders & ~bit)
        for key in new:
            holders, count = self._settled(key), self._counts.get(engine, 0)
            if holders & bit:
                continue
            if count >= self._most_keys:
                self.num_left_out += 1
                continue
            self._holders[key] = holders | bit
            self._counts[engine] = count + 1

    def gone(self, engine: int) -> None:
        """``engine`` has nothing any more, and nothing is expected of it."""
        bit = self._bits.pop(engine, 0)
        if bit:
            del self._engines[bit]
            self._alive &= ~bit
            if self._counts.pop(engine, 0):
                self._gone |= bit
        for request_id in [one for one, (there, _) in self._requests.items() if there == engine]:
            self.ended(request_id)

    # --- bits ---------------------------------------------------------------------------------------------------------------------------

    def _bit(self, engine: int) -> int:
        """The bit that stands for ``engine``: one that stands for no other, and is left over from none."""
        bit = self._bits.get(engine)
        if bit is None:
            taken = self._alive | self._gone
            bit = ~taken & (taken + 1)  # the lowest that is free
            self._bits[engine], self._engines[bit] = bit, engine
            self._alive |= bit
        return bit

    def _settled(self, key: bytes) -> int:
        """Who has ``key``, of those that there are; it is in the table of swept keys afterwards, if anywhere."""
        holders = self._unswept.pop(key, None) if self._unswept else None
        if holders is None:
            return self._holders.get(key, 0) & self._alive
        self._settle(key, holders & self._alive)
        return holders & self._alive

    def _settle(self, key: bytes, holders: int) -> None:
        if holders:
            self._holders[key] = holders
        else:
            self._holders.pop(key, None)

    def _sweep(self, num_keys: int) -> None:
        """Look at so many keys, as long as there may be some that nobody has."""
        while num_keys > 0:
            if not self._unswept:
                self._gone &= ~self._sweeping
                self._sweeping = self._gone
                if not self._gone:
                    return
                self._unswept, self._holders = self._holders, {}
            num_now = min(num_keys, len(self._unswept))
            for _ in range(num_now):
                key, holders = self._unswept.popitem()
                if holders & self._alive:
                    self._holders[key] = holders & self._alive
            num_keys -= max(1, num_now)

    # --- what is on its way -------------------------------------------------------------------------------------------------------------

    def expect(self, request_id: str, engine: int, keys: Iterable[bytes]) -> None:
        """A request with these keys was sent to ``engine``."""
        self.ended(request_id)
        mine = short_keys(keys)
        if not mine:
            return
        self._requests[request_id] = engine, mine
        self._bit(engine)
        self._sweep(SWEEP)
        for key in mine:
            engines = self._expected.get(key)
            if engines is None:
                self._expected[key] = {engine: 1}
            else:
                engines[engine] = engines.get(engine, 0) + 1
        while len(self._requests) > self._most_expected:
            self.ended(next(iter(self._requests)))

    def ended(self, request_id: str) -> None:
        """Nothing more is expected of a request: what it published has been told."""
        engine, keys = self._requests.pop(request_id, (-1, []))
        for key in keys:
            engines = self._expected[key]
            if engines[engine] > 1:
                engines[engine] -= 1
                continue
            del engines[engine]
            if not engines:
                del self._expected[key]

    # --- questions ----------------------------------------------------------------------------------------------------------------------

    def matched(self, keys: Seq[bytes]) -> dict[int, int]:
        """Leading blocks of a prompt with these ``keys`` that engines have or will have; engines with none are not in it.

        Takes time for the longest run of all, however many engines and requests there are.
        """
        found = dict[int, int]()
        alive = -1  # engines that had every key so far
        has, had, expected = self._holders.get, self._unswept.get, self._expected.get
        for num_blocks, key in enumerate(short_keys(keys)):
            having = (has(key, 0) | had(key, 0)) & self._alive
            for engine in expected(key, _NOBODY):
                having |= self._bits[engine]
            if num_blocks and alive & ~having:
                self._note(found, alive & ~having, num_blocks)
            alive &= having
            if not alive:
                break
        else:
            self._note(found, alive if keys else 0, len(keys))
        return found

    def _note(self, found: dict[int, int], bits: int, num_blocks: int) -> None:
        while bits:
            lowest = bits & -bits
            found[self._engines[lowest]] = num_blocks
            bits ^= lowest

    def check_invariants(self) -> None:
        """AssertionError unless counts and sets agree, and no bound is broken."""
        assert {engine: bit for bit, engine in self._engines.items()} == self._bits
        assert self._alive == sum(self._bits.values()) and not self._alive & self._gone and not self._sweeping & ~self._gone
        assert not self._holders.keys() & self._unswept.keys(), "a key is in two tables"
        counts = dict[int, int]()
        for key, holders in (*self._holders.items(), *self._unswept.items()):
            assert holders and not holders & ~(self._alive | self._gone), "a key without holders is kept, or one of a holder that never was"
            assert key in self._unswept or not holders & self._sweeping, "a key that has been swept is of somebody who is gone"
            one = dict[int, int]()
            self._note(one, holders & self._alive, 1)
            for engine in one:
                counts[engine] = counts.get(engine, 0) + 1
        assert counts == {engine: count for engine, count in self._counts.items() if count}
        assert all(count <= self._most_keys for count in self._counts.values())
        assert len(self._requests) <= self._most_expected
        times = Counter((key, engine) for engine, keys in self._requests.values() for key in keys)
        assert times == {(key, engine): count for key, engines in self._expected.items() for engine, count in engines.items()}
        assert all(self._expected.values()), "a key that nobody is expected to publish is kept"
