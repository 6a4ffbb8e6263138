"""Routers that hear of keys, engines that lend each other a hand, links of pairs: whole simulations."""

from __future__ import annotations

import pytest

from octavo.distributed.handoff import Link
from octavo.distributed.roles import MixedLimits
from octavo.distributed.router import RoundRobin, ShortestQueue, create_router
from octavo.simulator.handing_over import HandoffOptions
from octavo.simulator.links import Links, parse_links
from octavo.simulator.outages import Outage
from octavo.simulator.sim_costs import SimCosts
from octavo.simulator.simulation import Simulation, SimulationOptions
from octavo.workload.requests import WorkloadRequest
from tests.simulator.engines import POSITION_S, ROW_S, STEP_S, engine, run, work


def prompt(first: int, num_tokens: int) -> list[int]:
    return [first + i for i in range(num_tokens)]


def test_a_router_hears_what_an_engine_has_and_what_it_lost() -> None:
    """The second request goes where the first was; when that engine's cache has gone over to others, to the idle one. They go elsewhere
    before that where they can."""
    shared, other = prompt(1000, 40), prompt(5000, 60)
    load = [
        WorkloadRequest(0.0, [*shared, 1], 2),
        WorkloadRequest(20.0, [*shared, 2], 2),
        WorkloadRequest(40.0, [*other, 1], 30),  # it needs nearly all of 24 blocks
        WorkloadRequest(80.0, [*shared, 3], 2),
    ]
    report = run([engine(num_blocks=24), engine(num_blocks=12)], load, router=create_router("soonest", 4, SimCosts()))
    by_id = {record.request_id: record for record in report.records}
    assert by_id["0"].engine == by_id["1"].engine == by_id["2"].engine == 0
    assert by_id["1"].num_cached == 40 and by_id["0"].num_cached == 0
    assert by_id["3"].num_cached < 40
    for sizes in ((64, 12), (24, 24)):
        kept = run([engine(num_blocks=size) for size in sizes], load, router=create_router("soonest", 4, SimCosts()))
        assert {record.request_id: record.num_cached for record in kept.records}["3"] == 40


def test_keys_of_the_router_are_those_of_the_caches() -> None:
    router = create_router("soonest", 4, SimCosts())
    simulation = Simulation([engine(num_blocks=20), engine(num_blocks=20)], router)
    simulation.run(WorkloadRequest(3.0 * i, prompt(100 * (i % 7), 17 + i % 5), 3 + i % 4) for i in range(40))
    for one in simulation.engines:
        router.told(one.index, *one.take_key_changes())
        index = one.scheduler.prefix_index
        assert index is not None
        assert router.keys.num_keys(one.index) == sum(index.is_full(node) for node in index.blocks().values()) > 0  # type: ignore[attr-defined]
    router.keys.check_invariants()  # type: ignore[attr-defined]
    assert router.keys.num_expected == 0  # type: ignore[attr-defined]


def test_a_prefill_engine_under_pressure_is_helped() -> None:
    """One engine for prompts, two for answers; prompts come in a burst."""
    specs = [engine(role="prefill", kv_bytes_per_token=10), *[engine(role="decode", kv_bytes_per_token=10)] * 2]
    load = [work(0.1 * i, 48, 6, token=i + 1) for i in range(12)] + [work(200.0, 8, 4)]
    handoff = HandoffOptions(Link(1e6))
    limits = MixedLimits(borrow_s=1.0, return_s=0.9, hold_s=2.0)
    alone = run(specs, load, handoff=handoff, router=ShortestQueue(True))
    helped = run(specs, load, handoff=handoff, router=ShortestQueue(True), mixed=limits)
    assert alone.num_completed == helped.num_completed == 13
    assert alone.num_handed_over == 13 and 0 < helped.num_handed_over < 13
    ttft = [report.ttft_s["p90"] for report in (alone, helped)]
    assert ttft[0] is not None and ttft[1] is not None and ttft[1] < 0.7 * ttft[0]
    assert helped.records[-1].engine != 0  # the last one, long after, has its answer made where answers are made


