"""Distributions: closed forms within five standard errors, limits held exactly, odd values refused.

Seeds are fixed, so a bound holds or fails for good; five standard errors are what an honest sampler keeps with any seed.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter

import pytest

from octavo.workload.arrivals import ClosedLoop, OpenLoop
from octavo.workload.lengths import Fixed, LogNormal, Recorded, Uniform, parse_lengths

N = 20_000
ERRORS = 5.0  # standard errors


def draws(lengths: Fixed | Uniform | LogNormal, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [lengths.draw(rng) for _ in range(N)]


def cdf(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def test_fixed_is_fixed() -> None:
    assert set(draws(Fixed(17))) == {17}


def test_uniform_has_every_length_as_often() -> None:
    counts = Counter(draws(Uniform(3, 12)))
    assert set(counts) == set(range(3, 13))
    error = math.sqrt(N * 0.1 * 0.9)
    assert all(abs(count - N / 10) < ERRORS * error for count in counts.values())


def test_quantiles_are_those_of_the_draws() -> None:
    lengths = LogNormal(100, 0.8, 10, 400)
    sample = draws(lengths)
    for share in (0.001, 0.1, 0.5, 0.9, 0.999):
        error = ERRORS * math.sqrt(N * share * (1 - share))
        length = lengths.quantile(share)
        assert sum(x < length for x in sample) <= N * share + error and sum(x <= length for x in sample) >= N * share - error
    assert lengths.quantile(0.5) == round(100 / math.exp(0.32)) and (lengths.quantile(1e-9), lengths.quantile(1 - 1e-9)) == (10, 400)


@pytest.mark.parametrize(("mean", "sigma"), [(20_000, 0.5), (50_000, 1.0), (3_000, 0.0)])
def test_logarithms_are_normal(mean: float, sigma: float) -> None:
    logs = [math.log(x) for x in draws(LogNormal(mean, sigma, 1, 1 << 24))]
    rounding = 1 / 500  # relative, of the smallest values that come up
    assert abs(statistics.fmean(logs) - (math.log(mean) - sigma**2 / 2)) <= ERRORS * sigma / math.sqrt(N) + rounding
    assert abs(statistics.pstdev(logs) - sigma) <= ERRORS * sigma / math.sqrt(2 * N) + rounding


@pytest.mark.parametrize(("mean", "sigma", "low", "high"), [(161, 1.0, 4, 1024), (120, 0.8, 4, 512), (100, 2.0, 50, 60)])
def test_limits_take_what_lies_beyond_them(mean: float, sigma: float, low: int, high: int) -> None:
    values = draws(LogNormal(mean, sigma, low, high))
    mu = math.log(mean) - sigma**2 / 2
    below, above = ((math.log(limit) - mu) / sigma for limit in (low, high))
    inside = mean * (cdf(above - sigma) - cdf(below - sigma))
    expected = low * cdf(below) + inside + high * (1 - cdf(above))
    assert min(values) == low and max(values) == high
    assert abs(statistics.fmean(values) - expected) < ERRORS * statistics.pstdev(values) / math.sqrt(N) + 0.5
    share = values.count(high) / N
    p = 1 - cdf((math.log(high - 0.5) - mu) / sigma)
    assert abs(share - p) < ERRORS * math.sqrt(p * (1 - p) / N)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("128", Fixed(128)),
        ("uniform:64:256", Uniform(64, 256)),
        ("lognormal:161:1.0:4:1024", LogNormal(161, 1, 4, 1024)),
        (" 7 ", Fixed(7)),
    ],
)
def test_written_forms(text: str, lengths: object) -> None:
    assert parse_lengths(text) == lengths
    assert parse_lengths(str(lengths)) == lengths


BAD_LENGTHS = [
    *("", "x", "1.5", "128:", "uniform", "uniform:1", "uniform:1:2:3", "uniform:a:b", "lognormal:1:1", "gauss:1:2"),
    *("0", "-3", "99999999999", "uniform:0:5", "uniform:5:4", "lognormal:nan:1:1:5", "lognormal:5:inf:1:5"),
    *("lognormal:5:1:6:5", "lognormal:0:1:1:5"),
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_LENGTHS)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not allowed; ") as refused:
        parse_lengths(text)
    assert str(refused.value).startswith(repr(text))


def gaps(process: OpenLoop, seed: int = 0) -> list[float]:
    times = list(itertools.islice(process.times(random.Random(seed)), N))
    assert times == sorted(times)
    return [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]


@pytest.mark.parametrize("cv", [0.25, 1.0, 2.0])
@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_gaps_have_the_mean_and_the_variation_asked_for(rate: float, cv: float) -> None:
    found = gaps(OpenLoop(rate, cv))
    mean, variance = 1 / rate, (cv / rate) ** 2
    assert abs(statistics.fmean(found) - mean) < ERRORS * math.sqrt(variance / N)
    excess = 6 * cv**2  # of a Gamma variable of shape cv ** -2
    assert abs(statistics.pvariance(found) - variance) < ERRORS * variance * math.sqrt((excess + 2) / N)


def test_cv_1_is_poisson() -> None:
    """Arrivals in a second have mean and variance of the rate; a Gamma process of another shape has another variance."""
    rate = 10.0
    times = itertools.takewhile(lambda t: t < 2000, OpenLoop(rate).times(random.Random(0)))
    counts = Counter(map(int, times))
    per_second = [counts[second] for second in range(2000)]
    assert abs(statistics.fmean(per_second) - rate) < ERRORS * math.sqrt(rate / 2000)
    fourth = 3 * rate**2 + rate
    assert abs(statistics.pvariance(per_second) - rate) < ERRORS * math.sqrt((fourth - rate**2) / 2000)
    none = math.exp(-rate / 10)  # in a tenth of a second
    assert none == pytest.approx(0.3679, abs=1e-4)
    assert abs(sum(gap > 0.1 for gap in gaps(OpenLoop(rate))) / N - none) < ERRORS * math.sqrt(none * (1 - none) / N)


def test_cv_0_is_a_clock() -> None:
    assert list(itertools.islice(OpenLoop(8.0, 0.0).times(random.Random(0)), 4)) == [0.125, 0.25, 0.375, 0.5]


def test_a_closed_loop_has_everything_due_at_once() -> None:
    assert list(itertools.islice(ClosedLoop(3).times(random.Random(0)), 5)) == [0.0] * 5


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_rates_have_limits(rate: float) -> None:
    with pytest.raises(ValueError, match="^rate: "):
        OpenLoop(rate)


def test_burstiness_is_the_shape_of_the_gaps() -> None:
    for burstiness, cv in ((1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)):
        assert OpenLoop.of_burstiness(3.0, burstiness) == OpenLoop(3.0, cv)


@pytest.mark.parametrize("cv", [-0.1, math.nan, math.inf])
def test_variation_has_limits(cv: float) -> None:
    with pytest.raises(ValueError, match="^cv: "):
        OpenLoop(1.0, cv)


def test_concurrency_has_limits() -> None:
    with pytest.raises(ValueError, match="^concurrency: 0 "):
        ClosedLoop(0)


def test_recorded_lengths_come_as_often_as_they_were_recorded() -> None:
    rng = random.Random(0)
    counts = Counter(Recorded((3, 7, 7, 900)).draw(rng) for _ in range(N))
    assert set(counts) == {3, 7, 900}
    assert abs(counts[7] - N / 2) < ERRORS * math.sqrt(N / 4)
    for values, message in (((), "at least one length"), ((3, 0), "length: 0 is not allowed")):
        with pytest.raises(ValueError, match=message):
            Recorded(values)
