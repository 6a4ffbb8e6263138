"""`octavo bench serve`: an own server or a running one, the record, and flags that contradict each other."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import bench_serve
from octavo.workload.requests import WorkloadRequest
from tests.cli.conftest import Ended, Octavo
from tests.engine.scripted import bigram_engine
from tests.server.harness import RunningServer

ROOT = Path(__file__).parents[2]
KEYS = {
    *("bench", "url", "model", "workload", "load", "seed", "num_requests", "num_completed", "num_errors", "errors", "wall_s"),
    *("output_tok_s", "total_tok_s", "request_s", "ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "send_delay_ms", "client_cpu_us_per_token"),
    *("goodput", "concurrency", "date"),
}
SMALL = ("--num-requests", "4", "--concurrency", "2", "--prompt-len", "12", "--output-len", "uniform:3:6", "--token-ids", "10:250")


def last_record(ended: Ended) -> dict[str, Any]:
    assert ended.out, ended.err
    record = json.loads(ended.out.splitlines()[-1])
    assert isinstance(record, dict)
    return record


def test_an_own_server_with_engine_flags(octavo: Octavo, tiny: Path) -> None:
    flags = ("--max-num-seqs", "3", "--kv-cache-memory", "8MiB", "--no-enable-prefix-caching", "--threads", "1")
    ended = octavo("bench", "serve", "--model", tiny, *SMALL, *flags, "--goodput", "ttft:60000")
    assert (ended.code, ended.err) == (0, "")
    record = last_record(ended)
    assert record.keys() >= KEYS
    assert (record["bench"], record["model"], record["num_completed"]) == ("serve", "tiny", 4)
    assert ended.out.startswith(f"tiny at {record['url']}: closed loop, 2 at once; 12 in, uniform:3:6 out\n4 of 4 requests in ")
    with pytest.raises(AssertionError):  # it has gone
        octavo_is_at(record["url"])


def octavo_is_at(url: str) -> None:
    import urllib.error
    import urllib.request

    try:
        urllib.request.urlopen(url + "/health", timeout=5).close()
    except urllib.error.URLError:
        raise AssertionError(f"nothing at {url}") from None


def test_an_own_server_that_does_not_start(octavo: Octavo, tiny: Path) -> None:
    ended = octavo("bench", "serve", "--model", tiny, "--max-model-len", "999999", *SMALL)
    assert ended.code == 1 and ended.out == ""
    assert ended.err.startswith("octavo: the server did not start: --max-model-len: 999999 is not allowed; the model was trained for")


def test_engine_flags_reach_the_own_server(octavo: Octavo, tiny: Path) -> None:
    ended = octavo("bench", "serve", "--model", tiny, "--max-model-len", "64", *SMALL[:4], "--prompt-len", "70", "--token-ids", "10:250")
    assert ended.code == 1 and "warming up failed: http_400: " in ended.err and "context is 64 tokens" in ended.err


def test_a_running_server(octavo: Octavo) -> None:
    with RunningServer(bigram_engine(max_num_seqs=4)) as server:
        url = f"http://127.0.0.1:{server.port}"
        (line,) = octavo("bench", "serve", "--url", url, *SMALL, "--json").out.splitlines()
        assert json.loads(line)["num_completed"] == 4
        ended = octavo("bench", "serve", "--url", url, *SMALL, "--served-model-name", "nosuch")
        assert ended.code == 1 and ended.err == f"octavo: --served-model-name: 'nosuch' is not served at {url}; there is: m\n"
        ended = octavo("bench", "serve", "--url", url, *SMALL[:-1], "10:9999", "--warmup", "0")
        assert ended.code == 1 and last_record(ended)["errors"] == {"http_400": 4}
        assert ended.err.startswith("octavo: no request was answered whole: ")


def test_open_loops_and_traces(octavo: Octavo, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,num_prompt,num_output\n" + "".join(f"{i},{10 + i},{i}\n" for i in range(1, 7)))
    with RunningServer(bigram_engine(max_num_seqs=4)) as server:
        argv = ("bench", "serve", "--url", f"http://127.0.0.1:{server.port}", "--token-ids", "10:250", "--json")
        record = last_record(octavo(*argv, "--trace", trace, "--trace-speed", "40", "--trace-max-len", "20", "--trace-start", "1"))
        assert (record["num_completed"], record["num_output_tokens"], record["num_left_out"]) == (4, 2 + 3 + 4 + 5, 1)
        assert record["trace"] == str(trace) and record["concurrency"] is None and record["wall_s"] >= 3 / 40
        record = last_record(octavo(*argv, "--trace", trace, "--rate", "100", "--max-concurrency", "2", "--num-requests", "3"))
        assert (record["num_prompt_tokens"], record["rate"], record["max_concurrency"]) == (11 + 12 + 13, 100.0, 2)
        record = last_record(octavo(*argv, "--rate", "50", "--burstiness", "inf", "--duration", "0.09", "--output-len", "2"))
        assert record["num_completed"] == 4 and record["duration"] == 0.09 and record["burstiness"] == "inf"  # JSON has no infinity
    ended = octavo(*argv, "--trace", trace, "--trace-start", "100")
    assert ended.code == 1 and "has no request left from --trace-start on" in ended.err
    trace.write_text("a,b\n")
    ended = octavo(*argv, "--trace", trace)
    assert ended.code == 1 and ended.err.startswith(f"octavo: {trace}: line 1: no known trace has these columns: a, b; ")


def test_nobody_listens(octavo: Octavo) -> None:
    ended = octavo("bench", "serve", "--url", "http://127.0.0.1:9")
    assert (ended.code, ended.err) == (1, "octavo: http://127.0.0.1:9 cannot be measured: connect: no connection: Connection refused\n")


CONTRADICTIONS = [
    (["--url", "http://h", "--threads", "2"], r"'--threads': it is a flag of a server started here"),
    (["--url", "http://h", "--model", "x"], r"'--model': it is a flag of a server started here"),
    (["--rate", "1", "--concurrency", "2"], r"'--concurrency': a closed loop has no --rate"),
    (["--burstiness", "2"], r"'--burstiness': it shapes the gaps of --rate"),
    (["--rate", "1", "--burstiness", "0"], r"'--burstiness': 0.0 is not allowed; a number from 0.0001, or inf"),
    (["--rate", "0"], r"'--rate': 0.0 is not allowed"),
    (["--max-concurrency", "2"], r"'--max-concurrency': it bounds an open loop"),
    (["--trace-speed", "2"], r"'--trace-speed': there is no --trace"),
    (["--workload", "spike", "--rate", "2"], r"'--rate': the spike workload has its own"),
    (["--workload", "spike", "--trace-start", "2"], r"'--trace-start': the spike workload has its own"),
    (["--prompt-len", "many"], r"'--prompt-len': 'many' is not allowed; N, uniform:LOW:HIGH or lognormal:"),
    (["--output-len", "uniform:5:2"], r"'--output-len': 'uniform:5:2': high: 2 is not allowed; from 5"),
    (["--shared-prefix", "5:0"], r"'--shared-prefix': 5:0 is not allowed; at least 1 token and 1 group"),
    (["--shared-prefix", "5:1:2"], r"'--shared-prefix': '5:1:2' is not of the form TOKENS\[:GROUPS\]"),
    (["--token-ids", "5"], r"'--token-ids': '5' is not of the form LOW:HIGH"),
    (["--token-ids", "9:5"], r"'--token-ids': 9:5 is not allowed; 0 <= LOW < HIGH"),
    (["--goodput", "fast"], r"'--goodput': 'fast' is not allowed; NAME:MILLISECONDS"),
    (["--duration", "nan"], r"'--duration': nan is not allowed"),
    (["--timeout", "0"], r"'--timeout': 0.0 is not allowed"),
    (["--max-num-seqs", "0"], r"'--max-num-seqs': 0 is not allowed; from 1"),
    (["--trace", "nosuch.csv"], r"'--trace': File 'nosuch.csv' does not exist"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "message"), CONTRADICTIONS, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_contradictions_are_refused_before_anything_starts(
    octavo: Octavo, monkeypatch: pytest.MonkeyPatch, argv: list[str], message: str
) -> None:
    monkeypatch.setattr(bench_serve, "fetched", lambda *_: pytest.fail("a model was asked for"))
    ended = octavo("bench", "serve", *argv)
    assert ended.code == 2 and ended.out == ""
    assert re.search(message, " ".join(ended.err.split())), ended.err


@pytest.mark.parametrize("flags", [("--trace-speed", "2", "--rate", "3"), ("--rate", "3", "--prompt-len", "3", "--output-len", "3")])
def test_a_trace_of_which_nothing_is_used(octavo: Octavo, tmp_path: Path, flags: tuple[str, ...]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,num_prompt,num_output\n1,2,3\n")
    ended = octavo("bench", "serve", "--url", "http://h", "--trace", trace, *flags)
    assert ended.code == 2 and re.search(r"'--trace(-speed)?': ", ended.err)


def requests_of(monkeypatch: pytest.MonkeyPatch, octavo: Octavo, *argv: str) -> tuple[dict[str, Any], list[WorkloadRequest]]:
    """What a command line would send, and the record's words for it."""
    cases = []

    def no_run(target: object, case: Any, progress: object) -> dict[str, Any]:
        cases.append(case)
        raise RuntimeError("not run")

    monkeypatch.setattr("octavo.bench.serve.run_serve", no_run)
    assert octavo("bench", "serve", "--url", "http://h", *argv).err == "octavo: not run\n"
    (case,) = cases
    return case.described, list(case.load.requests())