def test_without_pressure_a_mixed_pool_is_none() -> None:
    specs = [engine(role="prefill", kv_bytes_per_token=10), engine(role="decode", kv_bytes_per_token=10)]
    load = [work(5.0 * i, 12, 4) for i in range(8)]
    handoff = HandoffOptions(Link(1e6))
    plain = run(specs, load, handoff=handoff)
    assert run(specs, load, handoff=handoff, mixed=MixedLimits()).records == plain.records


def test_no_room_for_answers_keeps_them_where_the_prompt_is() -> None:
    specs = [engine(role="prefill", kv_bytes_per_token=10), engine(num_blocks=16, role="decode", kv_bytes_per_token=10)]
    load = [work(0.0, 20, 30, token=i + 1) for i in range(4)]
    limits = MixedLimits(borrow_s=100.0, hold_s=0.0)
    report = run(specs, load, handoff=HandoffOptions(Link(1e6)), mixed=limits)
    assert report.num_completed == 4 and report.num_handed_over == 1
    assert sorted(record.engine for record in report.records) == [0, 0, 0, 1]


def test_a_pair_may_have_a_link_of_its_own() -> None:
    specs = [engine(role="prefill", kv_bytes_per_token=100), *[engine(role="decode", kv_bytes_per_token=100)] * 2]
    load = [work(0.0, 10, 2)]
    fast = run(specs, load, handoff=HandoffOptions(Link(1000.0))).records[0]
    slow = run(specs, load, handoff=HandoffOptions(Link(1000.0), links={(0, 1): Link(100.0, 0.5)})).records[0]
    assert fast.engine == slow.engine == 1
    assert slow.e2e_s - fast.e2e_s == pytest.approx(10.0 + 0.5 - 1.0)  # 1,000 bytes
    elsewhere = run(specs, load, handoff=HandoffOptions(Link(1000.0), links={(0, 2): Link(100.0)})).records[0]
    assert elsewhere == fast


def test_links_are_shared_by_whom_they_belong_to() -> None:
    links = Links(Link(10.0), {(0, 1): Link(5.0)})
    assert links.between(0, 1) is links.between(0, 1) is not links.between(0, 2)
    assert links.between(0, 2) is links.between(0, 3) is not links.between(1, 0)
    assert (links.between(0, 1).bytes_per_s, links.between(1, 0).bytes_per_s) == (5.0, 10.0)


def test_links_from_text() -> None:
    assert parse_links("0-2=1e9, 1-2=5e8:0.01") == {(0, 2): Link(1e9, 1e-4), (1, 2): Link(5e8, 0.01)}
    for text in ("", "0=1", "0-1", "0-0=1", "0-1=0", "0-1=nan", "0-1=inf", "0-1=1:-1", "0-1=1:inf", "a-1=1", "0-1-2=1", "-1-2=1"):
        with pytest.raises(ValueError, match="links: .* is not allowed"):
            parse_links(text)
    with pytest.raises(ValueError, match="links: '0-1' is given twice"):
        parse_links("0-1=1,0-1=2")


def test_engines_price_prompts_and_tokens_for_routers() -> None:
    one, costs = Simulation([engine()]).engines[0], SimCosts()
    assert costs.prompt_s(one, 8, 4) == pytest.approx(STEP_S + 4 * ROW_S + 0.0001 * 12)
    assert costs.token_s(one, 3, 10) == pytest.approx(STEP_S + 3 * ROW_S + 0.0001 * 30)


def test_without_a_prefix_cache_nothing_is_told() -> None:
    specs = [engine(cache={"enable_prefix_caching": False})] * 2
    simulation = Simulation(specs, create_router("soonest", 4, SimCosts()), SimulationOptions())
    assert simulation.run([work(float(i), 20, 2) for i in range(6)]).num_completed == 6
    assert simulation.engines[0].take_key_changes() == ([], [])
    assert Simulation(specs, RoundRobin()).engines[0].take_key_changes() == ([], [])


