"""Ways of serving compared: figures and verdicts by hand, loads that are fixed beforehand, and all of it for a moment."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import statistics
import sys
from array import array
from itertools import islice
from pathlib import Path

import pytest

from octavo.bench.cluster_ways import WayRun
from octavo.bench.stream_record import StreamRecord
from octavo.config import ConfigError
from octavo.costs.coefficients import Coefficients
from octavo.distributed.handoff import Link
from octavo.engine.llm import make_config
from octavo.reproduce.cluster_accuracy import Scaled, WaysAccuracy, WaysCase, answers_of, measure_ways, two_workers
from octavo.reproduce.cluster_prediction import Answer, KindCost, Predictor
from octavo.reproduce.compared import Limits
from octavo.reproduce.way_figures import WayComparison, WayFigures, compared
from octavo.simulator.shared_host import Crowding
from octavo.workload.lengths import LogNormal
from octavo.workload.requests import Independent, WorkloadRequest
from octavo.workload.traces import Trace, TraceRow
from tests.bench.sleeping_worker import CROWDING
from tests.models.tiny import write_tiny_gguf

THREE = [Answer(0.0, 0.5, (0.1, 0.3)), Answer(1.0, 1.1, ()), Answer(2.0, 4.0, (0.1, 0.1, 0.4))]
PREDICTOR = Predictor(KindCost(Coefficients((1e-3,) * 6)), Crowding(0.25, 0.1, 0.05, 0.15), Link(1e9, 0.005), 0.001, 0.002)


def test_figures_by_hand() -> None:
    figures = WayFigures.of(THREE, Limits(ttft_s=0.6, itl_s=0.19))
    assert figures.ttft_p50_s == pytest.approx(0.5) and figures.ttft_p99_s == pytest.approx(0.5 + 0.98 * 1.5)
    assert figures.itl_s == pytest.approx(0.2) and figures.itl_p99_s == pytest.approx(0.3 + 0.96 * 0.1)
    assert figures.output_per_s == pytest.approx(8 / 4.6)
    assert figures.good_per_s == pytest.approx(1 / 4.6)  # the first is slow on average, the last is late
    assert WayFigures.of(THREE[1:2], Limits(1.0, 1.0))[2:4] == (0.0, 0.0)


def test_answers_of_a_run() -> None:
    """Times from the start of the run; a request that failed is none."""
    requests = [WorkloadRequest(0.5, [5], 2), WorkloadRequest(0.7, [5], 2)]
    records = [StreamRecord(1, 2, due_s=100.5, event_times=array("d", [100.75, 101.0])), StreamRecord(1, 2, due_s=100.7)]
    records[1].fail("refused", "no")
    (answer,) = answers_of(WayRun(records, {}), requests)
    assert (answer.arrival_s, answer.first_s, answer.gaps_s) == (0.5, 0.75, (0.25,))
    assert (answer.ttft_s, answer.last_s, answer.itl_s) == (0.25, 1.0, 0.25)


@pytest.mark.parametrize(
    ("figure", "real", "simulated", "agrees"),
    [
        ("ttft_p50_s", (1.0, 1.0), 1.149, True),
        ("ttft_p50_s", (1.0, 1.0), 1.151, False),
        ("ttft_p99_s", (1.0, 1.0, 2.0), 2.0, True),  # another real run could have it
        ("itl_p99_s", (1.0, 1.0, 2.0), 2.01, False),
        ("output_per_s", (100.0, 100.0, 200.0), 120.0, False),  # a spread excuses neither throughput
        ("good_per_s", (1.0, 1.0, 2.0), 1.2, False),  # nor goodput
        ("good_per_s", (0.0, 0.0), 0.0, True),
        ("good_per_s", (0.0, 0.0), 0.1, False),
    ],
)
def test_verdicts(figure: str, real: tuple[float, ...], simulated: float, agrees: bool) -> None:
    assert WayComparison("a load", "a way", figure, real, statistics.median(real), simulated, 0.0).agrees is agrees


def test_ends_of_distributions_are_over_all_runs_together() -> None:
    """Each run has one late request; a second one that is late as well is in the last percent of all, and so is half of it."""
    runs = [[Answer(0.0, 0.1, (0.01,) * 60)] * 49 + [Answer(0.0, last, (0.01,) * 59 + (last,))] for last in (1.0, 3.0)]
    limits = Limits(0.2, 0.02)
    figures, each = WayFigures.of_runs(runs, limits), [WayFigures.of(run, limits) for run in runs]
    assert figures.ttft_p99_s == pytest.approx(1.0 + 0.01 * 2.0) and figures.itl_p99_s == 0.01
    assert figures.output_per_s == pytest.approx((each[0].output_per_s + each[1].output_per_s) / 2)
    some = {one.figure: one for one in compared("a load", "a way", runs, limits, figures, figures)}
    assert some["ttft_p99_s"].real == tuple(one.ttft_p99_s for one in each) and some["ttft_p99_s"].measured == figures.ttft_p99_s
    assert {name: one.num_values for name, one in some.items() if one.num_values} == {"ttft_p99_s": 100, "itl_p99_s": 6000}
    assert all(one.difference == 0.0 and one.agrees for one in some.values())
    assert WayFigures.middle([each[1], each[0], figures]).output_per_s == figures.output_per_s


def test_the_record_and_the_table() -> None:
    real = [WayFigures(1.0, 2.0, 0.1, 0.2, 50.0, 2.0), WayFigures(1.1, 2.6, 0.1, 0.2, 52.0, 2.0)]
    measured = WayFigures(1.05, 2.3, 0.1, 0.2, 51.0, 2.0)
    guess, at_pace = WayFigures(1.05, 2.6, 0.13, 0.2, 51.0, 1.0), measured
    columns = zip(WayFigures._fields, zip(*real, strict=True), measured, guess, at_pace, (0, 24, 0, 310, 0, 0), strict=True)
    some = [WayComparison("code 30 %", "apart", *values) for values in columns]
    assert [one.agrees for one in some] == [True, True, False, True, True, False]
    assert not some[1].is_close or some[1].in_spread
    biases = {("code 30 %", "apart"): (0.01, -0.02)}
    accuracy = WaysAccuracy("m", tuple(some), (("code 30 %", 2.0, 12),), biases, {"code": Limits(0.5, 0.02)}, PREDICTOR, 0)
    record = json.loads(json.dumps(accuracy.record()))
    assert (record["num_figures"], record["num_agree"], record["agrees"]) == (6, 4, False)
    assert record["figures"][2]["difference"] == pytest.approx(0.3) and record["figures"][2]["difference_at_pace"] == 0.0
    assert [one.get("num_values") for one in record["figures"]] == [None, 24, None, 310, None, None]
    assert record["learned"]["link_latency_s"] == 0.005 and record["slo"]["code"] == {"ttft_s": 0.5, "itl_s": 0.02}
    assert record["learned"]["crowding_decode_prompt"] == 0.1
    text = accuracy.text()
    assert "4 of 6 figures agree" in text and "apart +1.0 %, -2.0 %" in text and "+30.0 %" in text
    assert "steps that decode take 25.0 % more, those with prompts 5.0 %, beside one that computes prompts 10.0 % and 15.0 %" in text
    agreeing = dataclasses.replace(accuracy, comparisons=(some[0],))
    assert agreeing.agrees and not dataclasses.replace(agreeing, num_failed=1).agrees


def test_lengths_of_a_trace_scaled_down() -> None:
    trace = Trace((TraceRow(0.0, 800, 80), TraceRow(1.0, 3, 1), TraceRow(2.0, 90000, 80000)))
    found = set(islice(Scaled(trace, 8.0, 4.0, 1000).lengths(random.Random(1)), 200))
    assert found == {(100, 20), (1, 1), (500, 500)}


def test_ways_differ_in_what_is_compared_alone() -> None:
    config = make_config("m", max_num_seqs=8, max_num_batched_tokens=512)
    apart, chunks, first = two_workers(config, 96)
    assert [dict(way.workers) for way in (apart, chunks, first)] == [{"prefill": 1, "decode": 1}, {"both": 2}, {"both": 2}]
    assert apart.config == config and apart.is_apart and not chunks.is_apart
    changed = dataclasses.replace(config.scheduler, max_num_batched_tokens=96)
    assert chunks.config == dataclasses.replace(config, scheduler=changed)
    assert first.config.scheduler.scheduling_policy == "prefill_first" and not first.config.scheduler.enable_chunked_prefill
    assert first.config.scheduler.max_num_batched_tokens == 2048
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        two_workers(config, 4)


ROOT = Path(__file__).parents[2]
SLEEPING = (sys.executable, "-m", "tests.bench.sleeping_worker")
SETTINGS = {"num_kv_blocks": 400, "max_num_seqs": 4, "max_num_batched_tokens": 64, "threads": 1}


def test_real_workers_and_their_simulation(tmp_path: Path) -> None:
    """For a moment, on a tiny model: everything that is to be measured is there. Whether it agrees is no test's business."""
    model = str(write_tiny_gguf(tmp_path / "m.gguf", context=256))
    lengths = Independent(LogNormal(20.0, 0.5, 2, 60), LogNormal(6.0, 0.5, 1, 20))
    case = WaysCase({"some": lengths}, 1, 6, 0.1, (0.5,))
    said = list[str]()
    accuracy = measure_ways(two_workers(make_config(model, **SETTINGS), 32)[:2], model, case, said.append)
    assert accuracy.num_failed == 0 and len(accuracy.comparisons) == 2 * len(WayFigures._fields)
    places = {("some 50 %", "apart"), ("some 50 %", "chunks")}
    assert {(one.load, one.way) for one in accuracy.comparisons} == places == set(accuracy.biases)
    assert all(len(one.real) == 1 and one.median > 0.0 for one in accuracy.comparisons if not one.figure.startswith(("itl", "good")))
    assert accuracy.loads[0][1] > 0.0 and accuracy.limits["some"].ttft_s > 0.0 and accuracy.predictor.link.bytes_per_s > 0.0
    assert said[0] == "scenes and probes" and said[-2].startswith("run 1 of 1, some 50 %, chunks") and said[-1] == "simulated runs"


@pytest.mark.soak
def test_workers_that_sleep_are_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take what a law says however busy this machine is, and are held up by neighbours as it says: that is found again, and of
    what the simulator says of real processes most is right."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    model = str(write_tiny_gguf(tmp_path / "m.gguf", context=2048))
    config = make_config(model, num_kv_blocks=1200, max_num_seqs=16, max_num_batched_tokens=512, threads=1)
    lengths = Independent(LogNormal(140.0, 0.8, 4, 600), LogNormal(26.0, 0.7, 2, 80))
    accuracy = measure_ways(two_workers(config, 128), model, WaysCase({"some": lengths}, 1, 25, 12.0), command=SLEEPING)
    assert accuracy.num_failed == 0, accuracy.text()
    assert accuracy.predictor.crowding == pytest.approx(tuple(CROWDING), abs=0.2), accuracy.text()
    assert sum(one.agrees for one in accuracy.comparisons) >= 0.7 * len(accuracy.comparisons), accuracy.text()
