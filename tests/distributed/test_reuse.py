"""How often what an engine evicts next is asked for again: by hand, and for anything that engines may tell."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.distributed.reuse import Reuse
from tests.distributed.views import keys

TEXTS = st.text("ab", min_size=1, max_size=6)
MOVES = st.lists(st.tuples(st.sampled_from(("publish", "forget", "gone", "sent")), st.integers(0, 2), TEXTS), max_size=40)


BLOCKS = 100  # of each engine


def new_keys(number: int) -> tuple[bytes, ...]:
    """Five that no other number has."""
    return keys(chr(256 + number) + "abcd")


def test_an_engine_to_which_nothing_has_come_has_room() -> None:
    reuse = Reuse()
    reuse.told(0, keys("abcd"), ())  # it had them when it joined
    reuse.sent(0, keys("abcd"), 5)
    reuse.sent(0, keys("abcd"), 5)
    assert reuse.kept(0, BLOCKS) == inf == reuse.kept(1, BLOCKS)
    assert reuse.uses_lost(0, BLOCKS) == 0.0 == reuse.uses_lost(1, BLOCKS)


def test_what_is_not_full_keeps_blocks_as_long_as_it_takes_to_fill() -> None:
    reuse = Reuse()
    for engine in (0, 1):
        reuse.told(engine, (), ())  # it is there, and empty
    for i in range(12):  # an engine gets two requests of three, of five new blocks each
        engine = i % 3 // 2
        reuse.sent(engine, (), 6)
        reuse.told(engine, new_keys(i), ())
    assert reuse.kept(0, 50) == pytest.approx(15, rel=0.1) and reuse.kept(1, 50) == pytest.approx(30, rel=0.1)
    assert reuse.kept(0, 500) == pytest.approx(10 * reuse.kept(0, 50))
    assert reuse.kept(0, 0) == reuse.kept(0, 40) < reuse.kept(0, 50)  # it holds more than it has blocks: it has room elsewhere
    reuse.sent(0, new_keys(0), 6)  # found
    lost = [reuse.uses_lost(engine, 50) for engine in (0, 1)]
    assert lost[0] > lost[1] > 0.0
    kept = reuse.kept(0, 50)
    for _ in range(20):
        reuse.sent(1, (), 1)
    assert reuse.kept(0, 50) > 1.2 * kept  # less comes than did
    reuse.told(0, (), new_keys(0)[3:])
    assert reuse.kept(0, 50) == 20  # what has been seen goes before what was foreseen


def test_who_joins_late_is_measured_from_then() -> None:
    reuse = Reuse()
    for i in range(200):
        reuse.sent(0, (), 6)
        reuse.told(0, new_keys(i), ())
    for i in range(4):
        reuse.sent(1, (), 6)
        reuse.told(1, new_keys(200 + i), ())
    assert reuse.kept(1, 50) == pytest.approx(10)
    reuse.gone(1)
    assert reuse.kept(1, 50) == inf


def test_what_nobody_asks_for_again_costs_nothing() -> None:
    reuse = Reuse()
    for name in ("abcd", "efgh"):
        reuse.sent(0, keys(name), 5)
        reuse.told(0, keys(name), ())
    reuse.told(0, (), keys("abcd"))
    assert reuse.uses_lost(0, BLOCKS) == 0.0


def test_uses_are_those_of_an_average_block_less_the_longer_it_waited() -> None:
    reuse = Reuse()
    reuse.told(0, keys("abcd"), ())
    reuse.told(1, keys("xy"), ())
    reuse.told(2, keys("z"), ())
    reuse.sent(0, keys("abcd"), 8)  # 4 of 8 blocks are used again, one request after they came
    reuse.told(0, (), keys("abcd")[3:])  # gone at once
    reuse.told(1, (), keys("xy")[1:])  # as old as those that are used again
    assert reuse.uses_lost(0, BLOCKS) == pytest.approx(1.0)
    assert reuse.uses_lost(1, BLOCKS) == pytest.approx(0.5)
    assert reuse.uses_lost(2, BLOCKS) == 0.0
    for _ in range(3):
        reuse.sent(2, (), 0)
    lost = [reuse.uses_lost(engine, BLOCKS) for engine in (0, 1)]
    assert lost[0] < 0.25 and 4 * lost[0] == pytest.approx(5 * lost[1])  # nothing has gone since
    reuse.gone(1)
    assert reuse.uses_lost(1, BLOCKS) == 0.0 and reuse.num_keys(1) == 0


def test_the_newest_that_is_gone_counts_and_what_was_not_told_of_does_not() -> None:
    reuse = Reuse()
    reuse.told(0, keys("a"), ())
    reuse.sent(0, keys("a"), 1)
    reuse.told(0, keys("b"), ())
    before = reuse.uses_lost(0, BLOCKS)
    reuse.told(0, (), keys("zz"))
    assert reuse.uses_lost(0, BLOCKS) == before == pytest.approx(1 / 101)  # it gets one new block a request, and keeps it for 100
    reuse.told(0, (), (*keys("b"), *keys("a")))
    assert reuse.uses_lost(0, BLOCKS) == pytest.approx(1.0)  # one of two


def test_what_was_evicted_too_soon_counts_as_used_again() -> None:
    reuse = Reuse()
    for _ in range(4):
        reuse.told(0, keys("abcd"), ())
        reuse.told(0, (), keys("abcd")[::-1])
        reuse.sent(0, keys("abcd"), 5)
    assert reuse.num_keys(0) == 0 and reuse.uses_lost(0, BLOCKS) > 1.0


def test_what_is_followed_is_bounded() -> None:
    reuse = Reuse(most_keys=2)
    reuse.told(0, keys("abc"), ())
    assert reuse.num_keys(0) == 2
    reuse.told(0, keys("x"), keys("abc")[:1])
    assert reuse.num_keys(0) == 2
    with pytest.raises(ValueError, match="most_keys: -1 is not allowed"):
        Reuse(-1)


@given(MOVES)
def test_uses_are_a_number_whatever_is_told(moves: list[tuple[str, int, str]]) -> None:
    reuse = Reuse(most_keys=8)
    for what, engine, text in moves:
        if what == "publish":
            reuse.told(engine, keys(text), ())
        elif what == "forget":
            reuse.told(engine, (), keys(text)[-1:])
        elif what == "gone":
            reuse.gone(engine)
        else:
            reuse.sent(engine, keys(text), len(text) + 1)
        reuse.check_invariants()
