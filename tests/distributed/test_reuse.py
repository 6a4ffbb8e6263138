"""How often what an engine evicts next is asked for again: by hand, and for anything that engines may tell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.distributed.reuse import Reuse
from tests.distributed.views import keys

TEXTS = st.text("ab", min_size=1, max_size=6)
MOVES = st.lists(st.tuples(st.sampled_from(("publish", "forget", "gone", "sent")), st.integers(0, 2), TEXTS), max_size=40)


def test_an_engine_that_forgot_nothing_has_room() -> None:
    reuse = Reuse()
    reuse.told(0, keys("abcd"), ())
    reuse.sent(0, keys("abcd"), 5)
    assert reuse.uses_lost(0) == 0.0 == reuse.uses_lost(1)


def test_what_nobody_asks_for_again_costs_nothing() -> None:
    reuse = Reuse()
    for name in ("abcd", "efgh"):
        reuse.sent(0, keys(name), 5)
        reuse.told(0, keys(name), ())
    reuse.told(0, (), keys("abcd"))
    assert reuse.uses_lost(0) == 0.0


def test_uses_are_those_of_an_average_block_less_the_longer_it_waited() -> None:
    reuse = Reuse()
    reuse.told(0, keys("abcd"), ())
    reuse.told(1, keys("xy"), ())
    reuse.told(2, keys("z"), ())
    reuse.sent(0, keys("abcd"), 8)  # 4 of 8 blocks are used again, one request after they came
    reuse.told(0, (), keys("abcd")[3:])  # gone at once
    reuse.told(1, (), keys("xy")[1:])  # as old as those that are used again
    assert reuse.uses_lost(0) == pytest.approx(1.0)
    assert reuse.uses_lost(1) == pytest.approx(0.5)
    assert reuse.uses_lost(2) == 0.0
    for _ in range(3):
        reuse.sent(2, (), 0)
    assert reuse.uses_lost(0) < 0.25 and 4 * reuse.uses_lost(0) == pytest.approx(5 * reuse.uses_lost(1))  # nothing has gone since
    reuse.gone(1)
    assert reuse.uses_lost(1) == 0.0 and reuse.num_keys(1) == 0


def test_the_newest_that_is_gone_counts_and_what_was_not_told_of_does_not() -> None:
    reuse = Reuse()
    reuse.told(0, keys("a"), ())
    reuse.sent(0, keys("a"), 1)
    reuse.told(0, keys("b"), ())
    before = reuse.uses_lost(0)
    reuse.told(0, (), keys("zz"))
    assert reuse.uses_lost(0) == before == 0.0
    reuse.told(0, (), (*keys("b"), *keys("a")))
    assert reuse.uses_lost(0) == pytest.approx(1.0)  # one of two


def test_what_was_evicted_too_soon_counts_as_used_again() -> None:
    reuse = Reuse()
    for _ in range(4):
        reuse.told(0, keys("abcd"), ())
        reuse.told(0, (), keys("abcd")[::-1])
        reuse.sent(0, keys("abcd"), 5)
    assert reuse.num_keys(0) == 0 and reuse.uses_lost(0) > 1.0


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
