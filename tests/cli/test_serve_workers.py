"""`octavo serve --workers`: real processes on a small model, through the real openai client; and what the flags refuse."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import openai
import pytest

from octavo import LLM, SamplingParams
from octavo.cli.cluster_flags import cluster_plan
from octavo.cli.serve import serve
from octavo.distributed.cluster_options import HandoverOptions
from tests.cli.conftest import Octavo
from tests.models.tiny import write_tiny_gguf

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0
PROMPTS = ["the quick brown fox", "a", "once upon a time there was", "hello hello hello hello"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", context=1024)


class Served:
    """`octavo serve`, ready, with its port."""

    def __init__(self, path: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "octavo.cli.main", "serve", "--model", str(path), "--port", "0", "--num-kv-blocks", "256", *flags]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        port = re.search(r":(\d+) \(", line)
        assert port is not None, line
        self.port = int(port[1])

    def get(self, target: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        connection.request("GET", target)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer

    def pids(self) -> dict[str, int]:
        return {worker["name"]: worker["pid"] for worker in self.get("/v1/cluster")["workers"]}

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT_S)


@pytest.fixture(scope="module")
def served(path: Path) -> Iterator[Served]:
    server = Served(path, "--workers", "2", "--threads", "1", "--worker-suspect-s", "20", "--worker-wait-s", "600")
    try:
        yield server
        pids = server.pids()
        assert server.end() == 0
        for pid in pids.values():
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    finally:
        server.process.kill()


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as one:
        yield one


@pytest.fixture(scope="module")
def expected(path: Path) -> list[str]:
    params = [SamplingParams(temperature=0.9, max_tokens=700, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
    with LLM(str(path), num_kv_blocks=256, threads=1) as llm:
        return [output.outputs[0].text for output in llm.generate(PROMPTS, params)]


def stream(client: openai.OpenAI, i: int) -> Iterator[str]:
    """The text of a streamed answer, piece by piece."""
    more = {"ignore_eos": True}
    for chunk in client.completions.create(
        model="tiny", prompt=PROMPTS[i], max_tokens=700, temperature=0.9, seed=i, stream=True, extra_body=more
    ):
        yield chunk.choices[0].text


def advised(served: Served) -> list[str]:
    """What `octavo explain --advise` says, line by line. At its low priority a replay has little of a busy machine, workers may not answer
    in time there, and what is not done after a while is left out, which it says: it is asked again, for another window."""
    command = [sys.executable, "-m", "octavo.cli.main", "explain", "--advise", "--url", f"http://127.0.0.1:{served.port}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    for window in range(600, 595, -1):
        done = subprocess.run([*command, "--window", str(window)], capture_output=True, text=True, env=environment, check=False)
        if done.returncode == 0 and "for want of time" not in done.stdout:
            return done.stdout.splitlines()
        assert any(words in done.stdout + done.stderr for words in ("for want of time", "it took longer than", "ask again later")), done
    pytest.fail(f"this machine has no time for a replay: {done}")


def test_the_window_of_both_workers_is_replayed(served: Served, client: openai.OpenAI) -> None:
    """In a process of its own, by the steps that the workers have told of."""
    for i in range(10):
        client.completions.create(model="tiny", prompt=[5 + i] * 40, max_tokens=12, extra_body={"ignore_eos": True})
    lines = advised(served)
    assert re.fullmatch(r"\d+ requests of the last \d+ s replayed, \d+ of them compared", lines[0])
    assert re.search(r"measured .*, replayed .*: the replay is [\d.]+ % off", lines[1])
    for change in ("one worker more (--workers 3)", "one worker less (--workers 1)", "--router ", "--max-num-batched-tokens "):
        assert any(change in line for line in lines[2:]), lines
    replay = served.get("/v1/explain/summary?seconds=600")["replay"]
    assert replay["num_compared"] >= 10 and replay["skipped"] == [] and 0.0 < replay["replayed_s"] < 60.0


def test_answers_are_those_of_one_engine(client: openai.OpenAI, expected: list[str]) -> None:
    for i in range(len(PROMPTS)):
        assert "".join(stream(client, i)) == expected[i]


def test_a_stream_goes_on_when_its_worker_is_killed(served: Served, client: openai.OpenAI, expected: list[str]) -> None:
    """Whichever worker has the stream, one after the other is killed while it goes on."""
    before, text, pieces = served.pids(), "", stream(client, 2)
    for pid in before.values():
        for _ in range(5):
            text += next(pieces)
        os.kill(pid, signal.SIGKILL)
        deadline_s = time.monotonic() + TIMEOUT_S
        while pid in served.pids().values():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
    assert text + "".join(pieces) == expected[2]
    assert {worker["name"] for worker in served.get("/v1/cluster")["workers"]} <= set(before)


BOTH = "it does nothing where all workers do both; it goes with --workers prefill=N,decode=N"
HANDOFF_FLAGS = (
    "--kv-transport tcp", "--kv-wire-dtype int8", "--kv-checksum crc32", "--handoff-min-layerwise 1", "--no-borrow-workers",
    "--handoff-reserve-s 1", "--handoff-copy-s 1",
)  # fmt: skip


PAIR = "--workers prefill=2,decode=1"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--workers 0", "from 1 to 1024 workers"),
        ("--workers two", "a number, or numbers by role"),
        ("--workers prefill=1", "nobody does decode"),
        ("--workers prefill=1,prefill=2", "each role once, and prefill is there twice"),
        ("--workers-listen 80", "HOST:PORT"),
        ("--router round-robin", "it does nothing without --workers"),
        ("--worker-suspect-s 0.59 --workers 2", "0.59 is not allowed; a number from 0.6 to 86400"),
        ("--worker-suspect-s 1e308 --workers 2", "'--worker-suspect-s': 1e+308 is not allowed; a number from 0.6 to 86400"),
        ("--workers " + "9" * 5000, "'--workers': '999"),
        ("--max-workers 3", "it does nothing without --workers"),
        ("--workers 3 --max-workers 2", "'--max-workers': 2 is not allowed; at least as many as workers has of them (3)"),
        ("--workers 3 --max-workers two", "'--max-workers': 'two' is not allowed; a number, or numbers by role"),
        ("--workers 3 --max-workers 1025", "at most 1024 workers in all, and these would be 1025"),
        ("--workers 3 --max-workers decode=4", "decode=4 is not allowed; workers has none of role decode"),
        (f"{PAIR} --max-workers 4", "4 is not allowed; numbers by role such as decode=4, since workers is prefill=2,decode=1"),
        (f"{PAIR} --max-workers prefill=1,decode=4", "prefill=1 is not allowed; at least as many as workers has of them (2)"),
        (f"{PAIR} --max-workers both=4", "both=4 is not allowed; workers has none of role both"),
        (f"{PAIR} --max-workers decode=1023", "decode=1023 is not allowed; at most 1024 workers in all, and these would be 1025"),
        (f"{PAIR} --max-workers decode=2,decode=3", "'--max-workers': 'decode=2,decode=3' is not allowed"),
        ("--workers-listen 127.0.0.1:1 --max-workers 4", "since workers is none"),
        *((f"--workers {workers} {flag}", BOTH) for flag in HANDOFF_FLAGS for workers in ("2", "both=1")),
    ],
)
def test_flags_that_make_no_cluster_are_refused(octavo: Octavo, flags: str, message: str) -> None:
    result = octavo("serve", *flags.split())
    assert result.code == 2 and message in result.err


@pytest.mark.parametrize("value", ["1e308", "9" * 300, "9" * 5000, "-" + "9" * 5000, "nan", "1e400"])
def test_numbers_beyond_all_measure_are_refused_by_flag_or_taken(value: str) -> None:
    """No sum or product of them is what is told to be wrong, nor is it how Python reads numbers."""
    params = [option for option in serve.params if isinstance(option, click.Option) and option.name in CLUSTER_NUMBERS]
    assert len(params) == len(CLUSTER_NUMBERS)
    for option in params:
        flag = option.opts[0]
        workers = ["--workers", value] if flag == "--workers" else ["--workers", "prefill=1,decode=1", flag, value]
        try:
            with serve.make_context("serve", workers) as context:
                assert cluster_plan(context.params) is not None
        except click.BadParameter as error:
            named = error.param_hint or (error.param.opts[0] if error.param is not None else "")
            assert flag in str(named), error
            assert len(error.message) < 6000


CLUSTER_NUMBERS = {
    "workers", "max_workers", "worker_wait_s", "worker_suspect_s", "worker_stall_s", "handoff_min_layerwise", "handoff_reserve_s",
    "handoff_copy_s",
}  # fmt: skip
HERE = "--workers-listen 127.0.0.1:1"


@pytest.mark.parametrize("workers", ["--workers prefill=1,decode=1", "--workers both=1,prefill=1", f"--workers 1 {HERE}", HERE])
@pytest.mark.parametrize("flag", HANDOFF_FLAGS)
def test_where_workers_may_have_roles_there_may_be_hand_offs(workers: str, flag: str) -> None:
    context = serve.make_context("serve", [*workers.split(), *flag.split()], help_option_names=["-h", "--help"])
    with context:
        plan = cluster_plan(context.params)
    assert plan is not None and plan.options.handover != HandoverOptions()


@pytest.mark.parametrize(
    ("flags", "limits", "most"),
    [
        ("--workers 2", {}, 2),
        ("--workers 2 --max-workers 4", {"both": (2, 4)}, 4),
        (f"{PAIR} --max-workers decode=4", {"decode": (1, 4)}, 6),
        (f"{PAIR} --max-workers prefill=2,decode=4", {"prefill": (2, 2), "decode": (1, 4)}, 6),
        ("--workers both=1,prefill=1,decode=1 --max-workers both=3", {"both": (1, 3)}, 5),
    ],
)
def test_numbers_of_workers_by_role(flags: str, limits: dict[str, tuple[int, int]], most: int) -> None:
    """Cores and memory are shared as for all that may come."""
    with serve.make_context("serve", flags.split(), help_option_names=["-h", "--help"]) as context:
        plan = cluster_plan(context.params)
    assert plan is not None and {role: (one.least, one.most) for role, one in plan.options.scale.items()} == limits
    assert plan.options.most_workers(plan.workers) == most


def test_a_worker_without_a_secret_or_an_address_says_so(octavo: Octavo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_CLUSTER_SECRET", raising=False)
    result = octavo("worker", "--connect", "127.0.0.1:1")
    assert result.code == 1 and "OCTAVO_CLUSTER_SECRET" in result.err
    monkeypatch.setenv("OCTAVO_CLUSTER_SECRET", "0123456789abcdef")
    for name in ("", "a b", "../a", "..", "x" * 129):
        result = octavo("worker", "--connect", "127.0.0.1:1", "--name", name)
        assert result.code == 2 and "'--name'" in result.err and "1 to 128 printable ASCII characters" in result.err, name
    result = octavo("worker", "--connect", "127.0.0.1:1", "--give-up-s", "0.2")
    assert result.code == 1 and "octavo worker: no front end at 127.0.0.1:1 yet: " in result.err
    result = octavo("worker", "--connect", "nowhere")
    assert result.code == 2 and "'nowhere' is not allowed; HOST:PORT" in result.err
    result = octavo("worker", "--connect", "127.0.0.1:0")
    assert result.code == 2 and "'--connect'" in result.err and "'127.0.0.1:0' is not allowed; a port from 1 to 65535" in result.err
    for listen in ("::1", "10.0.0.1:70000", "unix:/tmp/kv", ""):
        result = octavo("worker", "--connect", "127.0.0.1:1", "--kv-listen", listen)
        assert result.code == 2 and "'--kv-listen'" in result.err and f"{listen!r} is not allowed; HOST, HOST:PORT" in result.err, listen
    for listen in ("10.0.0.1", "10.0.0.1:7071", "[::]:7071", "[::1]"):
        result = octavo("worker", "--connect", "127.0.0.1:1", "--kv-listen", listen, "--give-up-s", "0.01")
        assert result.code == 1 and "no front end" in result.err, listen


POOLS = ("--num-kv-blocks 0", "--kv-cache-memory 0", "--kv-cache-memory 3parsecs", "--num-kv-blocks 8 --kv-cache-memory 2GiB")


@pytest.mark.parametrize("flags", POOLS)
def test_a_pool_that_cannot_be_is_refused_to_a_worker_as_to_a_server(octavo: Octavo, monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    monkeypatch.setenv("OCTAVO_CLUSTER_SECRET", "0123456789abcdef")
    server, worker = octavo("serve", *flags.split()), octavo("worker", "--connect", "127.0.0.1:1", "--give-up-s", "0.1", *flags.split())
    assert server.code == worker.code == 2 and "Invalid value for '--" in worker.err
    assert worker.err.splitlines()[-1] == server.err.splitlines()[-1]


@pytest.mark.parametrize("flags", [("--num-kv-blocks", "100000000"), ("--num-kv-blocks", "64", "--workers-listen", "127.0.0.1:PORT")])
def test_a_start_that_comes_to_nothing_ends_with_one_sentence(path: Path, flags: tuple[str, ...]) -> None:
    """Workers for which there is no memory, and an address that somebody has. What they say themselves is a sentence, too."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        argv = [flag.replace("PORT", str(taken.getsockname()[1])) for flag in flags]
        command = [sys.executable, "-m", "octavo.cli.main", "serve", "--model", str(path), "--port", "0", "--workers", "2", *argv]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OCTAVO_CLUSTER_SECRET": "a secret of the tests"}
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S, check=False)
    lines = ended.stderr.splitlines()
    own = [line for line in lines if not line.startswith("octavo worker: ")]
    assert ended.returncode == 1 and ended.stdout == "" and len(own) == 1, ended.stderr
    if "100000000" in flags:
        assert re.match(r"octavo: the workers cannot be started: worker-\d(, worker-\d)?: num_kv_blocks: 100000000 is not allow", own[0])
        assert len(lines) <= 3, "each worker says it once"
    else:
        assert own[0].startswith("octavo: workers_listen: cannot listen at 127.0.0.1:") and "already in use" in own[0]


def test_a_server_says_where_workers_are_to_come_before_any_has(path: Path) -> None:
    """With port 0 nobody could find it."""
    command = [sys.executable, "-m", "octavo.cli.main", "serve", "--model", str(path), "--port", "0", "--workers-listen", "127.0.0.1:0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OCTAVO_CLUSTER_SECRET": "a secret of the tests"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        said = re.fullmatch(r"octavo: waiting for workers at 127\.0\.0\.1:(\d+)\n", line)
        assert said is not None, line
        socket.create_connection(("127.0.0.1", int(said[1])), TIMEOUT_S).close()
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0 and out == ""
    finally:
        process.kill()
        process.wait()
