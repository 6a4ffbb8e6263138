"""What a replay says a switch would gain, against what it gains when it is thrown: a real engine on a device of known, noisy cost."""

from __future__ import annotations

import io
import json
import random
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.what_if import replay_of_lines, replay_window
from octavo.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.core.recorded_window import OBJECTIVES, Figures, RecordedWindow, SwitchOutcome, WindowReplay, WindowRequest, figures_of
from octavo.core.request import SamplingParams
from octavo.engine.advice import RuleAdvisor
from octavo.engine.engine import Engine
from octavo.engine.replay_advice import FRESH_S, ReplayAdvisor, ReplayedAdvice, ReplayError, Replays
from octavo.engine.window_snapshot import snapshot
from octavo.simulator.what_if import WhatIf, main, simulated, what_if
from tests.engine.planted import Arrival, run_load, salted, steady_load, tokens
from tests.engine.timed import MOVE_S, Law, TimedRun
from tests.models.tiny import write_tiny_gguf

LAW = Law(noise=0.03)
ALL = 1e9  # seconds: the whole run
WAIT_S = 120.0  # hangs are found, slow machines are forgiven


def window_of(run: TimedRun) -> RecordedWindow:
    return snapshot(run.engine, ALL)


def mean_wall_s(run: TimedRun) -> float:
    records = run.engine.timeline.records()
    return sum((record.ended_s or 0.0) - record.arrival_s for record in records) / len(records)


@dataclass(frozen=True)
class Thrown:
    """A switch: the load and the options without it, and what changes with it."""

    kind: str
    change: str
    load: list[Arrival]
    options: dict[str, Any]
    with_it: dict[str, Any]
    load_with_it: list[Arrival] | None = None
    law: Law = field(default=LAW)


SHARED = steady_load(50, 3.0, 1, prefix=320)
THROWN = [
    Thrown("pool", "--num-kv-blocks 24", steady_load(90, 16.0, 1), {"num_kv_blocks": 12}, {"num_kv_blocks": 24}),
    Thrown("places", "--max-num-seqs 4", steady_load(90, 16.0, 1), {"max_num_seqs": 2}, {"max_num_seqs": 4}),
    Thrown(
        "chunk", "--max-num-batched-tokens 64", steady_load(100, 11.0, 3), {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"max_num_batched_tokens": 64, "max_num_seqs": 8}, law=Law(step=5e-3, noise=0.03),
    ),
    Thrown(
        "policy", "--scheduling-policy fcfs", steady_load(90, 15.0, 1), {"scheduling_policy": "static", "max_num_seqs": 4},
        {"scheduling_policy": "fcfs", "max_num_seqs": 4},
    ),
    Thrown(
        "prefix_cache", "prefix caching (leave out --no-enable-prefix-caching)", SHARED, {"cache": {"enable_prefix_caching": False}}, {},
    ),
    Thrown("speculation", "--spec auto", steady_load(60, 8.0, 1), {}, {"spec": "auto"}, law=Law(step=8e-3, row=2e-4, noise=0.03)),
    Thrown("salt", "one cache_salt for requests that may share", salted(SHARED), {}, {}, SHARED),
]  # fmt: skip


@pytest.mark.parametrize("thrown", THROWN, ids=lambda thrown: thrown.kind)
def test_a_predicted_gain_is_what_the_switch_gains(thrown: Thrown) -> None:
    before = run_load(thrown.load, thrown.law, **thrown.options)
    after = run_load(thrown.load_with_it or thrown.load, thrown.law, **thrown.with_it)
    gain = 1.0 - mean_wall_s(after) / mean_wall_s(before)
    assert gain >= 0.1, "the case is to be one that matters"
    one = WhatIf(window_of(before))
    base = one.base()
    assert (base.num_requests, base.num_compared) == (len(thrown.load), len(thrown.load))
    assert base.error("wall") == pytest.approx(0.0, abs=0.05)
    one.switches = [switch for switch in one.switches if switch.change == thrown.change]
    (outcome,) = one.outcomes()
    assert outcome.kind == thrown.kind
    assert outcome.gain(base.replayed, "wall") == pytest.approx(gain, rel=0.25)


