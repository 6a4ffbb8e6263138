"""What a replay says a cluster would gain, against what it gains: whole engines on devices of known, noisy cost behind a front end."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
import pytest

from octavo.cli.what_if import replay_of_lines
from octavo.core.cluster_window import ClusterWindow, WindowFrontEnd
from octavo.core.recorded_window import WindowReplay
from octavo.distributed.cluster_options import ClusterOptions, HandoverOptions, parse_workers
from octavo.distributed.handoff import HandoffLimits, Link
from octavo.engine.replay_advice import ReplayedAdvice
from octavo.simulator.cluster_switches import Setup, _fewer
from octavo.simulator.cluster_what_if import UNSEEN_LINK, ClusterWhatIf, _place, handoffs_of
from octavo.simulator.what_if import main, what_if
from tests.engine.planted import Arrival, steady_load, tokens
from tests.engine.timed import Law
from tests.simulator.test_front_end import spec
from tests.simulator.timed_cluster import TimedCluster

LAW = Law(noise=0.03)
TWO = {"worker-0": "both", "worker-1": "both"}
APART = {"prefill-0": "prefill", "decode-0": "decode"}
SHORTEST = ClusterOptions(router="shortest-queue")


def wall_s(cluster: TimedCluster) -> float:
    """The mean time from arrival to the last token, as it was."""
    found = ClusterWhatIf(cluster.window()).load.measured().wall
    assert found is not None
    return found


def poisson(seed: int, number: int, rate: float, make: Callable[[int, float, random.Random], Arrival]) -> list[Arrival]:
    rng, now, out = random.Random(seed), 0.0, []
    for i in range(number):
        now += rng.expovariate(rate)
        out.append(make(i, now, rng))
    return out


def advised(replay: WindowReplay, objective: str = "wall") -> list[str]:
    """Changes by rank; nothing that gains something comes behind what does not."""
    ranked = ReplayedAdvice(replay, 0.0, 60.0).ranked(objective)
    gains = [one.gain_s for one in ranked]
    assert gains == sorted(gains, reverse=True) and gains[-1] == 0.0
    return [one.change for one in ranked]


def gain_of(replay: WindowReplay, change: str, objective: str = "wall") -> float:
    (outcome,) = (one for one in replay.outcomes if one.change == change)
    gain = outcome.gain(replay.replayed, objective)
    assert gain is not None
    return gain


# --- the right switch first, a useless one last ------------------------------------------------------------------------------------------


def test_where_two_workers_are_too_few_a_third_comes_first() -> None:
    load = steady_load(60, 60.0, 1)
    two = TimedCluster(TWO, LAW, SHORTEST, max_num_seqs=4).serve(load)
    replay = what_if(two.window())
    assert (replay.num_requests, replay.num_compared) == (60, 60)
    assert replay.error("wall") == pytest.approx(0.0, abs=0.05)
    changes = advised(replay)
    assert changes[0] == "one worker more (--workers 3)" and changes[-1] == "one worker less (--workers 1)"
    three = TimedCluster({**TWO, "worker-2": "both"}, LAW, SHORTEST, max_num_seqs=4).serve(load)
    gain = 1.0 - wall_s(three) / wall_s(two)
    assert gain > 0.3 and gain_of(replay, changes[0]) == pytest.approx(gain, rel=0.2)
    useless = ("--num-kv-blocks 800", "--no-enable-prefix-caching", "--kv-cache-dtype int8")
    assert all(abs(gain_of(replay, change)) < 0.01 for change in useless)


def test_where_the_pools_are_too_small_larger_ones_come_first() -> None:
    load, law = steady_load(60, 16.0, 1), Law(step=8e-3, row=1e-4, noise=0.03)
    small = TimedCluster(TWO, law, SHORTEST, num_kv_blocks=8).serve(load)
    replay = what_if(small.window())
    assert replay.error("wall") == pytest.approx(0.0, abs=0.05)
    changes = advised(replay)
    assert changes[0] == "--num-kv-blocks 16" and changes[-1] == "one worker less (--workers 1)"
    gain = 1.0 - wall_s(TimedCluster(TWO, law, SHORTEST, num_kv_blocks=16).serve(load)) / wall_s(small)
    assert gain > 0.3 and gain_of(replay, changes[0]) == pytest.approx(gain, rel=0.2)


def test_where_prompts_stand_between_tokens_apart_comes_first() -> None:
    """Short streams all the time, and now and then a prompt that takes as long as all of a stream."""
    load = poisson(1, 70, 30.0, lambda i, at_s, rng: Arrival(f"s{i}", at_s, tokens(rng, 16), 20))
    load += poisson(2, 5, 1.8, lambda i, at_s, rng: Arrival(f"p{i}", at_s, tokens(rng, 600), 2))
    settings = {"max_num_batched_tokens": 256, "max_num_seqs": 16}
    both = what_if(TimedCluster(TWO, LAW, SHORTEST, **settings).serve(load).window())
    assert both.error("itl_p99") == pytest.approx(0.0, abs=0.05)
    changes = advised(both, "itl_p99")
    assert changes[0] == "prefill and decode apart (--workers prefill=1,decode=1)" and changes[-1] == "one worker less (--workers 1)"
    one = ClusterWhatIf(TimedCluster(APART, LAW, SHORTEST, UNSEEN_LINK, **settings).serve(load).window())
    one.switches = [switch for switch in one.switches if switch.kind == "together"]
    apart = replace(one.base(), outcomes=tuple(one.outcomes()))
    assert apart.error("itl_p99") == pytest.approx(0.0, abs=0.05)
    assert apart.measured.itl_p99 is not None and both.measured.itl_p99 is not None
    gain = 1.0 - apart.measured.itl_p99 / both.measured.itl_p99
    assert gain > 0.4 and gain_of(both, changes[0], "itl_p99") == pytest.approx(gain, rel=0.2)
    assert gain_of(apart, "prefill and decode together (--workers 2)", "itl_p99") < -0.4  # and back again is no good


def test_where_hand_offs_are_slow_together_comes_first() -> None:
    load = steady_load(50, 8.0, 1)
    apart = TimedCluster(APART, LAW, SHORTEST, Link(1e5, 0.1), max_num_seqs=16).serve(load)
    window = apart.window()
    link = handoffs_of(window).link
    assert link.bytes_per_s == pytest.approx(1e5, rel=0.1) and link.latency_s == pytest.approx(0.1, abs=0.01)
    replay = what_if(window)
    assert replay.error("wall") == pytest.approx(0.0, abs=0.03)
    changes = advised(replay)
    assert changes[0] == "prefill and decode together (--workers 2)"
    gain = 1.0 - wall_s(TimedCluster(TWO, LAW, SHORTEST, max_num_seqs=16).serve(load)) / wall_s(apart)
    assert gain > 0.3 and gain_of(replay, changes[0]) == pytest.approx(gain, rel=0.2)


def test_where_decode_workers_are_full_the_link_is_not_to_blame() -> None:
    """Most answers wait for room, and the link is fast: a line through all of their seconds would be one of waits."""
    load, law, fast = steady_load(60, 14.0, 1), Law(step=8e-3, row=1e-4, noise=0.03), Link(1e9, 3e-3)
    options = replace(SHORTEST, handover=HandoverOptions(may_borrow=False))
    full = TimedCluster(APART, law, options, fast, decode_blocks=16, max_num_seqs=16).serve(load)
    legs = [one.legs[0] for one in full.journeys.all() if len(one.legs) > 1]
    waits = [leg.found_s - leg.first_s for leg in legs if leg.found_s is not None and leg.first_s is not None]
    assert len(waits) == len(legs) and sum(wait_s > 0.05 for wait_s in waits) > len(legs) // 2
    window = full.window()
    link = handoffs_of(window).link
    assert link.latency_s == pytest.approx(3e-3, abs=1e-3) and link.bytes_per_s > 1e8
    one = ClusterWhatIf(window)
    one.switches = [switch for switch in one.switches if switch.kind == "more_decode"]
    replay = replace(one.base(), outcomes=tuple(one.outcomes()))
    assert replay.error("wall") == pytest.approx(0.0, abs=0.1)
    more = TimedCluster({**APART, "decode-1": "decode"}, law, options, fast, decode_blocks=16, max_num_seqs=16).serve(load)
    gain = 1.0 - wall_s(more) / wall_s(full)
    assert gain > 0.3 and gain_of(replay, one.switches[0].change) == pytest.approx(gain, rel=0.2)


def test_where_beginnings_are_computed_twice_another_router_comes_first() -> None:
    """Six beginnings, of which a worker's cache holds four: sent round, all are computed again and again."""
    beginnings = [tokens(random.Random(5 + k), 640) for k in range(6)]
    load = poisson(5, 60, 10.0, lambda i, at_s, rng: Arrival(f"r{i}", at_s, beginnings[rng.randrange(6)] + tokens(rng, 20), 10))
    turns = TimedCluster(TWO, LAW, ClusterOptions(router="round-robin"), num_kv_blocks=180).serve(load)
    replay = what_if(turns.window())
    assert replay.error("wall") == pytest.approx(0.0, abs=0.1)
    changes = advised(replay)
    assert changes[0].startswith("--router ") and changes[-1] == "--no-enable-prefix-caching"
    other = ClusterOptions(router=changes[0].split()[1])
    gain = 1.0 - wall_s(TimedCluster(TWO, LAW, other, num_kv_blocks=180).serve(load)) / wall_s(turns)
    assert gain > 0.2 and gain_of(replay, changes[0]) == pytest.approx(gain, rel=0.33)


