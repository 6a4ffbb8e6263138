"""``max_itl_ms`` through the whole engine, on a device with a known law and a virtual clock: gaps, the prompts' progress, reports."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest

from octavo.config import ConfigError, SchedulerConfig
from octavo.core.cost import StepShape
from octavo.core.step import StepPlan
from octavo.engine.itl_warnings import ItlWarnings
from octavo.engine.llm import make_config
from octavo.engine.metric_families import metric_families
from octavo.server.prometheus import exposition
from tests.engine.timed import HOST_S, Law, TimedRun

BOUND_S = 0.050
STREAMS = [f"stream{i}" for i in range(8)]


def with_streams(law: Law, max_itl_ms: float = 1000 * BOUND_S, **options: object) -> TimedRun:
    """Eight streams, each of which has 16 tokens, as the first thing that this engine does."""
    run = TimedRun(law, max_itl_ms=max_itl_ms, **options)
    for name in STREAMS:
        run.add(name, 64, 3000)
    for name in STREAMS:
        run.run_until(name, 16)
    return run


def stream_gaps_s(run: TimedRun, since_s: float, until_s: float) -> list[float]:
    return [gap for name in STREAMS for gap in run.gaps_s(name, since_s, until_s)]


def optimal_ttft_s(law: Law, num_prompt: int) -> float:
    """By steps beside eight streams that each hold the most tokens which the bound allows."""
    streams, done, total_s = StepShape(), 0, 0.0
    for _ in STREAMS:
        streams.add(100, 1, 1)

    def step_s(count: int) -> float:
        return law.seconds(streams.plus(done, count, int(done + count == num_prompt))) + HOST_S

    while done < num_prompt:
        count = 1
        while count < num_prompt - done and step_s(count + 1) <= BOUND_S:
            count += 1
        total_s, done = total_s + step_s(count), done + count
    return total_s


@pytest.mark.parametrize("law", [Law(), Law(pair=7e-7), Law(step=2e-2, row=2e-4)])
def test_a_long_prompt_beside_streams(law: Law) -> None:
    """No gap is over the bound by more than what a prediction is off, and hardly any of the bound is left unused."""
    run = with_streams(law)
    arrival_s = run.clock.now()
    run.add("long", 3000, 4)
    run.run_until("long")
    gaps = stream_gaps_s(run, arrival_s, run.clock.now())
    assert max(gaps) <= 1.03 * BOUND_S
    assert sum(gaps) / len(gaps) >= 0.85 * BOUND_S
    assert run.ttft_s("long") <= 1.1 * optimal_ttft_s(law, 3000)


def test_steps_that_scatter() -> None:
    law = Law(noise=0.05)
    run = with_streams(law)
    arrival_s = run.clock.now()
    for i in range(4):
        run.add(f"long{i}", 3000, 4)
    run.run_until("long3")
    gaps = stream_gaps_s(run, arrival_s, run.clock.now())
    assert sum(gap <= BOUND_S for gap in gaps) >= 0.8 * len(gaps)
    assert max(gaps) <= 1.2 * BOUND_S
    assert sum(gaps) / len(gaps) >= 0.85 * BOUND_S


def test_a_machine_that_becomes_slower_is_followed() -> None:
    run = with_streams(Law())
    run.add("long", 6000, 4)
    for _ in range(20):
        run.step()
    run.device.law = replace(run.device.law, step=4e-3, row=8e-4, pair=8e-8)
    for _ in range(3):
        run.step()
    since_s = run.clock.now()
    run.run_until("long")
    gaps = stream_gaps_s(run, since_s, run.clock.now())
    assert max(gaps) <= 1.1 * BOUND_S and sum(gaps) / len(gaps) >= 0.75 * BOUND_S


def test_steps_that_are_held_up_do_not_spoil_the_others() -> None:
    run = with_streams(Law())
    run.device.delay = lambda step: 0.06 if step % 15 == 0 else 0.0
    arrival_s = run.clock.now()
    run.add("long", 6000, 4)
    run.run_until("long")
    gaps = sorted(stream_gaps_s(run, arrival_s, run.clock.now()))
    undisturbed = gaps[: len(gaps) * 13 // 15]
    assert max(undisturbed) <= 1.03 * BOUND_S
    assert sum(undisturbed) / len(undisturbed) >= 0.8 * BOUND_S


def test_without_streams_only_the_token_budget_binds() -> None:
    run = TimedRun(Law(), max_itl_ms=1.0)
    run.add("long", 3000, 4)
    run.run_until("long")
    assert [plan.num_tokens for plan in run.device.plans] == [512] * 5 + [440]


def test_a_prompt_of_one_token_is_no_stream_yet() -> None:
    run = TimedRun(Law(), max_itl_ms=1.0)
    run.add("one", 1, 1)
    run.add("long", 3000, 4)
    run.step()
    assert run.device.plans[0].num_tokens == 512


def test_the_token_budget_holds_beside_a_loose_bound() -> None:
    run = with_streams(Law(), max_itl_ms=1e6, max_num_batched_tokens=64)
    run.add("long", 1000, 4)
    run.run_until("long")
    assert max(plan.num_tokens for plan in run.device.plans) == 64


# --- fairness -----------------------------------------------------------------------------------------------------------------------------


def test_a_short_prompt_behind_a_long_one_gets_in() -> None:
    """At half speed or better: it needs at most the time of a prompt of twice its length, and a step that is under way."""
    run = with_streams(Law())
    run.add("long", 6000, 4)
    for _ in range(10):
        run.step()
    run.add("short", 300, 4)
    run.run_until("short")
    assert run.ttft_s("short") <= 1.1 * optimal_ttft_s(run.device.law, 600) + BOUND_S
    assert not run.times_s["long"]


def test_a_long_prompt_gets_on_however_many_short_ones_come() -> None:
    run = with_streams(Law())
    run.add("long", 3000, 4)
    for i in range(1000):
        if run.times_s["long"]:
            break
        run.add(f"short{i}", 60, 2)
        run.step()
    assert run.ttft_s("long") <= 2.2 * optimal_ttft_s(run.device.law, 3000)


def test_equal_prompts_are_served_in_their_order_and_lose_nothing() -> None:
    run = with_streams(Law())
    names = [f"long{i}" for i in range(3)]
    for name in names:
        run.add(name, 2000, 4)
    run.run_until("long2")
    alone_s = optimal_ttft_s(run.device.law, 2000)
    for i, name in enumerate(names):
        assert run.ttft_s(name) <= 1.15 * (i + 1) * alone_s


def test_prompts_wait_for_each_others_blocks() -> None:
    """Prompts that begin alike and arrive together, the longest first: what they share is computed once, and each gets its answer."""
    run = TimedRun(Law(), max_itl_ms=1000 * BOUND_S)
    run.add("stream", 64, 500)
    run.run_until("stream", 2)
    prompt = [5 + i % 200 for i in range(900)]
    for i in range(4):
        run.add(f"twin{i}", prompt + [9 + i] * (100 - 20 * i), 3)
    computed = run.engine.scheduler.stats.num_computed_tokens
    for i in range(4):
        run.run_until(f"twin{i}", 3)
    num_others = 100 + 80 + 60 + 40 + 4 * (16 + 3) + len(run.times_s["stream"])  # own ends, part-filled blocks, outputs, the stream
    assert run.engine.scheduler.stats.num_computed_tokens - computed <= 900 + num_others


# --- a bound that cannot be kept ----------------------------------------------------------------------------------------------------------


def test_a_bound_that_cannot_be_kept_is_reported_and_starves_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Eight streams alone take 6 ms."""
    with caplog.at_level(logging.WARNING, "octavo.engine"):
        run = with_streams(Law(), max_itl_ms=4.0)
        for name, num_prompt in (("long", 800), ("longer", 1200)):
            run.add(name, num_prompt, 4)
        first = len(run.device.plans)
        run.run_until("longer")
    pieces = [piece.num_tokens for plan in run.device.plans[first:] for piece in plan.slices if piece.num_tokens > 1]
    assert set(pieces) == {16} and len(pieces) == len(run.device.plans) - first
    assert run.times_s["long"]
    gaps = [gap for name in run.times_s for gap in run.gaps_s(name)]
    excess = run.engine.metrics.itl_excess_s
    assert excess.count == sum(gap > 0.004 for gap in gaps) > 0
    assert excess.total == pytest.approx(sum(gap - 0.004 for gap in gaps if gap > 0.004))
    warnings = [record.getMessage() for record in caplog.records]
    assert 1 <= len(warnings) <= 1 + run.clock.now() / 10
    assert warnings[0].startswith("max_itl_ms 4 was broken: ") and "prompt tokens in " in warnings[0]


