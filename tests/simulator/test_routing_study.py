"""Prefix routing against taking turns, on conversations over engines with real prefix caches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.core.cost import StepShape
from octavo.distributed.dispatcher import Backpressure
from octavo.simulator.front_end import FrontEndOptions
from octavo.simulator.routing_bounds import BOUNDS, bounds, least_computed
from octavo.simulator.routing_study import ANSWER_TOKEN, BASELINE, Routed, RoutingCase, computed_over, route_once
from octavo.workload.requests import WorkloadRequest
from tests.simulator.engines import LinearCost, engine

SPEC = replace(engine(num_blocks=4000, block_size=16, max_num_seqs=64, max_num_batched_tokens=512), max_model_len=16_384)
CASE = RoutingCase(rate=1.0, duration_s=40.0)


class RowCost(LinearCost):
    """As on a CPU: half a millisecond for a row, two for a step."""

    def seconds_of(self, shape: StepShape) -> float:
        return 0.002 + 0.0005 * shape.num_rows + 1e-7 * shape.num_context


def test_following_the_cache_computes_less_than_half() -> None:
    spec = replace(SPEC, cost=RowCost())
    runs = [route_once(spec, CASE, router, 0) for router in (BASELINE, "soonest")]
    turns, soonest = runs
    assert turns.num_requests == soonest.num_requests > 60 and turns.num_prompt == soonest.num_prompt
    assert computed_over(runs, "soonest")[1] <= 0.5
    assert soonest.hit_rate > turns.hit_rate > 0.1 and soonest.ttft_p50_s < turns.ttft_p50_s
    assert soonest.share < 0.5  # and yet all engines work
    assert route_once(spec, CASE, "soonest", 0) == soonest


class QuickCost(LinearCost):
    """A machine that is never busy for long: load is no reason to leave an engine whose cache overflows."""

    def seconds_of(self, shape: StepShape) -> float:
        return 0.0008 + 0.00003 * shape.num_rows + 2e-9 * shape.num_context


@pytest.mark.parametrize("learn", [False, True])
def test_no_cache_overflows_beside_empty_ones(learn: bool) -> None:
    spec, case = replace(SPEC, cost=QuickCost(), num_blocks=700), replace(CASE, rate=2.0, duration_s=60.0)
    turns, soonest = route_once(spec, case, BASELINE, 1), route_once(spec, case, "soonest", 1, learn)
    found = {bound.name: bound.num_computed for bound in bounds(spec, case, 1)}
    assert tuple(found) == BOUNDS
    assert found["one cache"] > 1.1 * found["least"]  # all caches together are too small
    assert found["least"] <= soonest.num_computed <= 1.2 * found["one cache"] and soonest.num_computed < 0.55 * turns.num_computed
    assert soonest.share < 0.4


class SlowCost(LinearCost):
    """A prompt takes longer than the work that engines are given at a time."""

    def seconds_of(self, shape: StepShape) -> float:
        return 0.004 + 0.0015 * shape.num_rows + 3e-7 * shape.num_context


def test_waiting_at_the_front_end_hides_no_cache_from_the_router() -> None:
    """What goes at once to engines that are seen as they are is what it is held against."""
    spec, case = replace(SPEC, cost=SlowCost(), num_blocks=8000), replace(CASE, rate=2.0)
    at_once, waits = (route_once(spec, case, "soonest", 0, True, front_end) for front_end in (None, FrontEndOptions()))
    hidden = route_once(spec, case, "soonest", 0, True, FrontEndOptions(Backpressure(most_delayed=0)))
    assert waits.num_requests == at_once.num_requests > 200
    assert waits.num_computed < 1.1 * at_once.num_computed and waits.ttft_p90_s < 1.1 * at_once.ttft_p90_s
    assert hidden.num_computed > 1.4 * waits.num_computed and hidden.ttft_p90_s > 2 * waits.ttft_p90_s


def test_the_least_is_every_block_once() -> None:
    def request(prompt: list[int], num_output: int = 0) -> WorkloadRequest:
        return WorkloadRequest(0.0, prompt, num_output)

    first = request([1] * 20, 13)
    assert least_computed([first], 16) == 20
    assert least_computed([first, first], 16) == 24  # a full block is found
    assert least_computed([first, request([1] * 20 + [ANSWER_TOKEN] * 13 + [5])], 16) == 22  # and the answer, but for its last token
    assert least_computed([first, request([1] * 20 + [ANSWER_TOKEN] * 12)], 16) == 36  # the last token is computed in any case
    assert least_computed([first, request([2] * 20)], 16) == 40


def test_ratios_need_the_same_seeds() -> None:
    one = Routed("soonest", 0, 1, 100, 60, 0.0, 0.0, 0.0, 0.25)
    runs = [one, replace(one, router=BASELINE, num_cached=20), replace(one, seed=1), replace(one, router=BASELINE, seed=1, num_cached=0)]
    assert computed_over(runs, "soonest") == (0.4, 0.5)
    with pytest.raises(ValueError, match="none of 'x' and 'round-robin'"):
        computed_over(runs, "x")


def test_what_cannot_run_is_no_result() -> None:
    with pytest.raises(ValueError, match="did not complete"):
        route_once(replace(SPEC, num_blocks=4), CASE, BASELINE, 0)