# --- how KV goes over ---------------------------------------------------------------------------------------------------------------------


def with_handover(window: ClusterWindow, **changed: object) -> ClusterWindow:
    front_end = window.front_end
    return replace(window, front_end=replace(front_end, handover=replace(front_end.handover, **changed)))  # type: ignore[arg-type]


def test_what_goes_layer_by_layer_takes_what_it_took() -> None:
    """Shorter prompts wait for all of their KV, long ones for a layer of eight: one line through both would be neither's."""
    sizes = (60, 180, 400)
    load = poisson(7, 60, 3.0, lambda i, at_s, rng: Arrival(f"r{i}", at_s, tokens(rng, sizes[i % 3]), 12))
    options = replace(SHORTEST, handover=HandoverOptions(min_layerwise=200))
    window = TimedCluster(APART, LAW, options, Link(2e5, 0.01, num_layers=8), max_num_seqs=16).serve(load).window()
    assert window.front_end.handover.min_layerwise == 200
    found, after = handoffs_of(window), {size: [s for num, s in window.hand_offs if num == size] for size in sizes}
    assert found.layerwise is not None and sum(map(len, after.values())) == 60
    assert min(after[180]) > 1.5 * min(after[60]) and min(after[180]) > 1.5 * min(after[400])
    assert ClusterWhatIf(window).base().error("wall") == pytest.approx(0.0, abs=0.03)
    assert (ClusterWhatIf(with_handover(window, min_layerwise=1 << 20)).base().error("wall") or 0.0) > 0.05