def test_metrics_say_how_often_by_how_much_and_how_wrong_predictions_were() -> None:
    run = with_streams(Law(), max_itl_ms=4.0)
    lines = exposition(metric_families(run.engine))[0].decode().splitlines()
    values = {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}
    excess, model = run.engine.metrics.itl_excess_s, run.engine.gap_model
    assert values["octavo_inter_token_bound_broken_total"] == values["octavo_inter_token_excess_seconds_count"] == excess.count > 0
    assert values["octavo_inter_token_excess_seconds_sum"] == pytest.approx(excess.total)
    assert model is not None and values["octavo_step_cost_error_ratio"] == model.device.median_error


def test_warnings_count_what_they_left_unsaid(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "octavo.engine"):
        run = with_streams(Law(step=0.5), max_itl_ms=100.0)
        while run.clock.now() < 25.0:
            run.step()
    assert len(caplog.records) == 3
    assert "more steps broke it since the last warning, the worst by a gap of " in caplog.records[1].getMessage()


def test_the_worst_gap_that_was_left_unsaid_is_named(caplog: pytest.LogCaptureFixture) -> None:
    said = ItlWarnings(0.05)
    plan = StepPlan(7)
    with caplog.at_level(logging.WARNING, "octavo.engine"):
        for now_s, gap_s in ((0.0, 0.051), (1.0, 0.073), (2.0, 0.06), (11.0, 0.052), (22.0, 0.055)):
            said.broken(plan, 0.05, gap_s, now_s)
    first, second, third = (record.getMessage() for record in caplog.records)
    assert "worst" not in first and "worst" not in third
    assert second.endswith("; 2 more steps broke it since the last warning, the worst by a gap of 73.0 ms")


