"""`octavo bench cluster-ways`: what is measured of what is asked for, the record, what is refused. Nothing is measured here."""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from octavo.costs.coefficients import Coefficients
from octavo.distributed.handoff import Link
from octavo.reproduce.cluster_accuracy import WaysAccuracy, WaysCase
from octavo.reproduce.cluster_prediction import KindCost, Predictor
from octavo.reproduce.compared import Limits
from octavo.reproduce.way_figures import WayComparison
from octavo.simulator.shared_host import Crowding
from tests.cli.conftest import Octavo

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, row in (("conv", "800,80"), ("code", "1600,20")):
        (tmp_path / f"AzureLLMInferenceTrace_{name}.csv").write_text(f"{HEAD}2023-11-16 18:15:46.6805900,{row}\n")
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What was asked to be measured."""
    found: dict[str, Any] = {}

    def measure(ways: list[Any], path: str, case: WaysCase, progress: Any) -> WaysAccuracy:
        found.update(ways=ways, path=path, case=case)
        some = WayComparison("code 30 %", "apart", "itl_p99_s", (0.01, 0.012), 0.0115, 0.011, 0.011, 417)
        predictor = Predictor(KindCost(Coefficients((1e-3,) * 6)), Crowding(0.1, 0.1, 0.1, 0.1), Link(1e9, 0.005), 0.001, 0.002)
        biases = {("code 30 %", "apart"): (0.01, 0.02)}
        return WaysAccuracy("tiny", (some,), (("code 30 %", 1.5, 9),), biases, {"code": Limits(0.5, 0.02)}, predictor, 0)

    monkeypatch.setattr("octavo.reproduce.cluster_accuracy.measure_ways", measure)
    return found


def test_what_is_asked_for_is_measured(octavo: Octavo, tiny: Path, data: Path, asked: dict[str, Any]) -> None:
    ended = octavo("bench", "cluster-ways", "-m", tiny, "--data", data, "--repeat", "3", "--requests", "25", "--chunk", "64")
    assert ended.code == 0, ended.err
    record = json.loads(ended.out.splitlines()[-1])
    assert record["bench"] == "cluster-ways" and record["num_agree"] == 1 and record["agrees"]
    assert "1 of 1 figures agree" in ended.out and re.search(r"ITL p99, ms +417 +11.5 ", ended.out)
    ways, case = asked["ways"], asked["case"]
    assert asked["path"] == str(tiny) and (case.repeat, case.num_requests, case.calibrate_s, case.seed) == (3, 25, 60.0, 0)
    assert [way.name for way in ways] == ["apart", "chunks", "prompts first"]
    assert ways[1].config.scheduler.max_num_batched_tokens == 64
    configs = [way.config for way in ways]
    assert {(one.backend.threads, one.cache.num_kv_blocks, one.scheduler.max_num_seqs) for one in configs} == {(1, 1024, 16)}
    lengths = {name: next(islice(one.lengths(random.Random(1)), 1)) for name, one in case.loads.items()}
    assert lengths == {"conversation": (100, 10), "code": (200, 10)}


def test_what_is_said_of_workers_counts(octavo: Octavo, tiny: Path, data: Path, asked: dict[str, Any]) -> None:
    flags = ("--threads", "2", "--max-num-seqs", "4", "--num-kv-blocks", "300", "--load", "code", "--json")
    ended = octavo("bench", "cluster-ways", "-m", tiny, "--data", data, *flags)
    assert ended.code == 0 and len(ended.out.splitlines()) == 1, ended.err
    config = asked["ways"][0].config
    assert (config.backend.threads, config.cache.num_kv_blocks, config.scheduler.max_num_seqs) == (2, 300, 4)
    assert list(asked["case"].loads) == ["code"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--spec", "auto"), "'--spec'"),
        (("--swap-space", "1GiB"), "'--kv-host-memory'"),
        (("--chunk", "17", "--max-num-seqs", "18"), "'--chunk': 17 is not allowed; at least --max-num-seqs (18)"),
        (("--requests", "0"), "'--requests'"),
    ],
)
def test_what_is_refused(octavo: Octavo, tiny: Path, data: Path, flags: tuple[str, ...], named: str) -> None:
    ended = octavo("bench", "cluster-ways", "-m", tiny, "--data", data, *flags)
    assert ended.code == 2 and named in ended.err


def test_a_trace_that_is_not_there_is_named(octavo: Octavo, tiny: Path, tmp_path: Path) -> None:
    ended = octavo("bench", "cluster-ways", "-m", tiny, "--data", tmp_path, "--load", "code")
    assert ended.code == 1 and "AzureLLMInferenceTrace_code.csv" in ended.err