def test_hand_offs_of_a_kind_that_was_not_seen(cluster: TimedCluster) -> None:
    window = cluster.window()
    layered = replace(window, workers=tuple(replace(one, engine=replace(one.engine, num_kv_layers=8)) for one in window.workers))
    none = handoffs_of(layered)
    assert none.link == replace(UNSEEN_LINK, num_layers=8) and none.layerwise is None and none.min_layerwise == 512
    seen = [(100.0, 0.1), (200.0, 0.2), (300.0, 0.3)]
    whole = handoffs_of(replace(layered, hand_offs=tuple(seen)))
    assert whole.layerwise is None and whole.link.num_layers == 8
    assert whole.link.bytes_per_s == pytest.approx(1000 * window.engine.kv_bytes_per_token)
    layers = handoffs_of(with_handover(replace(layered, hand_offs=tuple(seen)), min_layerwise=50))
    assert layers.link == UNSEEN_LINK and layers.layerwise == replace(whole.link, num_layers=0)


def test_an_answer_for_which_there_is_no_room_is_its_prefill_workers_as_soon_as_in_the_cluster() -> None:
    load, law = steady_load(50, 12.0, 1), Law(step=8e-3, row=1e-4, noise=0.03)
    options = replace(SHORTEST, handover=HandoverOptions(may_borrow=False, limits=HandoffLimits(reserve_s=0.1)))
    full = TimedCluster(APART, law, options, Link(1e9, 3e-3), decode_blocks=16, max_num_seqs=16).serve(load)
    stayed = sum(len(one.legs) == 1 for one in full.journeys.all())
    window = full.window()
    assert stayed > 5 and window.front_end.handover.reserve_s == 0.1
    assert ClusterWhatIf(window).base().error("wall") == pytest.approx(0.0, abs=0.05)
    assert (ClusterWhatIf(with_handover(window, reserve_s=30.0)).base().error("wall") or 0.0) > 0.1


