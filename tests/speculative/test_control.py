"""How many tokens are drafted: the best by exhaustive search, prices as they are, and never a loss worth speaking of."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.speculative.acceptance import CLASS_OF, LOOKUP_PRIOR, MODEL_PRIOR, NUM_CLASSES, SequenceRates, SharedRates
from octavo.speculative.control import DraftControl, best_rate, best_worth, share_out
from octavo.speculative.step_seconds import StepSeconds, bucket_of, monotone
from tests.speculative.replay import flat_then_linear

# --- what is best ---------------------------------------------------------------------------------------------------------------------

CHANCES = st.lists(st.lists(st.sampled_from([1.0, 0.9, 0.75, 0.5, 0.25]), max_size=4).map(lambda r: sorted(r, reverse=True)), max_size=3)
PRICES = st.lists(st.integers(0, 5), min_size=13, max_size=13).map(lambda steps: [1.0 + s for s in itertools.accumulate(steps)])


@settings(max_examples=200, deadline=None)
@given(CHANCES, PRICES)
def test_no_choice_of_lengths_has_a_better_rate(chances: list[list[float]], prices: list[float]) -> None:
    """Against all choices of a length for each sequence; and the worth of drafts likewise."""
    gains = sorted((c for row in chances for c in row), reverse=True)
    num = 1.0 + len(chances)
    best, rate = best_rate(gains, num, prices)
    choices = list(itertools.product(*(range(len(row) + 1) for row in chances)))
    kept = {lengths: sum(sum(row[:k]) for row, k in zip(chances, lengths, strict=True)) for lengths in choices}
    rates = [(num + kept[lengths]) / prices[sum(lengths)] for lengths in choices]
    assert rate == pytest.approx(max(rates))
    worth = best_worth(gains, 2.0, prices)
    values = [2.0 * kept[lengths] - prices[sum(lengths)] for lengths in choices]
    assert 2.0 * sum(gains[:worth]) - prices[worth] == pytest.approx(max(values))
    if best:
        lengths = share_out(chances, gains, best)
        assert sum(lengths) == best and all(k <= len(row) for k, row in zip(lengths, chances, strict=True))
        assert kept[tuple(lengths)] == pytest.approx(sum(gains[:best]))


@pytest.mark.parametrize(("a", "c"), [(0.6, 0.1), (0.8, 0.05), (0.9, 0.02), (0.75, 0.02), (0.3, 0.5)])
def test_the_rate_is_the_paper_s_factor(a: float, c: float) -> None:
    """Leviathan et al., theorem 3.8: (1 - a^(k+1)) / ((1 - a)(k c + 1)), at the k where it is best."""
    gains = [a**j for j in range(1, 41)]
    prices = [1.0 + k * c for k in range(41)]
    factors = [(1.0 - a ** (k + 1)) / ((1.0 - a) * (k * c + 1.0)) for k in range(41)]
    best, rate = best_rate(gains, 1.0, prices)
    assert rate == pytest.approx(max(factors)) and factors[best] == pytest.approx(max(factors))


# --- chances --------------------------------------------------------------------------------------------------------------------------


def test_chances_follow_what_came_true() -> None:
    shared = SharedRates()
    rates = SequenceRates(shared)
    assert rates.chances(1, 3)[0] == pytest.approx(LOOKUP_PRIOR[0])
    rng = random.Random(2)
    for _ in range(400):
        rates.add(3, rng.random() < 0.9)
        rates.add(4, rng.random() < 0.5)
    first, second = rates.chances(3, 2)
    assert 0.75 < first < 1.0 and 0.2 < second / first < 0.8
    assert rates.chances(3, 0) == []
    assert all(a >= b for a, b in itertools.pairwise(rates.chances(1, 16)))


def test_a_sequence_s_own_trials_outweigh_those_of_others() -> None:
    shared = SharedRates(MODEL_PRIOR)
    good, bad, new = SequenceRates(shared), SequenceRates(shared), SequenceRates(shared)
    for _ in range(30):
        good.add(2, True)
        bad.add(2, False)
    assert good.chances(2, 1)[0] > 0.8
    assert bad.chances(2, 1) == [] or bad.chances(2, 1)[0] < 0.2
    assert 0.4 < new.chances(2, 1)[0] < 0.6
    assert new.chances(40, 1)[0] == pytest.approx(MODEL_PRIOR[-1])  # another class knows nothing of it


def test_every_evidence_has_a_class() -> None:
    assert [CLASS_OF[e] for e in (1, 2, 6, 7, 8, 9, 32, 33)] == [0, 1, 5, 6, 6, 7, 9, 10]
    assert len(LOOKUP_PRIOR) == NUM_CLASSES
    rates = SequenceRates(SharedRates())
    rates.add(10**9, True)
    assert rates.chances(10**9, 1)[0] > LOOKUP_PRIOR[-1]


# --- prices ---------------------------------------------------------------------------------------------------------------------------


def test_buckets_are_in_the_order_of_their_rows() -> None:
    buckets = [bucket_of(rows) for rows in range(1, 5000)]
    assert buckets[:17] == [*range(1, 17), 16 + 0] and all(0 <= b - a <= 1 for a, b in itertools.pairwise(buckets))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), min_size=1, max_size=5))
def test_monotone_is_the_nearest(values: list[tuple[int, int]]) -> None:
    """Least squares under order, from its definition: max over left ends of min over right ends of weighted means (min-max formula)."""

    def mean(i: int, j: int) -> float:
        return sum(v * w for v, w in values[i : j + 1]) / sum(w for _, w in values[i : j + 1])

    n = len(values)
    expected = [max(min(mean(i, j) for j in range(k, n)) for i in range(k + 1)) for k in range(n)]
    assert monotone([(float(v), float(w)) for v, w in values]) == pytest.approx(expected)


def learned(noise: float, num_steps: int = 1500, seed: int = 1) -> StepSeconds:
    """What is learned of a device with a flat part from steps of 1 to 40 rows and various contexts."""
    curve, cost, rng = flat_then_linear(4), StepSeconds(), random.Random(seed)
    for _ in range(num_steps):
        rows, context = rng.choice([1, 1, 1, 2, 3, 5, 8, 12, 16, 24, 40]), rng.randint(100, 1000)
        cost.observe(rows, context, (curve(rows) + 1e-6 * context) * max(0.5, rng.gauss(1.0, noise)))
    return cost


@pytest.mark.parametrize(("noise", "error"), [(0.0, 0.02), (0.05, 0.08)])
def test_a_curve_is_learned(noise: float, error: float) -> None:
    curve, cost = flat_then_linear(4), learned(noise)
    for rows in (1, 2, 3, 4, 5, 6, 10, 12, 14, 16, 20, 32, 40):  # 4, 6 and 32 were not seen and are near a bend
        assert cost.seconds(rows, 500) == pytest.approx(curve(rows) + 5e-4, rel=error + (0.07 if rows in (4, 6, 32) else 0.0))
    assert cost.prices(1, 20, 500) == [cost.seconds(rows, 500) for rows in range(1, 22)]
    assert cost.seconds(80, 500) >= cost.seconds(40, 500)


def test_context_is_told_from_rows() -> None:
    """One row at little context and sixteen at much, then the other way round: neither was seen."""
    cost, rng = StepSeconds(), random.Random(4)
    for _ in range(600):
        for rows, low in ((1, 100), (16, 5000)):
            context = low + rng.randrange(2000)
            cost.observe(rows, context, 2e-3 + 1e-4 * rows + 1e-6 * context)
    assert cost.seconds(16, 200) == pytest.approx(3.8e-3, rel=0.05)
    assert cost.seconds(1, 6000) == pytest.approx(8.1e-3, rel=0.05)


def test_a_new_pace_scales_what_was_not_seen_of_late() -> None:
    cost = learned(0.0)
    before = cost.seconds(16, 500)
    for _ in range(60):
        cost.observe(1, 500, 2.0 * (flat_then_linear(4)(1) + 5e-4))
    assert cost.seconds(16, 500) == pytest.approx(2.0 * before, rel=0.15)
    assert cost.seconds(1, 500) == pytest.approx(2.0 * (flat_then_linear(4)(1) + 5e-4), rel=0.05)


def test_a_step_that_was_held_up_teaches_little() -> None:
    cost = learned(0.0)
    for rows in (1, 16):
        before = cost.seconds(rows, 500)
        cost.observe(rows, 500, 50.0 * before)
        assert cost.seconds(rows, 500) == pytest.approx(before, rel=0.2)
    fresh = StepSeconds()
    for seconds in (0.3, 2e-3, 2e-3):  # the first steps of a process
        fresh.observe(1, 10, seconds)
    assert fresh.seconds(1, 10) == pytest.approx(2e-3)


def test_what_is_known_and_what_is_not() -> None:
    cost = StepSeconds()
    assert cost.seconds(3, 10) == 0.0 and not cost.knows(3, 100)
    cost.observe(0, 10, 1.0)
    cost.observe(3, 10, 0.0)
    assert cost.num_steps == 0
    for _ in range(3):
        assert not cost.knows(3, 100)
        cost.observe(3, 10, 1e-3)
    assert cost.knows(3, 100) and not cost.knows(4, 100)
    for _ in range(100):
        cost.observe(1, 10, 1e-3)
    assert not cost.knows(3, 100)
    assert cost.seconds(6, 10) == pytest.approx(2e-3)  # beyond the largest: by the row


# --- the purse ------------------------------------------------------------------------------------------------------------------------


def plain_steps(control: DraftControl, num_steps: int, seconds: float = 1e-3) -> None:
    for _ in range(num_steps):
        control.settle(1, 10, seconds, control.observe(1, 1, 1, 10, seconds, 0.0))


def test_nothing_is_drafted_before_plain_decoding_is_known() -> None:
    control = DraftControl()
    for _ in range(3):
        assert control.lengths([[1.0] * 4], 1, 10, 0, 4, 0.0) == [0] and control.purse_s == 0.0
        plain_steps(control, 1)
    assert control.lengths([[1.0] * 4], 1, 10, 0, 4, 0.0) == [1]  # the first stage
    assert control.lengths([], 1, 10, 0, 4, 0.0) == [] and control.lengths([[]], 1, 10, 0, 4, 0.0) == [0]


def test_an_empty_purse_buys_nothing_until_time_has_passed() -> None:
    control = DraftControl()
    plain_steps(control, 3)
    num_lost = 0
    while control.lengths([[1.0] * 4], 1, 10, 0, 4, 0.0) != [0]:  # a device on which the second row costs more than the first
        control.settle(1, 10, 3e-3, control.observe(2, 1, 1, 10, 3e-3, 0.0))
        num_lost += 1
    assert 1 <= num_lost <= 4
    plain_steps(control, 400)
    assert control.purse_s < 4e-3  # the allowance is a small share of the time
    plain_steps(control, 2000)
    assert control.purse_s > 4e-3


def test_stages_of_rows_are_tried_one_after_the_other() -> None:
    """With drafts that all come true on a device that does 20 rows in the time of one, up to what is wanted."""
    control, tried = DraftControl(), []
    plain_steps(control, 3)
    for _ in range(40):
        k = control.lengths([[1.0] * 16], 1, 10, 0, 16, 0.0)[0]
        tried.append(k)
        control.settle(1, 10, 1e-3, control.observe(1 + k, 1, 1 + k, 10, 1e-3, 0.0))
    assert tried[0] == 1 and tried[-1] >= 15
    assert tried == sorted(tried)


def test_drafts_that_take_host_time_have_to_earn_it() -> None:
    control = DraftControl()
    plain_steps(control, 3)
    for _ in range(40):
        k = control.lengths([[1.0] * 8], 1, 10, 0, 8, 0.0)[0]
        control.settle(1, 10, 1e-3, control.observe(1 + k, 1, 1 + k, 10, 1e-3, 0.0))
    assert control.lengths([[0.9] * 8], 1, 10, 0, 8, 0.0) == [8]
    assert control.lengths([[0.9] * 8], 1, 10, 0, 8, 2e-3) == [0]


def test_beside_prompts_a_draft_earns_the_time_of_its_row() -> None:
    """Rows of a full step cost what rows cost, whatever is free in a small one."""
    control, curve = DraftControl(), flat_then_linear(4, row_s=1e-3)
    plain_steps(control, 3, curve(1))
    for _ in range(80):
        k = control.lengths([[1.0] * 16], 1, 10, 0, 16, 0.0)[0]
        seconds = curve(1 + k)
        control.settle(1, 10, seconds, control.observe(1 + k, 1, 1 + k, 10, seconds, 0.0))
    assert control.lengths([[0.5, 0.4, 0.3]], 1, 10, 0, 3, 0.0) == [3]
    assert control.lengths([[0.5, 0.4, 0.3]], 1, 10, 200, 3, 0.0) == [0]
    assert control.lengths([[0.95]], 1, 10, 200, 1, 0.0) == [1]
