"""Engines that are killed and come back: no request is lost, none gets a token twice."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.distributed.handoff import HandoffLimits, Link
from octavo.distributed.roles import MixedLimits
from octavo.distributed.router import RoundRobin, create_router
from octavo.simulator.handing_over import HandoffOptions
from octavo.simulator.outages import Outage, moments, parse_outage
from octavo.simulator.report import SimulationReport
from octavo.simulator.sim_costs import SimCosts
from octavo.simulator.simulation import Simulation, SimulationOptions
from octavo.workload.arrivals import OpenLoop
from octavo.workload.lengths import Uniform
from octavo.workload.requests import Independent, Workload
from tests.simulator.engines import engine, run, work

PREFILL, DECODE = engine(role="prefill", kv_bytes_per_token=100), engine(role="decode", kv_bytes_per_token=100)
CASES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "together": ([engine()] * 3, {}),
    "by keys": ([engine()] * 3, {"router": lambda: create_router("soonest", 4, SimCosts())}),
    "apart": ([PREFILL, PREFILL, DECODE, DECODE], {"handoff": HandoffOptions(Link(2000.0))}),
    "mixed": ([PREFILL, PREFILL, DECODE, DECODE], {"handoff": HandoffOptions(Link(2000.0)), "mixed": MixedLimits(1.0, 0.9, hold_s=3.0)}),
}
OUTAGES = [Outage(0, 5.0, 20.0), Outage(1, 18.0, 31.0), Outage(2, 25.0, 40.0), Outage(0, 45.0, 60.0)]


def load() -> list[Any]:
    pairs = Independent(Uniform(1, 24), Uniform(1, 30))
    return list(Workload(OpenLoop(0.9), pairs, 60, seed=5).requests())


def outcome(name: str, outages: list[Outage], jump: bool = True) -> SimulationReport:
    specs, options = CASES[name]
    options = dict(options)
    router = options.pop("router", RoundRobin)()
    simulation = Simulation(specs, router, SimulationOptions(keep_requests=True, outages=outages, jump=jump, **options))
    report = simulation.run(load())
    for one in simulation.engines:
        one.interrupt()
        one.scheduler.check_invariants()
        assert one.scheduler.num_used_blocks == one.scheduler.num_running == one.scheduler.num_waiting == 0
    return report


@pytest.mark.parametrize("name", CASES)
def test_every_request_ends_with_the_tokens_that_it_wants(name: str) -> None:
    report, calm = outcome(name, OUTAGES), outcome(name, [])
    assert report.num_completed == calm.num_completed == 60 and report.num_moved > 5 and calm.num_moved == 0
    wanted = {str(i): (len(request.prompt_token_ids), request.num_output) for i, request in enumerate(load())}
    assert {record.request_id: (record.num_prompt, record.num_output) for record in report.records} == wanted
    assert report.output_tokens == calm.output_tokens and report.ttft_s["mean"] > calm.ttft_s["mean"]  # type: ignore[operator]
    assert outcome(name, OUTAGES).to_dict() == report.to_dict()


@pytest.mark.parametrize("name", CASES)
def test_jumping_changes_nothing(name: str) -> None:
    assert outcome(name, OUTAGES).records == outcome(name, OUTAGES, jump=False).records


def test_what_was_said_is_computed_again_elsewhere() -> None:
    load = [work(0.0, 10, 8)]
    calm = run([engine()] * 2, load).records[0]
    (record,) = run([engine()] * 2, load, outages=[Outage(0, 2.0)]).records
    assert calm.engine == 0 and record.engine == 1 and record.ttft_s == calm.ttft_s
    assert record.e2e_s > calm.e2e_s and record.worst_gap_s is not None and calm.worst_gap_s is not None
    assert record.worst_gap_s > calm.worst_gap_s


def test_requests_wait_while_nobody_is_there() -> None:
    report = run([engine()], [work(0.0, 10, 8), work(3.0, 4, 2)], outages=[Outage(0, 1.0, 50.0)])
    assert report.num_completed == 2 and all(record.arrival_s + record.e2e_s > 50.0 for record in report.records)
    gone = run([engine()], [work(0.0, 10, 8)], outages=[Outage(0, 1.0)])
    assert (gone.num_completed, gone.num_unfinished) == (0, 1)


@pytest.mark.parametrize("mixed", [None, MixedLimits(1.0, 0.9), MixedLimits(1.0, 0.9, hold_s=1e9)])
@pytest.mark.parametrize("router", [RoundRobin, lambda: create_router("soonest", 4, SimCosts())])
def test_who_is_left_of_a_pair_answers_whole_requests(mixed: MixedLimits | None, router: Any) -> None:
    """As in a cluster: whichever role is gone, and whether the other may be borrowed or has just been; nobody waits for it to come back.
    What was being computed there, and what waited to be handed over, goes on with those that are left too."""
    handoff = HandoffOptions(Link(2000.0), HandoffLimits(reserve_s=1e6))
    for gone in (0, 1):
        load = [work(float(i), 10, 8) for i in range(12)]
        options = {"mixed": mixed, "handoff": handoff, "outages": [Outage(gone, 3.5, 200.0)]}
        report = run([PREFILL, DECODE], load, router=router(), **options)
        assert report.num_completed == 12
        late = [record for record in report.records if record.arrival_s > 3.5]
        assert {record.engine for record in late} == {1 - gone}
        assert all(record.arrival_s + record.e2e_s < 200.0 for record in report.records)
    never = run([PREFILL, DECODE], [work(0.0, 10, 8)], outages=[Outage(0, 1.0), Outage(1, 1.0)], mixed=mixed, handoff=handoff)
    assert (never.num_completed, never.num_unfinished) == (0, 1)


def test_a_cache_is_gone_with_its_engine() -> None:
    load = [work(0.0, 13, 1), work(20.0, 13, 1)]
    assert run([engine()], load).records[1].num_cached == 12
    assert run([engine()], load, outages=[Outage(0, 5.0, 6.0)]).records[1].num_cached == 0


def test_one_that_drains_keeps_what_it_has_and_gets_nothing_new() -> None:
    load = [work(0.0, 10, 8), work(3.0, 4, 2)]
    calm = run([engine()], load[:1]).records[0]
    report = run([engine()], load, outages=[Outage(0, 1.0, 50.0, drains=True)])
    first, second = report.records
    assert first == calm and report.num_moved == 0
    assert second.ttft_s is not None and second.arrival_s + second.ttft_s > 50.0


def test_one_that_has_drained_has_its_cache_unless_another_comes_back() -> None:
    load = [work(0.0, 13, 1), work(20.0, 13, 1)]
    for is_new, num_cached in ((True, 0), (False, 12)):
        assert run([engine()], load, outages=[Outage(0, 5.0, 6.0, True, is_new)]).records[1].num_cached == num_cached
    late = run([engine()], [work(0.0, 13, 8), work(20.0, 13, 1)], outages=[Outage(0, 0.5, 1.0, True)])
    assert late.num_moved == 0 and [record.num_cached for record in late.records] == [0, 12]  # it has not drained by then, and goes on


def test_outages_are_checked() -> None:
    assert parse_outage("2@1.5") == Outage(2, 1.5) and parse_outage("0@1-4") == Outage(0, 1.0, 4.0)
    for text in ("", "1", "x@1", "1@x", "1@5-5", "1@5-3", "1@1.2.3"):
        with pytest.raises(ValueError, match="outage: .* is not allowed; ENGINE@AT"):
            parse_outage(text)
    with pytest.raises(ValueError, match="outage: engine 2 is not allowed; they are numbered from 0 to 1"):
        moments([Outage(2, 1.0)], 2)
    with pytest.raises(ValueError, match="engine 0 is killed at 3 s, when it is gone"):
        moments([Outage(0, 1.0, 5.0), Outage(0, 3.0)], 1)
    with pytest.raises(ValueError, match="outage: 2.0 to 1.0"):
        Outage(0, 2.0, 1.0)
