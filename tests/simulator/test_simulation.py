"""Times and figures of small simulations, computed by hand."""

from __future__ import annotations

import math

import pytest

from octavo.core.cost import StepShape
from octavo.core.kv_pages import PageLayout
from octavo.simulator.engine_spec import EngineSpec, PowerModel, Speculation
from octavo.simulator.records import Slo
from octavo.simulator.simulation import Simulation, SimulationOptions
from octavo.workload.arrivals import OpenLoop
from octavo.workload.lengths import Uniform
from octavo.workload.requests import Independent, Workload
from tests.simulator.engines import POSITION_S, ROW_S, STEP_S, LinearCost, engine, run, work


def step_s(*slices: tuple[int, int]) -> float:
    """Seconds of a step whose slices are (start, rows)."""
    rows = sum(num_rows for _, num_rows in slices)
    return STEP_S + ROW_S * rows + POSITION_S * sum(start + num_rows for start, num_rows in slices)


def test_one_request_takes_its_steps() -> None:
    report = run([engine()], [work(3.0, 10, 4)])
    (record,) = report.records
    assert record.ttft_s == pytest.approx(step_s((0, 10)))
    decode = [step_s((10 + i, 1)) for i in range(3)]
    assert record.e2e_s == pytest.approx(step_s((0, 10)) + sum(decode))
    assert record.itl_s == pytest.approx(sum(decode) / 3) and record.worst_gap_s == pytest.approx(decode[-1])
    assert (record.num_prompt, record.num_output, record.num_cached, report.num_steps) == (10, 4, 0, 4)
    assert report.duration_s == pytest.approx(3.0 + record.e2e_s)


def test_a_request_that_comes_during_a_step_joins_the_next() -> None:
    report = run([engine()], [work(0.0, 4, 3), work(0.1, 6, 1, token=2)])
    first_s = step_s((0, 4))
    second_s = first_s + step_s((4, 1), (0, 6))
    assert report.records[0].request_id == "1" and report.records[0].ttft_s == pytest.approx(second_s - 0.1)
    assert report.records[1].e2e_s == pytest.approx(second_s + step_s((5, 1)))


def test_a_request_that_comes_as_a_step_ends_joins_the_next() -> None:
    shape = StepShape()
    shape.add(0, 4, 1)
    report = run([engine()], [work(0.0, 4, 2), work(LinearCost().seconds_of(shape), 6, 1, token=2)])
    assert report.num_steps == 2 and report.records[1].ttft_s == pytest.approx(step_s((4, 1), (0, 6)))


def test_a_long_prompt_goes_in_chunks() -> None:
    report = run([engine()], [work(0.0, 40, 1)])
    assert report.records[0].ttft_s == pytest.approx(step_s((0, 16)) + step_s((16, 16)) + step_s((32, 8)))


def test_what_is_cached_is_not_computed_again() -> None:
    report = run([engine()], [work(0.0, 13, 1), work(50.0, 13, 1)])
    assert report.records[1].num_cached == 12 and report.cached_tokens == 12
    assert report.records[1].ttft_s == pytest.approx(step_s((12, 1)))


def test_no_request_is_a_report_of_nothing() -> None:
    report = run([engine()], [])
    data = report.to_dict()
    assert (report.num_arrived, report.num_completed, report.duration_s, report.num_steps) == (0, 0, 0.0, 0)
    assert report.requests_per_s is None and report.slo_attainment is None and report.engines[0].busy_share is None
    assert data["ttft_s"] == {"count": 0, "mean": None, "p50": None, "p90": None, "p99": None, "max": None}
    assert not any(isinstance(value, float) and math.isnan(value) for value in data.values())


def test_what_never_fits_is_refused_and_the_others_run() -> None:
    report = run([engine(num_blocks=4)], [work(0.0, 40, 2), work(0.0, 5, 2), work(1.0, 5, 10**6)])
    assert (report.num_arrived, report.num_refused, report.num_completed) == (3, 1, 2)
    assert report.first_refusal is not None and "prompt" in report.first_refusal
    assert report.slo_attainment == pytest.approx(2 / 3)
    assert report.records[1].num_output == 12  # as many as the pool has room for, as in the engine