def test_a_bound_on_gaps_gains_what_it_gains() -> None:
    """Short streams beside which long prompts come, on a device of known cost: they end before the prompt does where it lets them."""
    rng = random.Random(4)
    load = [Arrival(f"s{i}", 0.15 * i, tokens(rng, 16), 20) for i in range(60)]
    load += [Arrival(f"p{i}", 0.3 + 1.5 * i, tokens(rng, 1600), 1) for i in range(6)]
    options = {"max_num_batched_tokens": 256, "max_num_seqs": 16}
    before = WhatIf(window_of(run_load(load, LAW, **options)))
    bounds = [switch for switch in before.switches if switch.kind == "bound"]
    assert [switch.change.split()[0] for switch in bounds] == ["--max-itl-ms"] * 2
    low_ms, high_ms = (float(switch.change.split()[1]) for switch in bounds)
    assert high_ms == pytest.approx(2 * low_ms, rel=0.05)
    before.switches, base = bounds, before.base()
    for outcome, bound_ms in zip(before.outcomes(), (low_ms, high_ms), strict=True):
        after = WhatIf(window_of(run_load(load, LAW, **options, max_itl_ms=bound_ms))).base()
        assert base.measured.itl_p99 is not None and after.measured.itl_p99 is not None
        gain = 1.0 - after.measured.itl_p99 / base.measured.itl_p99
        assert gain >= 0.1 and outcome.gain(base.replayed, "itl_p99") == pytest.approx(gain, rel=0.25)
    bounded = WhatIf(window_of(run_load(load, LAW, **options, max_itl_ms=low_ms)))
    assert [switch.change for switch in bounded.switches if switch.kind == "bound"] == ["no bound on gaps (leave out --max-itl-ms)"]


def test_what_is_within_the_error_cannot_be_told() -> None:
    """Neither gain nor harm; only what is next to nothing gains nothing."""
    replayed = Figures(1.0, *[None] * 5)
    changes = {"much": 0.2, "some": 0.6, "hardly": 0.99, "a little harm": 1.3, "much harm": 1.9}
    outcomes = tuple(SwitchOutcome(name, name, "why", replace(replayed, wall=wall_s)) for name, wall_s in changes.items())
    replay = WindowReplay(9, 9, Figures(2.5, *[None] * 5), replayed, outcomes)
    told = {one.change: one for one in ReplayedAdvice(replay, 0.0, 60.0).ranked("wall")}
    assert replay.error("wall") == pytest.approx(0.6)
    assert [one.is_told for one in told.values()] == [True, False, True, False, True] == [one.shown()["told"] for one in told.values()]
    assert told["much"].gain_s == pytest.approx(0.8 * 2.5) and all(one.gain_s == 0.0 for name, one in told.items() if name != "much")
    assert told["some"].why == "why: what it gains cannot be told, 40.0 % less is within the replay's error of 60.0 %"
    assert "cannot be told, 30.0 % more" in told["a little harm"].why and "it gains nothing (+1.0 %)" in told["hardly"].why
    assert "it gains nothing, 90 % more" in told["much harm"].why


def test_what_gains_nothing_ranks_last_and_says_so() -> None:
    run = run_load(steady_load(90, 16.0, 1), LAW, max_num_seqs=2)
    advice = ReplayedAdvice(what_if(window_of(run)), 0.0, ALL).ranked("wall")
    gains = {one.change: one.gain_s for one in advice}
    assert len(advice) >= 7  # one of each kind
    useful = [one for one in advice if one.gain_s > 0.0]
    assert advice[: len(useful)] == useful == sorted(useful, key=lambda one: -one.gain_s)
    assert "--max-num-seqs 4" in [one.change for one in useful]
    for useless in ("--num-kv-blocks 8192", "--kv-cache-dtype int8", "--no-enable-prefix-caching"):
        assert gains[useless] == 0.0
    assert all(("it gains nothing" in one.why) == one.is_told and one.error is not None for one in advice[len(useful) :])


def test_an_advisor_replays_once_for_a_window_and_asks_the_rules_about_requests() -> None:
    run, windows = run_load(steady_load(30, 16.0, 1), LAW, max_num_seqs=2), list[RecordedWindow]()

    def replayer(window: RecordedWindow) -> WindowReplay:
        windows.append(window)
        return what_if(window)

    rules, timeline = RuleAdvisor(run.engine.config), run.engine.timeline
    advisor = ReplayAdvisor(run.engine, replayer, rules)
    found = advisor.of_window(timeline, (), 60.0)
    assert found and found == advisor.of_window(timeline, (), 60.0) and len(windows) == 1
    run.clock.advance(FRESH_S + 1.0)
    advisor.of_window(timeline, (), 60.0)
    assert len(windows) == 2
    record = max(timeline.records(), key=lambda record: (record.ended_s or 0.0) - record.arrival_s)
    seconds, wall_s = record.seconds, (record.ended_s or 0.0) - record.arrival_s
    assert advisor.of_request(timeline, record, seconds, wall_s) == rules.of_request(timeline, record, seconds, wall_s) != []


