"""What is told of steps that were logged: four numbers of crowding by a plane, and by how much steps that decode differ beside it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.bench.cluster_ways import Overlap
from octavo.bench.logged_worker import LoggedStep
from octavo.core.cost import StepShape
from octavo.reproduce.crowding import HELD_UP, Predicted, crowding_of, pace_of, spread_of
from octavo.simulator.shared_host import Crowding, Spread, StepKind

DECODES, PROMPT = StepShape(2, 2, 2, 60, 60), StepShape(40, 1, 1, 40, 820)


def predicted(shape: StepShape, seconds: float, times: float, overlap: Overlap, idle: bool = False) -> Predicted:
    """A step that took ``times`` the ``seconds`` that were said of it."""
    return Predicted(LoggedStep(0.0, shape, "decode", seconds * times, seconds * times, idle), seconds, overlap)


def by_law(crowding: Crowding, number: int = 300) -> list[Predicted]:
    """Steps beside neighbours of all kinds, each exactly as long as ``crowding`` makes it."""
    rng, out = random.Random(3), []
    for _ in range(number):
        shape, busy, prompts = rng.choice((DECODES, PROMPT)), rng.choice((0.0, 1.0, rng.random())), rng.random()
        overlap = Overlap(busy * (1.0 - prompts), busy * prompts)
        out.append(predicted(shape, rng.uniform(0.01, 0.1), 1.3 / pace_of(crowding, shape, overlap), overlap))
    return out


def test_paces_by_hand() -> None:
    """Half its time beside somebody who makes it half again as long: of these two thirds are done."""
    crowding = Crowding(0.5, 1.0, 0.25, 0.0)
    assert pace_of(crowding, DECODES, Overlap(0.5, 0.0)) == pytest.approx(0.5 + 0.5 / 1.5)
    assert pace_of(crowding, DECODES, Overlap(0.0, 1.0)) == pytest.approx(0.5)
    assert pace_of(crowding, PROMPT, Overlap(0.4, 0.6)) == pytest.approx(0.4 / 1.25 + 0.6)
    assert pace_of(Crowding(), PROMPT, Overlap(0.4, 0.6)) == 1.0


@pytest.mark.parametrize("crowding", [Crowding(0.4, 0.2, 0.1, 0.3), Crowding(0.0, 0.8, 0.0, 0.0), Crowding()])
def test_crowding_is_found_again(crowding: Crowding) -> None:
    """Whatever the prediction is off by: here all steps take 1.3 times what was said of them."""
    assert crowding_of(by_law(crowding)) == pytest.approx(crowding, abs=5e-3)


def test_nothing_is_said_of_neighbours_that_are_always_alike() -> None:
    steps = [one._replace(overlap=Overlap(1.0, 0.0)) for one in by_law(Crowding(0.5, 0.5, 0.5, 0.5))]
    assert crowding_of(steps) == Crowding() == crowding_of([])


def test_neighbours_do_not_make_steps_shorter() -> None:
    """Who is faster beside others was so by chance: that kind adds nothing, and the other what it does."""
    steps = [predicted(DECODES, 0.01, 0.7 if prompt else 1.4 if decode else 1.0, Overlap(decode, prompt)) for decode, prompt in BESIDE]
    found = crowding_of(steps)
    assert found.decode_prompt == 0.0 and found.decode_decode > 0.4 and found[2:] == (0.0, 0.0)


BESIDE = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)] * 20


def test_idleness_and_long_delays_are_no_crowding() -> None:
    some = [predicted(DECODES, 0.01, 1.5 if decode else 1.0, Overlap(decode, 0.0)) for decode in (0.0, 1.0) * 40]
    woken = [predicted(DECODES, 0.01, 9.0, Overlap(1.0, 0.0), idle=True)] * 40
    assert crowding_of(some + woken) == crowding_of(some)
    late = [predicted(DECODES, 0.01, times, Overlap(1.0, 0.0)) for times in (HELD_UP, 50.0)]
    assert crowding_of([*some, late[0]]) == crowding_of([*some, late[1]])


@given(st.lists(st.tuples(st.booleans(), st.floats(0.1, 8.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0)), max_size=30))
@settings(max_examples=100, deadline=None)
def test_whatever_is_measured_crowding_is_a_number_from_0(measured: list[tuple[bool, float, float, float]]) -> None:
    steps = [predicted(DECODES if is_decode else PROMPT, 0.01, times, Overlap(d * (1 - p), d * p)) for is_decode, times, d, p in measured]
    assert all(0.0 <= more < float("inf") for more in crowding_of(steps))


def test_steps_differ_as_they_did_about_the_mean() -> None:
    """Three quarters take what is said of them, one twice as much: beside nobody; beside a prompt all are alike, which crowding has."""
    crowding = Crowding(0.0, 0.6, 0.0, 0.0)
    alone = [predicted(DECODES, 0.01, times, Overlap()) for times in (1.0, 1.0, 1.0, 2.0) * 10]
    crowded = [predicted(DECODES, 0.01, 1.6, Overlap(0.0, 1.0))] * 30
    few = [predicted(DECODES, 0.01, 3.0, Overlap(1.0, 0.0))] * (Spread.MIN_TAKEN - 1)
    prompts = [predicted(PROMPT, 0.1, 2.5, Overlap())] * 50
    spread, rng = spread_of(crowding, alone + crowded + few + prompts), random.Random(1)
    drawn = [spread.draw(None, 0.01, rng) for _ in range(2000)]
    assert {round(one, 9) for one in drawn} == {0.8, 1.6} and sum(drawn) / len(drawn) == pytest.approx(1.0, abs=0.03)
    assert spread.draw(StepKind.PROMPT, 0.01, rng) == pytest.approx(1.0)
    assert spread.draw(StepKind.DECODE, 0.01, rng) == 1.0
    assert spread and not spread_of(crowding, prompts)