def test_a_closed_loop_keeps_its_number_and_goes_on_past_refusals() -> None:
    load = [work(0.0, 40 if i == 3 else 4, 3) for i in range(9)]
    report = run([engine(num_blocks=8)], load, concurrency=2)
    assert (report.num_completed, report.num_refused) == (8, 1)
    starts = sorted(record.arrival_s for record in report.records)
    assert starts[:2] == [0.0, 0.0] and starts[2] > 0.0
    for record in report.records:
        others = [other for other in report.records if other.arrival_s <= record.arrival_s < other.arrival_s + other.e2e_s]
        assert len(others) <= 2


def test_the_clock_can_be_stopped() -> None:
    report = run([engine()], [work(0.0, 4, 100), work(50.0, 4, 1)], until_s=10.0)
    assert (report.duration_s, report.num_completed, report.num_unfinished) == (10.0, 0, 1)


def test_limits_are_counted_by_request() -> None:
    load = [work(0.0, 16, 3), work(30.0, 4, 3)]
    long_s, short_s = step_s((0, 16)), step_s((0, 4))
    assert run([engine()], load, slo=Slo(ttft_s=(long_s + short_s) / 2)).slo_attainment == 0.5
    assert run([engine()], load, slo=Slo(ttft_s=1.0, itl_s=0.1)).slo_attainment == 0.0
    assert run([engine()], load, slo=Slo(e2e_s=100.0, gap_s=STEP_S * 1.1)).slo_attainment == 1.0


def test_energy_and_cost_follow_the_machine() -> None:
    spec = engine(power=PowerModel(idle_w=10.0, busy_w=110.0, usd_per_hour=7.2))
    report = run([spec], [work(2.0, 4, 1)])
    busy_s = step_s((0, 4))
    assert report.energy_j == pytest.approx(2.0 * 10.0 + busy_s * 110.0)
    assert report.cost_usd == pytest.approx((2.0 + busy_s) * 7.2 / 3600.0)
    assert run([engine()], [work(0.0, 4, 1)]).cost_usd is None


def test_all_gaps_are_kept_on_request() -> None:
    simulation = Simulation([engine()], None, SimulationOptions(keep_gaps=True))
    simulation.run([work(0.0, 4, 4), work(0.7, 4, 2)])
    first = step_s((0, 4))
    assert list(simulation.log.gaps["0"]) == pytest.approx([step_s((4, 1)), step_s((5, 1), (0, 4)), step_s((6, 1), (4, 1))], abs=1e-9)
    assert first == pytest.approx(0.5404) and len(simulation.log.gaps["1"]) == 1


def test_the_pool_is_measured_while_steps_run() -> None:
    report = run([engine(num_blocks=10)], [work(0.0, 8, 2)])
    (one,) = report.engines
    first_s, second_s = step_s((0, 8)), step_s((8, 1))
    assert one.pool_most == 0.3
    assert one.pool_mean == pytest.approx((2 * first_s + 3 * second_s) / (first_s + second_s) / 10)


def test_drafts_save_steps_by_their_acceptance() -> None:
    load = [work(0.0, 4, 60)]
    plain = run([engine()], load).num_steps
    sure = run([engine(speculation=Speculation(4, acceptance=1.0))], load)
    never = run([engine(speculation=Speculation(4, acceptance=0.0))], load)
    assert plain == never.num_steps == 60
    assert sure.num_steps == 1 + math.ceil(59 / 5)
    assert sure.records[0].num_output == 60
    slow = run([engine(speculation=Speculation(4, acceptance=1.0, draft_s=1.0))], load)
    assert slow.duration_s > sure.duration_s + 40.0


