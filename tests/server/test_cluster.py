"""A server with workers behind it answers every route: accounts and lists of all workers, operations, and what becomes of a lost one."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from octavo.cli.main import cli
from octavo.distributed.learned_costs import LearnedCosts
from octavo.engine.causes import NAMES
from octavo.server.app import ServerOptions
from tests.engine.scripted import bigram_engine
from tests.server.cluster_harness import RunningCluster
from tests.server.harness import TIMEOUT_S, RunningServer, sse_events, strict_json, wait_until

KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningCluster]:
    with RunningCluster({"w0": "both", "w1": "both"}, ServerOptions(api_key="secret")) as running:
        yield running


def get(server: RunningServer, path: str) -> dict[str, Any]:
    status, _, data = server.request("GET", path, headers=KEY)
    assert status == 200, data
    return strict_json(data)


def complete(server: RunningServer, **fields: Any) -> dict[str, Any]:
    return server.post("/v1/completions", {"prompt": "abc", "temperature": 0, "ignore_eos": True, **fields}, KEY)


def adds_up(found: dict[str, Any]) -> None:
    seconds = {entry["cause"]: entry["seconds"] for entry in found["causes"]}
    assert set(seconds) <= {*NAMES, "remainder"}
    assert sum(seconds.values()) == pytest.approx(found["wall_s"], abs=1e-5)
    assert abs(seconds["remainder"]) <= 0.01 * found["wall_s"]
    assert all(value >= 0 for cause, value in seconds.items() if cause != "remainder")


def run(server: RunningServer, *args: str) -> Any:
    return CliRunner().invoke(cli, [*args, "--url", f"http://127.0.0.1:{server.port}", "--api-key", "secret"])


def test_an_answer_carries_its_account_and_so_does_its_id(server: RunningCluster) -> None:
    answer = complete(server, max_tokens=12, explain=True)
    adds_up(answer["explain"])
    assert answer["explain"]["workers"] in (["w0"], ["w1"]) and answer["usage"]["completion_tokens"] == 12
    wait_until(lambda: "delivery" in str(get(server, f"/v1/requests/{answer['id']}/explain")["causes"]))
    found = get(server, f"/v1/requests/{answer['id']}/explain")
    adds_up(found)
    assert {"network", "decode", "preparation"} <= {entry["cause"] for entry in found["causes"]}
    several = complete(server, prompt=["abc", "de"], n=2, max_tokens=3, explain=True)["explain"]
    adds_up(several)
    assert several["prompts"] == 2


def test_lists_the_summary_and_metrics_are_of_all_workers(server: RunningCluster) -> None:
    ids = [complete(server, prompt=[5 + i] * 20, max_tokens=4)["id"] for i in range(6)]
    assert [entry["id"] for entry in get(server, "/v1/requests?limit=6")["data"]] == ids[::-1]
    summary = get(server, "/v1/explain/summary?seconds=600&steps=8")
    assert summary["num_requests"] >= 6 and summary["complete"] is True
    assert {worker["name"] for worker in summary["workers"]} == {"w0", "w1"}
    assert summary["engine"]["kv_blocks"] == 2 * 512 and summary["engine"]["max_num_seqs"] == 8
    status, _, data = server.request("GET", "/v1/explain/summary?advice=replay", headers=KEY)
    assert status == 501 and "without a simulator" in strict_json(data)["error"]["message"]
    _, _, data = server.request("GET", "/metrics", headers=KEY)
    samples = dict(line.rsplit(" ", 1) for line in data.decode().splitlines() if not line.startswith("#"))
    taken = [float(samples[f'octavo_requests_total{{role="both",worker="{name}"}}']) for name in ("w0", "w1")]
    assert float(samples['octavo_num_requests_waiting{role="front_end",worker=""}']) == 0
    assert sum(taken) >= 6 and float(samples['octavo_cluster_hand_offs_total{role="front_end",worker=""}']) == 0


def test_top_and_explain_show_a_cluster(server: RunningCluster) -> None:
    complete(server, max_tokens=5)
    shown = run(server, "top", "--once")
    assert shown.exit_code == 0, shown.output
    assert "w0" in shown.output and "w1" in shown.output and "0 of 8" in shown.output
    shown = run(server, "explain", "--last")
    assert shown.exit_code == 0 and "network" in shown.output and "on w" in shown.output, shown.output


def test_a_stream_goes_on_when_its_worker_is_lost() -> None:
    with RunningCluster({"w0": "both", "w1": "both"}) as server:
        alone = server.complete("abc", max_tokens=60, ignore_eos=True)["choices"][0]["text"]
        body = {"prompt": "abc", "temperature": 0, "max_tokens": 60, "ignore_eos": True, "request_id": "it", "explain": True}
        goes_on = threading.Event()
        for worker in server.workers.values():
            worker.hold_at(20, goes_on)
        events = sse_events(server.open_stream("/v1/completions", body))
        wait_until(lambda: any(one["completion_tokens"] > 3 for one in get(server, "/v1/requests?state=running")["data"]))
        (holder,) = get(server, "/v1/requests?state=running")["data"][0]["workers"]
        link = server.cluster.control.find(holder)
        server.workers[holder].cut()
        wait_until(lambda: server.cluster.control.find(holder) is not link)
        goes_on.set()
        chunks = [strict_json(event) for event in events if event != "[DONE]"]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == alone
        account = chunks[-1]["explain"]
        adds_up(account)
        lost = next(entry for entry in account["causes"] if entry["cause"] == "worker_lost")
        assert lost["seconds"] > 0 and holder in lost["detail"]
        assert server.metrics()['octavo_cluster_lost_attempts_total{role="front_end",worker=""}'] == 1


# --- operations ---------------------------------------------------------------------------------------------------------------------------


def test_requests_of_one_session_keep_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was idle when its first request came has a session from then on; others go to the first of two that are idle."""
    monkeypatch.setattr(LearnedCosts, "saw", lambda *_: None)  # of two alike the one that the system held up would be the slower one
    with RunningCluster({"w0": "both", "w1": "both"}, delay_s=0.02) as server:

        def worker_of(**fields: Any) -> str:
            (worker,) = complete(server, max_tokens=4, explain=True, **fields)["explain"]["workers"]
            return str(worker)

        with server.open_stream("/v1/completions", {"prompt": "abc", "max_tokens": 3000, "ignore_eos": True}):
            wait_until(lambda: any(link.load.num_running for link in server.cluster.control))
            first, (busy,) = worker_of(prompt_cache_key="mine"), get(server, "/v1/requests?state=running")["data"][0]["workers"]
            assert first != busy

        def when_idle(**fields: Any) -> str:
            """Once both have told that they are, of all that they were sent."""
            wait_until(lambda: all(link.view.num_sequences == 0 for link in server.cluster.control))
            return worker_of(**fields)

        assert [when_idle(prompt_cache_key="mine", prompt=prompt) for prompt in ("abc", "bcd", "c")] == [first] * 3
        assert when_idle(prompt_cache_key="theirs") == when_idle() == busy


