"""What engines have, as told and as expected: against sets of strings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.distributed import published_keys
from octavo.distributed.published_keys import SHORT_KEY_BYTES, PublishedKeys
from tests.distributed.views import keys

TEXTS = st.text("ab", min_size=1, max_size=6)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(0, 3), TEXTS),
        st.tuples(st.just("forget"), st.integers(0, 3), TEXTS),
        st.tuples(st.just("gone"), st.integers(0, 3), st.just("")),
        st.tuples(st.just("expect"), st.integers(0, 3), TEXTS),
        st.tuples(st.just("end"), st.integers(0, 3), TEXTS),
    ),
    max_size=40,
)


@given(MOVES, TEXTS, st.sampled_from([1, 2, published_keys.SWEEP]))
def test_the_longest_leading_run_of_each_engine_is_found(moves: list[tuple[str, int, str]], wanted: str, sweep: int) -> None:
    """However slowly what is left of those who are gone is swept away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published_keys, "SWEEP", sweep)
        follow(moves, wanted)


def follow(moves: list[tuple[str, int, str]], wanted: str) -> None:
    known, truth, expected = PublishedKeys(), dict[int, set[bytes]](), dict[str, tuple[int, set[bytes]]]()
    for what, engine, text in moves:
        if what == "publish":
            known.told(engine, keys(text), ())
            truth.setdefault(engine, set()).update(keys(text))
        elif what == "forget":
            known.told(engine, (), keys(text)[-1:])
            truth.setdefault(engine, set()).discard(keys(text)[-1])
        elif what == "gone":
            known.gone(engine)
            truth.pop(engine, None)
            expected = {name: pair for name, pair in expected.items() if pair[0] != engine}
        elif what == "expect":
            known.expect(text, engine, keys(text))
            expected[text] = (engine, set(keys(text)))
        else:
            known.ended(text)
            expected.pop(text, None)
        known.check_invariants()
    found = dict[int, int]()
    for engine in range(4):
        have = truth.get(engine, set()).union(*(mine for home, mine in expected.values() if home == engine))
        run = 0
        while run < len(wanted) and keys(wanted)[run] in have:
            run += 1
        if run:
            found[engine] = run
    assert known.matched(keys(wanted)) == found


def test_keys_may_come_whole_or_cut_short() -> None:
    known = PublishedKeys()
    known.told(0, [key[:SHORT_KEY_BYTES] for key in keys("abc")], ())
    assert known.matched(keys("abcd")) == {0: 3} == known.matched([key[:SHORT_KEY_BYTES] for key in keys("abc")])


def test_an_engine_is_never_taken_to_have_more_than_it_said() -> None:
    known = PublishedKeys(most_keys=3)
    known.told(0, keys("abcde"), ())
    assert (known.num_keys(0), known.num_left_out, known.matched(keys("abcde"))) == (3, 2, {0: 3})
    known.told(0, keys("x"), keys("abc")[-1:])  # what goes makes room
    known.check_invariants()
    assert known.matched(keys("abc")) == {0: 2} and known.matched(keys("x")) == {0: 1}


def test_many_that_expect_the_same_are_as_one() -> None:
    known = PublishedKeys()
    for i in range(100):
        known.expect(str(i), i % 2, keys("abcd"))
    assert known.matched(keys("abcd")) == {0: 4, 1: 4}
    assert all(len(engines) == 2 for engines in known._expected.values())  # what is looked at for each key
    for i in range(99):
        known.ended(str(i))
        known.check_invariants()
    assert known.matched(keys("abcd")) == {1: 4}
    known.ended("99")
    assert known.matched(keys("abcd")) == {} and known.num_expected == 0


def test_what_is_expected_is_bounded_and_the_oldest_goes_first() -> None:
    known = PublishedKeys(most_expected=2)
    for engine, name in enumerate(("aa", "bb", "cc")):
        known.expect(name, engine, keys(name))
    known.check_invariants()
    assert [known.matched(keys(name)) for name in ("aa", "bb", "cc")] == [{}, {1: 2}, {2: 2}] and known.num_expected == 2
    known.ended("bb")
    known.ended("never sent")
    assert known.matched(keys("bb")) == {}


def test_nothing_is_known_of_nothing() -> None:
    known = PublishedKeys()
    assert known.matched(()) == {} == known.matched(keys("a"))
    known.told(0, (), keys("a"))
    known.gone(7)
    known.expect("r", 0, ())
    assert known.num_expected == 0
    with pytest.raises(ValueError, match="most_keys: -1 is not allowed"):
        PublishedKeys(most_keys=-1)


class CountedDict(dict[bytes, int]):
    """Counts the entries that are looked at."""

    looks = 0

    def __iter__(self) -> Iterator[bytes]:
        for key in super().__iter__():
            CountedDict.looks += 1
            yield key

    def items(self):  # type: ignore[no-untyped-def]
        for pair in super().items():
            CountedDict.looks += 1
            yield pair

    def popitem(self) -> tuple[bytes, int]:
        CountedDict.looks += 1
        return super().popitem()


def test_an_engine_that_goes_is_never_waited_for() -> None:
    """Not one of its keys is looked at then; each call afterwards looks at a few, until no memory is left of it."""
    known, number = PublishedKeys(), 20_000
    known._holders = CountedDict()
    known.told(0, [b"a%07d" % i for i in range(number)], ())
    known.told(1, [b"a%07d" % i for i in range(0, number, 100)], ())
    CountedDict.looks = 0
    known.gone(0)
    assert CountedDict.looks == 0 and known.num_keys(0) == 0
    assert known.matched([b"a%07d" % 0, b"a%07d" % 1]) == {1: 1}, "nobody is told of it from then on"
    num_calls = 0
    while known._gone:
        before = CountedDict.looks
        known.told(1, (), ())
        num_calls += 1
        assert CountedDict.looks - before <= published_keys.SWEEP
    known.check_invariants()
    assert num_calls == pytest.approx(number / published_keys.SWEEP, rel=0.05)
    assert len(known._holders) + len(known._unswept) == number // 100 == known.num_keys(1)


def test_an_engine_that_comes_back_over_and_over_takes_no_more_room() -> None:
    """A worker that reconnects tells all it has anew; no more bits are used than there are engines and sweeps on their way."""
    known = PublishedKeys()
    known.told(1, keys("ab" * 50), ())
    for _ in range(50):
        known.told(0, [b"%08d" % i for i in range(1000)], ())
        known.told(0, (), [b"%08d" % i for i in range(0, 1000, 10)])
        assert known.matched([b"%08d" % 1, b"%08d" % 2]) == {0: 2} and known.matched(keys("ab")) == {1: 2}
        known.check_invariants()
        assert len(known._holders) + len(known._unswept) <= 100 + 3 * 1000
        assert (known._alive | known._gone).bit_length() <= 4
        known.gone(0)
