"""The doctor: what it examines, what it does about a kernel that is wrong, and how it says so. No verdict here depends on speed."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from octavo.backends.cpu import _native, kernel_path, verdicts
from octavo.backends.cpu.kernel_path import CheckRow, path_name
from octavo.bench import doctor
from octavo.bench.decode import decode_share
from octavo.bench.doctor import DoctorOptions, DoctorReport, examine
from octavo.bench.doctor_text import report_text
from octavo.bench.kernels import KernelCases, KernelSpeed
from octavo.bench.limits import Limits, PeakProbe, ReadProbe
from octavo.bench.offline import OfflineCase
from octavo.config import KV_DTYPES
from octavo.core.step import StepPlan
from tests.models.tiny import write_tiny_gguf

LEVELS = _native.isa_levels()
BEST = LEVELS[-1]
several_levels = pytest.mark.skipif(len(LEVELS) < 2, reason="this machine has one kernel level")
PEAKS = [PeakProbe(kind, f"{kind} instruction", n, 1e6, 1e-4 / n) for kind in ("int8", "bf16", "f32") for n in (1, 2)]
READS = [ReadProbe(where, n, 4, 1024, True, 1 << 20, 1e6, 1e-4 / n) for where in ("memory", "cache") for n in (1, 2)]


@cache
def checked(level: str, fault: str | None = None, full: bool = True) -> list[CheckRow]:
    """The cases of a level, with a fault in one of its entries."""
    return _native.check_kernels(level, full) if fault is None else _native.check_kernels_test(level, full, fault)


def speeds_of(path: str, limits: Limits, cases: KernelCases, budget_s: float) -> list[KernelSpeed]:
    """As measure_kernels, without the time it takes."""
    products = [KernelSpeed("matmul", dtype, rows, None, 1e6, 2e6, 1e-4, "int8", 0.5) for dtype in cases.formats for rows in cases.rows]
    prompts = [KernelSpeed("prefill", kv, n, n, 1e6, 2e6, 1e-4, "bf16", 0.25) for kv in cases.kv_dtypes for n in cases.contexts]
    decoding = [KernelSpeed("decode", kv, 1, n, 1e6, 2e6, 1e-4, "read", 1.0) for kv in cases.kv_dtypes for n in cases.contexts]
    return products + prompts + decoding


@pytest.fixture(autouse=True)
def patient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home without models and verdicts; measurements are replaced, checks are not."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    monkeypatch.delenv("OCTAVO_ISA", raising=False)
    monkeypatch.setattr(doctor, "measure_limits", lambda threads, budget_s: Limits(threads, 512, READS, PEAKS))
    monkeypatch.setattr(doctor, "measure_kernels", speeds_of)
    kernel_path.short_check.cache_clear()


def examined(options: DoctorOptions = DoctorOptions(threads=2), faults: dict[str, str] | None = None, full: bool = False) -> DoctorReport:
    return examine(options, lambda _: None, lambda level: checked(level, (faults or {}).get(level), full))


# --- a machine on which all is right ------------------------------------------------------------------------------------------------------


def test_every_kernel_format_and_class_is_checked() -> None:
    rows = checked(BEST)
    assert {row[0] for row in rows} == set(_native.kernel_entries())
    shapes = ["1 row", "2-4 rows", "5-16 rows", "17-64 rows", "512 rows"]
    for kernel, formats in (("matmul", [*KernelCases().formats, "q4_k as f32"]), ("attention", KernelCases().kv_dtypes)):
        assert {row[1:3] for row in rows if row[0] == kernel} == {(name, shape) for name in formats for shape in shapes}
    assert all(right and error <= tolerance for *_, right, error, tolerance in rows)


def test_the_record_is_json_with_everything_in_it() -> None:
    report = examined(full=True)
    record = json.loads(json.dumps(report.record(), allow_nan=False))
    assert record["doctor"] == "right" and record["warnings"] == [] and record["decode"] is None
    assert record["machine"].keys() == {"cpu", "cpus", "cpus_usable", "caches", "memory_bytes", "memory_available_bytes", "huge_pages"}
    used = record["used"]
    assert (used["level"], used["levels"], used["kv_dtype"], used["threads"]) == (BEST, LEVELS, "bf16", 2)
    assert used["entries"] == dict.fromkeys(_native.kernel_entries(), BEST) and used["pinned_threads"] in (0, 1)
    limits = record["limits"]
    assert limits["best"] == {"memory_read_bytes_s": 2e10, "int8_ops_s": 2e10, "bf16_ops_s": 2e10, "f32_ops_s": 2e10}
    assert len(limits["reads"]) == len(READS) and {"bytes", "seconds", "rate"} <= limits["reads"][0].keys()
    assert len(limits["peaks"]) == len(PEAKS) and {"operations", "seconds", "rate"} <= limits["peaks"][0].keys()
    (level,) = record["levels"]
    assert (level["level"], level["path"], level["wrong"], level["replaced"]) == (BEST, BEST, {}, {})
    assert level["checks"][0].keys() == {"kernel", "format", "shape", "right", "error", "tolerance"}
    assert len(level["checks"]) == len(checked(BEST)) and {"share", "limit", "seconds"} <= level["speeds"][0].keys()
    assert verdicts.read_verdicts() == {}  # nothing wrong is nothing to look up
    assert json.loads(verdicts.verdict_file().read_text())["machines"].popitem()[1] == {BEST: {}}


def test_the_text_is_a_table_that_fits_a_terminal() -> None:
    lines = report_text(examined(full=True)).splitlines()
    assert max(map(len, lines)) <= 100
    head = next(line for line in lines if line.startswith("KERNEL"))
    rows = [line for line in lines if line.startswith(("matmul", "attention", "rmsnorm", "sampling"))]
    at = {name: head.index(name) for name in ("FORMAT", "SHAPE", "CHECK", "SHARE")}
    assert all(row[column - 1] == " " and row[column] != " " for row in rows for column in at.values())
    ends = (0, at["FORMAT"], at["SHAPE"], at["CHECK"])
    by_place = {tuple(row[a:b].strip() for a, b in pairwise(ends)): row for row in rows}
    assert len(by_place) == len(rows)
    assert "right" in by_place["matmul", "q4_1", "1 row"] and by_place["matmul", "q4_1", "5-16 rows"].endswith("0.020 TOP/s  50 % of int8")
    assert by_place["attention", "f16", "512 rows"].endswith("25 % of bf16") and "right" in by_place["attention", "f16", "512 rows"]
    assert by_place["attention", "f16", "1 row behind 2048"].endswith("10.0 GB/s  100 % of read")
    assert by_place["attention", "f32", "2048 rows"].split()[4:8] == ["-", "-", "-", "0.020"]
    assert by_place["matmul", "q4_k as f32", "1 row"].split()[-2:] == ["-", "-"]
    assert len(rows) == sum(row[0] in ("matmul", "attention", "rmsnorm", "sampling") for row in checked(BEST)) + 3 * len(KV_DTYPES)
    assert lines[-1].startswith(f"{len(checked(BEST))} classes of kernel cases checked: all right.")
    assert sum(line.endswith("*") for line in lines) == 4 + 6  # the best read of each place, and peak of each kind, by threads


def test_every_level_can_be_examined() -> None:
    report = examined(DoctorOptions(tuple(LEVELS), threads=1))
    assert [level.path for level in report.levels] == LEVELS and report.all_right


@several_levels
def test_what_is_used_is_said_though_another_level_is_examined() -> None:
    verdicts.write_verdicts({BEST: {"add": "an earlier verdict"}})
    report = examined(DoctorOptions((LEVELS[0],), threads=1))
    assert report.used["level"] == BEST
    assert report.used["entries"] == dict.fromkeys(_native.kernel_entries(), BEST) | {"add": LEVELS[-2]}


def test_quick_measures_less(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[float] = []
    monkeypatch.setattr(doctor, "measure_kernels", lambda path, limits, cases, budget_s: budgets.append(budget_s) or [])
    for quick in (False, True):
        examined(DoctorOptions(threads=1, quick=quick))
    assert budgets[1] < budgets[0]


# --- a kernel that is wrong ---------------------------------------------------------------------------------------------------------------


@several_levels
def test_a_wrong_kernel_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = LEVELS[-2]
    report = examined(faults={BEST: "matmul"}, full=True)
    (level,) = report.levels
    path = path_name(BEST, {"matmul": lower})
    assert not report.all_right and level.path == path and level.wrong.keys() == {"matmul"}
    assert report.record()["doctor"] == "wrong"
    assert report.used["entries"] == dict.fromkeys(_native.kernel_entries(), BEST) | {"matmul": lower}
    (warning,) = report.warnings
    assert warning.startswith(f"kernel matmul of {BEST} is wrong (q4_0, 1 row: error ") and warning.endswith(f"that of {lower} is used")
    assert kernel_path.kernel_path() == path  # of the next process
    text = report_text(report)
    assert "WARNING: kernel matmul" in text and f"{BEST}, but matmul of {lower}" in text and "NOT all right" in text
    wrong = [line for line in text.splitlines() if "WRONG" in line]
    assert len(wrong) == 14 * 5 and all(line.startswith("matmul") for line in wrong) and max(map(len, text.splitlines())) <= 100
    assert examined().all_right and kernel_path.kernel_path() == BEST  # a fault that is gone is used again


@pytest.mark.skipif(len(LEVELS) < 3, reason="this machine has fewer than three kernel levels")
def test_lower_levels_are_checked_before_they_step_in() -> None:
    *_, third, second, best = LEVELS
    report = examined(faults={best: "rope", second: "rope"})
    assert [level.path for level in report.levels] == [f"{best}-rope:{third}"]
    kept = {level: set(wrong) for level, wrong in verdicts.read_verdicts().items()}
    assert kept == {best: {"rope"}, second: {"rope"}, third: set()}


def test_a_kernel_that_is_wrong_on_every_level_is_said_to_be() -> None:
    report = examined(faults=dict.fromkeys(LEVELS, "quantize"))
    (level,) = report.levels
    assert level.path is None and level.speeds == [] and not report.all_right
    (warning,) = report.warnings
    assert "kernel quantize" in warning and "no lower level has one that is right" in warning
    assert BEST in report_text(report)
    json.dumps(report.record(), allow_nan=False)


def test_an_error_that_is_no_number_is_null_in_json() -> None:
    rows = [("add", "", "1-16 values", False, float("inf"), 0.0)]
    report = examine(DoctorOptions((LEVELS[0],), threads=1), lambda _: None, lambda _: rows)
    record = json.loads(json.dumps(report.record(), allow_nan=False))
    assert record["levels"][0]["checks"][0]["error"] is None
    assert "not a number" in report_text(report)


def test_a_verdict_that_cannot_be_kept_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(levels: dict) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(doctor, "write_verdicts", refuse)
    (warning,) = examined().warnings
    assert "kernels.json (Read-only file system)" in warning


# --- decoding -----------------------------------------------------------------------------------------------------------------------------


def test_what_a_token_reads_is_counted(tmp_path: Path) -> None:
    """Gemma 2's tiny twin: every other layer sees 32 positions, the others all."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", arch="gemma2")
    share = decode_share(str(path), 1, 5e9, OfflineCase(num_prompt=20, num_output=30, batch=1, repeat=1))
    from octavo.models.loading import load_model

    program = load_model(path).program
    assert {kv.window for kv in program.kv_layers} == {32, None}
    steps = range(20, 20 + 29)  # positions of the tokens that decoding computes
    read = 0
    for kv in program.kv_layers:
        seen = sum(1 for p in steps for key in range(p + 1) if kv.window is None or key > p - kv.window)
        read += seen * 2 * kv.kv_heads * kv.head_dim * 2  # bf16
    assert share.kv_bytes == pytest.approx(read / len(steps))
    assert share.share == pytest.approx((share.weight_bytes + share.kv_bytes) * share.decode_tok_s / 5e9)
    assert (share.model, share.kv_dtype, share.num_prompt, share.num_output) == ("tiny", "bf16", 20, 30) and share.weight_bytes > 0