@pytest.mark.parametrize(
    ("workload", "number", "concurrency", "prompts", "outputs", "prefix"),
    [("single", 6, 1, (128, 128), (128, 128), 0), ("prefix", 48, 16, (576, 576), (64, 64), 512), ("chat", 64, 16, (4, 1024), (4, 512), 0)],
)
def test_presets(
    monkeypatch: pytest.MonkeyPatch, octavo: Octavo, workload: str, number: int, concurrency: int,
    prompts: tuple[int, int], outputs: tuple[int, int], prefix: int,
) -> None:  # fmt: skip
    described, requests = requests_of(monkeypatch, octavo, "--workload", workload)
    assert len(requests) == number and described["concurrency"] == concurrency
    assert all(prompts[0] <= len(r.prompt_token_ids) <= prompts[1] and outputs[0] <= r.num_output <= outputs[1] for r in requests)
    assert len({tuple(r.prompt_token_ids[:prefix]) for r in requests}) == 1 and len({tuple(r.prompt_token_ids) for r in requests}) == number


def test_flags_go_before_presets(monkeypatch: pytest.MonkeyPatch, octavo: Octavo) -> None:
    described, requests = requests_of(monkeypatch, octavo, "--workload", "prefix", "--shared-prefix", "8:2", "--num-requests", "20")
    assert len(requests) == 20 and {len(r.prompt_token_ids) for r in requests} == {72} and described["shared_prefix"] == "8:2"
    assert {r.session for r in requests} == {"prefix-0", "prefix-1"}


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_stops_the_own_server_too(tiny: Path, tmp_path: Path, signum: int, code: int) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    argv = ["bench", "serve", "--model", str(tiny), "--duration", "600", "--concurrency", "1", *SMALL[4:]]
    process = subprocess.Popen([sys.executable, "-m", "octavo.cli.main", *argv], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        child = _child_of(process)
        process.send_signal(signum)
        assert process.wait(120) == code
        assert not Path(f"/proc/{child}").exists()
    finally:
        process.kill()
        process.communicate()


def _child_of(process: subprocess.Popen[bytes]) -> int:
    """The server, once it is one."""
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s and process.poll() is None:
        for number in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            with contextlib.suppress(OSError):  # another child may have ended meanwhile
                if b"serve\0--host" in Path(f"/proc/{number}/cmdline").read_bytes():
                    return int(number)
        time.sleep(0.02)
    raise AssertionError("no server was started")