def test_short_prompts_go_in_one_piece() -> None:
    """A prompt of 10 tokens is 1,000 bytes, and takes longer than they do: a link of ten layers has one left, where prompts so short go by
    layers."""
    specs = [engine(role="prefill", kv_bytes_per_token=100), engine(role="decode")]
    ends = []
    for least in (0, 10, 11):
        options = HandoffOptions(Link(5e3, 0.01, num_layers=10), min_layerwise=least)
        ends.append(run(specs, [work(0.0, 10, 2)], handoff=options).duration_s)
    assert ends[0] == ends[1] and ends[2] - ends[0] == pytest.approx(0.2 - 0.02)


def test_chunks_of_a_prompt_go_while_the_next_is_computed() -> None:
    """Three chunks of 16 tokens, each of 1,600 bytes and computed for longer than they take to go: a layer of the last is waited for. Room
    asked for at the first token leaves all but what the last step hides."""
    specs = [engine(role="prefill", kv_bytes_per_token=100, max_num_batched_tokens=16), engine(role="decode")]
    ends = {}
    for at_token in (False, True):
        options = HandoffOptions(Link(5e3, 0.01, num_layers=10), at_token=at_token)
        one = run(specs, [work(0.0, 48, 2)], handoff=options).records[0]
        assert one.ttft_s is not None
        ends[at_token] = one.e2e_s - one.ttft_s - 0.01 - (STEP_S + ROW_S + POSITION_S * 49)
    last_step_s = STEP_S + 16 * ROW_S + POSITION_S * 48
    assert ends[False] == pytest.approx(4800 / 10 / 5e3 / 3) and ends[True] == pytest.approx(4800 / 5e3 - last_step_s)


def reserving(until_s: float, **options: object) -> Simulation:
    """Stopped while the first of three chunks of a prompt is computed, or after."""
    specs = [engine(role="prefill", kv_bytes_per_token=100), engine(role="decode"), engine(role="decode")]
    simulation = Simulation(specs, None, SimulationOptions(until_s=until_s, handoff=HandoffOptions(Link(1e6)), **options))  # type: ignore[arg-type]
    simulation.run([work(0.0, 48, 4)])
    return simulation


def test_what_is_reserved_for_a_prompt_is_given_back_when_the_prompt_is_over() -> None:
    simulation = reserving(0.3)
    _, first, second = simulation.engines
    assert first.scheduler.transfers.is_reserved("0") and first.scheduler.num_used_blocks == 12 and not second.scheduler.num_used_blocks
    assert simulation.handoffs.withdraw("0", 0.3) == {1} and simulation.handoffs.withdraw("0", 0.3) == set()
    assert not first.scheduler.transfers.is_reserved("0") and not first.scheduler.num_used_blocks
    lost, first, second = reserving(0.5, outages=[Outage(0, 0.4)]).engines  # and nobody is left to compute its prompt apart
    assert not any(one.scheduler.transfers.is_reserved("0") for one in (lost, first, second))
    assert sorted([first.scheduler.num_used_blocks, second.scheduler.num_used_blocks]) == [0, 4], "its first chunk, and no more"


def test_a_prompt_whose_receiver_is_lost_stays_where_it_is() -> None:
    """As in a cluster, where the request is its sender's until it begins elsewhere."""
    simulation = reserving(30.0, outages=[Outage(1, 0.4)])
    sender = simulation.engines[0]
    assert simulation.log.num_completed == 1 and sender.stats.num_handed_over == 0 and simulation.handoffs.stats.num_failed == 1
    assert not simulation.engines[2].scheduler.num_used_blocks and sender.stats.num_steps == 3 + 3


def test_who_waited_for_a_receiver_has_sent_nothing_beside_its_prompt() -> None:
    """The decode engine has one place. The second prompt, whose step is long enough for all of its 1,000 bytes, finds it taken, and all of
    them go over when it is free."""
    specs = [engine(role="prefill", kv_bytes_per_token=100), engine(role="decode", max_num_seqs=1)]
    second_s = []
    for num_layers in (0, 10):
        options = HandoffOptions(Link(5e3, 0.01, num_layers=num_layers))
        found = run(specs, [work(0.0, 10, 9), work(0.1, 10, 2, token=2)], handoff=options).records
        second_s.append(max(one.arrival_s + one.e2e_s for one in found) - min(one.arrival_s + one.e2e_s for one in found))
    assert second_s[0] == pytest.approx(second_s[1])
