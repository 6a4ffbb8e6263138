"""Workers tell where the time of an attempt went when it ends, so that accounts are as rich when they have gone, however they went."""

from __future__ import annotations

import asyncio
import itertools
import math
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.distributed import messages
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_reports import ClusterReports
from octavo.distributed.journeys import Journeys
from octavo.distributed.messages import Event, Events
from octavo.distributed.worker_account import MAX_ENTRIES, MAX_TEXT_CHARS, ToldAdvice, WorkerAccount, account_of
from octavo.distributed.worker_engine import ACCOUNT_BYTES, engine_id
from octavo.engine.params import PreparedRequest
from tests.distributed.kv_clusters import is_empty, kv_cluster
from tests.distributed.test_worker import PARAMS, WAIT_S, answer, front_end, held_at_token, until, worker
from tests.distributed.told_cluster import ToldCluster, Worker, seconds_of
from tests.models.tiny import write_tiny_gguf

ENDED = Request("r", [5], SamplingParams(max_tokens=9), 1, frozenset(), 0.0)


def tell(cluster: ToldCluster, worker_name: str, key: int) -> int:
    """A worker says what it has to say of an attempt; how many bytes that is."""
    account = account_of(cluster.workers[worker_name].run.engine, engine_id(key))
    assert account is not None
    data = messages.encode(Events([Event(key, account=account)]))
    came = messages.from_worker(data)
    assert isinstance(came, Events) and (got := came.events[0].account) is not None and got.fault() is None
    cluster.journeys.told(worker_name, engine_id(key), got)
    return len(data)


def causes(cluster: ToldCluster, shows_misses: bool = True) -> dict[str, Any]:
    """The account of r, without advice."""
    reports = ClusterReports(cluster.journeys, cluster, cluster.clock, "m", shows_misses)
    account = asyncio.run(reports.account(["r"]))
    assert account is not None
    return account | {"advice": []}


def all_go(cluster: ToldCluster) -> None:
    cluster.roles = dict  # type: ignore[method-assign, assignment]


# --- to the digit -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shows_misses", [True, False])
def test_what_is_told_at_the_end_is_what_would_be_answered_later(shows_misses: bool) -> None:
    cluster = ToldCluster(Worker("w0", 700.0, max_num_seqs=2))
    run = cluster.workers["w0"].run
    prompt = [4 + i % 200 for i in range(100)]
    for number in (1, 2):  # r is behind these, and finds what they have cached under another salt
        other = Request(f"x{number}", prompt, SamplingParams(max_tokens=40, ignore_eos=True), 1, frozenset(), 700.0, cache_salt="s")
        run.times_s[other.request_id] = []
        run.engine.add(PreparedRequest(other, []))
    run.step()
    cluster.open("r", received_s=0.0)
    cluster.place("r", "w0")
    cluster._keys |= {"x1": -1, "x2": -2}
    while cluster.find("r").ended_s is None:
        told = [event for event in run.step() if event.request_id == engine_id(1)]
        cluster.at(cluster.workers["w0"].now + 0.05)
        for event in told:
            cluster.journeys.tokens("r", len(event.token_ids), cluster.clock.now())
            if event.finish_reason is not None:
                cluster.journeys.ended("r", event.finish_reason, cluster.clock.now())
    asked, num_bytes = causes(cluster, shows_misses), tell(cluster, "w0", 1)
    all_go(cluster)
    assert causes(cluster, shows_misses) == asked and num_bytes <= ACCOUNT_BYTES
    assert {"queued_batch", "prefill", "decode", "others_decode", "network"} <= seconds_of(asked).keys()
    assert ("cache_miss" in seconds_of(asked)) is shows_misses
    summary = asyncio.run(cluster.reports.summary(600.0, 0, "wall"))
    assert {part["cause"] for part in summary["causes"]} == seconds_of(causes(cluster)).keys() - {"remainder"}


def test_a_leg_that_was_handed_over_is_told_before_it_goes() -> None:
    cluster = ToldCluster(Worker("p", 50.0, "prefill"), Worker("d", 9.0, "decode"))
    cluster.open("r", num_prompt=200)
    cluster.place("r", "p")
    cluster.run("p", "r", 1)
    sender = cluster.workers["p"].run.engine
    (token,) = sender.loop.offer(engine_id(1))
    tell(cluster, "p", 1)
    cluster.at(cluster.clock.now() + 0.75)
    cluster.workers["p"].run.clock.advance(0.75)
    cluster.place("r", "d", made=[token], handed_over=True)
    sender.release(engine_id(1))
    cluster.run("d", "r", 10)
    asked = causes(cluster)
    tell(cluster, "d", 2)
    all_go(cluster)
    assert causes(cluster) == asked and {"prefill", "decode", "hand_off", "network"} <= seconds_of(asked).keys()


