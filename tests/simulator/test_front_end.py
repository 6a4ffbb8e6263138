"""The front end of a simulated cluster: that requests wait, go and are answered when they would at a real one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.costs.coefficients import Coefficients
from octavo.distributed.autoscale import ScaleLimits
from octavo.distributed.cluster_options import ClusterOptions, HandoverOptions
from octavo.distributed.dispatcher import Backpressure
from octavo.distributed.handoff import Link
from octavo.distributed.roles import MixedLimits
from octavo.distributed.router import ROUTERS, create_router
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.front_end import FrontEndOptions
from octavo.simulator.fronted import FrontedSimulation
from octavo.simulator.handing_over import HandoffOptions
from octavo.simulator.outages import Outage
from octavo.simulator.simulation import Simulation, SimulationOptions
from octavo.workload.requests import WorkloadRequest
from tests.engine.planted import steady_load
from tests.engine.timed import HOST_S, Law
from tests.simulator.timed_cluster import NUM_BLOCKS, TimedCluster

LAW = Law()
COST = Coefficients((LAW.row, LAW.pair, LAW.position, 0.0, LAW.logit_row, LAW.step), HOST_S)
SETTINGS = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
KEPT = SimulationOptions(keep_requests=True)
PATIENT = Backpressure(1e9, most_sequences=5)  # by numbers, which nobody has to predict


def specs_like(cluster: TimedCluster) -> list[EngineSpec]:
    config = cluster.nodes[0].run.engine.config
    kv_bytes = cluster.nodes[0].run.engine.backend.kv_capacity(0).bytes_per_block // config.cache.block_size
    return [
        EngineSpec(COST, NUM_BLOCKS, 4096, config.scheduler, config.cache, node.role, node.name, kv_bytes_per_token=kv_bytes)
        for node in cluster.nodes
    ]


@pytest.mark.parametrize("rate", [5.0, 40.0, 120.0])
@pytest.mark.parametrize(
    ("roles", "router", "num_places"),
    [
        (("both", "both"), "shortest-queue", 8),
        (("both", "both"), "shortest-queue", 2),
        (("both", "both"), "prefix-affinity", 2),
        (("prefill", "decode"), "shortest-queue", 8),
    ],
)
def test_where_the_law_is_known_every_request_is_answered_when_it_is_said_to(
    rate: float, roles: tuple[str, ...], router: str, num_places: int
) -> None:
    """From idle to overload, of which some of it waits at the front end, or at workers of few places: nothing but the order of things is
    left to be wrong."""
    load, link = steady_load(50, rate, 3, prefix=48), Link(1e7, 0.004)
    options = ClusterOptions(router=router, backpressure=PATIENT)
    named = {f"w{i}": role for i, role in enumerate(roles)}
    real = TimedCluster(named, LAW, options, link, **{**SETTINGS, "max_num_seqs": num_places}).serve(load)
    told = SimulationOptions(keep_requests=True, keep_gaps=True, handoff=HandoffOptions(link))
    simulation = FrontedSimulation(specs_like(real), create_router(router), told, FrontEndOptions(PATIENT))
    report = simulation.run([WorkloadRequest(one.at_s, list(one.prompt), one.num_output) for one in load])
    assert len(report.records) == 50
    for record in report.records:
        times = real.times_s[load[int(record.request_id)].name]
        assert record.ttft_s == pytest.approx(times[0] - record.arrival_s, abs=1e-9)
        assert record.e2e_s == pytest.approx(times[-1] - record.arrival_s, abs=1e-9)
        gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
        assert simulation.log.gaps[record.request_id].tolist() == pytest.approx(gaps, abs=1e-9)
    waited_s = max(one.legs[0].sent_s - one.arrival_s for one in real.journeys.all())
    assert waited_s > 0.05 or rate < 100, "nobody had to wait"


@pytest.mark.parametrize("num_layers", [0, 8])
@pytest.mark.parametrize(
    ("num_decode", "budget", "rate"), [*((1, budget, rate) for budget in (64, 32) for rate in (5.0, 14.0, 40.0)), (2, 64, 14.0)]
)
def test_room_is_asked_for_when_a_prompt_begins_where_decode_workers_have_little(
    num_layers: int, num_decode: int, budget: int, rate: float
) -> None:
    """A pool of a few answers, and a link that is busy: who has room, since when, and what has gone by then are the cluster's. Where one of
    several is chosen, steps are not taken many at a time: blocks that are told amid those are as they began."""
    load, link, roles = steady_load(50, rate, 3, prefix=48), Link(2e5, 0.004, num_layers), ["prefill"] + ["decode"] * num_decode
    handover = HandoverOptions(may_borrow=False, min_layerwise=1)
    options = ClusterOptions(router="shortest-queue", backpressure=PATIENT, handover=handover)
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": budget}
    real = TimedCluster({f"w{i}": role for i, role in enumerate(roles)}, LAW, options, link, decode_blocks=24, **settings).serve(load)
    specs = [replace(one, num_blocks=24) if one.role == "decode" else one for one in specs_like(real)]
    worst_s = {}
    for at_token in (False, True):
        told = replace(KEPT, handoff=HandoffOptions(link, min_layerwise=1, at_token=at_token), jump=num_decode == 1)
        simulation = FrontedSimulation(specs, create_router("shortest-queue"), told, FrontEndOptions(PATIENT, may_borrow=False))
        records = simulation.run([WorkloadRequest(one.at_s, list(one.prompt), one.num_output) for one in load]).records
        last_s = {one.request_id: real.times_s[load[int(one.request_id)].name][-1] for one in records}
        worst_s[at_token] = max(abs(one.arrival_s + one.e2e_s - last_s[one.request_id]) for one in records)
        assert len(records) == 50
    assert worst_s[False] < 1e-9
    assert num_layers == 0 or worst_s[True] > 1e-3, "it is all the same when room is asked for"


def requests(number: int, rate: float, **fields: object) -> list[WorkloadRequest]:
    load = steady_load(number, rate, 1)
    return [WorkloadRequest(one.at_s, list(one.prompt), one.num_output, **fields) for one in load]  # type: ignore[arg-type]


class Checked(FrontedSimulation):
    """Looks at its books whenever something has happened."""

    def _begin_steps(self, now: float) -> None:
        super()._begin_steps(now)
        self._front.check_invariants()


def spec(name: str, role: str = "both", num_blocks: int = 400) -> EngineSpec:
    return EngineSpec(COST, num_blocks, 4096, role=role, name=name, kv_bytes_per_token=64)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("roles", [("both", "both"), ("prefill", "decode"), ("prefill", "both"), ("both", "decode")])
def test_every_router_answers_all_with_any_roles(router: str, roles: tuple[str, ...]) -> None:
    specs = [spec(f"{role}-{i}", role) for i, role in enumerate(roles)]
    simulation = Checked(specs, create_router(router), KEPT)
    assert len(simulation.run(requests(30, 40.0)).records) == 30 and not len(simulation._front)


def test_without_a_front_end_prefill_needs_decode() -> None:
    with pytest.raises(ValueError, match="prefill engines need decode engines"):
        Simulation([spec("a", "prefill"), spec("b", "both")])
    with pytest.raises(ValueError, match="prefill engines need decode engines"):
        FrontedSimulation([spec("a", "prefill")], None)
    for options in (SimulationOptions(mixed=MixedLimits()), SimulationOptions(scale={"both": ScaleLimits(most=2)})):
        with pytest.raises(ValueError, match="not allowed with a front end"):
            FrontedSimulation([spec("a")], None, options)


def test_those_of_one_user_wait_for_each_other_and_not_for_their_number() -> None:
    """Thirty of one user and then one of another: who comes last is not behind all of them."""
    crowd = [WorkloadRequest(0.0, [5] * 200, 20, user="many") for _ in range(30)]
    last = {}
    for user in ("many", "few"):
        patient = FrontEndOptions(Backpressure(1e9, most_sequences=2))
        simulation = FrontedSimulation([spec("a"), spec("b")], None, KEPT, patient)
        report = simulation.run([*crowd, WorkloadRequest(0.01, [6] * 200, 20, user=user)])
        last[user] = next(record.ttft_s for record in report.records if record.request_id == "30")
    assert last["few"] is not None and last["many"] is not None and last["few"] < 0.5 * last["many"]


def test_what_no_engine_can_hold_is_refused_and_what_one_can_goes_there() -> None:
    work = [WorkloadRequest(0.0, [5] * 100, 10), WorkloadRequest(0.0, [5] * 500, 10), WorkloadRequest(0.0, [5] * 2000, 10)]
    simulation = FrontedSimulation([spec("small", num_blocks=10), spec("large", num_blocks=60)], None, KEPT)
    records = simulation.run(work).records
    assert {record.request_id for record in records} == {"0", "1"} and simulation.log.num_refused == 1
    assert next(record.engine for record in records if record.request_id == "1") == 1
    simulation = FrontedSimulation([spec("one")], None, KEPT, FrontEndOptions(Backpressure(0.0, most_waiting=3)))
    simulation.run([WorkloadRequest(0.0, [5] * 100, 10) for _ in range(10)])
    assert simulation.log.num_refused == 7 and "at most 3 wait for a worker" in (simulation.log.first_refusal or "")


def test_an_engine_that_is_gone_gets_nothing_and_what_it_had_is_answered_elsewhere() -> None:
    for roles in (("both", "both"), ("prefill", "decode")):
        specs = [spec(f"{role}-{i}", role) for i, role in enumerate(roles)]
        simulation = Checked(specs, create_router("soonest"), replace(KEPT, outages=[Outage(0, 0.3, 0.9)]))
        records = simulation.run(requests(40, 80.0)).records
        assert len(records) == 40 and simulation.log.num_moved > 0


@pytest.mark.parametrize("roles", [("both",), ("both", "both"), ("prefill", "decode")])
def test_who_waits_while_no_engine_is_there_is_answered_when_one_is_back(roles: tuple[str, ...]) -> None:
    gone = [Outage(place, 0.3 + 0.05 * place, 0.9) for place in range(len(roles))]
    specs = [spec(f"e{place}", role) for place, role in enumerate(roles)]
    options = replace(KEPT, outages=gone)
    report = Checked(specs, create_router("soonest"), options, FrontEndOptions(Backpressure(0.0, 1))).run(requests(20, 50.0))
    assert report.num_completed == 20 and max(one.arrival_s + one.e2e_s for one in report.records) > 0.9


def test_one_that_drains_gets_nothing_and_loses_nothing() -> None:
    for roles in (("both", "both"), ("prefill", "decode")):
        specs = [spec(f"{role}-{i}", role) for i, role in enumerate(roles)]
        for gone in (0, 1):
            outage = Outage(gone, 0.3, 1.2, drains=True)
            simulation = Checked(specs, create_router("soonest"), replace(KEPT, outages=[outage]))
            assert len(simulation.run(requests(40, 30.0)).records) == 40 and simulation.log.num_moved == 0


def test_requests_wait_at_the_front_end_while_nobody_is_there() -> None:
    load = requests(10, 40.0)
    for concurrency in (None, 4):
        simulation = Checked([spec("a")], None, replace(KEPT, outages=[Outage(0, 0.0, 9.0)], concurrency=concurrency))
        records = simulation.run(load).records
        assert len(records) == 10 and all(record.arrival_s + record.e2e_s > 9.0 for record in records)
    for never in (Outage(0, 0.0), Outage(0, 0.0, drains=True)):
        report = Checked([spec("a")], None, replace(KEPT, outages=[never])).run(load)
        assert (report.num_completed, report.num_unfinished) == (0, 10)


def test_what_lost_its_engine_goes_on_before_what_came_later() -> None:
    patient = FrontEndOptions(Backpressure(1e9, most_sequences=1))
    load = [WorkloadRequest(0.0, [5] * 200, 30), *(WorkloadRequest(0.01, [6] * 200, 30) for _ in range(6))]
    simulation = Checked([spec("a"), spec("b")], create_router("round-robin"), replace(KEPT, outages=[Outage(0, 0.1)]), patient)
    ends_s = {record.request_id: record.arrival_s + record.e2e_s for record in simulation.run(load).records}
    assert simulation.log.num_moved == 1 and sorted(ends_s, key=lambda name: ends_s[name])[:2] == ["1", "0"]


def test_requests_that_are_placed_go_there_whatever_else_waits() -> None:
    placed = {str(i): i % 2 for i in range(6)}
    front_end = FrontEndOptions(Backpressure(0.0), placed=placed)
    records = FrontedSimulation([spec("a"), spec("b")], None, KEPT, front_end).run([WorkloadRequest(0.0, [5] * 50, 1)] * 6).records
    assert {record.request_id: record.engine for record in records} == placed
