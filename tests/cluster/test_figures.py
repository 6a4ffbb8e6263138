"""The figures of a chaos run, on made-up arrivals."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from tests.cluster.chaos_report import ChaosCase, ChaosResult, report
from tests.cluster.figures import Rate, RoundResult, Seen, drift, judge
from tests.cluster.schedule import ChaosEvent, Kind, Round


def stream(begin_s: float, end_s: float, per_s: float, but_not: tuple[float, float] = (0.0, 0.0)) -> Seen:
    """A piece of two characters, ``per_s`` times a second."""
    times = [begin_s + i / per_s for i in range(int((end_s - begin_s) * per_s))]
    return Seen(0, begin_s, [(t, 2) for t in times if not but_not[0] <= t < but_not[1]], end_s)


def test_rates() -> None:
    rate = Rate([stream(0, 10, 16, (4, 6)), stream(0, 10, 16)])
    assert rate.over(0, 4) == 64 and rate.over(4, 6) == 32 and rate.over(20, 21) == 0
    assert rate.median(0, 10) == 64
    assert rate.lowest(0, 8) == 32 and rate.lowest(0, 1) == 64
    with pytest.raises(ValueError, match="no window of 2 s fits"):
        rate.median(0, 1.5)


def test_recovery_counts_from_the_last_events_end() -> None:
    hit = Round((ChaosEvent(20, Kind.STOP, 0, 2), ChaosEvent(21, Kind.KILL, 1, 3)))
    (result,) = judge([stream(0, 40, 16, (20, 27))], [hit], (2, 20), 40)
    assert hit.end_s == 24
    assert result.recovery_s is not None and 2.4 <= result.recovery_s <= 2.7  # 27 s, less what a window may lack
    assert result.lowest_share == 0 and result.longest_pause_s == pytest.approx(7 + 1 / 16)


def test_what_never_recovers_and_what_never_suffered() -> None:
    first, second = (Round((ChaosEvent(at_s, Kind.LINK, 0, 2),)) for at_s in (20, 40))
    seen = [stream(0, 60, 16, (40, 60))]
    calm, dead = judge(seen, [first, second], (2, 20), 60)
    assert calm.recovery_s == 0 and calm.lowest_share == pytest.approx(1)
    assert dead.recovery_s is None and dead.lowest_share == 0 and dead.longest_pause_s > 20


def test_a_round_is_judged_by_the_calm_before_it() -> None:
    """The machine has got busy: half the rate is all there is."""
    hit = Round((ChaosEvent(40, Kind.STOP, 0, 2),))
    seen = [stream(0, 30, 16), stream(30, 60, 8, (40, 43))]
    (found,) = judge(seen, [hit], (2, 20), 60)
    assert found.recovery_s is not None and 0.5 <= found.recovery_s <= 0.8
    assert drift(seen, (2, 20), 60) == pytest.approx(0.5)


def test_the_longest_pause_has_both_ends() -> None:
    assert Seen(0, 1.0, [(2.0, 1), (2.5, 1)], 6.0).longest_pause_s == 3.5
    assert Seen(0, 1.0, [(3.0, 1), (3.5, 1)], 4.0).longest_pause_s == 2.0
    assert Seen(0, 1.0, [], 2.0).longest_pause_s == 1.0


def result(**changes: Any) -> ChaosResult:
    hit = Round((ChaosEvent(20, Kind.STOP, 0, 2),))
    fields = {"seen": [stream(0, 40, 16)], "rounds": [RoundResult(hit, 1.5, 0.4, 3.0)], "blocks_left": {"worker-0": 0.0}}
    return ChaosResult(ChaosCase("m", 1), **(fields | {"workers": [{"name": "worker-0", "state": "ready"}]} | changes))


def test_a_good_run_has_no_faults_and_its_page_the_figures() -> None:
    good = result()
    assert good.faults == []
    page = report(good, datetime.date(2026, 11, 30))
    assert page.startswith("# Chaos, 2026-11-30\n")
    assert "| Requests answered | 1 of 1 |" in page and "| stop | 1 | 1.5, 1.5 s | 40% | 3.0 s |" in page and "| kill | 0 | | | |" in page
    assert "does not hold" not in page


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"seen": [Seen(7, 1.0, [], 2.0, failure="503")]}, "request 7, sent at 1.0 s, failed: 503"),
        ({"seen": [Seen(7, 1.0, [], 2.0, wrong="choice 0")]}, "request 7, sent at 1.0 s, is wrong: choice 0"),
        ({"blocks_left": {"worker-0": 0.0, "worker-1": 3.0}}, "worker-1 holds 3 blocks at the end"),
        ({"workers": [{"name": "worker-2", "state": "gone"}]}, "worker-2 has not come back"),
        ({"recovery_s": 10.5}, "the round at 20 s (stop at worker 0 for 2.0 s): the full rate came back after 10.5 s"),
        ({"recovery_s": None}, "the round at 20 s (stop at worker 0 for 2.0 s): the full rate came back never"),
    ],
)
def test_each_fault_is_named(changes: dict[str, Any], fault: str) -> None:
    if "recovery_s" in changes:
        changes = {"rounds": [RoundResult(result().rounds[0].round, changes["recovery_s"], 0.4, 3.0)]}
    bad = result(**changes)
    assert bad.faults == [fault]
    assert f"- {fault}" in report(bad, datetime.date(2026, 11, 30))
