"""The events of a chaos run: the same for a seed, never all workers at once, with calm to recover in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.schedule import CALM_S, LEAD_S, LONG_S, SHORT_S, Kind, rounds

ALL = tuple(Kind)
EVERYWHERE = [ALL] * 3


@given(st.integers(0, 2**32), st.floats(0, 1500), st.integers(2, 6))
def test_rounds(seed: int, duration_s: float, num_workers: int) -> None:
    made = rounds(seed, duration_s, [ALL] * num_workers)
    assert made == rounds(seed, duration_s, [ALL] * num_workers)
    ends = [LEAD_S - CALM_S[0], *(one.end_s for one in made)]
    for one, before_s in zip(made, ends, strict=False):
        assert one.at_s - before_s >= CALM_S[0] - 1e-9
        hit = [event.worker for event in one.events]
        assert len(set(hit)) == len(hit) < num_workers
        assert list(one.events) == sorted(one.events, key=lambda event: event.at_s)
        for event in one.events:
            assert SHORT_S[0] <= event.lasts_s <= LONG_S[1] and (event.delay_s > 0) == (event.kind is Kind.DELAY)
            assert event.kind is not Kind.KILL or event.lasts_s >= LONG_S[0]
    assert not made or made[-1].end_s + CALM_S[0] <= duration_s


@given(st.integers(0, 2**32))
def test_a_longer_run_begins_as_a_shorter_one_does(seed: int) -> None:
    short = rounds(seed, 200, EVERYWHERE)
    assert rounds(seed, 1200, EVERYWHERE)[: len(short)] == short


def test_twenty_minutes_have_everything_everywhere() -> None:
    events = [event for one in rounds(1, 1200, EVERYWHERE) for event in one.events]
    assert {(event.kind, event.worker) for event in events} == {(kind, worker) for kind in Kind for worker in range(3)}
    assert any(len(one.events) == 2 for one in rounds(1, 1200, EVERYWHERE))
    assert rounds(1, 1200, EVERYWHERE) != rounds(2, 1200, EVERYWHERE)


def test_nothing_happens_to_a_worker_that_may_not() -> None:
    events = [event for one in rounds(3, 3000, [(Kind.KILL,), (Kind.STOP, Kind.CUT)]) for event in one.events]
    assert {(event.kind, event.worker) for event in events} == {(Kind.KILL, 0), (Kind.STOP, 1), (Kind.CUT, 1)}


def test_what_is_no_run() -> None:
    with pytest.raises(ValueError, match="kinds: 1 workers"):
        rounds(0, 100, [ALL])
    with pytest.raises(ValueError, match="something has to happen"):
        rounds(0, 100, [ALL, ()])


def test_events_read_well() -> None:
    texts = {str(event) for one in rounds(1, 1200, EVERYWHERE) for event in one.events}
    assert any(text.startswith("delay of ") and " ms at worker " in text for text in texts)
    assert any(text.startswith("kill at worker ") for text in texts)
