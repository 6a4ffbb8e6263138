"""The golden runs: the same requests on the same machines at the same times as in the public cluster simulator."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.simulator.block_cluster import BlockCluster
from octavo.simulator.slowdown import percentiles, slowdown_of
from tests.simulator.splitwise_golden import RUNS, per_request, spec, table, trace

each_run = pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['name']}-{run['trace'].split('_')[1]}")


@each_run
def test_each_request_as_published(run: dict[str, Any]) -> None:
    found, requests = BlockCluster(spec(run["name"])).run(trace(run["trace"])), per_request(run["per_request"])
    assert len(found.ttft_s) == len(requests)
    for i, golden in enumerate(requests):
        assert (found.prompt_machine[i], found.decode_machine[i]) == (golden["prompt_machine"], golden["decode_machine"]), i
        assert found.ttft_s[i] == pytest.approx(golden["ttft_s"], abs=2e-9, rel=0), i
        assert found.tbt_s[i] == pytest.approx(golden["tbt_s"], abs=2e-9, rel=0), i
        assert found.e2e_s[i] == pytest.approx(golden["e2e_s"], abs=2e-9, rel=0), i
    assert found.end_s == pytest.approx(run["last_completion_s"], abs=1e-8, rel=0)
    assert found.num_unfinished == 0
    both_on_one = sum(a == b for a, b in zip(found.prompt_machine, found.decode_machine, strict=True))
    assert both_on_one == run["both_on_one"]


@each_run
@pytest.mark.parametrize("lookup", ["published", "context", "two-variable"])
def test_every_percentile(run: dict[str, Any], lookup: str) -> None:
    found, golden = BlockCluster(spec(run["name"], lookup)).run(trace(run["trace"])), run["lookups"][lookup]
    slowdown = slowdown_of(found, table("a100-80gb"))
    for name, values in (("ttft", found.ttft_s), ("tbt", found.tbt_s), ("e2e", found.e2e_s)):
        assert percentiles(values) == pytest.approx(golden["percentiles_s"][name], rel=1e-9), name
        assert getattr(slowdown, name) == pytest.approx(golden["slowdown"][name], abs=6e-4, rel=0), name
    assert slowdown.holds is golden["nine_slos_hold"]


@each_run
def test_every_gap_is_counted(run: dict[str, Any]) -> None:
    found = BlockCluster(spec(run["name"])).run(trace(run["trace"]))
    assert found.gap_s.count == sum(found.num_output) - len(found.num_output)
    spent_s = sum(found.e2e_s) - sum(found.ttft_s)
    assert found.gap_s.mean == pytest.approx(spent_s / found.gap_s.count, rel=1e-6)
