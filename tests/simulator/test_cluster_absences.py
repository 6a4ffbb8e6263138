"""Replays of clusters whose workers were not there all the time: held against clusters in which they were not either."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.core.cluster_window import ClusterWindow, WindowAbsence
from octavo.distributed.cluster_options import ClusterOptions
from octavo.simulator.cluster_what_if import ClusterWhatIf
from octavo.simulator.outages import Outage
from tests.engine.planted import steady_load
from tests.engine.timed import Law
from tests.simulator.timed_cluster import TimedCluster, Turn

LAW = Law(noise=0.03)
TWO = {"worker-0": "both", "worker-1": "both"}
SHORTEST = ClusterOptions(router="shortest-queue")
CASES = {
    "lost and started again": (Turn(0.6, "kill", "worker-1"), Turn(1.6, "start", "worker-1")),
    "lost for good": (Turn(1.0, "kill", "worker-1"),),
    "drained and kept": (Turn(0.4, "drain", "worker-1"), Turn(1.8, "keep", "worker-1")),
    "restarted": (Turn(0.3, "drain", "worker-1"), Turn(1.5, "start", "worker-1")),
    "added": (Turn(0.0, "kill", "worker-1"), Turn(1.4, "start", "worker-1")),
}


def served(turns: tuple[Turn, ...], names: tuple[str, ...] = tuple(TWO)) -> ClusterWindow:
    cluster = TimedCluster(dict.fromkeys(names, "both"), LAW, SHORTEST, max_num_seqs=4)
    return cluster.serve(steady_load(70, 30.0, 1, prefix=48), turns).window()


def always(window: ClusterWindow) -> ClusterWindow:
    """As if all had been there all the time."""
    return replace(window, workers=tuple(replace(worker, absences=()) for worker in window.workers))


@pytest.mark.parametrize("case", CASES)
def test_the_replay_is_of_the_workers_that_were_there(case: str) -> None:
    window = served(CASES[case])
    one = ClusterWhatIf(window)
    base = one.base()
    assert base.num_requests == base.num_compared == 70, "what lost its worker is compared too"
    assert base.error("wall") == pytest.approx(0.0, abs=0.1 if case == "lost for good" else 0.07)  # nobody knows its prompts any more
    assert (ClusterWhatIf(always(window)).base().error("wall") or 0.0) > 0.15
    assert "not there all the time, and in the replay neither: worker-1" in window.notes
    more = {switch.kind: switch.change for switch in one.switches}
    is_gone = case == "lost for good"
    assert more["more_both"] == ("one worker more (--workers 2)" if is_gone else "one worker more (--workers 3)")
    assert ("fewer_both" in more) != is_gone and ("apart" in more) != is_gone


def test_a_worker_more_gains_what_it_gains_though_another_is_lost() -> None:
    turns = CASES["lost and started again"]
    window, more = served(turns), served(turns, (*TWO, "worker-2"))
    measured = [ClusterWhatIf(one).load.measured().wall or 0.0 for one in (window, more)]
    one = ClusterWhatIf(window)
    one.switches = [switch for switch in one.switches if switch.kind == "more_both"]
    (outcome,), base = one.outcomes(), one.base()
    gain, real = outcome.gain(base.replayed, "wall"), 1.0 - measured[1] / measured[0]
    assert real > 0.3 and gain == pytest.approx(real, rel=0.2)


def test_when_workers_were_away_is_when_engines_are() -> None:
    window = served(CASES["lost and started again"])
    one = ClusterWhatIf(window)
    begin_s = one.load.begin_s
    (away,) = window.workers[1].absences
    assert one.setup.outages(begin_s) == [Outage(1, begin_s + away.from_s, begin_s + (away.to_s or 0.0))]
    from_start = replace(one.setup, absences={"worker-0": (WindowAbsence(0.0, 1.0), WindowAbsence(2.0, None, True))})
    assert from_start.outages(5.0) == [Outage(0, 0.0, 6.0), Outage(0, 7.0, drains=True)]
    assert from_start.flag == "--workers 1" and [spec.name for spec in from_start.staying] == ["worker-1"]
    assert [spec.role for spec in from_start.with_roles(["prefill"]).specs] == ["both", "prefill"]


def test_what_filled_the_cache_of_a_worker_that_is_not_there_yet_is_computed_elsewhere() -> None:
    """Its blocks came from disk, say: they cannot be there before it is."""
    window = served(CASES["added"])
    requests = tuple(replace(one, num_cached=48, worker=1) for one in window.requests)
    one = ClusterWhatIf(replace(window, requests=requests))
    assert set(one.load.warmed) == {1} and one.base().replayed.wall is not None
