"""A load on an engine in this process: what is recorded, a clock that skips idle time, loads that follow from their seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.bench.in_process import Engines, Run, in_turn, serve, sustained_rate, token_range
from octavo.bench.stream_record import StreamRecord
from octavo.workload.arrivals import ClosedLoop, OpenLoop
from octavo.workload.lengths import Uniform
from octavo.workload.requests import Independent, TokenRange, Workload, WorkloadRequest
from tests.engine.scripted import Bigram, bigram_engine
from tests.models.tiny import write_tiny_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "rand.gguf", context=512)


def load(rate: float | None, num: int = 9, seed: int = 3) -> list[WorkloadRequest]:
    arrivals = ClosedLoop(num) if rate is None else OpenLoop(rate)
    return list(Workload(arrivals, Independent(Uniform(1, 60), Uniform(1, 12)), num, tokens=TokenRange(3, 500), seed=seed).requests())


def test_every_request_is_answered_as_long_as_it_says(path: Path) -> None:
    arms = {"a": {"num_kv_blocks": 64, "max_num_seqs": 3}, "b": {"num_kv_blocks": 64, "scheduling_policy": "static"}}
    with Engines(str(path), arms) as two:
        two.warm_up(5, 2)
        requests = load(1000.0)
        runs = [serve(engine, requests, salt="x") for engine in two.by_name.values()]
        assert f"on {two.first.backend.threads} threads" in two.describe()  # type: ignore[attr-defined]
    for run in runs:
        assert [r.num_tokens for r in run.records] == [one.num_output for one in requests] == [len(tokens) for tokens in run.outputs]
        assert [r.due_s for r in run.records] == [one.arrival_s for one in requests]
        for record in run.records:
            assert list(record.event_times) == sorted(record.event_times) and record.due_s <= record.sent_s <= record.event_times[0]
            assert record.end_s == record.event_times[-1]
    assert runs[0].outputs == runs[1].outputs


def test_time_without_work_is_skipped() -> None:
    """Hours between requests; nobody waits for them, and no latency holds any of it."""
    engine = bigram_engine()
    engine.backend.delay_s = 0.002  # type: ignore[attr-defined]
    requests = [WorkloadRequest(3600.0 * i, [5, 6], 3) for i in range(1, 4)]
    run = serve(engine, requests)
    assert run.num_steps == 9
    assert run.seconds > 7200
    for record, request in zip(run.records, requests, strict=True):
        assert record.sent_s == request.arrival_s == record.due_s
        assert 0.002 < record.event_times[0] - request.arrival_s < 3600
        assert record.end_s - record.event_times[0] < 3600


def test_whoever_comes_while_others_run_waits_for_the_step(path: Path) -> None:
    """Work is never skipped: a request that is due meanwhile is sent after the step, and its latency counts from when it was due."""
    engine = bigram_engine()
    engine.backend.delay_s = 2.0  # type: ignore[attr-defined]
    run = serve(engine, [WorkloadRequest(0.0, [5], 2), WorkloadRequest(1.0, [6], 1)])  # a busy machine begins the first step before then
    assert run.records[1].sent_s >= 2.0 and run.ttft_s[1] >= 3.0
    assert run.num_steps == 2


def test_a_watch_sees_each_step_in_flight(path: Path) -> None:
    with Engines(str(path), {"": {"num_kv_blocks": 64, "max_num_seqs": 2, "enable_prefix_caching": False}}) as one:
        scheduler, seen = one.first.scheduler, list[tuple[int, int]]()
        plain = serve(one.first, load(None))
        watched = serve(one.first, load(None), watch=lambda: seen.append((scheduler.num_running, scheduler.num_waiting)))
    assert watched.outputs == plain.outputs and len(seen) == watched.num_steps == plain.num_steps
    assert seen[0] == (2, 7) and seen[-1][1] == 0 and all(running <= 2 for running, _ in seen)


def test_a_request_that_fails_ends_the_run() -> None:
    engine = bigram_engine()
    assert isinstance(engine.backend, Bigram)
    engine.backend.logits[6] = float("nan")
    with pytest.raises(RuntimeError):
        serve(engine, [WorkloadRequest(0.0, [5, 6], 3)])


def test_a_load_follows_from_its_seed_and_is_the_same_at_every_rate() -> None:
    slow, fast, again, other = load(1.0), load(8.0), load(1.0), load(1.0, seed=4)
    assert slow == again != other
    assert [one.prompt_token_ids for one in slow] == [one.prompt_token_ids for one in fast]
    assert [one.num_output for one in slow] == [one.num_output for one in load(None)]
    assert [one.arrival_s for one in fast] == pytest.approx([one.arrival_s / 8 for one in slow])


def test_figures_of_a_run() -> None:
    run = Run()
    for due, times in ((0.0, [1.0, 2.0, 4.0]), (1.0, [5.0, 5.5])):
        record = StreamRecord(4, len(times), due_s=due, end_s=times[-1], num_reported=len(times))
        record.event_times.extend(times)
        run.records.append(record)
    assert run.seconds == 5.5 and run.request_s == pytest.approx(2 / 5.5)
    assert run.normalized_s == [pytest.approx(4 / 3), pytest.approx(4.5 / 2)]
    assert run.median_normalized_s == pytest.approx((4 / 3 + 2.25) / 2) == run.mean_normalized_s
    assert run.ttft_s == [1.0, 4.0] and run.gaps_s == [1.0, 2.0, 0.5]


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        (((1, 10), (2, 20)), 2),  # all keep it
        (((1, 31), (2, 40)), None),  # not even the first
        (((1, 10), (2, 50)), 1.5),  # half way from 10 to 50
        (((1, 10), (2, 50), (3, 5)), 1.5),  # what comes back later does not count
        (((1, 30),), 1),
        ((), None),
    ],
)
def test_the_rate_that_keeps_a_limit_of_30(points: tuple[tuple[float, float], ...], expected: float | None) -> None:
    assert sustained_rate(points, 30) == expected


def test_rounds_go_there_and_back() -> None:
    assert [list(in_turn(("a", "b", "c"), i)) for i in range(3)] == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]


def test_tokens_are_of_the_vocabulary(path: Path) -> None:
    with Engines(str(path), {"": {"num_kv_blocks": 8}}) as one:
        assert token_range(one.first) == TokenRange(100, 512)


def test_engines_are_closed_when_one_of_them_cannot_be_made(path: Path) -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        Engines(str(path), {"a": {"num_kv_blocks": 8}, "b": {"max_num_seqs": 0}})
