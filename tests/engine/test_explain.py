"""Accounts and advice: what they say, what they hide, and that a gain is what was recorded."""

from __future__ import annotations

import random
import re
import statistics

import pytest

from octavo.config import EngineConfig
from octavo.core.request import SamplingParams
from octavo.engine.advice import RuleAdvisor
from octavo.engine.causes import BOTTLENECK_OF, MEANINGS, NAMES, NUM_CAUSES, Bottleneck, Cause
from octavo.engine.explain import explain, hide_misses, in_words, main_cause, summarise
from octavo.engine.foresight import Foresight, num_foreseen
from octavo.engine.step_window import LastSteps, StepParts, StepWindow, in_order
from tests.engine.planted import LAW, Arrival, accounts, run_load, salted, steady_load, tokens
from tests.engine.timed import Law, TimedRun


def test_every_cause_has_a_meaning_and_a_place() -> None:
    assert set(MEANINGS) == set(Cause) and len(set(NAMES)) == NUM_CAUSES == len(BOTTLENECK_OF)
    assert [int(cause) for cause in Cause] == list(range(NUM_CAUSES))
    assert set(BOTTLENECK_OF) == set(Bottleneck)


def test_the_main_cause_is_what_could_be_avoided_unless_that_is_little() -> None:
    seconds = [0.0] * NUM_CAUSES
    seconds[Cause.DECODE], seconds[Cause.QUEUED_KV], seconds[Cause.OTHERS_DECODE] = 8.5, 1.0, 0.5
    assert main_cause(seconds, 10.0) is Cause.QUEUED_KV
    assert main_cause(seconds, 10.1) is Cause.DECODE
    assert main_cause([0.0] * NUM_CAUSES, 0.0) in Cause


def test_hidden_misses_count_as_prompts_and_nothing_is_lost() -> None:
    seconds = [float(i) for i in range(NUM_CAUSES)]
    total, prefill, others = sum(seconds), seconds[Cause.PREFILL], seconds[Cause.OTHERS_PREFILL]
    missed = seconds[Cause.CACHE_MISS]
    hide_misses(seconds, 2.0)
    assert sum(seconds) == total and seconds[Cause.CACHE_MISS] == 0.0
    assert seconds[Cause.PREFILL] == prefill + 2.0 and seconds[Cause.OTHERS_PREFILL] == others + missed - 2.0


def advised(run: TimedRun, name: str) -> dict[str, float]:
    timeline = run.engine.timeline
    record = timeline.find(name)
    assert record is not None
    found = explain(timeline, record, run.clock.now())
    return {a.change: a.gain_s for a in RuleAdvisor(run.engine.config).of_request(timeline, record, record.seconds, found.wall_s)}


MEMORY_BOUND = Law(step=2e-2, row=5e-5)  # a step reads the weights, and little else
LOAD = [Arrival(f"r{i}", 0.001 * i, tokens(random.Random(i), 60), 20) for i in range(12)]


TIGHT = [({"num_kv_blocks": 12}, "more KV blocks"), ({"max_num_seqs": 2}, "--max-num-seqs above 2")]


@pytest.mark.parametrize(("tight", "change"), TIGHT, ids=["pool", "places"])
def test_more_room_gains_what_was_said(tight: dict, change: str) -> None:
    """The other run has the room."""
    small, large = run_load(LOAD, MEMORY_BOUND, True, **tight), run_load(LOAD, MEMORY_BOUND)
    said = summarised_advice(small)
    gained_s = mean_wall(small) - mean_wall(large)
    assert gained_s > 0.1 * mean_wall(small)
    name = next(iter(said))
    assert name.startswith(change) and said[name] == pytest.approx(gained_s, rel=0.25)


def test_more_room_is_worth_little_where_arithmetic_is_short() -> None:
    law = Law(step=1e-3, row=1e-3)
    small, large = run_load(LOAD, law, True, num_kv_blocks=12), run_load(LOAD, law)
    assert mean_wall(small) - mean_wall(large) < 0.1 * mean_wall(small)
    said = summarised_advice(small)
    assert all(gain_s < 0.15 * mean_wall(small) for change, gain_s in said.items() if change.startswith("more KV blocks"))


def summarised_advice(run: TimedRun) -> dict[str, float]:
    records = run.engine.timeline.records()
    return {a.change: a.gain_s for a in RuleAdvisor(run.engine.config).of_window(run.engine.timeline, records, 60.0)}


def mean_wall(run: TimedRun) -> float:
    found = accounts(run)
    return sum(account.wall_s for account in found.values()) / len(found)


def test_a_common_salt_gains_what_was_said() -> None:
    load = steady_load(30, 0.5, 4, prefix=480)
    cold, warm = run_load(salted(load)), run_load(load)
    said = summarised_advice(cold)
    (change,) = (change for change in said if "cache_salt" in change)
    assert said[change] == pytest.approx(mean_wall(cold) - mean_wall(warm), rel=0.25)
    hiding = RuleAdvisor(cold.engine.config, shows_misses=False)
    assert not any("salt" in a.change for a in hiding.of_window(cold.engine.timeline, cold.engine.timeline.records(), 60.0))


def test_a_huge_prompt_leads_to_a_bound_on_gaps() -> None:
    run = TimedRun(LAW, max_num_seqs=4)
    run.add("stream", 20, 60)
    run.run_until("stream", 5)
    run.add("huge", 6000, 2)
    while run.engine.has_work:
        run.step()
    assert next(iter(advised(run, "stream"))).startswith("--max-itl-ms ")