def test_what_was_told_while_it_was_to_be_handed_over_is_not_the_end_of_it() -> None:
    """It was resumed where it was, and its worker died before it ended: what it had told says nothing of the rest."""
    cluster = ToldCluster(Worker("p", 50.0))
    cluster.open("r", num_prompt=200)
    cluster.place("r", "p")
    cluster.run("p", "r", 1)
    cluster.workers["p"].run.engine.loop.offer(engine_id(1))
    tell(cluster, "p", 1)
    leg = cluster.find("r").leg
    assert leg is not None and leg.told is not None and leg.account is None
    running = causes(cluster)
    assert seconds_of(running)["prefill"] > 0.0
    cluster.abort("r")
    assert leg.account is None
    all_go(cluster)
    assert "cannot be asked" in str(causes(cluster))


def test_of_a_lost_leg_nothing_that_was_told_counts() -> None:
    journeys = Journeys()
    journeys.opened(ENDED)
    journeys.placed("r", "w", "attempt-1", 1.0)
    journeys.told("w", "attempt-1", WorkerAccount("attempt-1", 1.0, "failed"))
    journeys.lost("r", 2.0)
    journey = journeys.find("r")
    assert journey is not None and journey.legs[0].account is None and not journeys._untold


# --- the books ----------------------------------------------------------------------------------------------------------------------------


def test_nobody_tells_of_what_another_had() -> None:
    journeys, account = Journeys(), WorkerAccount("attempt-1", 1.0, "finished")
    journeys.opened(ENDED)
    journeys.placed("r", "w", "attempt-1", 1.0)
    for worker_name, name in (("other", "attempt-1"), ("w", "attempt-2")):
        journeys.told(worker_name, name, account)
    journeys.ended("r", FinishReason.ABORT, 2.0)
    journey = journeys.find("r")
    assert journey is not None and journey.legs[0].told is None
    journeys.told("w", "attempt-1", account)  # behind its end
    assert journey.legs[0].account is account
    journeys.told("w", "attempt-1", WorkerAccount("attempt-1", 9.0, "finished"))
    assert journey.legs[0].account is account, "once it has ended nothing more is to be said"


def test_what_workers_do_not_tell_of_is_forgotten() -> None:
    journeys, keys = Journeys(capacity=4), itertools.count(1)
    for i in range(60):
        name, key = f"r{i}", engine_id(next(keys))
        journeys.opened(Request(name, [5], SamplingParams(max_tokens=9), 1, frozenset(), 0.0))
        journeys.placed(name, "w", key, 1.0)
        if i % 3 == 0:
            journeys.handed_over(name, "w", engine_id(next(keys)), 2.0)
        if i % 5 == 0:
            journeys.told("w", key, WorkerAccount(key, 1.0, "finished"))
        if i % 7 == 0:
            journeys.lost(name, 2.0)
        journeys.ended(name, FinishReason.ABORT, 3.0)
        assert len(journeys._untold) <= 4 and len(journeys._late) <= 4
    assert len(journeys._untold) == 4, "as many as ended requests"


GOOD = WorkerAccount("attempt-1", 1.0, "finished", 0.5, 0.0, {"prefill": 1.0}, {"prefill": 0.5}, {"prefill": "µs"})
FAULTY: dict[str, dict[str, Any]] = {
    "no time": {"wall_s": -1e-3},
    "no number": {"wall_s": math.nan},
    "a first token before it came": {"ttft_s": -0.5},
    "for ever": {"in_flight_s": math.inf},
    "less than no miss": {"own_missed_s": -1.0},
    "a cause of no number": {"seconds": {"prefill": math.nan}},
    "a cause that gives time back": {"seconds": {"prefill": 2.0, "decode": -1.0}},
    "the same to the first token": {"ttft_seconds": {"prefill": -math.inf}},
    "many causes": {"seconds": {f"c{i}": 1.0 for i in range(MAX_ENTRIES + 1)}},
    "many causes to the first token": {"ttft_seconds": {f"c{i}": 1.0 for i in range(MAX_ENTRIES + 1)}},
    "many details": {"details": {f"c{i}": "" for i in range(MAX_ENTRIES + 1)}},
    "much advice": {"advice": [ToldAdvice("a", 1.0, "b")] * (MAX_ENTRIES + 1)},
    "advice of no number": {"advice": [ToldAdvice("a", math.nan, "b")]},
    "a long detail": {"details": {"prefill": "x" * (MAX_TEXT_CHARS + 1)}},
    "a long name of a cause": {"seconds": {"x" * (MAX_TEXT_CHARS + 1): 1.0}},
    "an order to a terminal": {"details": {"prefill": "\x1b[2J"}},
    "an order in advice": {"advice": [ToldAdvice("a", 1.0, "\x07")]},
    "an unknown state": {"state": "\x1b"},
    "fewer tokens than none": {"num_output_tokens": -1},
    "fewer cached than none": {"num_cached": -1},
}