def test_the_positions_counted_are_the_positions_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.backends.cpu.backend import CpuBackend
    from octavo.bench import decode

    computed: list[int] = []
    counted: list[int] = []
    execute, values = CpuBackend.execute, decode.kv_values_read

    def watched(self: CpuBackend, plan: StepPlan):  # type: ignore[no-untyped-def]
        computed.extend(piece.start for piece in plan.slices if piece.num_tokens == 1)
        return execute(self, plan)

    monkeypatch.setattr(CpuBackend, "execute", watched)
    monkeypatch.setattr(decode, "kv_values_read", lambda engine, position: counted.append(position) or values(engine, position))
    decode_share(str(write_tiny_gguf(tmp_path / "tiny.gguf")), 1, 1e9, OfflineCase(20, 9, 1, repeat=2))
    assert counted * 3 == computed


@pytest.mark.parametrize(("cpu_share", "warned"), [(1.0, False), (0.5, True)])
def test_a_busy_machine_is_said_to_be(cpu_share: float, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    real = decode_share(str(path), 1, 1e9, OfflineCase(8, 4, 1, 1))
    monkeypatch.setattr(doctor, "cached_path", lambda entry: path)
    monkeypatch.setattr(doctor, "decode_share", lambda *_: replace(real, cpu_share=cpu_share))
    report = examined()
    assert report.decode is not None and bool(report.warnings) == warned
    assert not warned or "other processes took 50 % of a CPU" in report.warnings[0]
    text = report_text(report)
    assert "tiny, one stream, 8 + 4 tokens, KV in bf16:" in text and "GB/s that memory delivers" in text