def test_the_seed_alone_decides() -> None:
    def outcome(seed: int) -> object:
        load = Workload(OpenLoop(0.8), Independent(Uniform(1, 30), Uniform(1, 20)), 60, seed=seed).requests()
        return run([engine(), engine()], load, seed=seed)

    assert outcome(1) == outcome(1) != outcome(2)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "at least one is needed"),
        ([{"role": "decode"}], "nobody computes prompts"),
        ([{"role": "prefill"}], "prefill engines need decode engines"),
        ([{"role": "both"}, {"role": "decode"}], "prefill engines need decode engines"),
    ],
)
def test_engines_that_make_no_cluster_are_refused(specs: list[dict[str, str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Simulation([engine(**spec) for spec in specs])


def test_bad_specs_and_loads_are_refused() -> None:
    with pytest.raises(ValueError, match="role: 'x' is not allowed"):
        engine(role="x")
    with pytest.raises(ValueError, match="num_blocks: 0"):
        EngineSpec(LinearCost(), 0)
    with pytest.raises(ValueError, match="num_blocks: 1000000000000 is not allowed; from 1 to 67108864"):
        EngineSpec(LinearCost(), 10**12)
    with pytest.raises(ValueError, match="busy_w: nan"):
        PowerModel(busy_w=math.nan)
    with pytest.raises(ValueError, match="slo ttft_s: -1"):
        Slo(ttft_s=-1)
    with pytest.raises(ValueError, match="arrival_s: 1.0 is not allowed"):
        run([engine()], [work(2.0, 4, 1), work(1.0, 4, 1)])
    for arrival_s in (math.nan, math.inf):
        for load in ([work(arrival_s, 4, 1)], [work(0.0, 4, 1), work(arrival_s, 4, 1)]):
            with pytest.raises(ValueError, match=f"arrival_s: {arrival_s} is not allowed"):
                run([engine()], load)


def test_limits_that_were_broken_are_counted_by_name() -> None:
    load = [work(0.0, 10, 3), work(0.0, 10, 1), work(0.0, 10, 3)]
    report = run([engine(max_num_seqs=1)], load, slo=Slo(ttft_s=1.0, itl_s=STEP_S))
    assert report.num_broken == {"itl": 2, "ttft": 2} and report.slo_attainment == 0.0
    assert run([engine()], load, slo=Slo(ttft_s=100.0)).num_broken == {}


def test_a_run_stops_when_too_many_have_missed_their_limits() -> None:
    load = [work(float(i), 10, 3) for i in range(20)]
    whole = run([engine(max_num_seqs=1)], load, slo=Slo(ttft_s=2.0))
    num_late = whole.num_broken["ttft"]
    assert 3 < num_late < 20
    assert run([engine(max_num_seqs=1)], load, slo=Slo(ttft_s=2.0), most_misses=num_late) == whole
    stopped = run([engine(max_num_seqs=1)], load, slo=Slo(ttft_s=2.0), most_misses=3)
    assert stopped.num_broken == {"ttft": 4} and stopped.num_unfinished > 0 and stopped.num_arrived < 20
    refused = run([engine(num_blocks=2)], [work(0.0, 100, 3)] * 5, most_misses=0)
    assert refused.num_refused == 5 and refused.num_completed == 0


def test_windows_that_give_back_what_left_them_hold_more() -> None:
    """Of two pages to a block one is of layers with a window of 8: four sequences of 60 tokens have room where two had."""
    layout = PageLayout(64, 1, 1, 8, ((0, 0), (1, 0)))
    load = [work(0.0, 40, 20) for _ in range(4)]
    options = {"num_blocks": 32, "cache": {"enable_prefix_caching": False}, "admission_lookahead": 1}
    paged, whole = run([engine(layout=layout, **options)], load), run([engine(**options)], load)
    assert paged.num_completed == whole.num_completed == 4
    assert (paged.num_preemptions, whole.num_preemptions > 0 or whole.duration_s > paged.duration_s) == (0, True)


@pytest.mark.parametrize("rate", [1e-308, 5e-324, 1e-12])
def test_a_clock_that_would_lose_its_microseconds_is_refused(rate: float) -> None:
    load = Workload(OpenLoop(rate), Independent(Uniform(1, 4), Uniform(1, 4)), 5)
    with pytest.raises(ValueError, match="arrival_s: .* is not allowed; .* to 1e.10"):
        Simulation([engine()], options=SimulationOptions()).run(load.requests())
    dear = EngineSpec(LinearCost(), 64, wake_s=1e11)
    with pytest.raises(ValueError, match="the clock would stand at"):
        run([dear], [work(0.0, 4, 2)])