def test_a_gap_without_a_part_in_steps_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Two streams that outgrow the pool: one is preempted until the other has ended, and no step takes as long."""
    with caplog.at_level(logging.WARNING, "octavo.engine"):
        run = TimedRun(Law(), num_kv_blocks=10, max_itl_ms=1000 * BOUND_S, admission_lookahead=1)
        for name in ("first", "second"):
            run.add(name, 32, 100)
        run.run_until("second", 100)
    (message,) = (record.getMessage() for record in caplog.records if "max_itl_ms" in record.getMessage())
    found = re.search(r": ([0-9.]+) ms between .*; the stream was preempted for ([0-9.]+) ms of the gap$", message)
    assert found is not None, message
    longest_ms, out_ms = 1000 * max(run.gaps_s("second")), float(found[2])
    assert float(found[1]) == pytest.approx(longest_ms, abs=0.1) and 0.8 * longest_ms < out_ms < longest_ms


def test_without_a_bound_nothing_is_counted() -> None:
    run = TimedRun(Law(step=9.0))
    run.add("a", 20, 3)
    run.run_until("a", 3)
    assert run.engine.gap_model is None and run.engine.metrics.itl_excess_s.count == 0


# --- configuration ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_values_outside_the_limits(value: float) -> None:
    with pytest.raises(ConfigError, match="^max_itl_ms: .* is not allowed; a finite number of milliseconds above 0"):
        make_config("m", max_itl_ms=value)


def test_pieces_have_to_be_allowed() -> None:
    with pytest.raises(ConfigError, match="^max_itl_ms: 50.0 is not allowed; .*enable_chunked_prefill is off"):
        make_config("m", max_itl_ms=50.0, enable_chunked_prefill=False)
    assert make_config("m", max_itl_ms=50.0).scheduler == SchedulerConfig(max_itl_ms=50.0)
