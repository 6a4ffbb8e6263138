"""The simulator against the engine: to the last digit where the device's law is known, and the books of the comparison."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from octavo.bench.stream_record import StreamRecord
from octavo.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.costs.coefficients import Coefficients
from octavo.reproduce.compared import Limits
from octavo.reproduce.engine_figures import Comparison, Figures, Served, compare
from octavo.reproduce.simulator_accuracy import (
    LOADS,
    Accuracy,
    AccuracyCase,
    capacity,
    load_requests,
    measure_accuracy,
    simulate,
    spec_of,
    with_other_tokens,
)
from octavo.simulator.records import RequestRecord
from octavo.workload.lengths import LogNormal
from octavo.workload.requests import TokenRange, WorkloadRequest
from tests.engine.timed import HOST_S, Law, TimedRun
from tests.models.tiny import write_tiny_gguf

LAW = Law(pair=3e-7)
COST = Coefficients((LAW.row, LAW.pair, LAW.position, 0.0, LAW.logit_row, LAW.step), HOST_S)


def timed(**scheduler: object) -> TimedRun:
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 64, **scheduler}
    return TimedRun(LAW, num_kv_blocks=400, **settings)


def real_run(run: TimedRun, requests: list[WorkloadRequest]) -> list[Served]:
    """The engine in virtual time: requests that have come are added before a step, as the loop thread does it."""
    waiting, end_s = list(requests), dict[str, float]()
    while waiting or run.engine.has_work:
        if not run.engine.has_work and run.clock.now() < waiting[0].arrival_s:
            run.clock.advance_to(waiting[0].arrival_s)
        while waiting and waiting[0].arrival_s <= run.clock.now():
            work = waiting.pop(0)
            name = str(len(run.arrival_s))
            run.add(name, work.prompt_token_ids, work.num_output)
            run.arrival_s[name] = work.arrival_s
        for event in run.step():
            if event.finish_reason is not None:
                end_s[event.request_id] = run.clock.now()
    return [Served(run.arrival_s[name], times[0], times[-1], len(times)) for name, times in run.times_s.items()]


WHOLE = {"enable_chunked_prefill": False, "max_num_batched_tokens": 512}


@pytest.mark.parametrize(("rate", "settings"), [(0.8, {}), (14.0, {}), (60.0, {}), (14.0, WHOLE)])
def test_on_a_device_whose_law_is_known_both_are_the_same(rate: float, settings: dict[str, object]) -> None:
    """From idle to overload: first and last tokens of every request, so that nothing but the cost of a step can make a difference."""
    case = AccuracyCase(prompt=LogNormal(60.0, 0.8, 2, 300), output=LogNormal(20.0, 0.7, 1, 60), load_s=50.0 / rate)
    run = timed(**settings)
    tokens = TokenRange(4, run.device.vocab_size)
    requests = with_other_tokens(load_requests(case, "some", rate, 0.5, 4000), tokens, "t")
    assert len(requests) > 30
    real, simulated = real_run(run, requests), simulate(spec_of(run.engine, COST), requests)
    simulated = sorted(simulated, key=lambda one: one.arrival_s)
    assert len(real) == len(simulated) == len(requests)
    for one, guess in zip(real, simulated, strict=True):
        assert guess == pytest.approx(one, rel=1e-9, abs=1e-9)
    assert max(one.first_s - one.arrival_s for one in real) > (0.5 if rate > 50 else 0.01)


def test_waking_is_in_the_first_step_after_idleness_alone() -> None:
    spec = spec_of(timed().engine, COST)
    requests = [WorkloadRequest(0.0, [5] * 10, 3), WorkloadRequest(9.0, [6] * 10, 3), WorkloadRequest(9.001, [7] * 10, 3)]
    plain, waking = simulate(spec, requests), simulate(dataclasses.replace(spec, wake_s=0.25), requests)
    for one, other in zip(sorted(plain), sorted(waking), strict=True):
        assert other.first_s == pytest.approx(one.first_s + 0.25)
        assert other.last_s == pytest.approx(one.last_s + 0.25)
    assert spec_of(timed().engine, dataclasses.replace(COST, wake_s=0.125)).wake_s == 0.125


# --- figures and verdicts ---------------------------------------------------------------------------------------------------------------

FOUR = [Served(1.0, 1.5, 3.5, 5), Served(2.0, 2.1, 2.1, 1), Served(2.0, 3.0, 4.0, 3), Served(3.0, 3.2, 6.2, 4)]


def test_figures_by_hand() -> None:
    figures = Figures.of(FOUR, 5, Limits(ttft_s=0.6, itl_s=0.6))
    assert figures.ttft_p50_s == pytest.approx(0.35) and figures.ttft_p99_s == pytest.approx(0.985)
    assert figures.itl_s == pytest.approx((2.0 + 1.0 + 3.0) / 9)
    assert figures.output_per_s == pytest.approx(13 / 5.2)
    assert figures.slo_share == pytest.approx(2 / 5)  # the third is late, the fourth slow, the fifth was not answered


def test_both_sides_tell_the_same_of_a_request() -> None:
    record = StreamRecord(10, 3, due_s=101.0)
    record.event_times.extend([101.5, 102.0, 103.0])
    request = RequestRecord("a", 0, 1.0, 10, 3, 0, 0.5, 2.0, 0.75, 1.0)
    assert Served.of_record(record, 100.0) == Served.simulated(request) == Served(1.0, 1.5, 3.0, 3)
    assert Served(1.0, 1.5, 3.0, 3).itl_s == 0.75 and Served(1.0, 1.5, 1.5, 1).itl_s is None


@pytest.mark.parametrize(
    ("figure", "real", "simulated", "agrees"),
    [
        ("ttft_p50_s", (1.0, 1.0, 1.0), 1.0999, True),
        ("ttft_p50_s", (1.0, 1.0, 1.0), 1.1001, False),
        ("ttft_p99_s", (1.0, 1.0, 1.5), 1.5, True),  # another real run could have it
        ("ttft_p99_s", (1.0, 1.0, 1.5), 1.51, False),
        ("itl_s", (0.8, 1.0, 1.0), 0.8, True),
        ("itl_s", (1.0,), 0.89, False),
        ("output_per_s", (100.0, 100.0, 120.0), 104.9, True),
        ("output_per_s", (100.0, 100.0, 120.0), 106.0, False),  # a spread excuses no throughput
        ("slo_share", (0.90, 0.90, 1.0), 0.93, True),
        ("slo_share", (0.90, 0.90, 1.0), 0.94, False),
    ],
)
def test_verdicts(figure: str, real: tuple[float, ...], simulated: float, agrees: bool) -> None:
    assert Comparison("a load", figure, real, simulated, 0.0).agrees is agrees


def test_comparisons_and_their_records() -> None:
    runs = [Figures(1.0, 2.0, 0.1, 50.0, 0.5), Figures(1.1, 2.5, 0.1, 52.0, 0.6), Figures(1.2, 2.1, 0.1, 51.0, 0.5)]
    assert Comparison("a", "itl_s", (0.0, 0.0), 0.2, 0.0).difference == 1.0 and Comparison("a", "itl_s", (0.0,), 0.0, 0.0).agrees
    compared = compare("busy", runs, Figures(1.32, 2.4, 0.08, 50.0, 0.52), Figures(1.155, 2.1, 0.1, 51.0, 0.49))
    assert [one.figure for one in compared] == list(Figures._fields)
    assert [one.agrees for one in compared] == [False, True, False, True, True]
    assert compared[0].record() == {
        "load": "busy", "figure": "ttft_p50_s", "real": [1.0, 1.1, 1.2], "simulated": 1.32, "difference": 0.2, "in_spread": False,
        "agrees": False, "at_pace": 1.155, "difference_at_pace": 0.05,
    }  # fmt: skip
    assert compared[4].difference == pytest.approx(0.02) and compared[4].difference_at_pace == pytest.approx(-0.01)
    accuracy = Accuracy("m", tuple(compared), (("busy", 5.0, 40, (0.01, -0.02, 0.0)),), Limits(0.2, 0.01), {}, 0)
    assert not accuracy.agrees and "3 of 5 figures agree" in accuracy.text()
    assert "+20.0 %" in accuracy.text() and "+2.0 points" in accuracy.text() and "+1.0 %, -2.0 %, +0.0 %" in accuracy.text()
    agreeing = Accuracy("m", (compared[1],), (), Limits(0.2, 0.01), {}, 0)
    assert agreeing.agrees and not dataclasses.replace(agreeing, num_failed=1).agrees
    assert json.loads(json.dumps(accuracy.record()))["figures"][0] == compared[0].record()


# --- loads ------------------------------------------------------------------------------------------------------------------------------


def test_loads_are_fixed_beforehand_and_fit_their_time() -> None:
    case = AccuracyCase()
    for name, share in LOADS:
        requests = load_requests(case, name, 20.0 * share, share, 2048)
        assert requests == load_requests(case, name, 20.0 * share, share, 2048) and requests
        assert requests[-1].arrival_s < 25.0 / max(1.0, share)
    assert len(load_requests(case, "idle", 1e-6, 0.1, 2048)) == 1
    assert all(len(one.prompt_token_ids) + one.num_output <= 40 for one in load_requests(case, "half", 20.0, 0.5, 40))
    once, again = (with_other_tokens(load_requests(case, "half", 5.0, 0.5, 2048), TokenRange(), seed) for seed in ("a", "b"))
    assert [(one.arrival_s, len(one.prompt_token_ids), one.num_output) for one in once] == [
        (one.arrival_s, len(one.prompt_token_ids), one.num_output) for one in again
    ]
    prompts = [(one.prompt_token_ids, other.prompt_token_ids) for one, other in zip(once, again, strict=True)]
    assert all(one != other for one, other in prompts if len(one) > 8)


def test_capacity_is_what_a_full_engine_serves() -> None:
    """Output of one token each, prompts of one: a step of 16 rows serves 16 requests."""
    spec = spec_of(timed().engine, COST)
    case = AccuracyCase(prompt=LogNormal(4.0, 0.0, 4, 4), output=LogNormal(1.0, 0.0, 1, 1))
    step_s = HOST_S + LAW.step + 64 * LAW.row + 16 * LAW.logit_row + 16 * 4 * LAW.position + 16 * 10 * LAW.pair
    assert capacity(spec, case) == pytest.approx(16 / step_s, rel=0.15)


# --- all of it --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True], ids=["calibrated", "given"])
def test_a_real_engine_and_its_simulation(tmp_path: Path, given: bool) -> None:
    """Runs of a moment on a tiny model: everything that is to be measured is there. Whether it agrees is no test's business."""
    model = write_tiny_gguf(tmp_path / "rand.gguf", context=256)
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    config = EngineConfig(ModelConfig(str(model)), CacheConfig(num_kv_blocks=128), scheduler, BackendConfig(threads=1))
    prompt, output = LogNormal(20.0, 0.5, 2, 60), LogNormal(6.0, 0.5, 1, 20)
    case = AccuracyCase(2, 0.1, 0.05, (("idle", 0.05), ("overload", 1.5)), prompt, output)
    cost = Coefficients((2e-4, 0.0, 0.0, 0.0, 0.0, 1e-2)) if given else None
    said = list[str]()
    accuracy = measure_accuracy(config, case, cost, said.append)
    assert accuracy.num_failed == 0 and len(accuracy.comparisons) == 2 * len(Figures._fields)
    for one in accuracy.comparisons:
        assert len(one.real) == 2 and all(math.isfinite(value) and value >= 0.0 for value in (*one.real, one.simulated))
    assert [name for name, *_ in accuracy.loads] == ["idle", "overload"]
    assert all(len(biases) == 2 and rate > 0.0 and number >= 1 for _, rate, number, biases in accuracy.loads)
    assert bool(accuracy.errors) is not given
    assert len([line for line in said if line.startswith("run ")]) == 4
    assert all(name in accuracy.text() for name in ("idle", "overload", "TTFT p99", "requests/s"))
