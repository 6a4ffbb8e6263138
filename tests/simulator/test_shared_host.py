"""Engines that share a host: against a twin that goes in small steps of time, by hand, and to the bit as ever where nobody holds up."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.distributed.handoff import Link
from octavo.distributed.router import RoundRobin
from octavo.simulator.handing_over import HandoffOptions
from octavo.simulator.outages import Outage
from octavo.simulator.shared_host import Crowding, HostSharing, Spread, StepKind, Taken
from octavo.simulator.simulation import Simulation, SimulationOptions
from octavo.workload.requests import WorkloadRequest
from tests.simulator.engines import POSITION_S, ROW_S, STEP_S, engine, run, work

Job = tuple[float, int, int]  # when it comes, tokens of its prompt and its answer


def token_times(jobs: list[Job], hosts: list[HostSharing], **options: Any) -> list[list[float]]:
    """When each job, which has an engine to itself, gets its tokens."""
    options = {"hosts": hosts, "keep_requests": True, "keep_gaps": True, **options}
    simulation = Simulation([engine()] * len(jobs), RoundRobin(), SimulationOptions(**options))
    report = simulation.run([work(*job, token=i) for i, job in enumerate(jobs)])
    out = []
    for record in sorted(report.records, key=lambda record: int(record.request_id)):
        assert record.ttft_s is not None
        times = [record.arrival_s + record.ttft_s]
        for gap_s in simulation.log.gaps[record.request_id]:
            times.append(times[-1] + gap_s)
        out.append(times)
    return out


# --- a twin -----------------------------------------------------------------------------------------------------------------------------


@dataclass
class Twin:
    """A job on an engine of its own. ``left_s``: of its step, if it were alone."""

    arrival_s: float
    num_prompt: int
    num_output: int
    left_s: float | None = None
    times: list[float] = field(default_factory=list)

    def is_there(self, now: float) -> bool:
        return self.arrival_s <= now + 1e-12 and len(self.times) < self.num_output

    @property
    def decodes(self) -> bool:
        return bool(self.times) or self.num_prompt == 1

    def seconds(self) -> float:
        rows = 1 if self.times else self.num_prompt
        return STEP_S + ROW_S * rows + POSITION_S * (self.num_prompt + len(self.times))


def by_small_steps(jobs: list[Job], crowding: Crowding, dt: float) -> list[list[float]]:
    """In each moment every step in flight goes on by what its neighbours leave of it."""
    twins, tick = [Twin(*job) for job in jobs], 0
    while any(len(twin.times) < twin.num_output for twin in twins):
        now = tick * dt
        for twin in twins:
            if twin.left_s is None and twin.is_there(now):
                twin.left_s = twin.seconds()
        running = [twin for twin in twins if twin.left_s is not None]
        for twin in running:
            slow = 1.0
            for other in running:
                if other is not twin:
                    place = 2 * (not twin.decodes) + (not other.decodes)
                    slow += crowding[place]
            twin.left_s -= dt / slow
        tick += 1
        for twin in running:
            if twin.left_s <= 1e-12:
                twin.left_s = None
                twin.times.append(tick * dt)
    return [twin.times for twin in twins]


JOBS = st.lists(st.tuples(st.integers(0, 300).map(lambda n: n / 100), st.integers(1, 16), st.integers(1, 4)), min_size=2, max_size=3)
SLOWING = st.floats(0.0, 1.5)


@given(JOBS, st.builds(Crowding, SLOWING, SLOWING, SLOWING, SLOWING))
@settings(max_examples=40, deadline=None)
def test_all_goes_as_in_small_steps_of_time(jobs: list[Job], crowding: Crowding) -> None:
    jobs = sorted(jobs)
    found = token_times(jobs, [HostSharing(tuple(range(len(jobs))), crowding)])
    dt = 1e-3
    twins = by_small_steps(jobs, crowding, dt)
    for times, twin in zip(found, twins, strict=True):
        assert times == pytest.approx(twin, abs=40 * dt)  # each end of a step is late by up to dt, and so are those that it held up


# --- by hand ----------------------------------------------------------------------------------------------------------------------------


def test_a_step_is_slower_only_while_its_neighbour_is_in_one() -> None:
    """A prompt of 10 tokens alone, and one of 1 token, which decodes, from the middle of it on."""
    long_s, short_s, begins_s = STEP_S + 10 * (ROW_S + POSITION_S), STEP_S + ROW_S + POSITION_S, 0.3
    jobs, crowding = [(0.0, 10, 1), (begins_s, 1, 1)], Crowding(decode_prompt=1.0, prompt_decode=0.25)
    (first,), (second,) = token_times(jobs, [HostSharing((0, 1), crowding)])
    assert first == pytest.approx(begins_s + (long_s - begins_s) * 1.25)
    assert second == pytest.approx(first + short_s - (first - begins_s) / 2.0)


def test_several_neighbours_add_up() -> None:
    step_s = STEP_S + 10 * (ROW_S + POSITION_S)
    found = token_times([(0.0, 10, 1)] * 4, [HostSharing((0, 1, 3), Crowding(prompt_prompt=0.3))])
    assert [times[0] for times in found] == pytest.approx([1.6 * step_s, 1.6 * step_s, step_s, 1.6 * step_s])


def test_busy_time_is_the_time_that_steps_took() -> None:
    report = run([engine(), engine()], [work(0.0, 10, 5)] * 2, router=RoundRobin(), hosts=[HostSharing((0, 1), Crowding(*[0.5] * 4))])
    assert [one.busy_share for one in report.engines] == pytest.approx([1.0, 1.0])
    alone = run([engine(), engine()], [work(0.0, 10, 5)] * 2, router=RoundRobin())
    assert report.duration_s == pytest.approx(1.5 * alone.duration_s)


def test_who_is_gone_holds_nobody_up() -> None:
    """The second engine is killed half a second on, and what it had follows the first one's step."""
    outage, hosts = [Outage(1, 0.5)], [HostSharing((0, 1), Crowding(*[1.0] * 4))]
    first, second = token_times([(0.0, 10, 1), (0.0, 10, 1)], hosts, outages=outage)
    step_s = STEP_S + 10 * (ROW_S + POSITION_S)
    assert first[0] == pytest.approx(0.5 + step_s - 0.25) and second[0] == pytest.approx(first[0] + step_s)


