"""Which worker has which attempt, through random lives of requests: books, flights and links agree after every move."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo.core.request import Request, SamplingParams
from octavo.distributed.attempts import Attempts, Loss, RetryLimits
from octavo.distributed.fleet import Worker
from octavo.distributed.flight import Flight
from octavo.distributed.link import Link
from octavo.distributed.running_attempts import RunningAttempts
from octavo.engine.event_stream import EventStream
from tests.distributed.views import route


def flight_of(name: str) -> Flight:
    request = Request(name, [1, 2], SamplingParams(max_tokens=4), seed=0, arrival_s=0.0)
    return Flight(request, Attempts(request, RetryLimits(in_all=10_000)), EventStream([request], 1 << 20), route(name))


def link_of(index: int) -> Link:
    return Link(cast(Any, SimpleNamespace()), Worker(index, f"worker-{index}", "both", "h", 1, "b", 0.0, 0.0))


@pytest.mark.parametrize("seed", range(10))
def test_flights_links_and_keys_agree(seed: int) -> None:
    rng, running = random.Random(seed), RunningAttempts()
    links, flights = [link_of(i) for i in range(3)], [flight_of(f"r{i}") for i in range(8)]
    places: dict[str, Link] = {}
    seen = set[int]()
    for now in range(300):
        flight, link = rng.choice(flights), rng.choice(links)
        name = flight.request.request_id
        if name not in places:
            assert running.begin(flight, link, float(now)) == []
            assert flight.attempts.key not in seen and running.find(flight.attempts.key) is flight
            seen.add(flight.attempts.key)
            places[name] = link
        elif rng.random() < 0.4:
            running.moved(flight, link)
            places[name] = link
        else:
            key, had = flight.attempts.key, places.pop(name)
            if rng.random() < 0.5:
                running.left(flight)
            else:
                assert running.forget(flight) is had and running.forget(flight) is None
            assert running.find(key) is None and flight.link is None
            flight.attempts.lost(Loss.LEFT)
        running.check_invariants()
        assert len(running) == len(places)
        for one in links:
            assert {flight.request.request_id for flight in running.at(one)} == {name for name in places if places[name] is one}
            found = [flight.attempts.key for flight in running.at(one)]
            assert found == sorted(found) and set(found) == one.keys


def test_keys_of_another_front_end_are_others() -> None:
    first, second = flight_of("a"), flight_of("b")
    RunningAttempts().begin(first, link_of(0), 0.0)
    RunningAttempts().begin(second, link_of(0), 0.0)
    assert first.attempts.key >> 32 != second.attempts.key >> 32
