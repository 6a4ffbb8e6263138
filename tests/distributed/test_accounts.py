"""Accounts of requests that ran on several workers: every part to the digit on engines of known times, and without a gap for any way."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.distributed.accounts import merge
from octavo.distributed.answers import ToldEngine, Window
from octavo.distributed.cluster_reports import _mean_advice
from octavo.distributed.flood_log import MAX_LINES
from octavo.distributed.journeys import Journeys
from octavo.distributed.worker_account import ToldAdvice, WorkerAccount
from octavo.distributed.worker_engine import engine_id
from octavo.engine.causes import NAMES, Cause
from octavo.engine.serving import ReplayUnavailable
from octavo.server.prometheus import exposition
from tests.distributed.told_cluster import LINK_S, ToldCluster, Worker, seconds_of


def adds_up(account: dict) -> None:
    found = seconds_of(account)
    assert sum(found.values()) == pytest.approx(account["wall_s"], abs=1e-5)
    assert abs(found["remainder"]) <= 0.01 * account["wall_s"] + 1e-7
    assert all(seconds >= 0 for cause, seconds in found.items() if cause != "remainder")


def test_one_worker_and_the_way_there_and_back() -> None:
    cluster = ToldCluster(Worker("w0", offset_s=700.0))
    cluster.at(1.0)
    cluster.open("r", received_s=0.9)
    cluster.at(1.3)
    cluster.place("r", "w0")
    cluster.run("w0", "r", 10)
    cluster.at(cluster.clock.now() + 0.25)
    cluster.journeys.delivered(["r"], cluster.clock.now())
    account = cluster.account("r")
    adds_up(account)
    found = seconds_of(account)
    assert (account["state"], account["workers"]) == ("finished", ["w0"])
    assert found["preparation"] == pytest.approx(0.1) and found["queued_worker"] == pytest.approx(0.3)
    assert found["network"] == pytest.approx(2 * LINK_S) and found["delivery"] == pytest.approx(0.25)
    worker = cluster.workers["w0"].run
    ttft_s = 0.1 + 0.3 + 2 * LINK_S + worker.device.seconds[0] + 0.0004
    assert account["ttft_s"] == pytest.approx(ttft_s)
    own = worker.engine.timeline.find(engine_id(1))
    assert own is not None and found["decode"] == pytest.approx(own.seconds[Cause.DECODE], abs=1e-6) and found["decode"] > 0


def test_of_a_request_that_runs_the_step_in_flight_is_not_time_on_the_way() -> None:
    cluster = ToldCluster(Worker("w0", offset_s=5.0))
    cluster.open("r", num_output=50)
    cluster.place("r", "w0")
    cluster.run("w0", "r", 3)
    cluster.workers["w0"].run.clock.advance(30.0)  # in a step that does not end
    cluster.at(cluster.workers["w0"].now + LINK_S)
    account = cluster.account("r")
    adds_up(account)
    assert account["state"] == "running" and seconds_of(account)["network"] == pytest.approx(2 * LINK_S)


def test_a_worker_that_is_lost_takes_its_account_along() -> None:
    """The silence, the wait, and the way back to where it was are the loss; what had come by then is not."""
    cluster = ToldCluster(Worker("w0", 0.0), Worker("w1", -3.0 + 100.0))
    cluster.open("r", num_output=20)
    cluster.place("r", "w0")
    cluster.run("w0", "r", 5)
    last_s, first_s = cluster.clock.now(), cluster.find("r").first_token_s
    assert first_s is not None
    cluster.at(last_s + 1.0)
    cluster.journeys.lost("r", cluster.clock.now())
    cluster.at(last_s + 1.5)
    cluster.place("r", "w1", made=[4 + i for i in range(5)])
    cluster.step("w1")
    again_s = cluster.clock.now()
    cluster.run("w1", "r", 20)
    account = cluster.account("r")
    adds_up(account)
    found = seconds_of(account)
    assert found["worker_lost"] == pytest.approx(again_s - last_s) and account["workers"] == ["w0", "w1"]
    assert found["prefill"] == pytest.approx(first_s, abs=1e-6)  # as it was seen from here: nobody else can tell
    assert "network" not in found  # of the second leg after its first token, which took as long here as there
    (lost,) = (part for part in account["causes"] if part["cause"] == "worker_lost")
    assert "w0" in lost["detail"] and account["main_cause"] == "worker_lost" and account["bottleneck"] == "host"
    summary = asyncio.run(cluster.reports.summary(600.0, 0, "wall"))
    assert summary["num_gaps"] == 5 - 1 + 15 - 1 + 1 and summary["itl"]["p99"]["seconds"] == pytest.approx(again_s - last_s, rel=0.05)


def test_who_runs_where_a_lost_request_goes_on_waits_for_a_prompt_and_not_for_room() -> None:
    """More KV blocks would have helped neither of them: that is not to be advised."""
    cluster = ToldCluster(Worker("w0", 0.0), Worker("w1", 0.0))
    cluster.open("r", num_prompt=400, num_output=30)
    cluster.open("beside", num_prompt=20, num_output=30)
    cluster.place("beside", "w1")
    cluster.run("w1", "beside", 5)
    cluster.place("r", "w0")
    cluster.run("w0", "r", 5)
    cluster.journeys.lost("r", cluster.clock.now())
    cluster.place("r", "w1", made=[4 + i for i in range(5)])
    cluster.run("w1", "r", 30)
    cluster.run("w1", "beside", 30)
    for name in ("r", "beside"):
        account = cluster.account(name)
        adds_up(account)
        assert "recomputed" not in seconds_of(account) and "KV blocks" not in str(account["advice"])
    assert seconds_of(account)["others_prefill"] > 0.0
    (prefill,) = (part for part in cluster.account("r")["causes"] if part["cause"] == "prefill")
    assert "cannot be asked" in prefill["detail"]  # these seconds are the lost worker's, whatever the next one says of a prompt


def test_a_decode_worker_that_is_lost_takes_nothing_of_what_the_prefill_worker_told() -> None:
    cluster = ToldCluster(Worker("p", 50.0, "prefill"), Worker("d", 9.0, "decode"), Worker("d2", 3.0, "decode"))
    cluster.open("r", num_prompt=200, num_output=20)
    cluster.place("r", "p")
    cluster.run("p", "r", 1)
    (token,) = cluster.workers["p"].run.engine.loop.offer(engine_id(1))
    cluster.place("r", "d", made=[token], handed_over=True)
    cluster.workers["p"].run.engine.release(engine_id(1))
    cluster.run("d", "r", 5)
    cluster.journeys.lost("r", cluster.clock.now())
    cluster.place("r", "d2", made=[token, *range(5, 9)])
    cluster.run("d2", "r", 20)
    account = cluster.account("r")
    adds_up(account)
    (prefill,) = (part for part in account["causes"] if part["cause"] == "prefill")
    assert "its own prompt: 200 tokens" in prefill["detail"] and account["workers"] == ["p", "d", "d2"]


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_a_client_that_leaves_amid_a_step_is_charged_up_to_there(num_tokens: int) -> None:
    """Its worker hears of it when the step is over, and charges all of it."""
    cluster = ToldCluster(Worker("w0", offset_s=20.0))
    worker = cluster.workers["w0"].run
    cluster.open("r", num_output=50)
    cluster.place("r", "w0")
    cluster.run("w0", "r", num_tokens)
    cluster.at(cluster.workers["w0"].now + LINK_S + 0.2)
    cluster.abort("r")
    worker.device.delay = lambda step: 3.0
    cluster.step("w0", told=False)
    worker.engine.abort(engine_id(1))
    account = cluster.account("r")
    adds_up(account)
    assert account["state"] == "aborted" and account["wall_s"] < 1.0
    assert all(advice["gain_s"] <= account["wall_s"] for advice in account["advice"])


def test_a_leg_that_gave_nothing_is_lost_whole_and_the_next_is_told_as_it_was() -> None:
    cluster = ToldCluster(Worker("w0", 0.0), Worker("w1", 0.0))
    cluster.open("r")
    cluster.place("r", "w0")
    cluster.at(2.0)
    cluster.journeys.lost("r", 2.0)
    cluster.at(2.5)
    running = cluster.account("r")
    assert running["state"] == "queued" and seconds_of(running)["worker_lost"] == pytest.approx(2.5)
    cluster.place("r", "w1")
    cluster.run("w1", "r", 10)
    account = cluster.account("r")
    adds_up(account)
    found, told = seconds_of(account), cluster.workers["w1"].run.engine.timeline.find(engine_id(2))
    assert told is not None and found["worker_lost"] == pytest.approx(2.5)
    assert found["prefill"] == pytest.approx(told.seconds[Cause.PREFILL], abs=1e-6) and found["network"] == pytest.approx(2 * LINK_S)


def test_a_hand_off_is_a_cause_of_its_own() -> None:
    """Here the sender's account counts up to its first token; the next worker goes on after it."""
    cluster = ToldCluster(Worker("p", 50.0, "prefill"), Worker("d", 9.0, "decode"))
    cluster.open("r", num_prompt=200)
    cluster.place("r", "p")
    cluster.run("p", "r", 1)
    sender = cluster.workers["p"].run.engine
    first_s = cluster.clock.now()
    (token,) = sender.loop.offer(engine_id(1))
    cluster.at(first_s + 0.75)
    cluster.workers["p"].run.clock.advance(0.75)
    running = cluster.account("r")
    assert seconds_of(running)["hand_off"] == pytest.approx(0.75) and running["bottleneck"] == "network"  # as the sender has it
    cluster.place("r", "d", made=[token], handed_over=True)
    sender.release(engine_id(1))
    cluster.run("d", "r", 10)
    account = cluster.account("r")
    adds_up(account)
    found = seconds_of(account)
    assert found["hand_off"] == pytest.approx(0.75) and account["workers"] == ["p", "d"] and "p to d" in str(account["causes"])
    assert found["network"] == pytest.approx(4 * LINK_S)
    assert not sender.timeline._live and not sender.metrics._progress


