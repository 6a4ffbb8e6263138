"""Goodput of clusters: the search on systems whose capacity is a formula, and small clusters for real."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.simulator.goodput_study import (
    APART,
    CHUNKED,
    DESIGNS,
    MIXED,
    PROMPTS_FIRST,
    PROMPTS_WHOLE,
    Arm,
    GoodputOptions,
    GoodputStudy,
    Slowdowns,
)
from octavo.simulator.records import RequestRecord, Slo
from octavo.simulator.splitwise_study import A100, H100, Design
from octavo.workload.traces import Trace, TraceRow
from tests.simulator.splitwise_golden import table

TABLES = {A100: table(A100), H100: table(H100)}
TRACE = Trace((TraceRow(0.0, 900, 40), TraceRow(1.0, 1500, 20), TraceRow(2.0, 300, 60)))


class Known(GoodputStudy):
    """Requests keep the limits up to the capacity of a design, and none do beyond."""

    capacity: Callable[[Design], float]

    def run(self, arm: Arm, workload: str, rate: float, seed: int) -> Any:
        self.num_runs += 1
        return SimpleNamespace(num_arrived=1, slo_attainment=float(rate <= self.capacity(arm.design) + seed))


def known(capacity: Callable[[Design], float], **options: Any) -> Known:
    study = Known({}, {}, GoodputOptions(Slo(ttft_s=1.0, itl_s=1.0), **{"first": 10.0, "ratio": 1.05, **options}))
    study.capacity = capacity
    return study


def test_the_bracket_holds_the_capacity_of_each_seed() -> None:
    study = known(lambda design: 33.0, seeds=(0, 4))
    for bracket, capacity in zip(study.goodput(Arm(DESIGNS["Baseline-H100"], PROMPTS_WHOLE), "x"), (33.0, 37.0), strict=True):
        assert bracket.holds_at <= capacity < bracket.fails_at and bracket.fails_at == pytest.approx(1.05 * bracket.holds_at)


@pytest.mark.parametrize("best", [3, 11, 22, 30, 39])
def test_the_best_split_is_that_of_trying_all(best: int) -> None:
    """Prompts take ``best`` parts of 40 of all work: capacity is what the scarcer side can do."""
    study = known(lambda design: 100.0 * min(design.num_prompt / best, design.num_token / (40 - best)))
    found = study.best_split(DESIGNS["HH"], "x")
    assert found.arm == Arm(Design("HH", H100, 40 - best, H100, best), APART)
    (bracket,) = found.brackets
    assert bracket.holds_at <= 100.0 < bracket.fails_at
    assert all(design.num_machines == 40 and rate <= bracket.fails_at * 1.0001 for design, rate in found.tried)
    assert study.num_runs < 60


def test_the_power_bounds_what_is_tried() -> None:
    study = known(lambda design: float(design.num_prompt))
    found = study.best_split(DESIGNS["HA"], "x", DESIGNS["Baseline-H100"].power)
    (bracket,) = found.brackets
    assert bracket.holds_at <= found.arm.design.num_prompt <= 39 < bracket.fails_at * 1.05  # 39 + 1 is no better by a step of the grid
    assert all(design.power <= DESIGNS["Baseline-H100"].power for design, _ in found.tried)


def test_a_power_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="power: 44.0 is not allowed; it leaves HA 1P\\+1T no machine"):
        known(lambda design: 1.0).best_split(Design("HA", A100, 1, H100, 1), "x", 44.0)


def test_a_smaller_cluster_has_something_of_everything() -> None:
    options = GoodputOptions(scale=0.1)
    assert [str(options.scaled(DESIGNS[name])) for name in ("Baseline-A100", "HA")] == ["Baseline-A100 7", "HA 2P+3T"]
    assert str(GoodputOptions(scale=0.001).scaled(DESIGNS["HH"])) == "HH 1P+1T"


def test_small_clusters_for_real() -> None:
    options = GoodputOptions(Slo(ttft_s=1.5, itl_s=0.1), duration_s=8.0, scale=0.05)
    study = GoodputStudy(TABLES, {"x": TRACE}, options)
    together = options.scaled(DESIGNS["Baseline-H100"])  # two machines
    apart = options.scaled(DESIGNS["HH"])
    arms = [Arm(together, PROMPTS_FIRST), Arm(together, PROMPTS_WHOLE), Arm(together, CHUNKED), Arm(apart, APART), Arm(apart, MIXED)]
    calm = [study.run(arm, "x", 1.0, 0) for arm in arms]
    assert all(report.slo_attainment == 1.0 for report in calm)
    assert [report.num_handed_over for report in calm] == [0, 0, 0, calm[3].num_arrived, calm[3].num_arrived]
    assert study.specs(arms[0])[0].scheduler.scheduling_policy == "prefill_first"
    chunks = study.specs(arms[2])[0].scheduler
    assert (chunks.max_num_batched_tokens, chunks.enable_chunked_prefill) == (512, True)
    flooded = [study.run(arm, "x", 60.0, 0).slo_attainment for arm in arms]
    assert all(share is not None and share < 0.9 for share in flooded)
    assert study.run(arms[0], "x", 1.0, 0) == calm[0]


def test_slowdowns_count_by_the_prompt_of_each_request() -> None:
    study = GoodputStudy(TABLES, {}, GoodputOptions(Slowdowns(ttft=2.0, itl=1.5)))
    first_s, next_s = TABLES[A100].prompt_s(1000), TABLES[A100].token_s(1000)

    def record(ttft_s: float | None, itl_s: float | None) -> RequestRecord:
        return RequestRecord("r", 0, 0.0, 1000, 10, 0, ttft_s, 1.0, itl_s, None)

    records = (
        record(1.99 * first_s, 1.49 * next_s), record(2.01 * first_s, next_s), record(first_s, 1.51 * next_s), record(first_s, None),
        record(None, None),
    )  # fmt: skip
    assert study.attained(SimpleNamespace(num_arrived=8, records=records)) == 2 / 8  # type: ignore[arg-type]
    assert study.attained(SimpleNamespace(num_arrived=0, records=(), slo_attainment=None)) == 0.0  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="slowdown itl: 0.5"):
        Slowdowns(itl=0.5)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="slo: .* is not allowed; goodput needs both limits"):
        GoodputOptions(Slo(ttft_s=1.0))
    for options, message in (({"share": 1.0}, "share: 1.0"), ({"scale": 0.0}, "scale: 0.0"), ({"ratio": 1.0}, "ratio: 1.0")):
        with pytest.raises(ValueError, match=message):
            GoodputOptions(**options)
    with pytest.raises(ValueError, match="way: 'apart' is not allowed for Baseline-A100 70"):
        Arm(DESIGNS["Baseline-A100"], APART)
    with pytest.raises(ValueError, match="way: 'x'"):
        Arm(DESIGNS["AA"], "x")
