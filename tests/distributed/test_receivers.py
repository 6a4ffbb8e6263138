"""Who is asked for room instead of whoever was chosen."""

from __future__ import annotations

from octavo.distributed.receivers import receiver_among

PREFILL, BOTH, SMALL, LARGE = (0, "prefill", 90), (1, "both", 80), (2, "decode", 10), (3, "decode", 20)


def test_the_one_that_is_wanted_then_the_one_with_most_room_of_those_that_decode() -> None:
    every = [PREFILL, BOTH, SMALL, LARGE]
    assert [receiver_among(wanted, every) for wanted in (0, 1, 2, 3)] == [0, 1, 2, 3]
    assert receiver_among(9, every) == 3
    assert receiver_among(9, [PREFILL, BOTH, SMALL]) == 2
    assert receiver_among(9, [PREFILL, BOTH]) == 1
    assert receiver_among(9, [PREFILL]) is None and receiver_among(9, []) is None


def test_of_equals_the_first() -> None:
    assert receiver_among(9, [(5, "decode", 20), LARGE]) == 5
