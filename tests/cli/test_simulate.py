"""`octavo simulate`: machines, fitted costs, recordings, loads, and flags that contradict each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.costs.coefficients import Coefficients
from octavo.costs.machines import known_machines
from tests.cli.conftest import Ended, Octavo
from tests.models import configs
from tests.models.tiny import write_tiny_gguf

ROLES = ("--num-kv-blocks", "64", "--kv-bytes", "1000", "--rate", "1", "--roles", "prefill=1,decode=1")
LOAD = ("--rate", "20", "--num-requests", "30", "--prompt-len", "uniform:5:60", "--output-len", "uniform:2:20")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("costs") / "cost.json"
    path.write_text(Coefficients((1e-4, 0.0, 1e-7, 0.0, 0.0, 5e-3), median_error=0.032).to_json())
    return path


def last_record(ended: Ended) -> dict[str, Any]:
    assert ended.code == 0, ended.err
    record = json.loads(ended.out.splitlines()[-1])
    assert isinstance(record, dict)
    return record


def test_a_model_on_a_machine(octavo: Octavo, tiny: Path) -> None:
    ended = octavo("simulate", "-m", tiny, "--machine", "l4", *LOAD, "--slo", "ttft=5,itl=1")
    record = last_record(ended)
    assert record["num_completed"] == 30 and record["slo_attainment"] == 1.0 and record["energy_j"] > 0.0
    assert record["step_cost_error"] is None
    for text in ("TTFT", "ITL", "E2E", "KV pool %", "30 of 30 requests", "within the limits: 100 %"):
        assert text in ended.out
    assert octavo("simulate", "-m", tiny, "--machine", "l4", *LOAD, "--slo", "ttft=5,itl=1") == ended  # the seed decides
    assert len(octavo("simulate", "-m", tiny, "--machine", "l4", *LOAD, "--json").out.splitlines()) == 1


def test_what_is_not_known_is_not_printed(octavo: Octavo, tiny: Path, tmp_path: Path) -> None:
    """Limits that nobody gave, watts that nobody knows; and large numbers are read without an exponent."""
    ended = octavo("simulate", "-m", tiny, "--machine", "l4", *LOAD)
    assert ended.code == 0 and "within the limits" not in ended.out and "energy -" not in ended.out
    slow = tmp_path / "slow.json"
    slow.write_text(Coefficients((0.0, 0.0, 0.0, 0.0, 0.0, 20.0)).to_json())
    ended = octavo("simulate", "--fitted", slow, "--num-kv-blocks", "64", *LOAD, "--num-requests", "1")
    record = last_record(ended)
    assert record["energy_j"] is None and record["engines"][0]["energy_j"] is None and "energy - kWh, cost - USD" in ended.out
    assert "1 of 1 request in " in ended.out and " 20,000 " in ended.out and "e+" not in ended.out.rpartition("\n{")[0]


@pytest.mark.parametrize("name", ["cost.json", "run.jsonl"])
@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_file_is_said_to_be_empty(octavo: Octavo, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    ended = octavo("simulate", "--fitted", tmp_path / name, "--num-kv-blocks", "64", *LOAD)
    assert ended.code == 1 and ended.err == f"octavo: {tmp_path / name}: the file is empty\n"


def test_a_byte_order_mark_is_taken_off_every_file(octavo: Octavo, tiny: Path, tmp_path: Path) -> None:
    """Costs, recordings, machines, traces of either form, configs."""
    def marked(name: str, text: str) -> Path:
        (tmp_path / name).write_text("\ufeff" + text, encoding="utf-8")
        return tmp_path / name

    recording = tmp_path / "run.jsonl"
    flags = ("--record", recording, "--threads", "1", "--max-tokens", "12", "--temperature", "0")
    assert octavo("run", "-m", tiny, *flags, "hello there").code == 0
    recorded = marked("run2.jsonl", recording.read_text())
    cost = marked("cost.json", Coefficients((1e-4, 0.0, 1e-7, 0.0, 0.0, 5e-3)).to_json())
    own = marked("own.toml", '[mine]\nbasis = "measured"\nops_per_s = 1e12\nbytes_per_s = 1e11\nmemory_bytes = 1e9\n')
    csv = marked("t.csv", "arrival_s,num_prompt,num_output\n0,10,3\n")
    lines = marked("t.jsonl", '{"arrival_s": 0, "num_prompt": 10, "num_output": 3}\n')
    config = marked("config.json", json.dumps(configs.LLAMA_2_7B))
    for flags in (
        ("--replay", recorded), ("--fitted", recorded, "--num-kv-blocks", "64", *LOAD), ("--fitted", cost, "--num-kv-blocks", "64", *LOAD),
        ("--machines", own, "--machine", "mine", "-m", tiny, "--trace", csv), ("--machine", "l4", "-m", tiny, "--trace", lines),
        ("--machine", "h200-sxm", "-m", config, "--trace", lines),
    ):  # fmt: skip
        ended = octavo("simulate", *flags)
        assert ended.code == 0, ended.err


def test_machines_are_listed(octavo: Octavo, tmp_path: Path) -> None:
    shown = octavo("simulate", "--machine", "list").out
    assert all(f"\n{name} " in shown for name in known_machines())
    own = tmp_path / "own.toml"
    own.write_text('[mine]\nbasis = "measured"\nops_per_s = 1e12\nbytes_per_s = 1e11\nmemory_bytes = 1e9\nusd_per_hour = 36.0\n')
    assert "mine" in octavo("simulate", "--machine", "list", "--machines", own).out


def test_a_machine_of_ones_own_has_a_price(octavo: Octavo, tiny: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('[mine]\nbasis = "measured"\nops_per_s = 1e12\nbytes_per_s = 1e11\nmemory_bytes = 1e9\nusd_per_hour = 36.0\n')
    flags = ("simulate", "-m", tiny, "--machine", "mine", "--machines", own, *LOAD, "--json")
    record = last_record(octavo(*flags))
    assert record["cost_usd"] == pytest.approx(record["duration_s"] * 0.01)
    both = last_record(octavo(*flags, "--engines", "2", "--devices", "2"))
    assert both["cost_usd"] == pytest.approx(both["duration_s"] * 0.04)


def test_a_machine_has_its_own_devices_and_no_room_is_said(octavo: Octavo, tiny: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    figures = 'basis = "measured"\nops_per_s = 1e12\nbytes_per_s = 1e11\nusd_per_hour = 36.0\n'
    own.write_text(f"[pair]\n{figures}memory_bytes = 1e9\ndevices = 2\n[small]\n{figures}memory_bytes = 1e4\n")
    flags = ("simulate", "-m", tiny, "--machines", own, *LOAD)
    pair = last_record(octavo(*flags, "--machine", "pair"))
    assert pair["engines"][0]["name"] == "2*pair-0" and pair["cost_usd"] == pytest.approx(pair["duration_s"] * 0.02)
    assert last_record(octavo(*flags, "--machine", "pair", "--devices", "1"))["engines"][0]["name"] == "pair-0"
    ended = octavo(*flags, "--machine", "small")
    assert ended.code == 2 and "--machine" in ended.err and "leave 0, and a KV block takes" in ended.err


def test_layers_with_a_window_give_back_what_left_it(octavo: Octavo, tmp_path: Path) -> None:
    """As the planner counts them: in a pool that holds two such sequences whole more of them run at once."""
    model = write_tiny_gguf(tmp_path / "windows.gguf", arch="gemma3", layers=6, context=2048)
    load = ("--concurrency", "8", "--num-requests", "24", "--prompt-len", "900", "--output-len", "100")
    flags = ("simulate", "-m", model, "--machine", "l4", "--num-kv-blocks", "130", "--max-num-batched-tokens", "64", *load, "--json")
    grouped, whole = last_record(octavo(*flags)), last_record(octavo(*flags, "--no-enable-kv-groups"))
    assert grouped["num_completed"] == whole["num_completed"] == 24
    assert grouped["duration_s"] < 0.8 * whole["duration_s"]


def test_fitted_costs_need_no_model(octavo: Octavo, fitted: Path) -> None:
    flags = ("simulate", "--fitted", fitted, "--num-kv-blocks", "64", *LOAD, "--json")
    one, two = last_record(octavo(*flags)), last_record(octavo(*flags, "--engines", "2", "--router", "round-robin"))
    assert [engine["num_requests"] for engine in two["engines"]] == [15, 15]
    assert two["itl_s"]["mean"] < one["itl_s"]["mean"]
    assert one["step_cost_error"] == 0.032 and "off by 3.2 % (median)" in octavo(*flags[:-1]).out


def test_a_pair_of_engines_may_have_a_link_of_its_own(octavo: Octavo, fitted: Path) -> None:
    flags = (*ROLES, "--fitted", fitted, "--num-requests", "20", "--prompt-len", "40", "--output-len", "5")
    plain = last_record(octavo("simulate", *flags, "--json"))
    slow = last_record(octavo("simulate", *flags, "--json", "--links", "0-1=20000:0.5"))
    assert plain["num_handed_over"] == slow["num_handed_over"] == 20
    assert slow["itl_s"]["mean"] > 10 * plain["itl_s"]["mean"]


def test_engines_lend_each_other_a_hand(octavo: Octavo, tiny: Path) -> None:
    load = ("--rate", "4000", "--num-requests", "300", "--prompt-len", "60", "--output-len", "20", "--seed", "1")
    flags = ("simulate", "-m", tiny, "--machine", "t4", "--num-kv-blocks", "2000", "--roles", "prefill=1,decode=3", *load, "--json")
    for router in ("shortest-queue", "soonest"):
        plain, mixed = (last_record(octavo(*flags, "--router", router, *more)) for more in ((), ("--mixed",)))
        assert plain["num_completed"] == mixed["num_completed"] == plain["num_handed_over"] == 300
        assert mixed["num_handed_over"] <= 300


def test_an_engine_may_be_killed(octavo: Octavo, fitted: Path) -> None:
    flags = ("simulate", "--fitted", fitted, "--num-kv-blocks", "64", *LOAD, "--engines", "2")
    ended = octavo(*flags, "--outage", "0@0.5-1.5", "--outage", "1@1.0")
    record = last_record(ended)
    assert record["num_completed"] == 30 and record["num_moved"] > 0 and "went on elsewhere" in ended.out
    for outage, message in (("x", "ENGINE@AT"), ("2@1", "numbered from 0 to 1")):
        refused = octavo(*flags, "--outage", outage)
        assert refused.code == 2 and "'--outage'" in refused.err and message in refused.err


def test_engines_come_and_go(octavo: Octavo, fitted: Path) -> None:
    """Answers wait for blocks of the one decode engine: others come, and the table says for how long."""
    load = ("--rate", "5", "--num-requests", "60", "--prompt-len", "64", "--output-len", "200")
    flags = ("simulate", "--fitted", fitted, "--num-kv-blocks", "40", "--kv-bytes", "1000", *load, "--roles", "prefill=1,decode=1")
    alone, grown = octavo(*flags), octavo(*flags, "--max-engines", "decode=3")
    assert alone.code == grown.code == 0 and "there, s" in grown.out and "there, s" not in alone.out
    engines = json.loads(grown.out.splitlines()[-1])["engines"]
    assert [one["role"] for one in engines[:2]] == ["prefill", "decode"] and {one["role"] for one in engines[2:]} == {"decode"}


def test_roles_hand_over(octavo: Octavo, fitted: Path) -> None:
    flags = ("simulate", "--fitted", fitted, "--num-kv-blocks", "64", *LOAD, "--json", "--roles", "prefill=1,decode=2")
    assert last_record(octavo(*flags, "--kv-bytes", "1000"))["num_handed_over"] == 30
    ended = octavo(*flags)
    assert ended.code == 2 and "--kv-bytes" in ended.err


def test_a_recording_is_told_again_and_gives_costs_and_load(octavo: Octavo, tiny: Path, tmp_path: Path) -> None:
    recording = tmp_path / "run.jsonl"
    flags = ("--record", recording, "--threads", "1", "--max-tokens", "12", "--temperature", "0")
    assert octavo("run", "-m", tiny, *flags, "hello there").code == 0
    record = last_record(octavo("simulate", "--replay", recording, "--json"))
    assert (record["num_completed"], record["output_tokens"]) == (1, 12)
    assert last_record(octavo("simulate", "--fitted", recording, "--num-kv-blocks", "64", *LOAD, "--json"))["num_completed"] == 30
    larger = last_record(octavo("simulate", "--replay", recording, "--block-size", "32", "--json"))
    assert larger["engines"][0]["pool_most"] == pytest.approx(record["engines"][0]["pool_most"], rel=0.5)
    lines = recording.read_text().splitlines(keepends=True)
    recording.write_text(lines[0])
    ended = octavo("simulate", "--fitted", recording, "--num-kv-blocks", "64", *LOAD)
    assert ended.code == 2 and "steps: 0 are not enough to fit a cost on" in ended.err
    ended = octavo("simulate", "--replay", recording)
    assert ended.code == 2 and "'--replay': " in ended.err and "no request is in it" in ended.err
    adds = [line for line in lines if line.startswith('["add"')]
    recording.write_text("".join([lines[0], *adds]))
    ended = octavo("simulate", "--replay", recording, "--machine", "l4")
    assert ended.code == 2 and "no request is in it: 1 made no token, or had not ended when it did" in ended.err
    recording.write_text("".join([*lines, *(line.replace('"request_id":"', '"request_id":"another-') for line in adds)]))
    ended = octavo("simulate", "--replay", recording)
    assert "left out of the recording's requests: 1 made no token, or had not ended when it did" in ended.out
    assert last_record(ended)["num_left_out"] == 1
    recording.write_text("".join(line.replace('"max_tokens":12', '"max_tokens":3') for line in lines))
    ended = octavo("simulate", "--replay", recording, "--json")
    assert ended.code == 1 and "line " in ended.err


def test_a_recording_that_is_there_is_not_lost(octavo: Octavo, tiny: Path, tmp_path: Path) -> None:
    """As when a supervisor starts a server anew."""
    recording = tmp_path / "run.jsonl"
    flags = ("run", "-m", tiny, "--record", recording, "--threads", "1", "--max-tokens", "2", "hello there")
    assert octavo(*flags).code == 0
    assert recording.stat().st_mode & 0o777 == 0o600, "prompts are in it"
    was = recording.read_bytes()
    ended = octavo(*flags)
    assert ended.code == 1 and f"--record: {str(recording)!r} is not allowed; it holds {len(was):,} bytes already" in ended.err
    assert recording.read_bytes() == was


def test_traces_and_closed_loops(octavo: Octavo, fitted: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,num_prompt,num_output\n0,10,3\n4,20,5\n")
    flags = ("simulate", "--fitted", fitted, "--num-kv-blocks", "64", "--json")
    slow, fast = (last_record(octavo(*flags, "--trace", trace, "--trace-speed", speed)) for speed in ("1", "4"))
    assert (slow["prompt_tokens"], slow["output_tokens"]) == (30, 8)
    assert slow["duration_s"] - fast["duration_s"] == pytest.approx(3.0)
    resampled = last_record(octavo(*flags, "--trace", trace, "--rate", "5", "--num-requests", "40"))
    assert resampled["num_completed"] == 40 and resampled["prompt_tokens"] % 10 == 0
    lines = tmp_path / "t.jsonl"
    lines.write_text('{"arrival_s": 0, "num_prompt": 10, "num_output": 3}\n{"arrival_s": 4, "num_prompt": 20, "num_output": 5}\n')
    same = last_record(octavo(*flags, "--trace", lines, "--rate", "5", "--num-requests", "40"))
    assert same["output_tokens"] == resampled["output_tokens"]
    lines.write_text("")
    assert "there is no request in it" in octavo(*flags, "--trace", lines, "--rate", "5").err
    assert last_record(octavo(*flags, "--concurrency", "3", "--num-requests", "9", "--duration", "100"))["num_completed"] == 9
    assert last_record(octavo(*flags, "--rate", "5", "--num-requests", "0"))["num_arrived"] == 0


def test_drafts_and_prefixes(octavo: Octavo, fitted: Path) -> None:
    flags = ("simulate", "--fitted", fitted, "--num-kv-blocks", "256", *LOAD, "--json")
    plain, drafted = last_record(octavo(*flags)), last_record(octavo(*flags, "--spec", "4", "--acceptance", "0.9"))
    assert drafted["num_steps"] < 0.7 * plain["num_steps"]
    shared = last_record(octavo(*flags, "--shared-prefix", "64"))
    assert shared["cached_tokens"] > 20 * 64
    assert last_record(octavo(*flags, "--shared-prefix", "64", "--no-enable-prefix-caching"))["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--machine"),
        (("--machine", "l4", "--fitted", "FITTED"), "--fitted"),
        (("--fitted", "FITTED", "--rate", "1"), "--num-kv-blocks"),
        (("--fitted", "FITTED", "--num-kv-blocks", "9"), "--rate"),
        (("--fitted", "FITTED", "--num-kv-blocks", "9", "--rate", "1", "--concurrency", "2"), "--concurrency"),
        (("--fitted", "FITTED", "--num-kv-blocks", "9", "--kv-cache-memory", "1G", "--rate", "1"), "--num-kv-blocks"),
        (("--fitted", "FITTED", "--kv-cache-memory", "1G", "--rate", "1"), "--kv-cache-memory"),
        (("--fitted", "FITTED", "--kv-cache-memory", "1K", "--kv-bytes", "1000", "--rate", "1"), "hold no block"),
        (("--fitted", "FITTED", "--num-kv-blocks", "9", "--rate", "0"), "--rate"),
        (("--fitted", "FITTED", "--num-kv-blocks", "9", "--rate", "1", "--slo", "ttft=0"), "--slo"),
        (("--fitted", "FITTED", "--num-kv-blocks", "9", "--rate", "1", "--slo", "ttft=1,ttft=2"), "each once"),
        (("--fitted", "FITTED", "--num-kv-blocks", "9", "--rate", "1", "--roles", "prefill=1"), "--roles"),
        (("--fitted", "FITTED", *ROLES, "--max-engines", "4"), "'--max-engines': 4 is not allowed; numbers by role such as decode=4"),
        (("--fitted", "FITTED", *ROLES, "--max-engines", "decode=0"), "decode=0 is not allowed; at least as many as roles has of them (1)"),
        (("--fitted", "FITTED", "--num-kv-blocks", "9", "--rate", "1", "--mixed"), "--mixed"),
        (("--fitted", "FITTED", "--num-kv-blocks", "9", "--rate", "1", "--engines", "2", "--links", "0-1=1e9"), "--links"),
        (("--fitted", "FITTED", *ROLES, "--links", "0-2=1e9"), "--links"),
        (("--fitted", "FITTED", *ROLES, "--links", "0-1"), "--links"),
        (("--fitted", "FITTED", "--num-kv-blocks", "9", "--rate", "1", "--duration", "-1"), "--duration"),
        (("--fitted", "FITTED", "--num-kv-blocks", "9", "--rate", "1", "--roles", "prefill=1,decode=1", "--engines", "2"), "--engines"),
        (("--fitted", "FITTED", "--num-kv-blocks", "9", "--concurrency", "1", "--burstiness", "2"), "--burstiness"),
        (("--fitted", "FITTED", "--num-kv-blocks", "9", "--rate", "1", "--trace-speed", "2"), "--trace-speed"),
        (("--fitted", "FITTED", "--num-kv-blocks", "9", "--rate", "1", "--max-num-seqs", "0"), "--max-num-seqs"),
        (("--fitted", "FITTED", "--num-kv-blocks", "9", "--rate", "1", "--prompt-len", "x"), "--prompt-len"),
        (("--fitted", "FITTED", "--num-kv-blocks", "9", "--rate", "1", "--spec", "99"), "--spec"),
        (("-m", "TINY", "--machine", "nothing", "--rate", "1"), "--machine"),
        (("-m", "TINY", "--machine", "l4", "--kv-bytes", "3", "--rate", "1"), "--kv-bytes"),
        (("-m", "TINY", "--machine", "l4", "--block-size", "8", "--rate", "1"), "--block-size"),
        (("-m", "TINY", "--machine", "l4", "--kv-cache-memory", "1", "--rate", "1"), "hold no block"),
        (("-m", "TINY", "--machine", "l4", "--rate", "1", "--link", "1G"), "--link"),
        (("-m", "TINY", "--machine", "l4", "--rate", "1", "--acceptance", "0.5"), "--acceptance"),
        (("--fitted", "FITTED", "--num-kv-blocks", "9", "--rate", "1", "--draft-ms", "1"), "--draft-ms"),
        (("--fitted", "FITTED", "--num-kv-blocks", "9", "--rate", "1", "--spec", "2", "--draft-ms", "1e300"), "--draft-ms"),
        (("--fitted", "FITTED", "--num-kv-blocks", "9", "--rate", "1", "--devices", "2"), "--devices"),
        (("--fitted", "FITTED", "--num-kv-blocks", "9", "--trace", "FITTED", "--prompt-len", "5"), "--prompt-len"),
    ],
)
def test_contradictions_are_refused(octavo: Octavo, fitted: Path, tiny: Path, flags: tuple[str, ...], message: str) -> None:
    names = {"FITTED": fitted, "TINY": tiny}
    ended = octavo("simulate", *(names.get(flag, flag) for flag in flags))
    assert ended.code == 2 and message in ended.err and ended.out == ""