def test_kv_that_is_rounded_on_its_way_gains_nothing_by_being_stored_smaller() -> None:
    window = TimedCluster(APART, LAW, SHORTEST, Link(1e5, 0.0), max_num_seqs=16).serve(steady_load(40, 6.0, 1)).window()
    gains = {}
    for wire_dtype in ("auto", "int8"):
        one = ClusterWhatIf(with_handover(window, wire_dtype=wire_dtype))
        one.switches = [switch for switch in one.switches if switch.kind == "kv_dtype"]
        replay = replace(one.base(), outcomes=tuple(one.outcomes()))
        assert replay.error("wall") == pytest.approx(0.0, abs=0.05)  # of either: it took what it took
        gains[wire_dtype] = gain_of(replay, "--kv-cache-dtype int8")
    assert gains["auto"] > 0.1 and abs(gains["int8"]) < 0.01


# --- the window ---------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> TimedCluster:
    """Behind a beginning that both workers come to have."""
    return TimedCluster(TWO, LAW, SHORTEST).serve(steady_load(60, 20.0, 1, prefix=320))


def test_what_each_cache_had_before_the_window_it_has_in_the_replay(cluster: TimedCluster) -> None:
    half = sorted(request.arrival_s for request in cluster.requests.values())[30]
    window = cluster.window(cluster.clock.now() - half + 1e-9)
    assert len(window.requests) == 30 and not window.from_start
    one = ClusterWhatIf(window)
    assert sorted(one.load.warmed) == [0, 1]  # each had the beginning, and nothing else that anybody came back to
    assert one.base().error("ttft_p50") == pytest.approx(0.0, abs=0.08)
    cold = one.simulated(replace(one.load, warmed=(0, 0)), one.setup)
    assert cold.ttft_p99 is not None and one.base().replayed.ttft_p99 is not None
    assert cold.ttft_p99 > 1.5 * one.base().replayed.ttft_p99


