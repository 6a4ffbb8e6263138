"""Plans by real simulations of tiny models: deterministic, monotone in what machines can do, plain when nothing fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.config import CacheConfig, SchedulerConfig
from octavo.costs.coefficients import Coefficients
from octavo.costs.machines import Design, Machine
from octavo.models.outline import ModelOutline, read_outline
from octavo.planning.bracket import RateGrid
from octavo.planning.estimate import Estimate, estimate
from octavo.planning.kinds import Engine, MachineKind, fit_kind
from octavo.planning.load import PlanLoad
from octavo.planning.planner import PlanReport, make_plan
from octavo.planning.plans import SearchOptions, why_not
from octavo.planning.trials import Fleet, Group, TrialOptions, trial_size
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.records import Slo
from octavo.workload.traces import TraceRow
from tests.models.configs import OPT_13B
from tests.models.tiny import write_tiny_gguf

ROWS = tuple(TraceRow(0.1 * i, 40 + 7 * (i % 9), 2 + i % 6) for i in range(60))
LOAD = PlanLoad("toy", ROWS)
SLOW = Machine("slow", "measured", 3e9, 1e9, 4e6, busy_w=50.0, idle_w=5.0, usd_per_hour=1.0, step_error=0.1, host_s=0.005)
OPTIONS = TrialOptions(Slo(ttft_s=0.2, itl_s=0.03), seeds=(0, 1), most_requests=100, most_simulated=6000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelOutline:
    return read_outline(write_tiny_gguf(tmp_path_factory.mktemp("models") / "m.gguf", context=256))


@pytest.fixture(scope="module")
def engine(model: ModelOutline) -> Engine:
    return Engine(model, "bf16", SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64), CacheConfig(enable_prefix_caching=False))


def planned(engine: Engine, machines: list[Machine], rate: float | None = None, options: TrialOptions = OPTIONS, **more: Any) -> PlanReport:
    kinds, designs = [MachineKind.of(machine) for machine in machines], more.pop("designs", ())
    return make_plan(engine, LOAD, kinds, options, SearchOptions(rate, RateGrid(0.2), **more), designs)


def test_a_plan_says_the_same_each_time_and_is_plain_json(engine: Engine) -> None:
    machines = [SLOW, replace(SLOW, name="fast", ops_per_s=12e9, bytes_per_s=4e9, busy_w=150.0, usd_per_hour=2.5)]
    first, second = (planned(engine, machines, 60.0).to_dict() for _ in range(2))
    text = json.dumps(first, allow_nan=False)
    assert text == json.dumps(second, allow_nan=False)
    record = json.loads(text)
    assert record["fits"] and record["best"] is not None and record["minimize"] == "usd" and not record["limit_reached"]
    assert record["best"]["attainment_least"] >= 0.9
    assert {kind["machine"] for kind in record["machines"]} == {"slow", "fast"}
    for kind in record["machines"]:
        assert [one["seed"] for one in kind["brackets"]] == [0, 1] and 0 < kind["holds_at"] < kind["fails_at"]
    counts = {engine["machine"]: engine["count"] for engine in record["best"]["engines"]}
    price = {"slow": 1.0, "fast": 2.5}
    assert record["best"]["usd_per_hour"] == sum(count * price[name] for name, count in counts.items())
    assert record["num_simulated"] >= sum(trial["num_requests"] for trial in record["tried"]) > 0


def rate_of(report: PlanReport, name: str) -> float:
    assert report.result is not None
    (kind,) = [kind for kind in report.result.kinds if kind.fit.kind.name == name]
    return kind.holds_at or 0.0


def test_a_machine_that_can_do_more_holds_more(engine: Engine) -> None:
    machines = [replace(SLOW, name=f"m{i}", ops_per_s=3e9 * 2**i, bytes_per_s=1e9 * 2**i) for i in range(3)]
    report = planned(engine, machines)
    rates = [rate_of(report, machine.name) for machine in machines]
    assert rates == sorted(rates) and rates[2] > 1.5 * rates[0] > 0
    assert report.is_answered and report.rate is None and report.result is not None and report.result.best is None


def test_looser_limits_hold_more(engine: Engine) -> None:
    tight, loose = (planned(engine, [SLOW], options=replace(OPTIONS, slo=Slo(ttft_s, 0.02))) for ttft_s in (0.1, 1.0))
    many, few = (planned(engine, [SLOW], options=replace(OPTIONS, attainment=share)) for share in (0.99, 0.5))
    assert 0 < rate_of(tight, "slow") <= rate_of(loose, "slow") and 0 < rate_of(many, "slow") <= rate_of(few, "slow")


def test_recorded_arrivals_may_be_asked_for(engine: Engine) -> None:
    """They come evenly here, and even arrivals queue less than Poisson ones."""
    poisson, recorded = (planned(engine, [SLOW], options=replace(OPTIONS, arrivals=how)) for how in ("poisson", "trace"))
    assert rate_of(recorded, "slow") >= rate_of(poisson, "slow") > 0


def test_the_fewest_devices_that_hold_the_model(engine: Engine) -> None:
    load = LOAD.fitting(256)
    needed = engine.model.weight_bytes + engine.activation_bytes + engine.kv.num_bytes(load.max_context)
    for share, devices in ((1.01, 1), (0.51, 2), (0.26, 4), (0.2, 8)):
        kind = MachineKind.of(replace(SLOW, memory_bytes=needed * share / 0.9))
        assert fit_kind(kind, engine, load).devices == devices and fit_kind(kind, engine, load).fits
    exact = fit_kind(MachineKind.of(replace(SLOW, memory_bytes=needed / 0.9 + 1)), engine, load)
    assert exact.fits and exact.num_blocks == engine.kv.num_blocks(load.max_context)
    short = fit_kind(MachineKind.of(replace(SLOW, memory_bytes=(needed - 900) / 0.9)), engine, load, max_devices=1)
    assert not short.fits and short.missing_bytes == pytest.approx(900, abs=1)


def test_a_model_that_fits_nowhere_is_told_plainly(engine: Engine) -> None:
    report = planned(engine, [replace(SLOW, memory_bytes=1000.0)], 5.0)
    record = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert not report.is_answered and not record["fits"] and record["best"] is None and record["tried"] == []
    needed = engine.model.weight_bytes + engine.activation_bytes + engine.kv.num_bytes(LOAD.max_context)
    assert record["machines"][0]["missing_bytes"] == needed - 900 * 8


def test_more_devices_where_one_answer_alone_is_too_slow(engine: Engine) -> None:
    slow = replace(SLOW, bytes_per_s=1.5e7, ops_per_s=1e12, host_s=0.0, host_s_per_sequence=0.0)
    report = planned(engine, [slow], options=replace(OPTIONS, slo=Slo(itl_s=0.02)))
    assert report.fits[0].devices > 1 and rate_of(report, "slow") > 0
    hopeless = planned(engine, [replace(slow, host_s=0.03)], options=replace(OPTIONS, slo=Slo(itl_s=0.02)))
    assert not hopeless.is_answered and hopeless.result is not None and hopeless.trials == ()
    assert "one answer alone takes" in (hopeless.result.kinds[0].dropped or "")


def test_designs_restrict_the_search(engine: Engine) -> None:
    machines = [SLOW, replace(SLOW, name="other")]
    report = planned(engine, machines, 10.0, designs=(Design("d", prefill="slow", decode="other"), Design("e", both="other", num_both=2)))
    assert report.result is not None and report.result.colocated is not None and report.result.split is not None
    assert report.result.colocated.fleet == Fleet((Group("other", "both", 2),))
    assert [group.name for group in report.result.split.fleet.groups] == ["slow", "other"]


def test_a_fitted_machine(engine: Engine) -> None:
    kind = MachineKind.fitted(Coefficients((1e-5, 0.0, 1e-8, 0.0, 0.0, 2e-3), median_error=0.07), 4e6)
    report = make_plan(engine, LOAD, [kind], OPTIONS, SearchOptions(20.0, RateGrid(0.2)))
    assert report.result is not None and report.result.best is not None
    assert report.result.best.error == 0.07 and report.result.minimize == "machines" and report.result.best.usd_per_hour is None


def test_what_cannot_be_priced_is_refused(tmp_path: Path) -> None:
    (tmp_path / "opt.json").write_text(json.dumps(OPT_13B))
    with pytest.raises(ValueError, match="model: 'opt' is not allowed; it can be sized"):
        Engine(read_outline(tmp_path / "opt.json"))


class SteadyCost:
    """A step costs a hundredth, and a thousandth for each row."""

    def seconds_of(self, shape: Any) -> float:
        return float(0.01 + 0.001 * shape.num_rows)

    def seconds(self, plan: Any) -> float:
        return 0.01 + 0.001 * sum(len(piece.token_ids) for piece in plan.slices)


def test_estimates_by_hand() -> None:
    """Prompts of 20 and answers of 10 tokens: eight sequences at a time bring 8 + 16 rows a step, 34 ms; an answer takes ten of these."""
    load = PlanLoad("t", (TraceRow(0.0, 20, 10),))
    spec = EngineSpec(SteadyCost(), 100, scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64))
    found = estimate(spec, load, Slo(), 50)
    assert found.rate == pytest.approx(8 / (10 * 0.034)) and found.num_sequences == 8
    assert found.decode_rate == pytest.approx(8 / (10 * 0.018)) and found.prefill_rate == pytest.approx(1 / 0.03)
    assert found.least_itl_s == pytest.approx(0.011)
    few = estimate(spec, load, Slo(itl_s=0.02), 50)  # three sequences: 19 ms a step
    assert few.rate == pytest.approx(3 / (10 * 0.019)) and estimate(spec, load, Slo(), 2).rate == pytest.approx(2 / (10 * 0.016))


def test_trials_are_long_enough_for_what_they_are_to_show() -> None:
    """Several times what runs at once; at 20 requests per second a queue that grows by a fifth is 10 s long after 1,000 requests."""
    guess = Estimate(20.0, 1.0, 1.0, 97, 0.01)
    assert [trial_size(guess, Slo(ttft_s=ttft_s)) for ttft_s in (0.1, 10.0)] == [5 * 97, 1000]
    assert trial_size(Estimate(20.0, 1.0, 1.0, 3, 0.01), Slo(itl_s=1.0)) == 200


def test_requests_that_pile_up_keep_no_limits(engine: Engine) -> None:
    """With no limit on waiting every answer is as quick as ever, and still a hundred times what the engine can do is too much."""
    report = planned(engine, [SLOW], options=replace(OPTIONS, slo=Slo(itl_s=10.0)))
    assert report.result is not None and (report.result.kinds[0].fails_at or 1e9) < 10 * report.result.kinds[0].estimate.rate  # type: ignore[union-attr]
    worst = max(report.trials, key=lambda trial: trial.rate)
    assert worst.piled_up and not worst.holds and worst.attainment == 1.0 and why_not(worst) == "requests pile up"


def test_a_fitted_machine_wakes_as_in_the_simulator(engine: Engine) -> None:
    kind = MachineKind.fitted(Coefficients((1e-5, 0.0, 0.0, 0.0, 0.0, 1e-3), wake_s=0.01), 1e9)
    assert kind.spec(engine, 1, 50).wake_s == 0.01 and kind.spec(engine, 1, 50, slower=2.0).wake_s == 0.02
    assert (kind.spec(engine, 1, 50).name, kind.name_of(4)) == ("fitted", "4*fitted")
