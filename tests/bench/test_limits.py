"""Probes count what they do; the best of them is the machine's figure. No test here knows how fast a machine is."""

from __future__ import annotations

import pytest

from octavo.backends.cpu import _native
from octavo.bench import limits
from octavo.bench.limits import Limits, PeakProbe, ReadProbe, thread_counts

BUDGET_S = 0.001


@pytest.mark.parametrize("threads", [1, 3])
def test_reads_count_whole_parts_of_the_buffer(threads: int) -> None:
    size = 6 << 20
    rows = _native.probe_reads(threads, size, BUDGET_S)
    assert len({row[:3] for row in rows}) == len(rows) == 14
    assert [{row[i] for row in rows} for i in range(3)] == [{1, 2, 4}, {0, 512, 1024, 4096}, {True, False}]
    for streams, _, _, num_bytes, seconds in rows:
        step = 256 * threads * streams
        assert num_bytes == size // step * step and seconds > 0


def test_a_buffer_too_small_for_its_threads_is_made_larger() -> None:
    assert all(row[3] >= 2 << 20 for row in _native.probe_reads(2, 1, BUDGET_S))


@pytest.mark.parametrize("threads", [1, 2])
def test_peaks_count_operations_of_all_threads(threads: int) -> None:
    rows = {row[1]: row for row in _native.probe_arithmetic(threads, BUDGET_S)}
    width = {"int8": 1, "bf16": 2, "f32": 4}
    levels = _native.isa_levels()
    assert ("vpmaddubsw + vpmaddwd + vpaddd ymm" in rows) == ("avx2" in levels)
    assert ("vpdpbusd zmm" in rows) == any("avx512" in level for level in levels)
    for kind, instruction, operations, seconds in rows.values():
        vector_bytes = 64 if "zmm" in instruction else 32
        assert operations == 2 * vector_bytes // width[kind] * 10 * 10_000 * threads and seconds > 0


def test_no_threads_are_refused() -> None:
    for probe in (lambda: _native.probe_arithmetic(0, BUDGET_S), lambda: _native.probe_reads(0, 1 << 20, BUDGET_S)):
        with pytest.raises(ValueError, match="threads: at least 1"):
            probe()


def test_thread_counts() -> None:
    assert [thread_counts(n) for n in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


def test_every_place_kind_and_number_of_threads_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "memory_probe_bytes", lambda: 4 << 20)
    found = limits.measure_limits(2, BUDGET_S)
    assert {(r.where, r.threads) for r in found.reads} == {(where, n) for where in ("memory", "cache") for n in (1, 2)}
    assert {p.threads for p in found.peaks} in ({1, 2}, set())
    assert found.read_rate == max(r.bytes / r.seconds for r in found.reads if r.where == "memory" and r.threads == 2)


def test_the_best_is_of_the_threads_that_compute() -> None:
    def read(threads: int, seconds: float) -> ReadProbe:
        return ReadProbe("memory", threads, 1, 0, True, 100, 100.0, seconds)

    int8 = [PeakProbe("int8", name, n, done, s) for name, n, done, s in (("a", 2, 64.0, 2.0), ("b", 2, 64.0, 1.0), ("c", 1, 99.0, 1.0))]
    peaks = [*int8, PeakProbe("f32", "d", 2, 9.0, 1.0)]
    found = Limits(2, 512, [read(1, 1.0), read(2, 4.0), read(2, 2.0)], peaks)
    assert found.read_rate == 50.0
    rates = [found.peak_rate(*kinds) for kinds in (("int8",), ("f32",), ("bf16",), ("bf16", "f32"))]
    assert rates == [64.0, 9.0, None, 9.0]
    assert found.best_peak("int8", 2) is int8[1] and found.best_peak("int8", 1) is int8[2] and found.best_peak("bf16", 2) is None


def test_sizes_follow_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_memory_bytes", lambda: 64 << 30)
    monkeypatch.setattr(limits, "cache_bytes", lambda: {"L1d": 1 << 15, "L2": 1 << 20, "L3": 96 << 20})
    assert (limits.stream_bytes(), limits.memory_probe_bytes(), limits.cache_probe_bytes(3)) == (192 << 20, 384 << 20, 3 << 19)
    monkeypatch.setattr(limits, "cache_bytes", dict)
    assert (limits.stream_bytes(), limits.cache_probe_bytes(2)) == (64 << 20, 512 << 10)
    monkeypatch.setattr(limits, "cache_bytes", lambda: {"L3": 1 << 30})
    monkeypatch.setattr(limits, "available_memory_bytes", lambda: 256 << 20)
    assert (limits.stream_bytes(), limits.memory_probe_bytes()) == (512 << 20, 64 << 20)
