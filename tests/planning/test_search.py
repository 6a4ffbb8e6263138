"""The search on fleets whose capacity is a formula: against trying every fleet, and when nothing holds, fits, or may be spent."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.planning.bracket import RateGrid
from octavo.planning.estimate import Estimate
from octavo.planning.kinds import KindFit, MachineKind
from octavo.planning.load import PlanLoad
from octavo.planning.plans import SearchOptions, SearchResult
from octavo.planning.search import PlanSearch
from octavo.planning.trials import Fleet, Group, Trial, TrialOptions, Trials
from octavo.simulator.engine_spec import PowerModel
from octavo.simulator.records import Slo
from octavo.workload.traces import TraceRow
from tests.simulator.engines import LinearCost


@dataclass(frozen=True)
class Pace:
    """What an engine of a kind can do: requests per second of both phases, of prompts, of answers. ``off``: estimates are so many times."""

    both: float
    prefill: float
    decode: float
    watts: float
    usd: float | None = None
    off: float = 1.0
    fits: bool = True


@dataclass(slots=True)
class PacedTrials(Trials):
    """Trials that hold up to a capacity: engines add up, the slower phase counts, each seed a little below the one before."""

    paces: dict[str, Pace] = field(default_factory=dict)

    def _run(self, fleet: Fleet, rate: float, seed: int, slower: float) -> Trial:
        broken, share = dict[str, float](), (1.0 - 0.01 * seed) / slower
        phases = {"both": ("both", "ttft"), "prefill": ("prefill", "ttft"), "decode": ("decode", "itl")}
        for group in fleet.groups:
            phase, limit = phases[group.role]
            if fleet.cells * group.count * getattr(self.paces[group.name], phase) * share < rate - 1e-9:
                broken[limit] = 0.5
        return Trial(fleet, rate, seed, not broken, bool(broken), 0.5 if broken else 1.0, broken, 100, 1.0, False, 0.1, 0.1)


def fit_of(name: str, pace: Pace) -> KindFit:
    kind = MachineKind(name, "measured", 1e9, lambda engine, devices: LinearCost(), PowerModel(1.0, pace.watts, pace.usd), 0.1)
    return KindFit(kind, 1, 1000, 100, 10, 10, 0 if pace.fits else 77, 5, 3)


def search(
    paces: dict[str, Pace], rate: float | None, most_simulated: int = 10**9, seeds: tuple[int, ...] = (0,), **options: Any
) -> PlanSearch:
    fits = {name: fit_of(name, pace) for name, pace in paces.items()}
    estimates = {
        name: Estimate(pace.both * pace.off, pace.prefill * pace.off, pace.decode * pace.off, 4, 0.01)
        for name, pace in paces.items() if pace.fits
    }  # fmt: skip
    load = PlanLoad("load", (TraceRow(0.0, 10, 10), TraceRow(1.0, 10, 10)))
    trial_options = TrialOptions(Slo(1.0, 0.1), seeds=seeds, most_simulated=most_simulated)
    trials = PacedTrials(None, load, trial_options, fits, dict.fromkeys(fits, 200), paces=paces)  # type: ignore[arg-type]  # nothing is simulated
    return PlanSearch(trials, estimates, SearchOptions(rate, RateGrid(0.01), **options))


def price(paces: dict[str, Pace], result: SearchResult) -> float:
    assert result.best is not None
    groups = result.best.fleet.groups
    return result.best.fleet.cells * sum(group.count * paces[group.name].watts for group in groups)


def cheapest(paces: dict[str, Pace], rate: float) -> float:
    """Of all fleets of one kind, and of all pairs."""
    def least(pace: float) -> int:
        return max(1, math.ceil(rate / pace - 1e-9))

    together = [least(pace.both) * pace.watts for pace in paces.values()]
    apart = [least(p.prefill) * p.watts + least(d.decode) * d.watts for p, d in itertools.product(paces.values(), repeat=2)]
    return min(together + apart)


PACES = st.builds(
    lambda both, prefill, decode, watts, off: Pace(both, both * prefill, both * decode, watts, off=off),
    st.floats(1.0, 10.0), st.floats(1.1, 8.0), st.floats(1.1, 8.0), st.floats(10.0, 1000.0), st.floats(0.8, 1.25),
)  # fmt: skip


@given(st.lists(PACES, min_size=1, max_size=4), st.floats(0.1, 4.0))
@settings(max_examples=60, deadline=None)
def test_finds_the_cheapest_fleet_there_is(paces: list[Pace], share: float) -> None:
    """Of up to four engines of a phase; larger fleets are of equal cells, and come out a little larger."""
    named = {f"k{i}": pace for i, pace in enumerate(paces)}
    rate = share * min(pace.both for pace in paces) * 0.5
    result = search(named, rate, most_pairs=99).run()
    assert price(named, result) == pytest.approx(cheapest(named, rate))


@given(st.lists(PACES, min_size=1, max_size=3), st.floats(5.0, 200.0))
@settings(max_examples=40, deadline=None)
def test_large_fleets_are_of_equal_cells(paces: list[Pace], rate: float) -> None:
    named = {f"k{i}": pace for i, pace in enumerate(paces)}
    result = search(named, rate, most_pairs=99).run()
    best = result.best
    assert best is not None and best.trials[0].holds and best.fleet.cell_size <= 2 * 4 + 1
    total = {group.name: 0.0 for group in best.fleet.groups}
    assert len(total) <= 2 and price(named, result) >= cheapest(named, rate) - 1e-6
    assert price(named, result) <= 3 * cheapest(named, rate) + 2 * max(pace.watts for pace in paces)


def test_a_higher_rate_is_never_cheaper() -> None:
    paces = {"a": Pace(3.0, 9.0, 5.0, 100.0), "b": Pace(7.0, 20.0, 9.0, 250.0)}
    prices = [price(paces, search(paces, rate).run()) for rate in (0.5, 1.0, 2.5, 3.0, 5.0, 7.0, 9.0, 11.9)]
    assert prices == sorted(prices)


def test_rates_of_kinds_are_brackets_with_every_seed() -> None:
    result = search({"a": Pace(5.0, 9.0, 9.0, 100.0, off=1.4)}, None, seeds=(0, 1, 2)).run()
    (kind,) = result.kinds
    assert [seed for seed, _ in kind.brackets] == [0, 1, 2] and result.best is None
    for seed, bracket in kind.brackets:
        assert bracket.holds_at <= 5.0 * (1.0 - 0.01 * seed) < (bracket.fails_at or 0.0)
    assert kind.holds_at == min(bracket.holds_at for _, bracket in kind.brackets)
    assert kind.fails_at == max(bracket.fails_at or 0.0 for _, bracket in kind.brackets)


def test_what_fails_with_one_seed_is_no_plan() -> None:
    paces = {"a": Pace(5.0, 5.0, 5.0, 100.0)}
    one, all_seeds = search(paces, 4.96).run(), search(paces, 4.96, seeds=(0, 1, 2)).run()
    assert one.best is not None and one.best.fleet.num_engines == 1
    assert all_seeds.best is not None and all_seeds.best.fleet.num_engines == 2 and len(all_seeds.best.trials) == 3


def test_slower_steps_are_tried_on_what_is_chosen() -> None:
    tight, loose = search({"a": Pace(5.0, 5.0, 5.0, 100.0)}, 4.9).run().best, search({"a": Pace(5.0, 5.0, 5.0, 100.0)}, 4.0).run().best
    assert tight is not None and tight.slower is not None and not tight.slower.holds and tight.error == 0.1
    assert loose is not None and loose.slower is not None and loose.slower.holds


def test_apart_where_it_pays_and_together_where_it_does_not() -> None:
    prompt, answer = Pace(1.0, 40.0, 1.1, 100.0), Pace(1.0, 1.1, 40.0, 100.0)
    apart = search({"prompt": prompt, "answer": answer}, 20.0).run()
    assert apart.best is apart.split and str(apart.split and apart.split.fleet) == "1 x prompt for prefill + 1 x answer for decode"
    together = search({"a": Pace(10.0, 11.0, 11.0, 100.0)}, 9.0).run()
    assert together.best is together.colocated and str(together.best and together.best.fleet) == "1 x a"


def test_prices_decide_where_there_are_any() -> None:
    cheap, frugal = Pace(5.0, 6.0, 6.0, 500.0, usd=1.0), Pace(5.0, 6.0, 6.0, 100.0, usd=9.0)
    named = {"cheap": cheap, "frugal": frugal}
    by_usd, by_watts = search(named, 4.0).run(), search(named, 4.0, minimize="watts").run()
    assert by_usd.minimize == "usd" and str(by_usd.best and by_usd.best.fleet) == "1 x cheap"
    assert str(by_watts.best and by_watts.best.fleet) == "1 x frugal"
    assert by_usd.best is not None and by_usd.best.usd_per_hour == 1.0
    with pytest.raises(ValueError, match="minimize: 'usd' is not allowed; there is no usd_per_hour of b"):
        search({"a": cheap, "b": Pace(1.0, 1.0, 1.0, 1.0)}, 1.0, minimize="usd")


def test_budgets_drop_what_is_over_them() -> None:
    paces = {"a": Pace(5.0, 5.0, 5.0, 100.0, usd=2.0)}
    for options in ({"budget_w": 250.0}, {"budget_usd": 5.0}):
        assert search(paces, 9.9, **options).run().best is not None
        result = search(paces, 14.9, **options).run()
        assert result.best is None and any("over the budget" in one.outcome for one in result.considered)


def test_kinds_that_do_not_fit_are_named_with_what_is_missing() -> None:
    result = search({"a": Pace(5.0, 5.0, 5.0, 100.0), "small": Pace(1.0, 1.0, 1.0, 1.0, fits=False)}, 4.0).run()
    assert result.kinds[1].dropped == "77 bytes are missing" and str(result.best and result.best.fleet) == "1 x a"
    assert ("small", "77 bytes are missing") in [(one.what, one.outcome) for one in result.considered]


def test_nothing_holds_where_nothing_can() -> None:
    result = search({"a": Pace(1e-9, 1e-9, 1e-9, 100.0, off=1e9)}, 5.0).run()
    assert result.best is None and result.kinds[0].holds_at == 0.0
    assert "not even requests that come alone keep the limits: ttft late for 50 %" in (result.kinds[0].dropped or "")


def test_what_a_kind_failed_under_is_told_by_its_own_trials() -> None:
    """Not by whichever trial was the last one."""
    one = search({"a": Pace(1e-9, 1e-9, 1e-9, 100.0), "b": Pace(5.0, 6.0, 6.0, 100.0)}, None)
    other = one.trials.trial(Fleet((Group("b", "both", 1),)), 3.0, 0)
    failed = one.trials.trial(Fleet((Group("a", "both", 1),)), 3.0, 0)
    one.trials.done[:] = [replace(failed, rate=9.0, broken={"itl": 0.9}), failed, other]
    assert one._why_never("a", 0) == "ttft late for 50 %"


def test_the_limit_on_requests_ends_the_search_with_what_there_is() -> None:
    paces = {f"k{i}": Pace(5.0 + i, 6.0 + i, 6.0 + i, 100.0) for i in range(6)}
    whole = search(paces, 20.0)
    whole.run()
    for most in range(100, 100 * len(whole.trials.done) + 400, 700):
        one = search(paces, 20.0, most_simulated=most)
        result = one.run()
        assert one.trials.num_simulated <= most + 3 * 100  # the one that is running, and two with slower steps
        assert result.was_limited is (len(one.trials.done) < len(whole.trials.done))
        assert result.best is None or all(trial.holds for trial in result.best.trials)
        for name, kind in zip(paces, result.kinds, strict=True):  # wide as it may be, it is no lie
            for _, bracket in kind.brackets:
                assert bracket.holds_at <= paces[name].both and (bracket.fails_at is None or paces[name].both < bracket.fails_at)


def test_fleets_that_were_not_tried_are_told_by_what_one_engine_holds() -> None:
    """Three trials: two for the rate of one engine, of which 4.5 is seen to hold, and one of the fleet, with the first of three seeds."""
    result = search({"a": Pace(5.0, 6.0, 6.0, 100.0)}, 17.0, most_simulated=300, seeds=(0, 1, 2)).run()
    told = {one.what: one.outcome for one in result.considered}
    assert result.was_limited and result.best is None
    assert result.kinds[0].dropped == "not finished: the limit on simulated requests was reached"
    assert told["4 x a"].startswith("enough by what one engine holds alone, for 400 W; not tried: the limit on simulated requests")


def test_designs_are_tried_alone() -> None:
    paces = {"a": Pace(5.0, 50.0, 5.5, 100.0), "b": Pace(5.0, 5.5, 50.0, 100.0)}
    result = search(paces, 20.0, kinds=(), splits=(("b", "a"),)).run()
    assert result.colocated is None and result.split is not None and result.split.fleet.groups[0].name == "b"
    fixed = Fleet((Group("a", "prefill", 2), Group("b", "decode", 3)))
    result = search(paces, 90.0, kinds=(), splits=(), fixed=(fixed,)).run()
    assert result.best is not None and result.best.fleet == fixed
    result = search(paces, 110.0, kinds=(), splits=(), fixed=(fixed,)).run()
    assert result.best is None and "does not hold: ttft late" in result.considered[0].outcome


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0.0}, "rate: 0.0 is not allowed"),
        ({"rate": math.nan}, "rate: nan is not allowed"),
        ({"minimize": "joy"}, "minimize: 'joy' is not allowed"),
        ({"budget_w": -1.0}, "budget_w: -1.0 is not allowed"),
        ({"budget_usd": math.inf}, "budget_usd: inf is not allowed"),
    ],
)
def test_options_outside_their_limits(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SearchOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attainment": 0.0}, "attainment: 0.0"), ({"attainment": math.nan}, "attainment: nan"), ({"seeds": ()}, "seeds: "),
        ({"seeds": (1, 1)}, "seeds: "), ({"most_simulated": 0}, "most_simulated: 0"),
    ],
)  # fmt: skip
def test_trials_outside_their_limits(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrialOptions(Slo(1.0), **options)
