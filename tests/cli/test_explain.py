"""`octavo explain` and `octavo top` against a real server on the scripted model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial

import pytest
from click.testing import CliRunner

from octavo.cli.explain import account_lines, replay_lines
from octavo.cli.explain import explain as explain_command
from octavo.cli.top import picture
from octavo.cli.top import top as top_command
from octavo.cli.what_if import replay_window
from octavo.server.app import ServerOptions
from tests.engine.scripted import bigram_engine
from tests.server.harness import RunningServer


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    patient = partial(replay_window, limit_s=3600.0)  # at its low priority it has little of a busy machine
    with RunningServer(bigram_engine(max_num_seqs=4), ServerOptions(api_key="secret"), patient) as running:
        yield running


def run(command, server: RunningServer, *args: str, key: str = "secret"):  # type: ignore[no-untyped-def]
    return CliRunner().invoke(command, [*args, "--url", f"http://127.0.0.1:{server.port}", "--api-key", key])


def complete(server: RunningServer, **fields: object) -> str:
    body = {"prompt": "abc", "temperature": 0, "ignore_eos": True, **fields}
    return server.post("/v1/completions", body, {"Authorization": "Bearer secret"})["id"]


def test_explain_by_id_the_last_and_the_slowest(server: RunningServer) -> None:
    slow, last = complete(server, max_tokens=200), complete(server, max_tokens=2, request_id="a/b c")
    for args, expected in (((slow,), [slow]), (("--last",), [last]), (("--slowest", "2"), [slow])):
        shown = run(explain_command, server, *args)
        assert shown.exit_code == 0, shown.output
        heads = [line.split(":")[0] for line in shown.output.splitlines() if line and not line.startswith(" ")]
        assert heads[: len(expected)] == expected
        assert "decode" in shown.output and "remainder" in shown.output
    record = json.loads(run(explain_command, server, last, "--json").output)
    assert record["id"] == last == "cmpl-a/b c"


def test_advise_replays_the_last_minutes(server: RunningServer) -> None:
    for i in range(12):
        complete(server, prompt=[5 + i] * 40, max_tokens=9)
    shown = run(explain_command, server, "--advise", "--objective", "ttft_p99")
    assert shown.exit_code == 0, shown.output
    assert re.match(r"\d+ requests of the last 600 s replayed, \d+ of them compared", shown.output)
    assert "99th percentile of the time to the first token: measured" in shown.output and "it gains nothing" in shown.output
    record = json.loads(run(explain_command, server, "--advise", "--json").output)
    assert record["objective"] == "wall" and record["advice"]
    assert re.search(r"by a replay of \d+ requests, \d+ s ago, [\d.]+ % off", run(top_command, server, "--once").output)


def test_lines_of_a_replay() -> None:
    advice = [
        {"change": "--max-num-seqs 4", "gain_s": 1.5, "why": "more: 50 % less", "told": True},
        {"change": "--num-kv-blocks 9", "gain_s": 0.0, "why": "it gains nothing", "told": True},
        {"change": "--spec off", "gain_s": 0.0, "why": "what it gains cannot be told", "told": False},
    ]
    replay = {
        "objective": "wall", "window_s": 60.0, "num_requests": 9, "num_compared": 8, "measured_s": 3.0, "replayed_s": 0.3, "error": 0.9,
        "advice": advice, "skipped": ["--spec off"], "notes": ["a note"],
    }  # fmt: skip
    lines = replay_lines(replay)
    assert lines[1] == "mean time from arrival to the last token: measured 3.000 s, replayed 300 ms: the replay is 90.0 % off"
    assert "1.500 s less" in lines[2] and " nothing " in lines[3] and " not told " in lines[4]
    assert "for want of time: --spec off" in lines[5] and "(a note)" in lines[6]
    assert replay_lines(replay | {"error": None})[-1].endswith("they tell nothing of mean time from arrival to the last token")


@pytest.mark.parametrize("args", [(), ("x", "--last"), ("--last", "--slowest", "3"), ("--last", "--advise")])
def test_exactly_one_way_to_name_requests(server: RunningServer, args: tuple[str, ...]) -> None:
    shown = run(explain_command, server, *args)
    assert shown.exit_code == 2 and "one of REQUEST_ID, --last, --slowest and --advise is needed" in shown.output
    assert ("go not together" in shown.output) == bool(args)


@pytest.mark.parametrize("flag", [("--window", "60"), ("--objective", "wall")])
@pytest.mark.parametrize("way", [("--last",), ("--slowest", "3"), ("x",)])
def test_what_is_for_advice_alone_is_refused_elsewhere(server: RunningServer, way: tuple[str, ...], flag: tuple[str, ...]) -> None:
    shown = run(explain_command, server, *way, *flag)
    assert shown.exit_code == 2 and f"'{flag[0]}': it has no meaning without --advise" in shown.output


def test_errors_are_one_sentence(server: RunningServer) -> None:
    shown = run(explain_command, server, "nobody")
    assert shown.exit_code == 1 and "request_id: 'nobody' is not the id of an answer" in shown.output
    assert "a valid API key is needed" in run(explain_command, server, "--last", key="wrong").output
    nowhere = CliRunner().invoke(top_command, ["--once", "--url", "http://127.0.0.1:9"])
    assert nowhere.exit_code == 1 and "no server answers at http://127.0.0.1:9" in nowhere.output
    odd = CliRunner().invoke(top_command, ["--once", "--url", "file:///etc"])
    assert odd.exit_code == 2 and "does not begin with http" in odd.output


def test_top_once(server: RunningServer) -> None:
    complete(server, max_tokens=20)
    shown = run(top_command, server, "--once")
    assert shown.exit_code == 0, shown.output
    assert "\x1b" not in shown.output
    for text in ("octavo top   m   0 running, 0 waiting", "KV pool [", "places  [", "steps ", "token gap    p99", "no request runs"):
        assert text in shown.output
    assert all(len(line) <= 100 for line in shown.output.splitlines())


ENGINE = {
    "model": "m", "running": 3, "waiting": 40, "max_num_seqs": 4, "kv_blocks": 100, "kv_used": 50, "kv_cached": 25, "preemptions": 2,
    "output_tokens": 9,
}  # fmt: skip


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("colours", [False, True])
def test_a_picture_under_load(width: int, colours: bool) -> None:
    steps = [{"seconds": 0.01 * (i + 1), "prefill_s": 0.008 if i % 2 else 0.0, "decode_s": 0.002 * (i + 1), "kv_s": 0.0} for i in range(10)]
    held = {"seconds": 0.5, "bottleneck": "queue", "shares": {"queue": 0.9, "host": 0.1}}
    summary = {
        "engine": ENGINE, "steps": steps, "window_s": 60.0, "num_requests": 7, "num_gaps": 90,
        "ttft": {"p50": held, "p99": held}, "itl": {},
        "advice": [{"change": "--max-num-seqs above 4", "gain_s": 0.4, "why": "all places were taken"}],
        "replay": {
            "num_requests": 50, "age_s": 3.2, "error": 0.01,
            "advice": [
                {"change": "--num-kv-blocks 9", "gain_s": 1.2, "why": "w", "told": True},
                {"change": "x", "gain_s": 0.0, "why": "w", "told": True},
            ],
        },
    }  # fmt: skip
    request = {"id": "x" * 60, "state": "queued", "wall_s": 3.0, "prompt_tokens": 5, "completion_tokens": 0, "main_cause": "queued_batch"}
    lines = picture(summary, [request], width, 123.4, colours)
    plain = [re.sub(r"\x1b\[\d+m", "", line) for line in lines]
    assert all(len(line) <= width for line in plain)
    text = "\n".join(plain)
    if width == 200:
        assert "123 token/s" in text and "and 42 more" in text and "held by queue 90 %" in text
        assert "  400 ms less  --max-num-seqs above 4: all places were taken" in text and " 1.200 s less  --num-kv-blocks 9" in text
        assert "by a replay of 50 requests, 3 s ago, 1.0 % off:" in text and "x: w" not in text
        bar = next(line for line in plain if "KV pool" in line).split("[")[1].split("]")[0]
        assert (bar.count("#"), bar.count("-")) == (len(bar) // 2, len(bar) // 4)
    assert ("\x1b" in "".join(lines)) == colours


@pytest.mark.parametrize(("bottleneck", "what"), [("kv_capacity", "more KV blocks"), ("queue", "more places or workers"), ("client", "")])
def test_what_the_rules_cannot_tell_a_replay_can(bottleneck: str, what: str) -> None:
    held = {"seconds": 0.5, "bottleneck": bottleneck, "shares": {bottleneck: 0.99}}
    summary = {"engine": ENGINE, "window_s": 60.0, "num_requests": 7, "num_gaps": 9, "ttft": {"p99": held}, "itl": {}, "advice": []}
    account = {
        "id": "it", "wall_s": 1.0, "ttft_s": 0.9, "state": "finished", "main_cause": "x", "bottleneck": bottleneck, "causes": [],
        "advice": [],
    }  # fmt: skip
    advice = [{"change": "c", "gain_s": 0.4, "why": "w", "basis": "time stamps"}]
    for quiet, told in (
        (picture(summary, [], 200, None), picture(summary | {"advice": advice}, [], 200, None)),
        (account_lines(account), account_lines(account | {"advice": advice})),
    ):
        assert (f"what {what} would gain, the time stamps cannot tell: a replay can" in "\n".join(quiet)) == bool(what)
        assert "cannot tell" not in "\n".join(told)
    untold = {"num_requests": 9, "age_s": 1.0, "error": 0.6, "advice": [{"change": "c", "gain_s": 0.0, "why": "w", "told": False}]}
    shown = "\n".join(picture(summary | {"replay": untold}, [], 200, None))
    assert "60.0 % off: no gain is above its error" in shown and "nothing would help" not in shown


def test_a_terminal_of_a_few_characters_breaks_nothing() -> None:
    steps = [{"seconds": 0.01, "prefill_s": 0.0, "decode_s": 0.01, "kv_s": 0.0}]
    summary = {"engine": ENGINE, "steps": steps, "window_s": 60.0, "num_requests": 7, "num_gaps": 0, "ttft": {}, "itl": {}, "advice": []}
    for width in (1, 5, 12, 13):
        assert sum("█" in line for line in picture(summary, [], width, None)) == 1


def test_a_cluster_that_has_lost_its_workers_is_shown() -> None:
    none = ENGINE | {name: 0 for name in ("kv_blocks", "kv_used", "kv_cached", "max_num_seqs", "running")}
    summary = {"engine": none, "workers": [], "window_s": 60.0, "num_requests": 0, "num_gaps": 0, "ttft": {}, "itl": {}, "advice": []}
    assert "  no worker is there" in picture(summary, [], 80, None)


def test_small_parts_are_left_out_of_an_account() -> None:
    parts = [("decode", 9.995), ("masks", 0.005), ("remainder", 0.0)]
    account = {
        "id": "it", "wall_s": 10.0, "ttft_s": None, "state": "running", "main_cause": "decode", "bottleneck": "decode_memory", "advice": [],
        "causes": [{"cause": cause, "seconds": seconds, "detail": "x"} for cause, seconds in parts],
    }  # fmt: skip
    lines = account_lines(account)
    assert "no token yet" in lines[0] and [line.split()[0] for line in lines[1:3]] == ["decode", "remainder"]
    assert lines[3:] == ["  and 1 cause below 0.1 %, 5 ms together; --json has all"]