@pytest.mark.parametrize(("law", "flag"), [(Law(), r"--max-itl-ms [45](\.\d)?"), (Law(step=0.0625), "--max-itl-ms 130")])
def test_a_bound_is_a_number_as_flags_take_it(law: Law, flag: str) -> None:
    """Twice a step, to two digits, never 1.3e+02."""
    run = TimedRun(law, max_num_seqs=4)
    run.add("stream", 20, 60)
    run.run_until("stream", 5)
    run.add("huge", 9000, 2)
    while run.engine.has_work:
        run.step()
    assert re.fullmatch(flag, next(iter(advised(run, "stream"))))


def test_seconds_in_words() -> None:
    seconds = (0.0, 1.234e-4, 0.5, 0.9994, 0.9996, 12.0)
    assert [in_words(one) for one in seconds] == ["0 ms", "0.123 ms", "500 ms", "999 ms", "1.000 s", "12.000 s"]


def test_who_had_the_engine_alone_gets_no_advice() -> None:
    run = run_load([Arrival("one", 0.0, tokens(random.Random(1), 50), 20)])
    assert advised(run, "one") == {}
    assert RuleAdvisor(EngineConfig()).of_window(run.engine.timeline, [], 60.0) == []


def test_percentiles_and_what_holds_them() -> None:
    load = [*steady_load(60, 4.0, 2), Arrival("huge", 3.0, tokens(random.Random(5), 8000), 4)]
    run = run_load(load)
    found = summarise(run.engine.timeline, 1000.0, run.clock.now())
    ranked = sorted(account.ttft_s or 0.0 for account in accounts(run).values())
    assert found.num_ended == found.num_first_tokens == 61 and found.is_whole
    assert found.ttft["p50"].seconds == pytest.approx(ranked[30]) and found.ttft["p99"].seconds == pytest.approx(ranked[-1])
    assert found.ttft["p99"].bottleneck is Bottleneck.PREFILL
    assert found.itl["p50"].bottleneck is Bottleneck.DECODE
    assert found.num_gaps == sum(arrival.num_output - 1 for arrival in load)
    assert sum(found.seconds.values()) == pytest.approx(sum(account.wall_s for account in accounts(run).values()))
    late = summarise(run.engine.timeline, 1e-9, run.clock.now() + 5.0)
    assert (late.num_ended, late.num_gaps, late.ttft, late.itl) == (0, 0, {}, {})


def test_gap_percentiles_against_all_gaps() -> None:
    rng, window, gaps = random.Random(6), StepWindow(), []
    for i in range(2000):
        gap_s = rng.lognormvariate(-4.0, 1.0)
        gaps.append(gap_s)
        window.add_gap(i * 0.01, gap_s, in_order({Bottleneck.DECODE: gap_s}))
    gaps.sort()
    count, (half, most) = window.gaps(0.0, (0.5, 0.99))
    assert count == 2000
    assert half.seconds == pytest.approx(gaps[999], rel=0.05) and most.seconds == pytest.approx(gaps[1979], rel=0.05)
    for i in range(700):
        window.add_gap(1000.0 + i, 0.01, in_order({Bottleneck.KV: 0.01}))
    assert window.gaps(0.0, (0.5,))[0] == 600  # ten minutes are kept


def test_the_account_of_choices_counts_each_choice_s_tokens() -> None:
    run = TimedRun(LAW)
    run.engine.add(run.engine.prepare([5, 6, 7], SamplingParams(n=3, max_tokens=4, ignore_eos=True), "it"))
    while run.engine.has_work:
        run.engine.step()
    account = accounts(run)["it"]
    assert account.record.num_output_tokens == 12
    assert "12 tokens" in next(part.detail for part in account.causes if part.cause is Cause.DECODE)


def test_the_last_steps_between_two_moments_as_a_search_of_all_finds_them() -> None:
    rng, window, end_s = random.Random(4), StepWindow(), 0.0
    for i in range(60):
        since_s = end_s + rng.choice((0.0, 0.0, 0.5))
        end_s = since_s + rng.choice((0.1, 0.2, 0.3))
        window.steps.append(StepParts(i, since_s, since_s, end_s, 0.0, end_s - since_s, 0.0, i % 3, 1, 1))
    last = LastSteps(tuple(window.steps))
    for _ in range(200):
        begin_s, until_s = rng.uniform(-1.0, end_s + 1.0), rng.choice((None, rng.uniform(-1.0, end_s + 1.0)))
        overlapping = [s for s in window.steps if s.end_s > begin_s and (until_s is None or s.since_s < until_s)]
        assert list(last.between(begin_s, until_s)) == overlapping
    assert last.usual_s == statistics.median(step.seconds for step in window.steps if step.num_prompt_tokens == 0)
    assert LastSteps(()).usual_s is None


def test_what_could_have_been_foretold_is_counted_as_a_search_counts_it() -> None:
    rng = random.Random(6)
    for _ in range(50):
        tokens = [rng.randrange(4) for _ in range(60)]
        num_known, expected = rng.randrange(2, 40), 0
        for i in range(num_known, len(tokens)):
            places = [j for j in range(2, i) if tokens[j - 2 : j] == tokens[i - 2 : i]]
            expected += bool(places) and tokens[places[-1]] == tokens[i]
        assert num_foreseen(tokens, num_known) == expected
    foresight = Foresight()
    assert foresight.share is None
    for _ in range(40):
        foresight.see([1, 2, 3] * 30, 10)
    assert foresight.share == pytest.approx(1.0)
    for _ in range(800):
        foresight.see([rng.randrange(10**6) for _ in range(90)], 10)
    assert foresight.share is not None and foresight.share < 0.05