def test_a_summary_asks_for_what_had_ended_before_its_window() -> None:
    cluster = ToldCluster(Worker("p", 50.0, "prefill"), Worker("d", 9.0, "decode"))
    cluster.open("r", num_prompt=200)
    cluster.place("r", "p")
    cluster.run("p", "r", 1)
    sender = cluster.workers["p"].run
    (token,) = sender.engine.loop.offer(engine_id(1))
    cluster.place("r", "d", made=[token], handed_over=True)
    sender.engine.release(engine_id(1))
    for worker in cluster.workers.values():
        worker.run.clock.advance(500.0)
    cluster.run("d", "r", 10)
    first, second = sender.engine.timeline.find(engine_id(1)), cluster.workers["d"].run.engine.timeline.find(engine_id(2))
    summary = asyncio.run(cluster.reports.summary(60.0, 0, "wall"))
    prefill = next(part["seconds"] for part in summary["causes"] if part["cause"] == "prefill")
    assert first is not None and second is not None
    assert prefill == pytest.approx(first.seconds[Cause.PREFILL] + second.seconds[Cause.PREFILL], abs=1e-6)


def test_a_worker_that_does_not_answer_leaves_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.distributed.cluster_reports.ANSWER_S", 0.01)
    cluster = ToldCluster(Worker("w0", 0.0), Worker("w1", 0.0))
    cluster.open("r")
    cluster.place("r", "w0")
    cluster.run("w0", "r", 10)
    cluster.silent.add("w0")
    account = cluster.account("r")
    adds_up(account)
    assert set(seconds_of(account)) == {"prefill", "decode", "remainder"} and "cannot be asked" in str(account["causes"])
    summary = asyncio.run(cluster.reports.summary(60.0, 4, "wall"))
    assert summary["complete"] is False and [worker["name"] for worker in summary["workers"]] == ["w1"]