def test_the_workers_are_told_over_http_and_by_the_command(server: RunningCluster) -> None:
    found = get(server, "/v1/cluster")
    assert [(worker["role"], worker["state"]) for worker in found["workers"]] == [("both", "ready"), ("both", "ready")]
    assert {worker["name"] for worker in found["workers"]} == {"w0", "w1"}
    assert found["restart"] is None and found["waiting"] == 0
    shown = run(server, "cluster", "status")
    assert shown.exit_code == 0 and shown.output.count("ready") == 2, shown.output
    assert json.loads(run(server, "cluster", "status", "--json").output)["object"] == "cluster"


def test_a_drained_worker_ends_and_the_other_answers() -> None:
    with RunningCluster({"w0": "both", "w1": "both"}, ServerOptions(api_key="secret")) as server:
        shown = run(server, "cluster", "drain", "w1", "--wait")
        assert shown.exit_code == 0 and "takes no more requests" in shown.output, shown.output
        wait_until(lambda: not server.workers["w1"].is_alive)
        assert complete(server, max_tokens=3, explain=True)["explain"]["workers"] == ["w0"]
        assert [worker["name"] for worker in get(server, "/v1/cluster")["workers"]] == ["w0"]
        shown = run(server, "cluster", "drain", "w0", "--wait")
        assert shown.exit_code == 1 and "w0 is the last worker that takes requests" in shown.output, shown.output
        assert server.error("/v1/cluster/drain", {"worker": "w0"}, KEY)[1]["code"] == "not_now"
        assert complete(server, max_tokens=3, explain=True)["explain"]["workers"] == ["w0"]


