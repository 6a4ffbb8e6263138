"""The window of a cluster, as it is taken to be replayed: whose times these are, what is left out and said, and when there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from octavo.core.cluster_window import ClusterWindow, WindowAbsence, WindowFrontEnd, WindowHandover
from octavo.core.recorded_window import Figures, RecordedWindow, WindowReplay, packed, salt_key, unpacked
from octavo.core.request import FinishReason
from octavo.distributed import recorded_cluster
from octavo.distributed.answers import AboutRecorded, QuestionError, Recorded, answer_now
from octavo.distributed.attendance import Attendance, Presence, Seen
from octavo.distributed.cluster_options import ClusterOptions, HandoverOptions
from octavo.distributed.cluster_reports import ClusterReports
from octavo.distributed.dispatcher import Backpressure
from octavo.distributed.handoff import HandoffLimits
from octavo.distributed.recorded_cluster import RecordedCluster, front_end_of
from octavo.engine.replay_advice import FRESH_S, ReplayError
from tests.distributed.told_cluster import LINK_S, ToldCluster, Worker

NOTHING = Figures(*[None] * 6)


def recorded(cluster: ToldCluster, seconds: float = 600.0) -> ClusterWindow:
    return asyncio.run(cluster.reports.recorded(seconds))


def answered(cluster: ToldCluster, name: str, worker: str, num_output: int = 5, num_prompt: int = 40) -> None:
    cluster.open(name, num_prompt, num_output)
    cluster.place(name, worker)
    cluster.run(worker, name, num_output)


def pair() -> ToldCluster:
    """Whose clocks have nothing to do with each other."""
    cluster = ToldCluster(Worker("w0", 700.0), Worker("w1", 5.0))
    for i in range(4):
        answered(cluster, f"r{i}", f"w{i % 2}")
        cluster.at(cluster.clock.now() + 1.0)
    return cluster


def test_times_are_the_front_ends_and_what_caches_had_the_workers() -> None:
    cluster = pair()
    window = recorded(cluster)
    assert [(worker.name, worker.role) for worker in window.workers] == [("w0", "both"), ("w1", "both")]
    assert [request.worker for request in window.requests] == [0, 1, 0, 1] and window.notes == ()
    journeys = [cluster.find(f"r{i}") for i in range(4)]
    for request, journey in zip(window.requests, journeys, strict=True):
        assert journey.ended_s is not None and journey.first_token_s is not None
        assert request.arrival_s == pytest.approx(journey.arrival_s - journeys[0].arrival_s)
        assert request.wall_s == pytest.approx(journey.ended_s - journey.arrival_s)
        assert request.ttft_s == pytest.approx(journey.first_token_s - journey.arrival_s)
        assert (request.num_prompt, request.num_output) == (40, 5)
    keys = {request.keys for request in window.requests}
    assert len(keys) == 1 and len(keys.pop()) == 2  # all have the same prompt, and the same answer
    assert [request.num_cached for request in window.requests] == [0, 0, 32, 32]  # each worker's cache is its own
    assert window.way_s == pytest.approx(2 * LINK_S) and window.starts_idle and window.from_start
    assert all(len(step) == 6 and step[-1] > 0.0 for worker in window.workers for step in worker.steps)


def test_of_older_requests_a_window_knows_that_they_were() -> None:
    cluster = pair()
    window = recorded(cluster, cluster.clock.now() - cluster.find("r2").arrival_s + 1e-9)
    assert len(window.requests) == 2 and window.starts_idle and not window.from_start


def test_one_that_was_handed_over_has_the_cache_of_the_first_and_the_blocks_of_the_last() -> None:
    cluster = ToldCluster(Worker("p0", 30.0, "prefill"), Worker("d0", 2.0, "decode"))
    cluster.open("r", 40, 20)
    cluster.place("r", "p0")
    cluster.step("p0")
    first_s = cluster.clock.now()
    cluster.at(first_s + 0.25)
    cluster.place("r", "d0", made=[4], handed_over=True)
    cluster.run("d0", "r", 20)
    window = recorded(cluster)
    (request,) = window.requests
    assert (request.worker, request.num_cached, len(request.keys)) == (0, 0, 3)
    assert window.hand_offs == ((40.0, pytest.approx(0.25)),) and window.way_s == 0.0  # nobody stayed with one worker
    assert [worker.role for worker in window.workers] == ["prefill", "decode"]


def test_lost_workers_and_what_went_with_them_are_told() -> None:
    cluster = pair()
    cluster.open("lost", 40, 6)
    cluster.place("lost", "w0")
    cluster.step("w0")
    cluster.journeys.lost("lost", cluster.clock.now())
    cluster.place("lost", "w1", made=[4])
    cluster.run("w1", "lost", 6)
    window = recorded(cluster)
    (request,) = window.requests[4:]
    assert request.wall_s is None and request.worker == 1 and window.notes == (
        "1 request lost a worker that went on: replayed as if that had not been, and not compared",
    )
    del cluster.workers["w0"]
    gone = recorded(cluster)
    assert [worker.name for worker in gone.workers] == ["w1"]
    assert gone.notes[1:] == (
        "no longer there, and not in the replay: w0", "2 requests no worker knows any more: taken to share nothing with others"
    )  # fmt: skip
    assert [len(request.keys) for request in gone.requests] == [0, 2, 0, 2, 2]


def test_a_worker_that_is_gone_is_in_the_window_for_as_long_as_it_was_there() -> None:
    """And what was lost with it is compared: the replay loses it too."""
    attendance = Attendance(600.0)
    cluster = ToldCluster(Worker("w0", 700.0), Worker("w1", 5.0))
    cluster.reports = ClusterReports(cluster.journeys, cluster, cluster.clock, "m", True, attendance=attendance)

    def look() -> None:
        there = [Seen(name, "both", "boot", Presence.OPEN, 10 + place, 512) for place, name in enumerate(cluster.workers)]
        attendance.look(there, cluster.clock.now())

    look()
    for i in range(4):
        answered(cluster, f"r{i}", f"w{i % 2}")
        cluster.at(cluster.clock.now() + 1.0)
    cluster.open("lost", 40, 6)
    cluster.place("lost", "w1")
    cluster.step("w1")
    del cluster.workers["w1"]
    look()
    lost_s = cluster.clock.now()
    cluster.journeys.lost("lost", lost_s)
    cluster.place("lost", "w0", made=[4])
    cluster.run("w0", "lost", 6)
    window = recorded(cluster)
    here, gone = window.workers
    assert (here.absences, gone.name, gone.role, gone.steps) == ((), "w1", "both", ())
    assert gone.absences == (WindowAbsence(lost_s - cluster.find("r0").arrival_s, None),)
    assert gone.engine == replace(here.engine, num_blocks=11, max_model_len=512)
    assert [request.worker for request in window.requests] == [0, 1, 0, 1, 0] and window.requests[4].wall_s is not None
    assert window.notes == (
        "not there all the time, and in the replay neither: w1", "2 requests no worker knows any more: taken to share nothing with others"
    )  # fmt: skip
    assert ClusterWindow.of_dict(msgspec.json.decode(msgspec.json.encode(window.to_dict()))) == window


def test_without_anything_to_compare_or_without_a_worker_there_is_no_window() -> None:
    cluster = ToldCluster(Worker("w0", 0.0))
    with pytest.raises(ReplayError, match="no request of it has ended"):
        recorded(cluster)
    cluster.open("running", 10, 50)
    cluster.place("running", "w0")
    cluster.step("w0")
    with pytest.raises(ReplayError, match="no request of it has ended"):
        recorded(cluster)
    answered(cluster, "r", "w0")
    cluster.at(cluster.clock.now() + 700.0)
    with pytest.raises(ReplayError, match="no request of it has ended"):
        recorded(cluster)  # in these ten minutes
    answered(cluster, "s", "w0")
    cluster.workers.clear()
    with pytest.raises(ReplayError, match="workers: none is there"):
        recorded(cluster)


def test_a_worker_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.distributed.cluster_reports.ANSWER_S", 0.01)
    cluster = pair()
    cluster.silent = {"w1"}
    with pytest.raises(ReplayError, match="workers: w1 did not say what steps take there; .* ask again later"):
        recorded(cluster)


def more_keys(told: Recorded) -> Recorded:
    told.attempts[0].keys = bytes(8 << 18)
    return told


def more_steps(told: Recorded) -> Recorded:
    told.steps *= 1000
    return told


def half_a_key(told: Recorded) -> Recorded:
    told.attempts[0].keys = b"half"
    return told


def no_step(told: Recorded) -> Recorded:
    told.steps[0] = (1.0, 2.0)
    return told


def no_end_of_blocks(told: Recorded) -> Recorded:
    told.engine = replace(told.engine, num_blocks=1 << 40)
    return told


def test_a_front_end_that_has_no_time_to_ask_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.distributed.cluster_reports._TAKE_S", 0.01)
    cluster = pair()
    cluster.silent = {"w1"}
    reports = ClusterReports(cluster.journeys, cluster, cluster.clock, "m", True, lambda window: pytest.fail("nothing to replay"))
    with pytest.raises(ReplayError, match=r"workers: they could not be asked within 0\.01 s"):
        asyncio.run(reports.replay(60.0))


@pytest.mark.parametrize(
    ("lie", "match"),
    [(more_keys, "w1 did not say"), (more_steps, "w1 did not say"), (half_a_key, "keys: 4 bytes"), (no_step, "steps: w1 tells of some"),
     (no_end_of_blocks, "num_blocks: w1 tells of 1099511627776; at most 16777216 can be simulated")],
)
def test_what_no_worker_can_have_is_refused(lie: Callable[[Recorded], Recorded], match: str) -> None:
    cluster, asked = pair(), ToldCluster.ask

    class Lying(ToldCluster):
        async def ask(self, worker: str, what: str, args: bytes) -> bytes:
            told = await asked(cluster, worker, what, args)
            return msgspec.json.encode(lie(msgspec.json.decode(told, type=Recorded))) if worker == "w1" else told

    cluster.reports = ClusterReports(cluster.journeys, _as(Lying, cluster), cluster.clock, "m", True)
    with pytest.raises(ReplayError, match=match):
        recorded(cluster)


def _as(kind: type[ToldCluster], cluster: ToldCluster) -> ToldCluster:
    other = kind()
    other.workers = cluster.workers
    return other


def test_what_is_told_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = pair()
    monkeypatch.setattr(recorded_cluster, "MAX_REQUESTS", 3)
    window = recorded(cluster)
    age_s = cluster.clock.now() - cluster.find("r1").arrival_s
    assert len(window.requests) == 3 and window.notes == (f"of the window only the last 3 requests, from {age_s:.0f} s ago on",)
    cluster.open("left", 40, 5)
    cluster.place("left", "w0")
    cluster.journeys.ended("left", FinishReason.ABORT, cluster.clock.now())  # before its first token: it takes a place, and is not replayed
    left = recorded(cluster)
    assert len(left.requests) == 2 and left.notes[0].startswith("of the window only the last 2 requests")
    part = RecordedCluster(cluster.journeys.all(), 600.0, cluster.clock.now(), float("-inf"))
    few, many = part.questions(["w0"]), part.questions([f"w{i}" for i in range(200)])
    assert few["w0"].most_keys == 1 << 18 and sum(about.most_keys for about in many.values()) <= 1 << 18
    assert few["w0"].most_steps == 4096 and all(about.most_steps == 100 for about in many.values())
    monkeypatch.setattr(recorded_cluster, "MAX_ASKED", 1)
    assert [len(about.names) for about in part.questions(["w0", "w1"]).values()] == [1, 1]
    engine = cluster.workers["w0"].run.engine
    names = [leg.name for name in ("r0", "r2") for leg in cluster.find(name).legs]

    def told(**limits: int) -> Recorded:
        about = AboutRecorded(names, **{"most_keys": 100, "most_steps": 100, **limits})
        return msgspec.json.decode(answer_now(engine, "recorded", msgspec.json.encode(about)), type=Recorded)

    assert [len(attempt.keys) for attempt in told().attempts] == [16, 16]
    assert [len(attempt.keys) for attempt in told(most_keys=3).attempts] == [0, 16]  # those of the last
    assert 1 <= len(told(most_steps=2).steps) <= 2 < len(told().steps)
    for limits, field in (({"most_keys": 1 << 19}, "most_keys"), ({"most_steps": 0}, "most_steps")):
        with pytest.raises(QuestionError, match=f"{field}: .* is not allowed"):
            told(**limits)


def test_that_more_came_is_said_though_some_of_the_last_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_cluster, "MAX_REQUESTS", 3)
    cluster = pair()
    cluster.open("aborted", 40, 5)
    cluster.abort("aborted")
    window = recorded(cluster)
    assert len(window.requests) == 2 and window.notes[0].startswith("of the window only the last 2 requests, from ")
    monkeypatch.setattr(recorded_cluster, "MAX_REQUESTS", 5)
    assert recorded(cluster).notes == ()


def test_how_requests_are_spread_goes_along_and_so_does_whose_they_are() -> None:
    limits = HandoffLimits(reserve_s=2.0, copy_s=3.0)
    handover = HandoverOptions(wire_dtype="int8", min_layerwise=64, limits=limits, may_borrow=False)
    options = ClusterOptions(router="round-robin", backpressure=Backpressure(0.1, 7), handover=handover)
    assert front_end_of(options) == WindowFrontEnd("round-robin", False, 0.1, 7, WindowHandover(64, "int8", 2.0, 3.0))
    assert front_end_of(ClusterOptions()) == WindowFrontEnd("soonest")  # who leaves all as it is means the same in both places
    cluster = pair()
    request = cluster._requests["r0"]
    request.arrival_s = cluster.clock.now()
    request.request_id, request.user, request.session, request.priority = "theirs", "somebody", "talk", 3
    cluster._requests["theirs"] = request
    cluster.journeys.opened(request)
    cluster.place("theirs", "w0")
    cluster.run("w0", "theirs", 5)
    last = recorded(cluster).requests[-1]
    assert (last.user, last.session, last.priority) == (salt_key("somebody"), salt_key("talk"), 3)
    assert "somebody" not in str(recorded(cluster))


def test_keys_are_packed_alike_everywhere() -> None:
    keys = (1, (1 << 64) - 1, 7)
    assert unpacked(packed(keys)) == keys and packed(keys)[:8] == b"\x01" + bytes(7) and unpacked(b"") == ()


def test_the_summary_has_the_last_replay_and_a_fresh_one_answers_for_all() -> None:
    cluster, windows = pair(), list[ClusterWindow | RecordedWindow]()

    def replayer(window: ClusterWindow | RecordedWindow) -> WindowReplay:
        windows.append(window)
        return WindowReplay(4, 4, NOTHING, NOTHING, ())

    reports = ClusterReports(cluster.journeys, cluster, cluster.clock, "m", True, replayer)

    async def ask(seconds: float = 60.0) -> dict[str, Any]:
        await reports.replay(seconds)
        return await reports.summary(60.0, 0, "ttft_p50")

    async def summary() -> dict[str, Any]:
        return await reports.summary(60.0, 0, "wall")

    assert "replay" not in asyncio.run(summary()) and not windows
    found = asyncio.run(ask())["replay"]
    assert (found["objective"], found["num_requests"], found["advice"]) == ("ttft_p50", 4, []) and isinstance(windows[0], ClusterWindow)
    asyncio.run(ask())
    assert len(windows) == 1 and "replay" in asyncio.run(summary())
    cluster.at(cluster.clock.now() + FRESH_S + 1.0)
    asyncio.run(ask())
    assert len(windows) == 2
    cluster.workers.clear()
    with pytest.raises(ReplayError, match="workers: none is there"):
        asyncio.run(ask(61.0))