@pytest.mark.parametrize("fault", FAULTY)
def test_what_cannot_be_is_found_out_and_said_in_plain_words(fault: str) -> None:
    assert GOOD.fault() is None
    found = msgspec.structs.replace(GOOD, **FAULTY[fault]).fault()
    assert found is not None and found.isprintable() and len(found) < 200


# --- real workers -------------------------------------------------------------------------------------------------------------------------


async def told(engine: ClusterEngine, request_id: str) -> dict[str, Any]:
    account = await engine.reports(True).account([request_id])
    assert account is not None
    return account | {"advice": []}


def dies(engine: ClusterEngine) -> None:
    """As if the process had: nothing that it says from now on comes."""
    link = engine.control.find("a")
    assert link is not None
    link.channel.abort("it has died")


@pytest.mark.parametrize("how", ["drained", "dead"])
def test_accounts_outlive_their_worker(how: str) -> None:
    async def run() -> None:
        async with front_end() as engine:
            server, task = worker(engine.control.address, "a")
            await until(lambda: len(engine.open_links()) == 1)
            await answer(engine, "r")
            journey = engine.journeys.find("r")
            assert journey is not None and journey.leg is not None and journey.leg.account is not None, "it came with the end"
            before = await told(engine, "r")
            if how == "drained":
                server.leave("a signal")
                await asyncio.wait_for(task, WAIT_S)
            else:
                server._ended.set()
                dies(engine)
            await until(lambda: engine.control.find("a") is None)
            assert await told(engine, "r") == before and "cannot be asked" not in str(before)
            assert "decode" in seconds_of(before) and "between_steps" in seconds_of(before) and "network" in seconds_of(before)
            summary = await engine.reports(True).summary(600.0, 0, "wall")
            assert summary["num_requests"] == 1 and "between_steps" in {part["cause"] for part in summary["causes"]}
            (row,) = await engine.reports(True).answers({"r": ("r",)}, "recent", 9, "all")
            assert row["main_cause"] == before["main_cause"]
        await asyncio.wait_for(task, WAIT_S)

    asyncio.run(run())


def test_a_request_whose_client_has_left_is_told_as_well() -> None:
    async def run() -> None:
        async with front_end() as engine:
            server, task = worker(engine.control.address, "a")
            await until(lambda: len(engine.open_links()) == 1)
            goes_on = held_at_token(server, 5)
            stream = engine.submit([engine.prepare_checked([40, 41, 42, 43], engine.check_params(PARAMS), "r")])
            journey = engine.journeys.find("r")
            assert journey is not None
            await until(lambda: journey.num_output_tokens == 5)
            engine.abort(stream)
            assert journey.leg is not None and journey.leg.account is None
            goes_on.set()
            await until(lambda: journey.leg is not None and journey.leg.account is not None)
            server._ended.set()
            dies(engine)
            await until(lambda: engine.control.find("a") is None)
            found = await told(engine, "r")
            assert found["state"] == "aborted" and "decode" in seconds_of(found) and "cannot be asked" not in str(found)
        await asyncio.wait_for(task, WAIT_S)

    asyncio.run(run())


def test_an_account_that_cannot_be_made_costs_no_token(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*args: object) -> None:
        raise ArithmeticError("it does not add up")

    monkeypatch.setattr(WorkerAccount, "of", fail)

    async def run() -> None:
        async with front_end() as engine:
            _, task = worker(engine.control.address, "a")
            await until(lambda: len(engine.open_links()) == 1)
            assert len((await answer(engine, "r")).outputs[0].token_ids) == PARAMS.max_tokens
        await asyncio.wait_for(task, WAIT_S)

    asyncio.run(run())
    assert "cannot be told" in caplog.text


def test_both_sides_of_a_hand_off_have_told_when_they_are_killed(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", context=2048)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    async def run() -> None:
        async with kv_cluster(path, {"prefill": 1, "decode": 1}) as cluster:
            output = await cluster.run([3 + j * 7 % 250 for j in range(200)], params)
            await cluster.until(lambda: is_empty(cluster))
            engine, killed = cluster.engine, list(cluster.engine.control)
            before = await told(engine, output.request_id)
            assert before["workers"] == ["prefill-0", "decode-0"] and "hand_off" in seconds_of(before)
            for link in killed:
                cluster.signal(link.name, signal.SIGKILL)
            await cluster.until(lambda: not any(engine.control.find(link.name) is link for link in killed))
            assert await told(engine, output.request_id) == before and "cannot be asked" not in str(before)

    asyncio.run(run())