def test_lists_and_the_summary_are_of_all_workers() -> None:
    cluster = ToldCluster(Worker("w0", 300.0), Worker("w1", 40.0))
    for i in range(6):
        cluster.open(f"r{i}", num_output=3 + i)
        cluster.place(f"r{i}", f"w{i % 2}")
        cluster.run(f"w{i % 2}", f"r{i}", 3 + i)
    cluster.open("waits")
    answers = {f"r{i}": (f"r{i}",) for i in range(6)} | {"waits": ("waits",), "unknown": ("nobody",)}

    def told(sort: str, limit: int, state: str) -> list[dict[str, Any]]:
        return asyncio.run(cluster.reports.answers(answers, sort, limit, state))

    listed = told("recent", 3, "all")
    assert [one["id"] for one in listed] == ["waits", "r5", "r4"] and [one["workers"] for one in listed] == [[], ["w1"], ["w0"]]
    assert listed[1]["completion_tokens"] == 8 and listed[1]["prompt_tokens"] == 100
    assert len(told("recent", 9, "all")) == 7, "what is not known is left out"
    slowest = told("slowest", 1, "finished")
    assert slowest[0]["wall_s"] == max(one["wall_s"] for one in told("recent", 9, "finished"))
    call = {"call": ("r0", "r3", "waits")}
    (row,) = asyncio.run(cluster.reports.answers(call, "recent", 9, "running"))
    assert (row["id"], row["prompts"], row["completion_tokens"], row["state"]) == ("call", 3, 9, "queued")
    summary = asyncio.run(cluster.reports.summary(600.0, 4, "wall"))
    assert (summary["num_requests"], summary["num_first_tokens"], summary["complete"]) == (6, 6, True)
    assert summary["num_gaps"] == sum(2 + i for i in range(6)) and summary["engine"]["waiting"] == 1
    assert summary["engine"]["kv_blocks"] == 2 * 4096 and [step["worker"] for step in summary["steps"]] == ["w0", "w0", "w1", "w1"]
    for held in (*summary["ttft"].values(), *summary["itl"].values()):
        assert sum(held["shares"].values()) == pytest.approx(1.0, abs=0.01)
    assert "network" in summary["ttft"]["p50"]["shares"]
    with pytest.raises(ReplayUnavailable, match="without a simulator"):
        asyncio.run(cluster.reports.replay(60.0))


