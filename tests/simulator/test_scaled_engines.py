"""Engines that come and go with the load, simulated: the scalers are those of a cluster, and the right role grows."""

from __future__ import annotations

from collections import Counter

import pytest

from octavo.distributed.autoscale import ScaleLimits
from octavo.distributed.handoff import HandoffLimits, Link
from octavo.distributed.roles import MixedLimits
from octavo.distributed.router import create_router
from octavo.simulator.engine_spec import EngineSpec, PowerModel
from octavo.simulator.handing_over import HandoffOptions
from octavo.simulator.outages import Outage
from octavo.simulator.report import SimulationReport
from octavo.simulator.sim_costs import SimCosts
from octavo.workload.requests import WorkloadRequest
from tests.simulator.engines import engine, run, work

LIMITS = ScaleLimits(least=1, most=4, up_wait_s=4.0, down_after_s=60.0, start_s=10.0, rate_s=30.0)
HANDOFF = HandoffOptions(Link(1e6), HandoffLimits(reserve_s=1e4))
SIZES = {"max_num_batched_tokens": 64, "kv_bytes_per_token": 10, "num_blocks": 400}


def pair(**options: int) -> list[EngineSpec]:
    """A full step of either takes 1.14 and 0.59 s, so 56 prompt tokens or 13 output tokens come a second at most."""
    return [engine(role=role, **{**SIZES, **options}) for role in ("prefill", "decode")]


def load(*phases: tuple[int, float, int, int]) -> list[WorkloadRequest]:
    """(requests, seconds between two, prompt tokens, output tokens) one phase after another; no prompt begins as another."""
    made, now = list[WorkloadRequest](), 0.0
    for number, gap_s, num_prompt, num_output in phases:
        for _ in range(number):
            made.append(work(now, num_prompt, num_output, token=len(made) + 1))
            now += gap_s
    return made


CALM = (60, 4.0, 20, 8)


def added(report: SimulationReport) -> dict[str, int]:
    return dict(Counter(one.role for one in report.engines[2:]))


def scaled(specs: list[EngineSpec], requests: list[WorkloadRequest], **options: object) -> SimulationReport:
    report = run(specs, requests, scale={"prefill": LIMITS, "decode": LIMITS}, handoff=HANDOFF, **options)
    assert report.num_completed == len(requests) and report.num_handoffs_failed == 0
    return report


def test_a_calm_load_adds_nothing() -> None:
    assert added(scaled(pair(), load(CALM))) == {}


def test_a_step_of_prompts_adds_prefill_engines() -> None:
    step = (100, 1.2, 120, 3)  # 100 prompt tokens a second
    report = scaled(pair(), load(CALM, step, CALM))
    assert added(report).keys() == {"prefill"} and added(report)["prefill"] <= 3
    alone = run(pair(), load(CALM, step, CALM), handoff=HANDOFF)
    assert report.ttft_s["p90"] is not None and alone.ttft_s["p90"] is not None
    assert report.ttft_s["p90"] < 0.5 * alone.ttft_s["p90"]


def test_a_step_of_answers_adds_decode_engines() -> None:
    step = (100, 2.0, 10, 60)  # 30 output tokens a second
    report = scaled(pair(), load(CALM, step, CALM))
    assert added(report).keys() == {"decode"} and added(report)["decode"] <= 3


def test_a_step_of_long_answers_for_few_blocks_adds_decode_engines() -> None:
    """A decode engine has blocks for two answers at a time, and places for eight; 10 tokens a second are wanted of 13."""
    step = (60, 4.0, 60, 40)
    report = scaled(pair(num_blocks=52), load(CALM, step))
    assert added(report).keys() == {"decode"}
    assert added(scaled(pair(), load(CALM, step))) == {}, "with blocks enough"


def test_engines_go_when_the_load_is_over_and_cost_nothing_afterwards() -> None:
    specs = [engine(role=role, power=PowerModel(1.0, 2.0, 3.6), **SIZES) for role in ("prefill", "decode")]
    report = scaled(specs, load(CALM, (100, 1.2, 120, 3), CALM, CALM))
    more = [one for one in report.engines[2:] if one.role == "prefill"]
    assert more and all(0.0 < one.there_s < report.duration_s / 2 for one in more)
    assert [one.there_s for one in report.engines[:2]] == [report.duration_s] * 2
    assert report.cost_usd == pytest.approx(1e-3 * sum(one.there_s for one in report.engines))
    busy_s = sum(one.there_s * one.busy_share for one in report.engines if one.busy_share is not None)
    assert report.energy_j == pytest.approx(sum(one.there_s for one in report.engines) + busy_s)


def test_steps_that_are_taken_at_once_change_nothing() -> None:
    requests = load(CALM, (60, 2.0, 10, 60), CALM)
    assert scaled(pair(), requests).records == scaled(pair(), requests, jump=False).records


def test_engines_that_do_both_come_and_go() -> None:
    requests = load((40, 4.0, 20, 8), (80, 1.0, 60, 8), (100, 4.0, 20, 8))
    report = run([engine(**SIZES)], requests, scale={"both": LIMITS}, router=create_router("soonest", 4, SimCosts()))
    assert report.num_completed == len(requests) and 2 <= len(report.engines) <= 4
    assert report.duration_s < sum(one.there_s for one in report.engines) < 1.5 * report.duration_s


def test_with_borrowed_engines_the_lenders_pool_grows() -> None:
    """Decode engines compute prompts meanwhile, and are not what is lacking."""
    step = (100, 1.2, 120, 3)
    assert added(scaled(pair(), load(CALM, step, CALM), mixed=MixedLimits(borrow_s=4.0, return_s=1.0))).keys() == {"prefill"}


def test_an_engine_that_is_killed_is_followed_by_another() -> None:
    requests = load((60, 4.0, 20, 8))
    report = run(pair(), requests, scale={"prefill": LIMITS}, handoff=HANDOFF, outages=[Outage(0, 50.0)])
    assert report.num_completed == len(requests) and added(report) == {"prefill": 1}
    back = run(pair(), requests, scale={"prefill": LIMITS}, handoff=HANDOFF, outages=[Outage(0, 50.0, 55.0)])
    assert back.num_completed == len(requests) and added(back) == {}


def test_as_many_engines_as_limits_allow() -> None:
    with pytest.raises(ValueError, match="scale: 2 engines of role decode are not allowed; from 1 to 1"):
        run([*pair(), pair()[1]], [], scale={"decode": ScaleLimits(most=1)})


def test_prompts_that_are_cached_add_nothing() -> None:
    """As many prompts as above, which begin alike: a few tokens of each are left to compute."""
    alike = [work(one.arrival_s, len(one.prompt_token_ids), one.num_output, token=1) for one in load(CALM, (100, 1.2, 120, 3), CALM)]
    report = scaled(pair(), alike)
    assert 2 * report.cached_tokens > sum(len(one.prompt_token_ids) for one in alike) and added(report) == {}
