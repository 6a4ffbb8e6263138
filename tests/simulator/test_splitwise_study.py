"""Studies of clusters: the same requests at every rate, brackets as trying every rate finds them, the best of all splits."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.simulator.rate_curve import ratio_of
from octavo.simulator.splitwise_study import (
    A100,
    H100,
    H100_CAPPED,
    Bracket,
    Design,
    Study,
    StudyData,
    StudyOptions,
)
from octavo.workload.lengths import Recorded
from tests.simulator.splitwise_golden import table

OPTIONS = StudyOptions(duration_s=20.0, step=1.0, seeds=(0, 1), num_splits=3)
BASELINE = Design("Baseline", A100, 2)
SPLIT = Design("AA", A100, 3, A100, 3)


def study_of(options: StudyOptions = OPTIONS) -> Study:
    tables = {hardware: table(hardware) for hardware in (A100, H100, H100_CAPPED)}
    lengths = {"conversation": (Recorded((300, 900, 1500, 2500)), Recorded((10, 40, 90, 200)))}
    return Study(StudyData(tables, lengths), options)


def test_requests_of_a_seed_are_the_same_at_every_rate() -> None:
    study = study_of()
    slow, fast = list(study.requests("conversation", 2.0, 0)), list(study.requests("conversation", 8.0, 0))
    assert len(slow) < len(fast)
    assert [request[1:] for request in slow] == [request[1:] for request in fast[: len(slow)]]
    assert [arrival_s for arrival_s, _, _ in slow] == pytest.approx([4 * arrival_s for arrival_s, _, _ in fast[: len(slow)]])
    assert slow[-1][0] < 20.0
    assert slow != list(study.requests("conversation", 2.0, 1))


@pytest.mark.parametrize("guess", [None, 1.0, 3.0, 60.0])
@pytest.mark.parametrize("lookup", ["published", "two-variable"])
def test_a_bracket_is_what_trying_every_rate_finds(lookup: str, guess: float | None) -> None:
    study = study_of()
    found = study.bracket(BASELINE, lookup, 0, guess=guess)
    rates = [float(rate) for rate in range(1, int(found.fails_at) + 3)]
    holding = [rate for rate in rates if study.holds(BASELINE, lookup, rate, 0)]
    assert holding == rates[: len(holding)], "holding ends but once here"
    assert (found.holds_at, found.fails_at) == (holding[-1], holding[-1] + 1)
    assert list(found.broken) == study.slowdown(BASELINE, lookup, found.fails_at, 0).broken != []


def test_a_design_that_holds_at_no_rate() -> None:
    study = study_of(StudyOptions(duration_s=10.0, step=20.0, seeds=(0,)))
    assert study.bracket(Design("one", A100, 1), "published", 0).holds_at == 0.0


def test_each_seed_has_its_bracket() -> None:
    study = study_of()
    assert study.brackets(BASELINE, "published") == [study.bracket(BASELINE, "published", seed) for seed in (0, 1)]


def test_a_run_is_done_once() -> None:
    study = study_of()
    first = study.slowdown(BASELINE, "published", 2.0, 0)
    assert study.slowdown(BASELINE, "published", 2.0, 0) is first
    assert (study.num_runs, study.num_requests) == (1, len(list(study.requests("conversation", 2.0, 0))))


@pytest.mark.parametrize("lookup", ["published", "two-variable"])
def test_the_best_split_is_as_good_as_any(lookup: str) -> None:
    study = study_of(StudyOptions(duration_s=20.0, step=1.0, seeds=(0,), num_splits=6))
    found = study.best_split(SPLIT, lookup)
    every = [study.bracket(SPLIT.split(n), lookup, 0).holds_at for n in range(1, 6)]
    assert found.bracket.holds_at == max(every)
    assert found.bracket == study.bracket(found.design, lookup, 0)
    assert {design.num_prompt for design, _ in found.tried} == {1, 2, 3, 4, 5}
    assert all(not study.holds(design, lookup, fails_at, 0) for design, fails_at in found.tried)


def test_a_search_keeps_to_its_budget() -> None:
    study = study_of(StudyOptions(duration_s=10.0, step=4.0, seeds=(0,), num_splits=4))
    found = study.best_split(Design("HA", A100, 3, H100, 2), "published", power=200.0)
    assert all(design.power <= 200.0 and design.num_token >= 1 for design, _ in found.tried)
    assert all(design.power + 24.8 > 200.0 for design, _ in found.tried)


def test_a_budget_that_leaves_no_split_is_refused() -> None:
    with pytest.raises(ValueError, match="power: 30.0 is not allowed; it leaves HA 3P"):
        study_of().best_split(Design("HA", A100, 2, H100, 3), "published", power=30.0)


def test_what_clusters_cost() -> None:
    published = Design("AA", A100, 25, A100, 45)
    baseline = Design("Baseline-H100", H100, 40)
    assert (round(published.power), round(baseline.power), round(published.cost / baseline.cost, 2)) == (1736, 1760, 0.81)
    assert round(Design("HHcap", H100_CAPPED, 21, H100, 25).power) == 1747
    assert (str(published), str(baseline)) == ("AA 45P+25T", "Baseline-H100 40")
    assert published.split(30) == Design("AA", A100, 40, A100, 30)
    assert Design("HA", A100, 26, H100, 25).split(12, power=1760.0) == Design("HA", A100, 49, H100, 12)
    assert Design("AA", A100, 1, A100, 1).split(51, cost=190.4) == Design("AA", A100, 35, A100, 51)


def test_machines_stand_in_the_order_that_ties_go_by() -> None:
    study = study_of()
    kinds = [(cost.table.name, is_prompt) for cost, is_prompt in study.spec(Design("HA", A100, 1, H100, 1), "published").machines]
    assert kinds == [("BLOOM-176B on a100-80gb", False), ("BLOOM-176B on h100-80gb", True)]
    assert [is_prompt for _, is_prompt in study.spec(SPLIT, "published").machines] == [True] * 3 + [False] * 3
    assert not study.spec(BASELINE, "published").mixed_pools


def test_the_ratio_is_as_wide_as_the_brackets_allow() -> None:
    above, below = [Bracket(110, 115, ()), Bracket(120, 125, ())], [Bracket(50, 55, ()), Bracket(60, 65, ())]
    assert ratio_of(above, below) == (pytest.approx(120 / 65), pytest.approx(2.1), pytest.approx(115 / 50))
    assert ratio_of([Bracket(0, 5, ())], [Bracket(0, 5, ())])[0] == 0.0
    assert ratio_of([Bracket(5, 10, ())], [Bracket(0, 5, ())])[2] == float("inf")


def test_data_is_read_by_path(tmp_path: Path) -> None:
    sizes = [(256, 1, 128), (512, 1, 128), (512, 2, 128)]
    lines = [f"bloom-176b,{hardware},{p},{b},{o},{p * b},{10 + b},8" for hardware in (A100, H100) for p, b, o in sizes]
    header = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel"
    tables, trace = tmp_path / "tables.csv", tmp_path / "trace.csv"
    tables.write_text("\n".join([header, *lines]) + "\n")
    trace.write_text("arrival_s,num_prompt,num_output\n0,5,7\n1,6,8\n")
    data = StudyData.read(tables, {"conversation": trace})
    assert sorted(data.tables) == [A100, H100]
    assert data.lengths == {"conversation": (Recorded((5, 6)), Recorded((7, 8)))}
