"""Accounts of requests over HTTP: in the answer itself, by its id, in lists and summaries; with a key, with bad ids and fields."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from octavo.core.recorded_window import RecordedWindow, WindowReplay
from octavo.core.request import FinishReason
from octavo.engine import replay_advice
from octavo.engine.causes import NAMES, Bottleneck
from octavo.engine.explain import STATES, state_of
from octavo.engine.replay_advice import ReplayError
from octavo.engine.request_record import RecordState, RequestRecord
from octavo.server.app import ServerOptions
from octavo.simulator.what_if import what_if
from tests.engine.scripted import Bigram, bigram_engine
from tests.server.harness import RunningServer, strict_json, wait_until

FIELDS = {"wall_s", "ttft_s", "state", "finish_reason", "main_cause", "bottleneck", "causes", "advice"}


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with RunningServer(bigram_engine(max_num_seqs=4)) as running:
        yield running


def get(server: RunningServer, path: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    status, _, data = server.request("GET", path, headers=headers)
    assert status == 200, data
    return strict_json(data)


def adds_up(found: dict[str, Any]) -> None:
    assert {entry["cause"] for entry in found["causes"]} <= {*NAMES, "remainder"}
    assert all(entry["seconds"] >= 0 or entry["cause"] == "remainder" for entry in found["causes"])
    assert all(entry["detail"] for entry in found["causes"])
    assert sum(entry["seconds"] for entry in found["causes"]) == pytest.approx(found["wall_s"], abs=1e-5)
    (remainder,) = (entry["seconds"] for entry in found["causes"] if entry["cause"] == "remainder")
    assert abs(remainder) <= 0.01 * found["wall_s"]
    assert found["bottleneck"] in {b.value for b in Bottleneck} and found["main_cause"] in NAMES
    assert found["ttft_s"] is None or 0 < found["ttft_s"] <= found["wall_s"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_plain_answer_carries_its_account(path: str) -> None:
    from octavo.models.chat_template import ChatTemplate

    template = ChatTemplate("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with RunningServer(bigram_engine(chat_template=template)) as server:
        body = {"prompt": "abc"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "abc"}]}
        answer = server.post(path, body | {"max_tokens": 5, "explain": True, "ignore_eos": True})
        assert set(answer["explain"]) == FIELDS
        adds_up(answer["explain"])
        assert answer["explain"]["state"] == "finished"
        assert "explain" not in server.post(path, body | {"max_tokens": 5, "explain": False})


@pytest.mark.parametrize("usage", [False, True])
def test_the_last_chunk_of_a_stream_carries_it(server: RunningServer, usage: bool) -> None:
    body = {"prompt": ["abc", "de"], "n": 2, "max_tokens": 4, "explain": True, "ignore_eos": True}
    chunks = server.stream("/v1/completions", body | ({"stream_options": {"include_usage": True}} if usage else {}))
    assert ["explain" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    adds_up(chunks[-1]["explain"])
    assert chunks[-1]["explain"]["prompts"] == 2
    assert (chunks[-1].get("usage") is not None) == usage


def test_by_the_id_of_the_answer(server: RunningServer) -> None:
    answer = server.complete("abc", max_tokens=5, ignore_eos=True, explain=True)
    wait_until(lambda: get(server, f"/v1/requests/{answer['id']}/explain")["wall_s"] > answer["explain"]["wall_s"])
    found = get(server, f"/v1/requests/{answer['id']}/explain")
    assert set(found) == FIELDS | {"id", "object"} and found["id"] == answer["id"]
    adds_up(found)
    assert {"delivery", "preparation", "decode"} <= {entry["cause"] for entry in found["causes"]}
    named = server.complete("abc", max_tokens=2, request_id="a/b c")
    assert get(server, "/v1/requests/cmpl-a/b%20c/explain")["id"] == named["id"] == "cmpl-a/b c"


def test_of_a_request_that_runs(server: RunningServer) -> None:
    backend = server.engine.backend
    assert isinstance(backend, Bigram)
    backend.delay_s = 0.01
    with server.open_stream("/v1/completions", {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True, "request_id": "it"}):
        wait_until(lambda: server.engine.scheduler.num_running == 1)
        found = get(server, "/v1/requests/cmpl-it/explain")
        assert found["state"] in ("queued", "running") and found["finish_reason"] is None
        listed = get(server, "/v1/requests?state=running")
        assert [entry["id"] for entry in listed["data"]] == ["cmpl-it"]
        assert get(server, "/v1/requests?state=finished")["data"] == []


def test_what_became_of_a_request_is_its_state(server: RunningServer) -> None:
    backend = server.engine.backend
    assert isinstance(backend, Bigram)

    def told(name: str) -> tuple[str, str]:
        found = get(server, f"/v1/requests/cmpl-{name}/explain")
        (listed,) = (one for one in get(server, "/v1/requests")["data"] if one["id"] == f"cmpl-{name}")
        assert (listed["state"], listed["finish_reason"]) == (found["state"], found["finish_reason"])
        return found["state"], found["finish_reason"]

    server.complete("abc", max_tokens=2, ignore_eos=True, request_id="short")
    assert told("short") == ("finished", "length")
    backend.delay_s = 0.01
    with server.open_stream("/v1/completions", {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True, "request_id": "left"}):
        wait_until(lambda: server.engine.scheduler.num_running == 1)
    wait_until(lambda: server.engine.scheduler.num_running == 0)
    assert told("left") == ("aborted", "abort"), "its client has left"
    begin_step = server.engine.loop.begin_step

    def explode(now_s: float) -> None:
        raise AssertionError("a bug")

    server.engine.loop.begin_step = explode  # type: ignore[method-assign, assignment]
    assert server.error("/v1/completions", {"prompt": "x", "request_id": "hit"})[0] == 500
    server.engine.loop.begin_step = begin_step  # type: ignore[method-assign]
    assert told("hit") == ("failed", "error")


def test_states_of_records() -> None:
    """Of all that a record can be; the words are those of the docs."""
    page = (Path(__file__).parents[2] / "docs" / "explain.md").read_text()
    record = RequestRecord("it", 0.0, 0.0, 1)
    seen = []
    for state in RecordState:
        for reason in FinishReason if state is RecordState.ENDED else [None]:
            record.state, record.finish_reason = state, reason
            seen.append(state_of(record))
    assert set(seen) == set(STATES) and all(f"| `{word}` |" in page for word in STATES)


def test_a_row_for_each_answer_and_every_id_is_known(server: RunningServer) -> None:
    """However many prompts calls have, and however many of their requests the engine has forgotten."""
    server.engine.timeline.ended_records.capacity = 8
    made, rng = [], random.Random(1)
    for num_prompts in (5, 5, 1, *(rng.randint(1, 12) for _ in range(12))):
        made.append((server.complete(["abc"] * num_prompts, max_tokens=2, ignore_eos=True), num_prompts))
        for sort in ("recent", "slowest"):
            listed = get(server, f"/v1/requests?limit=100&sort={sort}")["data"]
            ids = [one["id"] for one in listed]
            assert len(set(ids)) == len(ids) and set(ids) <= {answer["id"] for answer, _ in made}
            assert made[-1][0]["id"] in ids
            for one in listed:
                assert get(server, f"/v1/requests/{quote(one['id'])}/explain").get("prompts") == one.get("prompts")
        ids = [one["id"] for one in get(server, "/v1/requests?limit=100")["data"]]
        assert ids == [answer["id"] for answer, _ in made[::-1]][: len(ids)], "the last one first"
        last = get(server, "/v1/requests?limit=1")["data"][0]
        answer, num_prompts = made[-1]
        if num_prompts <= 8:
            assert last.get("prompts", 1) == num_prompts and last["completion_tokens"] == answer["usage"]["completion_tokens"]
            assert last["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert [num_prompts for _, num_prompts in made[:3]] == [5, 5, 1]


def test_what_runs_is_known_however_much_has_ended_since(server: RunningServer) -> None:
    server.engine.timeline.ended_records.capacity = 4
    backend = server.engine.backend
    assert isinstance(backend, Bigram)
    backend.delay_s = 0.01
    with server.open_stream("/v1/completions", {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True, "request_id": "long"}):
        wait_until(lambda: server.engine.scheduler.num_running == 1)
        for _ in range(4):
            server.complete(["abc"] * 3, max_tokens=1)
        assert [one["id"] for one in get(server, "/v1/requests?state=running")["data"]] == ["cmpl-long"]
        assert get(server, "/v1/requests/cmpl-long/explain")["state"] == "running"


def test_unknown_ids_and_bad_fields(server: RunningServer) -> None:
    def refused(path: str, status: int) -> dict[str, Any]:
        got, _, data = server.request("GET", path)
        assert got == status
        error = strict_json(data)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    error = refused("/v1/requests/cmpl-nobody/explain", 404)
    assert error["code"] == "request_not_found" and error["param"] == "request_id" and "cmpl-nobody" in error["message"]
    assert refused("/v1/requests//explain", 404)["code"] == "request_not_found"
    for path, param in (
        ("/v1/explain/summary?seconds=0", "seconds"),
        ("/v1/explain/summary?seconds=601", "seconds"),
        ("/v1/explain/summary?seconds=1.5", "seconds"),
        ("/v1/explain/summary?seconds=", "seconds"),
        ("/v1/explain/summary?seconds=5&seconds=6", "seconds"),
        ("/v1/explain/summary?steps=513", "steps"),
        ("/v1/explain/summary?when=now", "when"),
        ("/v1/requests?limit=0", "limit"),
        ("/v1/requests?limit=101", "limit"),
        ("/v1/requests?sort=fast", "sort"),
        ("/v1/requests?state=new", "state"),
    ):
        assert refused(path, 400)["param"] == param


def test_the_key_protects_all_of_it() -> None:
    with RunningServer(bigram_engine(), ServerOptions(api_key="secret")) as server:
        for path in ("/v1/requests", "/v1/requests/x/explain", "/v1/explain/summary"):
            assert server.request("GET", path)[0] == 401
        key = {"Authorization": "Bearer secret"}
        assert get(server, "/v1/requests", key)["data"] == []
        assert server.request("GET", "/v1/requests/x/explain", headers=key)[0] == 404


def test_lists_and_the_summary(server: RunningServer) -> None:
    ids = [server.complete("abc", max_tokens=n, ignore_eos=True)["id"] for n in (3, 40, 2)]
    listed = get(server, "/v1/requests?limit=2")["data"]
    assert [entry["id"] for entry in listed] == [ids[2], ids[1]]
    assert [entry["completion_tokens"] for entry in listed] == [2, 40]
    assert get(server, "/v1/requests?sort=slowest&limit=1")["data"][0]["wall_s"] == max(
        entry["wall_s"] for entry in get(server, "/v1/requests")["data"]
    )
    found = get(server, "/v1/explain/summary?seconds=600&steps=5")
    assert (found["num_requests"], found["num_first_tokens"], found["complete"]) == (3, 3, True)
    assert found["num_gaps"] >= 42  # where the machine holds a write up, that is a gap as well
    assert len(found["steps"]) == 5 and found["engine"]["running"] == 0
    for percentiles in (found["ttft"], found["itl"]):
        assert set(percentiles) == {"p50", "p99"}
        for held in percentiles.values():
            assert sum(held["shares"].values()) == pytest.approx(1.0, abs=0.01)
            assert next(iter(held["shares"])) == held["bottleneck"]
    metrics = server.metrics()
    assert metrics['octavo_request_cause_seconds_total{cause="decode"}'] > 0
    assert any(name.startswith("octavo_bottleneck_ratio{") for name in metrics)


def test_an_idle_server_has_an_empty_summary(server: RunningServer) -> None:
    found = get(server, "/v1/explain/summary")
    assert (found["num_requests"], found["ttft"], found["itl"], found["causes"], found["advice"]) == (0, {}, {}, [], [])


@pytest.mark.parametrize("shown", [False, True])
def test_what_others_have_in_the_cache_is_told_with_the_flag_alone(shown: bool) -> None:
    with RunningServer(bigram_engine(), ServerOptions(explain_cache=shown)) as server:
        prompt = [5 + i for i in range(100)]
        server.complete(prompt, max_tokens=1, cache_salt="theirs")
        answer = server.complete(prompt, max_tokens=1, cache_salt="mine", explain=True)["explain"]
        summary = get(server, "/v1/explain/summary")
        told = {entry["cause"] for entry in answer["causes"] + summary["causes"]}
        assert ("cache_miss" in told) == shown
        assert ("salt" in str(answer) + str(summary)) == shown
        assert (server.metrics()['octavo_request_cause_seconds_total{cause="cache_miss"}'] > 0) == shown


def test_prompts_of_one_call_wait_for_each_other(server: RunningServer) -> None:
    answer = server.complete(["a", "b"], max_tokens=3, ignore_eos=True, explain=True)
    assert answer["explain"]["prompts"] == 2
    adds_up(answer["explain"])
    for record in server.engine.timeline.records():
        wait_until(lambda record=record: record.sent_s is not None)
        assert record.end_s - record.received_s == pytest.approx(sum(record.seconds), rel=1e-6)


# --- replayed advice ---------------------------------------------------------------------------------------------------------------------


def refused(server: RunningServer, path: str) -> tuple[int, dict[str, Any]]:
    status, _, data = server.request("GET", path)
    return status, strict_json(data)["error"]


def test_advice_is_replayed_on_demand_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_advice, "FRESH_S", 3600.0)  # however long one takes here
    windows = list[RecordedWindow]()

    def replayer(window: RecordedWindow) -> WindowReplay:
        windows.append(window)
        return what_if(window)

    with RunningServer(bigram_engine(max_num_seqs=4), replayer=replayer) as server:
        for i in range(30):
            server.complete([5 + i] * 40, max_tokens=12, ignore_eos=True)
        assert "replay" not in get(server, "/v1/explain/summary") and not windows
        found = get(server, "/v1/explain/summary?seconds=600&advice=replay&objective=ttft_p50")["replay"]
        assert len(windows) == 1 and len(windows[0].requests) == 30
        assert (found["objective"], found["num_requests"], found["window_s"]) == ("ttft_p50", 30, 600.0)
        assert found["error"] == pytest.approx(abs(found["replayed_s"] / found["measured_s"] - 1.0), abs=1e-3)
        assert found["advice"] and all(one["basis"] == "replay of 30 requests" for one in found["advice"])
        again = get(server, "/v1/explain/summary?seconds=600&advice=replay")["replay"]
        kept = get(server, "/v1/explain/summary?seconds=60")["replay"]
        assert len(windows) == 1 and again["objective"] == kept["objective"] == "wall" and kept["window_s"] == 600.0
        get(server, "/v1/explain/summary?seconds=599&advice=replay")
        assert len(windows) == 2  # another window is another question


def test_a_replay_that_cannot_be_made_is_an_error_of_the_question() -> None:
    with RunningServer(bigram_engine(), replayer=what_if_or_error) as server:
        status, error = refused(server, "/v1/explain/summary?advice=replay")
        assert (status, error["param"], error["code"]) == (409, "advice", "not_replayable")
        assert "steps: 0 are not enough" in error["message"]
        for query, param in (("advice=magic", "advice"), ("advice=replay&objective=happiness", "objective")):
            status, error = refused(server, f"/v1/explain/summary?{query}")
            assert (status, error["param"]) == (400, param)
    with RunningServer(bigram_engine()) as server:
        status, error = refused(server, "/v1/explain/summary?advice=replay")
        assert (status, error["code"]) == (501, "no_simulator")


def what_if_or_error(window: RecordedWindow) -> WindowReplay:
    try:
        return what_if(window)
    except ValueError as error:
        raise ReplayError(str(error)) from None


@pytest.mark.parametrize("shown", [False, True])
def test_a_replay_tells_what_salts_part_with_the_flag_alone(shown: bool) -> None:
    with RunningServer(bigram_engine(), ServerOptions(explain_cache=shown), what_if) as server:
        for i in range(12):
            server.complete([5 + k for k in range(100)], max_tokens=6, ignore_eos=True, cache_salt=f"salt {i % 3}")
        found = get(server, "/v1/explain/summary?advice=replay")["replay"]
        assert any("cache_salt" in one["change"] for one in found["advice"]) == shown
