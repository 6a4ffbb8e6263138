"""Loads on a device of known cost, run twice: as they are, and with something planted that slows them down."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.core.request import SamplingParams
from octavo.engine.explain import Explanation, explain
from octavo.engine.step_split import KnownPrice
from octavo.engine.timeline import Timeline
from tests.engine.timed import Law, TimedRun

LAW = Law()


def with_known_price(run: TimedRun, capacity: int = 2048) -> Timeline:
    """Give the run's engine a timeline that knows what its device's steps cost."""
    law, engine = run.device.law, run.engine
    price = KnownPrice([law.row, law.pair, law.position, 0.0, law.logit_row, law.step])
    engine.timeline = engine.loop.timeline = Timeline(engine.scheduler, run.clock, price, run.engine.gap_model is not None, capacity)
    return engine.timeline


@dataclass(frozen=True)
class Arrival:
    name: str
    at_s: float
    prompt: tuple[int, ...]
    num_output: int
    salt: str | None = None


def tokens(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(4, 250) for _ in range(num_tokens))


def steady_load(num_requests: int, rate: float, seed: int, prefix: int = 0) -> list[Arrival]:
    """Poisson arrivals of short prompts, behind a common beginning of ``prefix`` tokens."""
    rng, now_s, out = random.Random(seed), 0.0, []
    common = tokens(random.Random(99), prefix)
    for i in range(num_requests):
        now_s += rng.expovariate(rate)
        out.append(Arrival(f"r{i}", now_s, common + tokens(rng, rng.randrange(20, 80)), rng.randrange(10, 30)))
    return out


def run_load(arrivals: Sequence[Arrival], law: Law = LAW, known: bool = False, **options: object) -> TimedRun:
    """To its end. Requests come when they are due, in the middle of a step as well. ``known``: what steps cost need not be learned."""
    run, left = TimedRun(law, **options), sorted(arrivals, key=lambda a: a.at_s)  # type: ignore[arg-type]
    if known:
        with_known_price(run)
    while left or run.engine.has_work:
        if left and not run.engine.has_work and left[0].at_s > run.clock.now():
            run.clock.advance_to(left[0].at_s)
        while left and left[0].at_s <= run.clock.now():
            one = left.pop(0)
            params = SamplingParams(temperature=0.0, max_tokens=one.num_output, ignore_eos=True)
            prepared = run.engine.prepare(list(one.prompt), params, one.name, cache_salt=one.salt)
            prepared.request.arrival_s = one.at_s
            run.engine.add(prepared)
        run.engine.step()
    return run


def accounts(run: TimedRun) -> dict[str, Explanation]:
    timeline = run.engine.timeline
    return {record.request_id: explain(timeline, record, run.clock.now()) for record in timeline.records()}


def hurt(planted: dict[str, Explanation], plain: dict[str, Explanation]) -> list[Explanation]:
    """Accounts of the requests of both runs that took a fifth longer."""
    return [planted[name] for name, found in plain.items() if planted[name].wall_s >= 1.2 * found.wall_s]


def salted(arrivals: Sequence[Arrival]) -> list[Arrival]:
    return [replace(arrival, salt=arrival.name) for arrival in arrivals]