def test_what_was_handed_over_shares_its_beginning_in_the_replay_as_well() -> None:
    window = TimedCluster(APART, LAW, SHORTEST).serve(steady_load(30, 8.0, 1, prefix=320)).window()
    assert [len(one.keys) for one in window.requests] == [(one.num_prompt + one.num_output) // 16 for one in window.requests]
    assert len({one.keys[:20] for one in window.requests}) == 1
    base = ClusterWhatIf(window).base()
    assert base.error("ttft_p50") == pytest.approx(0.0, abs=0.05)
    strangers = replace(window, requests=tuple(replace(one, keys=()) for one in window.requests))
    assert (ClusterWhatIf(strangers).base().error("ttft_p50") or 0.0) > 0.5


def test_a_window_holds_no_tokens_and_survives_json(cluster: TimedCluster) -> None:
    window = cluster.window()
    for endless in (0.5, math.inf):
        window = with_handover(window, min_layerwise=7, wire_dtype="int8", reserve_s=endless, copy_s=endless)
        window = replace(window, front_end=replace(window.front_end, most_pending_s=endless))
        written = msgspec.json.encode(window.to_dict()).decode()  # which has no infinite numbers
        assert ClusterWindow.of_dict(json.loads(written)) == window
    assert not {"prompt_token_ids", "token_ids"} & set(written.split('"'))


def test_the_program_says_line_by_line_what_the_function_says(cluster: TimedCluster) -> None:
    window = cluster.window()
    few, out = replace(window, requests=window.requests[:12]), io.StringIO()
    main(io.StringIO(json.dumps(few.to_dict())), out)
    assert replay_of_lines(out.getvalue().splitlines(), "", 1.0) == what_if(few)


def test_what_tells_too_little_is_refused(cluster: TimedCluster) -> None:
    window = cluster.window()
    with pytest.raises(ValueError, match="window: no request of it has ended"):
        ClusterWhatIf(replace(window, requests=()))
    with pytest.raises(ValueError, match="steps: 0 are not enough to fit a cost on"):
        ClusterWhatIf(replace(window, workers=tuple(replace(worker, steps=()) for worker in window.workers)))


def test_a_worker_that_has_made_few_steps_is_taken_to_be_like_the_others(cluster: TimedCluster) -> None:
    window = cluster.window()
    first, second = window.workers
    slow = replace(first, steps=tuple((*step[:-1], 2.0 * step[-1]) for step in first.steps))
    specs = ClusterWhatIf(replace(window, workers=(slow, second, replace(second, name="new", steps=second.steps[:3])))).setup.specs
    paces = [spec.cost.seconds_of(_step(40)) for spec in specs]  # type: ignore[attr-defined]
    assert paces[0] == pytest.approx(2.0 * paces[1], rel=0.1) and paces[1] < paces[2] < paces[0]


def _step(num_rows: int) -> object:
    from octavo.core.cost import StepShape

    return StepShape(num_rows, 1, 1, num_rows, num_rows * num_rows // 2)


# --- which switches there are ------------------------------------------------------------------------------------------------------------


def changes_of(window: ClusterWindow, roles: Mapping[str, str]) -> list[str]:
    like = window.workers[0]
    other = replace(window, workers=tuple(replace(like, name=name, role=role) for name, role in roles.items()))
    found = ClusterWhatIf(other).switches
    for switch in found:
        parse_workers(switch.setup.flag.removeprefix("--workers "))  # somebody does everything
    return [switch.change for switch in found if "--workers" in switch.change]


def test_workers_are_added_taken_away_and_given_other_roles(cluster: TimedCluster) -> None:
    window = cluster.window()
    assert changes_of(window, {"worker-0": "both"}) == ["one worker more (--workers 2)"]
    assert changes_of(window, {f"worker-{i}": "both" for i in range(4)}) == [
        "one worker more (--workers 5)", "prefill and decode apart (--workers prefill=1,decode=3)",
        "prefill and decode apart (--workers prefill=2,decode=2)", "prefill and decode apart (--workers prefill=3,decode=1)",
        "one worker less (--workers 3)",
    ]  # fmt: skip
    assert changes_of(window, {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}) == [
        "one prefill worker more (--workers prefill=2,decode=2)", "one decode worker more (--workers prefill=1,decode=3)",
        "prefill and decode together (--workers 3)", "--workers prefill=2,decode=1",
        "one decode worker less (--workers prefill=1,decode=1)",
    ]  # fmt: skip
    assert changes_of(window, {"worker-0": "both", "prefill-0": "prefill"}) == [
        "one worker more (--workers both=2,prefill=1)", "one prefill worker more (--workers both=1,prefill=2)",
    ]  # fmt: skip


def test_with_a_worker_less_each_of_the_others_keeps_what_its_cache_had() -> None:
    roles = {"decode-0": "decode", "decode-1": "decode", "prefill-0": "prefill", "prefill-1": "prefill"}
    setup = Setup(tuple(spec(name, role) for name, role in roles.items()), WindowFrontEnd("soonest"))
    for less in (one.setup for one in _fewer(setup)):
        there = [one.name for one in less.specs]
        for number, (name, role) in enumerate(roles.items()):
            place = there[_place(name, number, less)]
            assert place == name if name in there and role == "prefill" else roles[place] == "prefill"


def test_every_switch_can_be_replayed_with_any_roles(cluster: TimedCluster) -> None:
    window = cluster.window()
    few, like = window.requests[:10], window.workers[0]
    for roles in (("both", "prefill"), ("prefill", "decode", "both")):
        workers = tuple(replace(like, name=f"{role}-0", role=role) for role in roles)
        replay = what_if(replace(window, requests=few, workers=workers))
        assert len(replay.outcomes) >= 12 and all(one.gain(replay.replayed, "wall") is not None for one in replay.outcomes)


def test_pools_of_different_sizes_are_named_together(cluster: TimedCluster) -> None:
    window = cluster.window()
    first, second = window.workers
    smaller = replace(second, engine=replace(second.engine, num_blocks=100))
    one = ClusterWhatIf(replace(window, workers=(first, smaller)))
    (pool,) = (switch for switch in one.switches if switch.kind == "pool")
    assert pool.change.startswith("twice the KV blocks of each worker")
    assert [spec.num_blocks for spec in pool.setup.specs] == [2 * first.engine.num_blocks, 200]


def test_the_replay_borrows_workers_where_the_server_does() -> None:
    """Two decode workers that idle beside one prefill worker which is under pressure."""
    roles = {**APART, "decode-1": "decode"}
    load = poisson(3, 12, 4.0, lambda i, at_s, rng: Arrival(f"r{i}", at_s, tokens(rng, 600), 4))
    for may_borrow in (True, False):
        options = replace(SHORTEST, handover=HandoverOptions(may_borrow=may_borrow))
        window = TimedCluster(roles, Law(row=2e-3), options, max_num_seqs=16, max_num_batched_tokens=256).serve(load).window()
        one = ClusterWhatIf(window)
        assert window.front_end.may_borrow is may_borrow and one.base().error("wall") == pytest.approx(0.0, abs=0.1)
        other = replace(one.setup, front_end=replace(window.front_end, may_borrow=not may_borrow))
        ratio = (one.simulated(one.load, other).wall or 0.0) / (one.base().replayed.wall or 1.0)
        assert ratio > 1.2 if may_borrow else ratio < 1 / 1.2