def test_metrics_have_the_worker_and_its_role() -> None:
    cluster = ToldCluster(Worker("w0", 0.0, "prefill"), Worker("w1", 0.0, "decode"))
    cluster.open("r")
    cluster.place("r", "w1")
    cluster.run("w1", "r", 10)
    body, _ = exposition(asyncio.run(cluster.reports.metrics()))
    lines = dict(line.rsplit(" ", 1) for line in body.decode().splitlines() if not line.startswith("#"))
    assert lines['octavo_requests_total{role="decode",worker="w1"}'] == "1.0"
    assert lines['octavo_requests_total{role="prefill",worker="w0"}'] == "0.0"
    assert lines['octavo_kv_slots_filled_ratio{role="prefill",worker="w0"}'] == "NaN"
    assert lines['octavo_request_seconds_bucket{le="+Inf",role="decode",worker="w1"}'] == "1.0"
    assert lines['octavo_cluster_lost_attempts_total{role="front_end",worker=""}'] == "0.0"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"null",
        b"[" * 100_000,
        b'{"accounts": [{"name": "attempt-1"}]}',
        b'{"accounts": [{"name": 7, "wall_s": 1, "state": "x"}]}',
        b'{"accounts": [{"name": "attempt-1", "wall_s": -1, "state": "finished", "ttft_s": 0.01}]}',
        b'{"accounts": [{"name": "attempt-1", "wall_s": 1, "ttft_s": 0.1, "state": "finished", "details": {"decode": "\\u001b[2J"}}]}',
        b'{"accounts": [], "gaps": [[99999999, [1, 2]], [1, [1]]], "is_whole": true, "advice": [], "num_advised": 0, "engine": {}}',
        b'{"families": [{"name": "octavo_steps", "kind": "gauge", "help": "", "samples": [[{}, 1]]}]}',
    ],
)
def test_an_answer_that_is_none_is_left_out(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ToldCluster(Worker("w0", 0.0), Worker("w1", 0.0))
    cluster.open("r")
    cluster.place("r", "w0")
    cluster.run("w0", "r", 10)
    ask = cluster.ask

    async def lied(worker: str, what: str, args: bytes) -> bytes:
        return answer if worker == "w0" else await ask(worker, what, args)

    monkeypatch.setattr(cluster, "ask", lied)
    account = cluster.account("r")
    adds_up(account)
    assert "cannot be asked" in str(account["causes"])
    summary = asyncio.run(cluster.reports.summary(60.0, 4, "wall"))
    assert [worker["name"] for worker in summary["workers"]] == ["w1"] and summary["complete"] is False
    assert b'worker="w1"' in exposition(asyncio.run(cluster.reports.metrics()))[0]


def test_many_questions_to_a_worker_that_hangs_are_a_few_lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever asks for accounts brings them about, as often as they like."""
    monkeypatch.setattr("octavo.distributed.cluster_reports.ANSWER_S", 0.01)
    cluster = ToldCluster(Worker("w0", 0.0), Worker("w1", 0.0))
    cluster.open("r")
    cluster.place("r", "w0")
    cluster.silent.add("w0")

    async def run() -> None:
        await asyncio.gather(*(cluster.reports.account(["r"]) for _ in range(20)), *(cluster.reports.metrics() for _ in range(20)))

    with caplog.at_level("WARNING", "octavo.distributed"):
        asyncio.run(run())
        cluster.reports._unanswered.flush()
    lines = [record.message for record in caplog.records]
    assert lines[:MAX_LINES] == ["worker w0: no answer to a question for accounts: TimeoutError"] * MAX_LINES
    assert len(lines) == MAX_LINES + 1 and lines[-1].startswith(f"worker: {40 - MAX_LINES} more within 10 s (20 times: no answer")


# --- any way ------------------------------------------------------------------------------------------------------------------------------


class Way:
    """One request on a random way, and what its workers would say of it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now, self.key = rng, 10.0, 0
        self.journeys = Journeys()
        self.told: dict[tuple[str, str], WorkerAccount] = {}
        self.journeys.opened(Request("r", [5], SamplingParams(max_tokens=99), 1, frozenset(), 10.0, received_s=9.0 + rng.random()))

    def wait(self) -> None:
        self.now += self.rng.choice((0.0, 0.001, 0.3, 5.0))

    def leg(self, place: bool = True) -> str:
        """Ends as "lost", "handed over" or "finished"."""
        rng, worker = self.rng, f"w{self.rng.randrange(3)}"
        if place:
            self.key += 1
            self.journeys.placed("r", worker, engine_id(self.key), self.now)
        sent_s, first_s = self.now, None
        for _ in range(rng.choice((0, 1, 4))):
            self.wait()
            first_s = first_s or self.now
            self.journeys.tokens("r", 1, self.now)
        last_s = self.now
        end = rng.choice(["lost", "finished", *(["handed over"] if first_s else [])])
        if end != "finished":
            self.wait()
        leg = self.journeys.find("r").legs[-1]  # type: ignore[union-attr]
        account = self.account(leg.name, sent_s, first_s, last_s)
        if rng.random() < 0.8:
            self.told[leg.worker, leg.name] = account
        return end

    def charge_a_step_that_went_on(self) -> None:
        """The client leaves amid it, and the worker charges all of it."""
        leg = self.journeys.find("r").legs[-1]  # type: ignore[union-attr]
        account = self.told.get((leg.worker, leg.name))
        if account is not None:
            step_s = self.rng.choice((0.0, 0.01, 2.0))
            account.wall_s += step_s
            account.seconds[NAMES[Cause.DECODE]] = account.seconds.get(NAMES[Cause.DECODE], 0.0) + step_s

    def account(self, name: str, sent_s: float, first_s: float | None, last_s: float) -> WorkerAccount:
        """Of a worker that got it after a while and whose events took a while to come, the first and the last one another while."""
        there_s, back_s, late_s = (self.rng.random() * 0.3 * ((first_s or last_s) - sent_s) for _ in range(3))
        ttft_s = None if first_s is None else first_s - sent_s - there_s - back_s - late_s
        wall_s = max(0.0, last_s - sent_s - there_s - back_s)
        causes = self.rng.sample(NAMES[1:26], 3)
        ttft = {} if ttft_s is None else {causes[0]: 0.7 * ttft_s, causes[1]: 0.3 * ttft_s}
        rest_s = wall_s - (ttft_s or 0.0)
        seconds = {cause: ttft.get(cause, 0.0) + share * rest_s for cause, share in zip(causes, (0.2, 0.5, 0.3), strict=True)}
        return WorkerAccount(name, wall_s, "finished", ttft_s, 0.0, seconds, ttft)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_becomes_of_a_request_its_causes_add_up(seed: int) -> None:
    way = Way(random.Random(seed))
    way.wait()
    end, place = "", True
    for _ in range(way.rng.randrange(1, 6)):
        end = way.leg(place)
        place = True
        if end == "finished":
            break
        if end == "lost":
            way.journeys.lost("r", way.now)
            way.wait()
        else:
            way.key += 1
            way.journeys.handed_over("r", "w9", engine_id(way.key), way.now)
            place = False
        check(way)
    reason = FinishReason.LENGTH if end == "finished" else FinishReason.ERROR
    if end == "finished" and way.rng.random() < 0.3:
        reason = FinishReason.ABORT
        way.charge_a_step_that_went_on()
    way.journeys.ended("r", reason, way.now)
    check(way)
    if way.rng.random() < 0.5:
        way.wait()
        way.journeys.delivered(["r"], way.now)
        check(way)


def check(way: Way) -> None:
    journey = way.journeys.find("r")
    assert journey is not None
    merged = merge(journey, way.told, way.now)
    found = merged.explanation(way.now)
    assert found.remainder_s == pytest.approx(0.0, abs=1e-6), [(c.cause.name, c.seconds) for c in found.causes]
    assert all(seconds >= -1e-9 for seconds in merged.seconds)
    if journey.first_token_s is not None:
        assert merged.ttft_seconds is not None
        assert sum(merged.ttft_seconds) == pytest.approx(journey.first_token_s - journey.received_s, abs=1e-6)
        pairs = [(a, b) for c, a, b in zip(Cause, merged.ttft_seconds, merged.seconds, strict=True) if c is not Cause.NETWORK]
        assert all(up_to <= all_of + 1e-9 for up_to, all_of in pairs)  # a first token may have been longer on its way than the last


def test_advice_to_different_numbers_of_one_flag_is_one() -> None:
    engine = ToldEngine("m", 0, 0, 1, 1, 0, 0, 0, 0)

    def window(num_advised: int, *advice: tuple[str, float]) -> Window:
        told = [ToldAdvice(change, gain_s, f"why {change}", "time stamps") for change, gain_s in advice]
        return Window([], [], True, told, num_advised, engine)

    first = window(3, ("--max-itl-ms 32", 0.4), ("more KV blocks (--num-kv-blocks 99)", 0.1))
    windows = [first, window(1, ("--max-itl-ms 37.5", 4.0)), window(0)]
    shown = [(one["change"], one["gain_s"], one["why"]) for one in _mean_advice(windows)]
    assert shown == [
        ("--max-itl-ms 37.5", pytest.approx(1.3), "why --max-itl-ms 37.5"),
        ("more KV blocks (--num-kv-blocks 99)", pytest.approx(0.075), "why more KV blocks (--num-kv-blocks 99)"),
    ]
