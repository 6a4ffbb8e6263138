"""`octavo bench routing` and `octavo bench goodput`: the record, the table, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.reproduce.goodput_plot import goodput_plot
from octavo.reproduce.svg import plot_svg
from tests.cli.conftest import Octavo

SMALL = ("--engines", "2", "--rate", "0.5", "--seconds", "6", "--seed", "0", "--num-kv-blocks", "600")
ROUTING = ("bench", "routing", "--machine", "l4", *SMALL)
TABLE = "model,hardware,tensor_parallel,prompt_size,batch_size,token_size,prompt_time,token_time\n"


def test_routers_are_compared_on_the_same_turns(octavo: Octavo, tiny_base: Path) -> None:
    ended = octavo(*ROUTING, "--model", tiny_base, "--router", "soonest")
    assert ended.code == 0, ended.err
    record = json.loads(ended.out.splitlines()[-1])
    assert [run["router"] for run in record["runs"]] == ["round-robin", "soonest"]
    assert len({run["num_prompt"] for run in record["runs"]}) == 1
    assert record["runs"][1]["num_computed"] <= record["runs"][0]["num_computed"]
    computed = {bound["bound"]: bound["num_computed"] for bound in record["bounds"]}
    assert list(computed) == ["least", "one cache", "by session"] and computed["least"] <= record["runs"][1]["num_computed"]
    assert "(one cache)" in ended.out and "over round-robin" in ended.out and "simulated" in ended.out


@pytest.mark.parametrize("how", ["--learn", "--front-end"])
def test_prices_can_be_learned_as_in_a_cluster(octavo: Octavo, tiny_base: Path, how: str) -> None:
    ended = octavo(*ROUTING, "--model", tiny_base, "--router", "soonest", how, "--json")
    assert ended.code == 0, ended.err
    record = json.loads(ended.out)
    assert record["learn"] and record["front_end"] == (how == "--front-end")
    assert record["runs"][1]["num_computed"] <= record["runs"][0]["num_computed"]


def test_what_is_not_there_is_named(octavo: Octavo, tmp_path: Path) -> None:
    ended = octavo("bench", "routing", "--machine", "x")
    assert ended.code == 2 and "'--machine': 'x' is not allowed; one of" in ended.err
    ended = octavo("bench", "routing", "--turns", "0.5")
    assert ended.code == 2 and "'--turns': 0.5 is not allowed" in ended.err
    ended = octavo("bench", "goodput", "--data", tmp_path)
    assert ended.code == 1 and "splitwise_perf_model.csv" in ended.err
    ended = octavo("bench", "goodput", "--data", tmp_path, "--slo", "ttft=1")
    assert ended.code == 2 and "'--slo'" in ended.err and "goodput needs both limits" in ended.err
    for text in ("ttft=3,e2e=2", "ttft=3", "itl=2", "ttft=3,itl=2,gap=2", "ttft=0.5,itl=2"):
        ended = octavo("bench", "goodput", "--data", tmp_path, "--slowdown", text)
        assert ended.code == 2 and f"'--slowdown': {text!r} is not allowed; ttft=TIMES,itl=TIMES" in ended.err


def test_goodput_of_a_small_cluster(octavo: Octavo, tmp_path: Path) -> None:
    rows = [TABLE]
    for hardware, speed in (("a100-80gb", 1.0), ("h100-80gb", 2.0), ("h100-80gb-pcap", 1.8)):
        for size, batch in ((128, 1), (512, 1), (2048, 1), (512, 8), (512, 64)):
            prompt_ms, token_ms = 0.25 * size * batch / speed, (40 + 0.6 * batch + 0.001 * size) / speed
            rows.append(f"bloom-176b,{hardware},8,{size},{batch},128,{prompt_ms},{token_ms}\n")
    (tmp_path / "splitwise_perf_model.csv").write_text("".join(rows))
    trace = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0,600,8\n2023-11-16 18:00:01.0,900,5\n"
    (tmp_path / "AzureLLMInferenceTrace_code.csv").write_text(trace)
    small = ("--scale", "0.05", "--seconds", "3", "--precision", "0.5", "--workload", "code", "--design", "HA", "--splits", "1")
    ended = octavo("bench", "goodput", "--data", tmp_path, "--plot", tmp_path / "curves.svg", *small)
    assert ended.code == 0, ended.err
    record = json.loads(ended.out.splitlines()[-1])
    assert [(arm["design"], arm["way"]) for arm in record["arms"]] == [
        *((name, way) for name in ("Baseline-A100", "Baseline-H100") for way in ("first", "whole", "chunked")), ("HA", "apart"),
    ]  # fmt: skip
    for arm in record["arms"]:
        (holds_at, fails_at), points = arm["brackets"][0], dict(arm["attained"]["0"])
        assert 0 < holds_at < fails_at and points[holds_at] >= 0.9 > points[fails_at]
    assert record["arms"][-1]["tried"] and "90 % of the requests within 3 times the TTFT and 1.5 times the mean" in ended.out
    drawn = goodput_plot(record)
    for line, arm in zip(drawn.lines, record["arms"], strict=True):
        assert line.label.startswith(arm["design"])
        attained = sorted((rate, 100.0 * share) for rate, share in arm["attained"]["0"])
        assert list(line.points) == attained[: len(line.points)] and all(share >= 50.0 for _, share in line.points[:-1])
        assert len(line.points) == len(attained) or line.points[-1][1] < 50.0
    assert (tmp_path / "curves.svg").read_text() == plot_svg(drawn)


def test_curves_over_several_seeds_are_means_where_all_have_points() -> None:
    attained = {"0": [[1.0, 1.0], [2.0, 0.9]], "1": [[2.0, 0.8], [3.0, 0.1]]}
    arm = {"design": "AA", "way": "apart", "num_prompt": 2, "num_token": 1, "attained": attained}
    (line,) = goodput_plot({"workload": "code", "attainment": 0.9, "arms": [arm]}).lines
    assert line.label == "AA 2P+1T" and [rate for rate, _ in line.points] == [2.0] and line.points[0][1] == pytest.approx(85.0)