# --- without crowding -------------------------------------------------------------------------------------------------------------------


def loads(seed: int) -> list[WorkloadRequest]:
    rng, now, out = random.Random(seed), 0.0, []
    for i in range(60):
        now += rng.expovariate(0.7)
        out.append(work(now, rng.randint(1, 40), rng.randint(1, 30), token=i))
    return out


@pytest.mark.parametrize("roles", [("both", "both"), ("prefill", "decode")])
def test_where_nobody_holds_up_nothing_changes_to_the_bit(roles: tuple[str, str]) -> None:
    specs = [engine(role=role, kv_bytes_per_token=100) for role in roles]
    alone, beside = (
        run(specs, loads(3), handoff=HandoffOptions(Link(5e3, 0.01)), hosts=hosts) for hosts in ([], [HostSharing((0, 1), Crowding())])
    )
    assert alone.records == beside.records and alone.gap_s == beside.gap_s and alone.duration_s == beside.duration_s


def test_others_than_those_of_the_host_are_as_ever() -> None:
    specs, hosts = [engine()] * 3, [HostSharing((0, 1), Crowding(*[0.7] * 4))]
    alone, beside = (run(specs, loads(5), router=RoundRobin(), hosts=some) for some in ([], hosts))
    times = [{one.request_id: one for one in report.records if one.engine == 2} for report in (alone, beside)]
    assert times[0] and times[0] == times[1]
    assert beside.engines[2].num_jumped_steps > 0 == beside.engines[0].num_jumped_steps
    assert beside.duration_s > alone.duration_s


@pytest.mark.parametrize(
    ("hosts", "named"),
    [
        ([HostSharing((0, 2), Crowding())], "hosts: engine 2 is not allowed; they are numbered from 0 to 1"),
        ([HostSharing((0, 1), Crowding()), HostSharing((1,), Crowding())], "hosts: engine 1 is named twice"),
        ([HostSharing((0, 1), Crowding(decode_prompt=-0.1))], "hosts: decode_prompt -0.1 is not allowed"),
        ([HostSharing((0, 1), Crowding(0.0, 0.0, float("nan")))], "hosts: prompt_decode nan is not allowed"),
    ],
)
def test_what_is_refused(hosts: list[HostSharing], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Simulation([engine(), engine()], options=SimulationOptions(hosts=hosts))


# --- steps that differ ------------------------------------------------------------------------------------------------------------------


def test_what_is_drawn_was_measured_beside_the_same_of_steps_as_long() -> None:
    short, long = [Taken(0.01, 1.0 + i / 1000) for i in range(60)], [Taken(0.1, 2.0 + i / 1000) for i in range(60)]
    spread, rng = Spread({None: short + long, StepKind.PROMPT: [Taken(0.01, 5.0)] * 30}), random.Random(2)
    for seconds, least in ((0.001, 1.0), (0.01, 1.0), (0.1, 2.0), (9.0, 2.0)):
        drawn = [spread.draw(None, seconds, rng) for _ in range(300)]
        assert all(least <= one < least + 0.06 for one in drawn) and len(set(drawn)) > 30
    assert spread.draw(StepKind.PROMPT, 1.0, rng) == 5.0 and spread.draw(StepKind.DECODE, 1.0, rng) == 1.0


def test_steps_that_decode_differ_and_prompts_do_not() -> None:
    """Beside nobody they are twice as long, beside a prompt four times; a prompt takes what it takes."""
    spread = Spread({None: [Taken(0.5, 2.0)] * 20, StepKind.PROMPT: [Taken(0.5, 4.0)] * 20})
    prompt_s, token_s = STEP_S + 10 * (ROW_S + POSITION_S), STEP_S + ROW_S + 11 * POSITION_S
    ((first, second),) = token_times([(0.0, 10, 2)], [HostSharing((0,), Crowding(), spread)])
    assert (first, second) == pytest.approx((prompt_s, prompt_s + 2.0 * token_s))
    found = token_times([(0.0, 10, 1), (0.1, 1, 1)], [HostSharing((0, 1), Crowding(), spread)])
    assert found[1][0] == pytest.approx(0.1 + 4.0 * (STEP_S + ROW_S + POSITION_S))


def test_the_seed_says_what_is_drawn() -> None:
    hosts = [HostSharing((0, 1), Crowding(*[0.2] * 4), Spread({None: [Taken(0.5, 0.5 + i / 40) for i in range(40)]}))]
    first, again, other = (run([engine(), engine()], loads(1), hosts=hosts, seed=seed).records for seed in (1, 1, 2))
    assert first == again != other
