"""`octavo doctor`, `octavo bench kernels` and `octavo bench scheduler` as commands: flags, output, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.backends.cpu import _native, verdicts
from octavo.bench import kernels, limits
from tests.cli.conftest import Octavo

LEVELS = _native.isa_levels()
BEST = LEVELS[-1]


@pytest.fixture(autouse=True)
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small memories and a home without models: what is measured means nothing here, and takes no time."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    monkeypatch.delenv("OCTAVO_ISA", raising=False)
    monkeypatch.setattr(limits, "memory_probe_bytes", lambda: 2 << 20)
    monkeypatch.setattr(kernels, "stream_bytes", lambda: 1 << 20)
    monkeypatch.setattr("octavo.bench.doctor.measure_kernels", one_of_each)
    measure_limits = limits.measure_limits
    monkeypatch.setattr("octavo.bench.doctor.measure_limits", lambda threads, _: measure_limits(threads, 0.0005))


def one_of_each(path: str, measured: limits.Limits, _cases: kernels.KernelCases, _budget_s: float) -> list[kernels.KernelSpeed]:
    return kernels.measure_kernels(path, measured, kernels.KernelCases(("q4_1",), (1,), ("f16",), (64,)), 0.0005)


def test_doctor_prints_tables_and_records_its_verdict(octavo: Octavo) -> None:
    ended = octavo("doctor", "--quick", "--threads", "1")
    assert ended.code == 0 and ended.err == ""
    assert f"\n{BEST}:\nKERNEL " in ended.out and "checked: all right." in ended.out
    assert "Decoding was not measured: the default model is not in the cache (`octavo pull smollm2`)." in ended.out
    assert verdicts.verdict_file().exists()


def test_doctor_json_is_one_object(octavo: Octavo) -> None:
    ended = octavo("doctor", "--quick", "--json", "--threads", "1", "--isa", LEVELS[0])
    (line,) = ended.out.splitlines()
    record = json.loads(line)
    assert ended.code == 0 and record["doctor"] == "right" and [level["level"] for level in record["levels"]] == [LEVELS[0]]
    assert record["used"]["level"] == BEST and record["limits"]["threads"] == 1


@pytest.mark.skipif(len(LEVELS) < 2, reason="this machine has one kernel level")
def test_a_wrong_kernel_is_exit_code_1_and_is_left_out_from_then_on(octavo: Octavo, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _native.check_kernels

    def check(level: str, full: bool) -> list:
        return _native.check_kernels_test(level, full, "rope") if level == BEST else real(level, full)

    with monkeypatch.context() as faulty:
        faulty.setattr(_native, "check_kernels", check)
        ended = octavo("doctor", "--quick", "--threads", "1")
    assert ended.code == 1 and f"WARNING: kernel rope of {BEST} is wrong" in ended.out
    path = f"{BEST}-rope:{LEVELS[-2]}"
    record = json.loads(octavo("bench", "offline", "--model", tiny, "--prompt", "4", "--output", "2", "--repeat", "1", "--json").out)
    assert record["isa"] == path and record["fingerprint"].endswith(path)


def test_flags_that_do_not_fit_are_refused(octavo: Octavo) -> None:
    ended = octavo("doctor", "--isa", LEVELS[0], "--all-isa")
    assert ended.code == 2 and "--isa names one level, --all-isa takes all" in ended.err
    assert octavo("doctor", "--isa", "sse9").code == 2
    assert octavo("doctor", "--threads", "0").code == 2


def test_a_level_that_is_not_there_is_refused(octavo: Octavo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "isa_levels", lambda: ["portable"])
    ended = octavo("doctor", "--isa", "avx512")
    assert ended.code == 2 and "'avx512' is not available here; this machine has portable" in ended.err


def test_bench_kernels(octavo: Octavo) -> None:
    argv = ("bench", "kernels", "--format", "q8_0", "--rows", "2", "--rows", "20", "--kv-cache-dtype", "bf16")
    argv = (*argv, "--threads", "1", "--seconds", "0.001")
    ended = octavo(*argv)
    record = json.loads(ended.out.splitlines()[-1])
    assert ended.code == 0 and record["bench"] == "kernels" and record["isa"] == BEST
    places = [(s["kernel"], s["format"], s["rows"]) for s in record["kernels"]]
    attention = [(kernel, "bf16", rows) for n in (512, 2048) for kernel, rows in (("prefill", n), ("decode", 1))]
    assert places == [("matmul", "q8_0", 2), ("matmul", "q8_0", 20), *attention]
    (line,) = octavo(*argv, "--json").out.splitlines()
    assert json.loads(line).keys() == record.keys()
    assert octavo("bench", "kernels", "--format", "q1_0").code == 2


@pytest.mark.parametrize("seconds", ["nan", "inf", "0"])
def test_bench_kernels_takes_only_a_time(octavo: Octavo, seconds: str) -> None:
    ended = octavo("bench", "kernels", "--seconds", seconds)
    assert ended.code == 2 and "'--seconds'" in ended.err


def test_bench_kernels_offers_every_format() -> None:
    from octavo.cli import bench

    assert bench._FORMATS == kernels.FORMATS


def test_bench_scheduler(octavo: Octavo) -> None:
    ended = octavo("bench", "scheduler", "--seqs", "2", "--prompt", "10", "--steps", "5")
    record = json.loads(ended.out.splitlines()[-1])
    assert ended.code == 0 and (record["bench"], record["num_seqs"], record["steps"]) == ("scheduler", 2, 5)
