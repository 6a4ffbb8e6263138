"""A cluster run block by block: transfers, full memory, odd lengths, and what it refuses. Times are told by a cost of round numbers."""

from __future__ import annotations

import math

import pytest

from octavo.core.policies.splitwise import SplitwiseLimits
from octavo.costs.tables import TableCost
from octavo.simulator.block_cluster import BlockCluster, ClusterResult, ClusterSpec
from octavo.simulator.slowdown import LIMITS, Slowdown, percentiles, slowdown_of
from tests.simulator.splitwise_golden import table


class RoundCost:
    """1 s per prompt row, 10 s per decode step whatever it holds, both together in a mixed one."""

    def step_s(self, num_prompt: int, num_decoding: int, num_context: int) -> float:
        return num_prompt + (10.0 if num_decoding else 0.0)


def run(requests: list[tuple[float, int, int]], prompt: int = 1, token: int = 1, room: float = 1000.0, mixed: bool = True) -> ClusterResult:
    cost = RoundCost()
    machines = [(cost, True)] * prompt + [(cost, False)] * token
    return BlockCluster(ClusterSpec(machines, mixed, room, 0.5, SplitwiseLimits(max_tokens=64))).run(requests)


def test_one_request_prompt_transfer_decoding() -> None:
    found = run([(1.0, 6, 4)])
    assert list(found.ttft_s) == [6.0]
    assert list(found.e2e_s) == [6.0 + 3.0 + 30.0]
    assert found.tbt_s == [33.0 / 4]
    assert (list(found.prompt_machine), list(found.decode_machine)) == ([0], [1])
    assert found.end_s == 40.0
    assert (found.gap_s.count, found.gap_s.most, found.gap_s.least) == (3, 13.0, 10.0)
    assert list(found.busy_s) == [6.0, 30.0]
    assert found.rows_s == {6: 6.0, 1: 30.0}


def test_on_one_machine_nothing_is_sent() -> None:
    found = run([(1.0, 6, 4)], prompt=0, token=1, mixed=False)
    assert list(found.e2e_s) == [36.0]


def test_an_arrival_ends_the_block_at_its_next_iteration() -> None:
    """The second prompt comes 5 s into the second iteration and runs beside the third."""
    found = run([(0.0, 6, 9), (21.0, 4, 2)], prompt=0, token=1, mixed=False)
    assert found.ttft_s[1] == 26.0 + 14.0 - 21.0
    assert found.e2e_s[1] == found.ttft_s[1] + 10.0
    assert found.e2e_s[0] == 6.0 + 80.0 + 4.0


def test_a_transfer_waits_for_room_and_asks_every_second() -> None:
    """The first request is promised 15 of 20 tokens on machine 1. The second finds no room there and keeps both phases on machine 0, which
    becomes mixed; the third finds room nowhere, goes to the least busy, machine 1, and takes 14 tokens before the first one's KV comes."""
    found = run([(0.0, 10, 5), (1.0, 8, 2), (2.5, 6, 8)], room=20.0)
    assert (list(found.prompt_machine), list(found.decode_machine)) == ([0, 0, 1], [1, 0, 1])
    assert list(found.ttft_s) == [10.0, 17.0, 6.0]
    assert found.e2e_s[2] == 6.0 + 70.0  # its memory is free at 78.5
    assert found.e2e_s[0] == 79.0 + 5.0 + 40.0
    assert found.e2e_s[1] == 84.0 + 10.0 - 1.0  # until the first one's KV has left, there is no room for its decoding


def test_an_answer_of_one_token_ends_when_its_kv_has_come() -> None:
    found = run([(1.0, 6, 1)])
    assert found.e2e_s[0] == 9.0
    assert found.gap_s.count == 0


def test_what_never_fits_is_told() -> None:
    found = run([(1.0, 30, 40)], room=50.0, prompt=0, token=1, mixed=False)
    assert found.num_unfinished == 1
    assert math.isnan(found.e2e_s[0])
    assert percentiles(found.e2e_s) == (math.inf,) * 3
    assert "e2e p50" in slowdown_of(found, table("a100-80gb")).broken


@pytest.mark.parametrize("requests", [[(2.0, 5, 5), (1.0, 5, 5)], [(1.0, 0, 5)], [(1.0, 5, 0)], [(math.nan, 5, 5)]])
def test_requests_that_cannot_be(requests: list[tuple[float, int, int]]) -> None:
    with pytest.raises(ValueError, match="is not allowed; by arrival, at least 1 token each"):
        run(requests)


def test_no_machines() -> None:
    with pytest.raises(ValueError, match="machines: at least one is needed"):
        BlockCluster(ClusterSpec([], False, 10.0, 0.0))


def test_percentiles_between_values() -> None:
    assert percentiles([4.0, 0.0, 2.0]) == pytest.approx((2.0, 3.6, 3.96))
    with pytest.raises(ValueError, match="at least one is needed"):
        percentiles([])


def test_an_objective_is_kept_below_its_limit_only() -> None:
    kept = {name: tuple(limit - 1e-9 for limit in limits) for name, limits in LIMITS.items()}
    assert Slowdown(**kept).holds
    for name, limits in LIMITS.items():
        for i, share in enumerate((50, 90, 99)):
            broken = kept | {name: (*kept[name][:i], limits[i], *kept[name][i + 1 :])}
            assert Slowdown(**broken).broken == [f"{name} p{share}"]


def test_on_an_idle_reference_machine_nobody_is_slower_by_more_than_the_definition() -> None:
    """Alone on one machine: a prompt takes its time, and each token after it; tbt divides by one token too many."""
    reference = table("a100-80gb")
    spec = ClusterSpec([(TableCost(reference), False)], False, 1e5, 0.0)
    found = slowdown_of(BlockCluster(spec).run([(1.0, 1000, 101)]), reference)
    token_s = reference.token_s(1) / reference.token_s(1000)
    assert found.ttft == pytest.approx((1.0,) * 3)
    assert found.tbt == pytest.approx((token_s * 100 / 101,) * 3)
    assert found.e2e[0] < 1.0
