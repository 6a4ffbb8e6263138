"""Kernel speeds: what is counted, which limit bounds it, and the record. Times are made up or not looked at."""

from __future__ import annotations

import json

import pytest

from octavo.backends.cpu import _native
from octavo.bench import kernels
from octavo.bench.kernels import KernelCases, attention_speed, matmul_speed, measure_kernels, run_kernels
from octavo.bench.limits import Limits, PeakProbe, ReadProbe

BEST = _native.isa_levels()[-1]
BUDGET_S = 0.0005
READ, INT8, BF16, F32 = 1e9, 8e9, 4e9, 2e9


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "stream_bytes", lambda: 1 << 20)


def limits(*kinds: str, threads: int = 1) -> Limits:
    peaks = [PeakProbe(kind, "", threads, rate, 1.0) for kind, rate in (("int8", INT8), ("bf16", BF16), ("f32", F32)) if kind in kinds]
    return Limits(threads, 512, [ReadProbe("memory", threads, 1, 0, True, 1, READ, 1.0)], peaks)


ALL = limits("int8", "bf16", "f32")


@pytest.mark.parametrize(("dtype", "bits"), [("q4_1", 5.0), ("q6_k", 6.5625), ("bf16", 16.0)])
@pytest.mark.parametrize("threads", [1, 3])
def test_products_are_counted(dtype: str, bits: float, threads: int) -> None:
    seconds, num_bytes, operations = _native.time_matmul(BEST, threads, dtype, 64, 512, 3, BUDGET_S)
    assert (num_bytes, operations) == (64 * 512 * bits / 8, 2 * 3 * 64 * 512) and seconds > 0


@pytest.mark.parametrize(("context", "rows"), [(1, 1), (40, 1), (40, 40), (100, 7)])
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_is_counted(context: int, rows: int, threads: int) -> None:
    """Each row multiplies with all positions up to its own, twice; every thread has a sequence of its own."""
    heads, kv_heads, head_dim = 6, 2, 16
    _, num_bytes, operations = _native.time_attention(BEST, threads, "f16", (heads, kv_heads, head_dim), context, rows, 0, BUDGET_S)
    seen = sum(position + 1 for position in range(context - rows, context))
    assert operations == threads * 2 * 2 * seen * heads * head_dim
    assert num_bytes == threads * 2 * 2 * kv_heads * head_dim * -(-context // 16) * 16


def test_kv_is_walked_over_as_many_layers_as_it_takes() -> None:
    layer = 2 * 2 * 64 * 16
    row = _native.time_attention(BEST, 1, "bf16", (1, 1, 64), 16, 1, 10 * layer - 1, BUDGET_S)
    assert row[1] == 10 * layer


def test_what_cannot_be_timed_is_refused() -> None:
    with pytest.raises(ValueError, match="rows: 0 is not allowed"):
        _native.time_matmul(BEST, 1, "q4_1", 16, 32, 0, BUDGET_S)
    with pytest.raises(ValueError, match="rows: 5 is not in 1"):
        _native.time_attention(BEST, 1, "f16", (1, 1, 16), 4, 5, 0, BUDGET_S)
    with pytest.raises(ValueError, match="heads"):
        _native.time_attention(BEST, 1, "f16", (3, 2, 16), 4, 1, 0, BUDGET_S)
    with pytest.raises(ValueError, match="kv dtype: int3"):
        _native.time_attention(BEST, 1, "int3", (1, 1, 16), 4, 1, 0, BUDGET_S)
    with pytest.raises(ValueError, match="format: 'q1_0' cannot be packed; known: q4_0"):
        measure_kernels(BEST, ALL, KernelCases(formats=("q1_0",)), BUDGET_S)


def bound_s(speed: kernels.KernelSpeed) -> float:
    assert speed.share is not None
    return speed.share * speed.seconds


def test_a_product_is_bound_by_whichever_takes_longer() -> None:
    one = matmul_speed(BEST, ALL, "q4_1", 1, BUDGET_S)
    assert one.limit == "read" and bound_s(one) == pytest.approx(one.bytes / READ)
    four = matmul_speed(BEST, ALL, "q4_1", 4, BUDGET_S)  # 4 rows x 1.6 weights a byte x 2 = 12.8 operations a byte, and 8 are as fast
    assert four.limit == "int8" and bound_s(four) == pytest.approx(four.operations / INT8)
    many = matmul_speed(BEST, ALL, "q4_1", 64, BUDGET_S)
    assert many.limit == "int8" and many.bytes < one.bytes
    floats = matmul_speed(BEST, ALL, "bf16", 16, BUDGET_S)
    assert floats.limit == "f32" and bound_s(floats) == pytest.approx(floats.operations / F32)
    assert matmul_speed(BEST, limits(), "q4_1", 64, BUDGET_S).share is None


def test_attention_is_bound_by_reading_or_the_best_peak_of_its_type() -> None:
    decode = attention_speed(BEST, ALL, "f16", 40, True, BUDGET_S)
    assert (decode.kernel, decode.rows, decode.limit) == ("decode", 1, "read") and decode.bytes >= 1 << 20
    assert bound_s(decode) == pytest.approx(decode.bytes / READ)
    for given, kv_dtype, limit, rate in ((ALL, "f16", "bf16", BF16), (ALL, "f32", "f32", F32), (limits("f32"), "bf16", "f32", F32)):
        prefill = attention_speed(BEST, given, kv_dtype, 40, False, BUDGET_S)
        assert (prefill.kernel, prefill.rows, prefill.limit) == ("prefill", 40, limit)
        assert bound_s(prefill) == pytest.approx(prefill.operations / rate)


def test_the_record_and_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_ISA", raising=False)
    monkeypatch.setattr(kernels, "measure_limits", lambda threads, budget_s: limits("int8", "f32", threads=threads))
    cases = KernelCases(("q8_0", "f32"), (1, 16), ("f16",), (32,))
    printed: list[str] = []
    run_kernels(cases, 2, BUDGET_S, printed.append, False)
    record = json.loads(printed[-1])
    assert (record["bench"], record["threads"], record["isa"]) == ("kernels", 2, BEST)
    assert (record["int8_ops_s"], record["bf16_ops_s"]) == (INT8, None)
    named = [(s["kernel"], s["format"], s["rows"], s["context"]) for s in record["kernels"]]
    products = [("matmul", dtype, rows, None) for dtype in ("q8_0", "f32") for rows in (1, 16)]
    assert named == [*products, ("prefill", "f16", 32, 32), ("decode", "f16", 1, 32)]
    assert len(printed[1].splitlines()) == 1 + len(named) and max(map(len, printed[1].splitlines())) <= 100
    only: list[str] = []
    run_kernels(cases, 2, BUDGET_S, only.append, True)
    assert len(only) == 1 and json.loads(only[0]).keys() == record.keys()
