"""When tokens of a simulation are read: measured delays in their order, never one token before the one before it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.distributed.handoff import Link
from octavo.simulator.delivery import Delivery, TokenReader
from octavo.simulator.handing_over import HandoffOptions
from octavo.simulator.shared_host import Crowding, HostSharing, StepKind
from octavo.simulator.simulation import Simulation, SimulationOptions
from tests.simulator.engines import engine, run, work

RISING = [float(i) for i in range(40)]


class Reader(TokenReader[str]):
    """Of streams that one engine makes."""

    def __init__(self, seed: int, delays: dict[str, list[float]]) -> None:
        super().__init__(random.Random(seed))
        self.delivery = Delivery(delays)

    def at(self, name: str, beside: str, now: float) -> float:
        return self.read_s(name, now, self.delivery, beside)


def reader(seed: int = 1, **delays: list[float]) -> Reader:
    return Reader(seed, delays)


def test_a_stream_goes_on_in_the_order_of_what_was_measured() -> None:
    some = reader(idle=RISING)
    first = some.at("a", "idle", 0.0)
    for i in range(1, 100):
        assert some.at("a", "idle", 1000.0 * i) == 1000.0 * i + (first + i) % 40
    starts = {reader(seed, idle=RISING).at("a", "idle", 0.0) for seed in range(60)}
    assert len(starts) > 20


def test_what_neighbours_are_in_counts_where_it_is_known() -> None:
    some = reader(idle=[0.001] * 20, busy=[0.5] * 20, seldom=[9.0])
    assert some.at("a", "idle", 1.0) == 1.001 and some.at("a", "busy", 2.0) == 2.5
    drawn = {reader(seed, idle=[0.001] * 20, busy=[0.5] * 20, seldom=[9.0]).at("a", "seldom", 0.0) for seed in range(100)}
    assert drawn == {0.001, 0.5, 9.0} or drawn == {0.001, 0.5}  # of all
    assert reader().at("a", "idle", 3.0) == 3.0


def test_no_token_is_read_before_the_one_before_it() -> None:
    """A late one holds up those behind it; another stream is read meanwhile, and who comes again under a name begins anew."""
    some = reader(idle=[0.0] * 20, busy=[5.0] * 20)
    assert [some.at("a", beside, now) for beside, now in (("busy", 1.0), ("idle", 2.0), ("idle", 7.0))] == [6.0, 6.0, 7.0]
    assert some.at("b", "idle", 2.0) == 2.0
    some.ended("a")
    assert some.at("a", "idle", 3.0) == 3.0


def test_a_stream_that_goes_on_elsewhere_is_read_in_order_there() -> None:
    """By others' delays, or none at all; what was late holds up what comes after it."""
    some, other = reader(idle=[5.0] * 20), Delivery({"idle": RISING})
    assert some.at("a", "idle", 1.0) == 6.0 and some.at_s("a", 2.0) == 6.0
    place = some.read_s("a", 100.0, other, "idle") - 100.0
    assert some.read_s("a", 200.0, other, "idle") == 200.0 + (place + 1) % 40
    assert some.read_s("a", 150.0, Delivery({}), "idle") == 200.0 + (place + 1) % 40
    assert some.at_s("a", 300.0) == 300.0 and some.at_s("b", 3.0) == 3.0 and len(some) == 1
    some.ended("a")
    assert not len(some)


@pytest.mark.parametrize("delay", [-1e-9, float("inf"), float("nan")])
def test_delays_that_are_none_are_refused(delay: float) -> None:
    with pytest.raises(ValueError, match=f"delays_s: {delay!r} is not allowed"):
        Delivery({"idle": [0.0, delay]})


def test_steps_go_on_as_they_did() -> None:
    """Every request has its tokens later by the same, and the engines do what they would."""
    load, hosts = [work(i / 2, 10, 8, token=i) for i in range(6)], [HostSharing((0, 1), Crowding(*[0.3] * 4))]
    delays: dict[StepKind | None, list[float]] = {None: [0.25] * 20}
    late = [HostSharing((0, 1), Crowding(*[0.3] * 4), delivery=Delivery(delays))]
    exact, found = (run([engine(), engine()], load, hosts=some) for some in (hosts, late))
    assert exact.duration_s == found.duration_s and [one.num_steps for one in exact.engines] == [one.num_steps for one in found.engines]
    for one, other in zip(exact.records, found.records, strict=True):
        assert (one.ttft_s or 0.0) + 0.25 == pytest.approx(other.ttft_s) and one.e2e_s + 0.25 == pytest.approx(other.e2e_s)
        assert one.itl_s == pytest.approx(other.itl_s)


def test_what_a_token_is_late_by_goes_by_the_neighbour_at_the_end_of_its_step() -> None:
    """The second request's prompt of 16 tokens covers the first ones of the other stream's tokens."""
    delays: dict[StepKind | None, list[float]] = {None: [0.0] * 20, StepKind.PROMPT: [0.1] * 20}
    load = [work(0.0, 1, 3), work(0.3, 16, 1, token=2)]

    def gaps_of(**sharing: Any) -> list[float]:
        options = SimulationOptions(hosts=[HostSharing((0, 1), Crowding(), **sharing)], keep_requests=True, keep_gaps=True)
        simulation = Simulation([engine(), engine()], options=options)
        simulation.run(load)
        return list(simulation.log.gaps["0"])

    (first, second), exact = gaps_of(delivery=Delivery(delays)), gaps_of()
    assert first == pytest.approx(exact[0] - 0.1) and second == pytest.approx(exact[1])


LATE: dict[StepKind | None, list[float]] = {None: [0.5] * 20}


@pytest.mark.parametrize("receiver", [[], [HostSharing((1,), Crowding())], [HostSharing((1,), Crowding(), delivery=Delivery(LATE))]])
def test_a_request_that_is_handed_over_has_no_token_read_before_the_one_before_it(receiver: list[HostSharing]) -> None:
    """Its first token is read late, when others, from another host, have long come; and nothing is kept of it in the end."""
    delays: dict[StepKind | None, list[float]] = {None: [8.0] * 20, StepKind.PROMPT: [8.0] * 20}
    hosts = [HostSharing((0,), Crowding(), delivery=Delivery(delays)), *receiver]
    handoff = HandoffOptions(Link(5e3, 0.01))
    options = SimulationOptions(hosts=hosts, keep_requests=True, keep_gaps=True, handoff=handoff)
    simulation = Simulation([engine(role=role, kv_bytes_per_token=100) for role in ("prefill", "decode")], options=options)
    simulation.run([work(0.0, 10, 20), work(0.5, 10, 1, token=2)])
    gaps = list(simulation.log.gaps["0"])
    assert len(gaps) == 19 and min(gaps) >= 0.0 and gaps[:10] == [0.0] * 10 and gaps[-1] > 0.5
    assert simulation._reader is not None and not len(simulation._reader)