def test_whoever_asks_while_a_replay_is_made_takes_its_result_however_long_that_took() -> None:
    """Else each of those that wait would make another one after it, where none is done before it is old."""
    run, now, asked, goes_on = run_load(steady_load(30, 16.0, 1), LAW), [0.0], list[float](), threading.Event()
    window, made = window_of(run), list[WindowReplay]()

    def clock() -> float:
        asked.append(now[0])
        return now[0]

    def replayer(window: RecordedWindow) -> WindowReplay:
        assert goes_on.wait(WAIT_S)
        now[0] += 2 * FRESH_S
        made.append(WhatIf(window).base())
        return made[-1]

    replays = Replays(replayer, clock)
    askers = [threading.Thread(target=replays.of, args=(60.0, lambda: window)) for _ in range(3)]
    for asker in askers:
        asker.start()
    deadline_s = time.monotonic() + WAIT_S
    while len(asked) < 4:  # one of them has begun, and has looked once more
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    goes_on.set()
    for asker in askers:
        asker.join(WAIT_S)
    assert len(made) == 1
    now[0] += 1.0
    assert replays.of(60.0, lambda: window).replay is made[1], "it is of long ago"


def test_a_closed_loop_is_replayed_as_one() -> None:
    """Clients that wait for their answers: what makes steps quicker brings their next requests sooner."""
    run, done = TimedRun(LAW, max_num_seqs=4), 0
    for i in range(6):
        run.add(f"r{i}", 40, 20)
    while done < 80:
        for event in run.step():
            if event.finish_reason is not None:
                done += 1
                run.add(f"next{done}", 40, 20)
    one = WhatIf(window_of(run))
    assert one.load.concurrency == 6
    base = one.base()
    assert base.num_compared == 80 and base.error("wall") == pytest.approx(0.0, abs=0.05)
    assert base.error("throughput") == pytest.approx(0.0, abs=0.05) and "6 clients" in base.notes[0]


def test_poisson_arrivals_are_no_closed_loop() -> None:
    for options in ({}, {"max_num_seqs": 2}):
        assert WhatIf(window_of(run_load(steady_load(90, 16.0, 1), LAW, **options))).load.concurrency is None


def test_what_the_cache_had_before_the_window_it_has_in_the_replay() -> None:
    load = steady_load(70, 3.0, 1, prefix=320)
    run = run_load(load, LAW)
    window = snapshot(run.engine, run.clock.now() - load[35].at_s + 1e-6)
    assert 30 <= len(window.requests) <= 35 and min(request.num_cached for request in window.requests) >= 320
    one = WhatIf(window)
    assert one.load.num_warming == 1
    assert one.base().error("ttft_p50") == pytest.approx(0.0, abs=0.08)


def test_answers_that_come_back_in_prompts_are_found_in_the_cache() -> None:
    run, said = TimedRun(LAW), list(range(5, 105))
    for turn in range(12):
        run.add(f"turn{turn}", [*said], 40)
        while run.engine.has_work:
            said += [token for event in run.step() for token in event.token_ids]
        said += [7 + turn] * 9
        run.clock.advance(0.05)
    one = WhatIf(window_of(run))
    assert one.load.text is not None
    base = one.base()
    assert base.error("ttft_p50") == pytest.approx(0.0, abs=0.08)
    cached = [request.num_cached for request in one._window.requests]
    assert cached == sorted(cached) and cached[-1] > 500


def test_requests_that_run_on_or_were_aborted_count_as_load_alone() -> None:
    run = TimedRun(LAW)
    for i in range(8):
        run.add(f"r{i}", 30, 9 if i < 5 else 500)
    run.run_until("r4", 9)
    run.engine.abort("r7")
    run.step()
    window = window_of(run)
    assert sum(request.wall_s is not None for request in window.requests) == 5 and len(window.requests) == 8
    assert WhatIf(window).base().num_compared == 5


def test_a_window_holds_no_tokens_and_survives_json() -> None:
    run = run_load(steady_load(20, 16.0, 1), LAW)
    window = window_of(run)
    again = RecordedWindow.of_dict(json.loads(json.dumps(window.to_dict())))
    assert again == window
    assert not {"prompt_token_ids", "token_ids"} & set(json.dumps(window.to_dict()).split('"'))
    replay = what_if(window)
    assert WindowReplay.of_dict(json.loads(json.dumps(replay.to_dict()))) == replay
    assert what_if(again) == replay