def test_a_worker_that_drains_is_taken_back_and_one_that_has_ended_has_to_be_started() -> None:
    """These were not started by the front end: it says where they have to be."""
    with RunningCluster({"w0": "both", "w1": "both"}, ServerOptions(api_key="secret"), delay_s=0.05) as server:
        body = {"prompt": "abc", "temperature": 0, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json", **KEY})
        wait_until(lambda: any(link.load.num_running for link in server.cluster.control))
        holder = next(link.name for link in server.cluster.control if link.keys)
        shown = run(server, "cluster", "drain", holder)
        assert shown.exit_code == 0 and f"{holder} takes no more requests; it has 1" in shown.output, shown.output
        shown = run(server, "cluster", "undrain", holder, "--wait")
        assert shown.exit_code == 0 and shown.output.splitlines() == [f"{holder} takes requests again", "done"], shown.output
        status, _, data = server.request("POST", "/v1/cluster/undrain", {"worker": holder}, KEY)
        assert (status, strict_json(data)["error"]["code"]) == (409, "not_now")
        connection.close()
        assert run(server, "cluster", "drain", "w1", "--wait").exit_code == 0
        shown = run(server, "cluster", "undrain", "w1")
        assert shown.exit_code == 1 and "w1 came from elsewhere and has ended; start it there again" in shown.output, shown.output
        assert get(server, "/v1/cluster")["absent"] == []


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("drain", {"worker": "w9"}, 404, "worker_not_found"),
        ("drain", {"worker": 7}, 400, "invalid_type"),
        ("drain", {}, 400, "missing_field"),
        ("drain", b"{", 400, "invalid_json"),
        ("drain", b"[]", 400, "invalid_json"),
        ("drain", {"worker": "w0", "force": True}, 400, "invalid_type"),
        ("undrain", {"worker": "w9"}, 404, "worker_not_found"),
        ("undrain", {"worker": "w0"}, 409, "not_now"),  # it is not drained
        ("undrain", {}, 400, "missing_field"),
        ("restart", {"now": True}, 400, "invalid_type"),
        ("restart", {}, 409, "not_now"),  # these workers were not started by the front end
    ],
)
def test_what_cannot_be_done_is_refused(server: RunningCluster, path: str, body: Any, status: int, code: str) -> None:
    got, error = server.error(f"/v1/cluster/{path}", body, KEY)
    assert (got, error["code"]) == (status, code)
    if code == "missing_field":
        assert error["param"] == "worker" and error["message"].startswith("worker: ")
    assert all(worker["draining"] is False for worker in get(server, "/v1/cluster")["workers"])


def test_operations_need_a_server_with_a_key_and_the_key(server: RunningCluster) -> None:
    changes = [("POST", f"/v1/cluster/{what}") for what in ("drain", "undrain", "restart")]
    for method, path in (("GET", "/v1/cluster"), *changes):
        assert server.request(method, path, {"worker": "w0"} if method == "POST" else None)[0] == 401
    with RunningCluster({"w0": "both"}) as open_server:
        for what in ("drain", "undrain"):
            assert open_server.error(f"/v1/cluster/{what}", {"worker": "w0"})[1]["code"] == "key_needed"
        assert open_server.error("/v1/cluster/restart", {})[0] == 403
        assert open_server.request("GET", "/v1/cluster")[0] == 200


def test_a_server_without_workers_says_so() -> None:
    with RunningServer(bigram_engine(), ServerOptions(api_key="secret")) as server:
        status, _, data = server.request("GET", "/v1/cluster", headers=KEY)
        assert (status, strict_json(data)["error"]["code"]) == (404, "no_cluster")
        assert server.error("/v1/cluster/restart", {}, KEY)[0] == 404