def test_the_program_says_line_by_line_what_the_function_says() -> None:
    window = window_of(run_load(steady_load(30, 16.0, 1), LAW, max_num_seqs=2))
    out = io.StringIO()
    main(io.StringIO(json.dumps(window.to_dict())), out)
    lines = out.getvalue().splitlines()
    assert replay_of_lines(lines, "", 1.0) == what_if(window)
    part = replay_of_lines([*lines[:4], lines[4][:20]], "", 1.0)
    assert len(part.outcomes) == 2 and len(part.skipped) == len(lines) - 4 and part.skipped[0] == what_if(window).outcomes[2].change
    with pytest.raises(ReplayError, match="it took longer than 1 s"):
        replay_of_lines(lines[:1], "", 1.0)
    with pytest.raises(ReplayError, match="ImportError: no such thing"):
        replay_of_lines([], "Traceback\nImportError: no such thing\n", 1.0)


def test_in_a_process_of_its_own() -> None:
    window = window_of(run_load(steady_load(30, 16.0, 1), LAW, max_num_seqs=2))
    assert replay_window(window, 600.0) == what_if(window)
    with pytest.raises(ReplayError, match="window: no request of it has ended"):
        replay_window(replace(window, requests=()))
    with pytest.raises(ReplayError, match="steps: 0 are not enough to fit a cost on"):
        replay_window(replace(window, steps=()))


def test_figures_are_nearest_ranks() -> None:
    figures = figures_of([WindowRequest(float(i), 0, 10, 10, wall_s=2.0, ttft_s=0.1 * i) for i in range(1, 101)])
    assert (figures.wall, figures.ttft_p50, figures.ttft_p99) == (2.0, pytest.approx(5.0), pytest.approx(9.9))
    assert figures.itl_p50 is None and figures.throughput == pytest.approx((99.0 + 2.0) / 1000)
    assert all(figures_of([]).of(objective) is None for objective in OBJECTIVES)


def test_layers_with_a_window_give_back_what_left_it_in_the_replay(tmp_path: Path) -> None:
    """A pool in which two requests would have room if all of it were kept: the engine runs more of them at once, and so does its replay."""
    model = write_tiny_gguf(tmp_path / "windows.gguf", arch="gemma3", layers=6, context=2048)
    settings = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    config = EngineConfig(ModelConfig(str(model)), CacheConfig(num_kv_blocks=48), settings, BackendConfig(threads=1))
    engine = Engine.load(config)
    try:
        for i in range(8):
            prompt = [5 + i] * 300
            engine.add(engine.prepare(prompt, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)))
        most = 0
        while engine.has_work:
            engine.step()
            most = max(most, engine.scheduler.num_running)
        window = snapshot(engine, ALL)
    finally:
        engine.close()
    assert most > 2 and window.engine.layout is not None and window.engine.layout["window"] == 32
    assert RecordedWindow.of_dict(json.loads(json.dumps(window.to_dict()))) == window
    steps = tuple((float(rows), 1.0, 1.0, float(rows), rows * (rows + 1) / 2, 0.5 + 1e-6 * rows) for rows in range(1, 9))
    one = WhatIf(replace(window, steps=steps))  # steps of half a second whatever they hold: how many there are is what counts
    base, whole = one.base(), simulated(one.load, (replace(one._spec, layout=None),))
    assert not any("window" in note for note in base.notes)
    assert base.replayed.throughput is not None and whole.throughput is not None
    assert base.replayed.throughput < 0.8 * whole.throughput


def test_moves_are_priced_however_preemption_is_settled() -> None:
    options = ENGINES["swapping"]
    for preemption in ("swap", "auto"):
        window = window_of(run_load(steady_load(24, 40.0, 1), LAW, **{**options, "preemption": preemption}))
        assert window.engine.move_s == pytest.approx(MOVE_S, rel=0.3)


ENGINES: dict[str, dict[str, Any]] = {
    "paced": {"max_itl_ms": 30.0},
    "srf": {"scheduling_policy": "srf"},
    "fair": {"scheduling_policy": "fair"},
    "whole prompts": {"enable_chunked_prefill": False},
    "swapping": {"num_kv_blocks": 9, "admission_lookahead": 1, "preemption": "swap", "cache": {"swap_space": 64 << 10}},
    "tiers": {"num_kv_blocks": 14, "cache": {"kv_host_memory": 64 << 10}},
    "by token": {"cache": {"prefix_granularity": "token"}},
    "reserved": {"cache": {"enable_prefix_caching": False, "kv_reservation": "max"}},
    "drafting": {"spec": 3},
}


@pytest.mark.parametrize("name", ENGINES)
def test_every_switch_of_every_engine_can_be_replayed(name: str) -> None:
    run = run_load(steady_load(24, 40.0, 1), LAW, **ENGINES[name])
    one = WhatIf(window_of(run))
    base, outcomes = one.base(), list(one.outcomes())
    assert len(outcomes) == len(one.switches) >= 8
    assert all(outcome.gain(base.replayed, "wall") is not None for outcome in outcomes)
    assert base.error("wall") == pytest.approx(0.0, abs=0.12)
