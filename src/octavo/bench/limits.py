"""What this machine could do: how fast it reads memory and cache, and how many products a second its instructions make.

Each limit is probed in several ways, natively; the best of them is the machine's figure. Bytes and operations are counted, not estimated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.backends.machine import available_memory_bytes
from octavo.backends.machine_facts import cache_bytes

_MIN_STREAM_BYTES = 64 << 20
_MAX_STREAM_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class ReadProbe:
    """One way of reading: ``streams`` pieces side by side per thread, software prefetch so far ahead (0: none)."""

    where: str  # memory | cache
    threads: int
    streams: int
    prefetch_bytes: int
    huge_pages: bool  # asked for
    buffer_bytes: int
    bytes: float
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds


@dataclass(frozen=True, slots=True)
class PeakProbe:
    kind: str  # int8 | bf16 | f32
    instruction: str
    threads: int
    operations: float  # 2 per multiply-add
    seconds: float

    @property
    def rate(self) -> float:
        """Operations a second."""
        return self.operations / self.seconds


@dataclass(frozen=True, slots=True)
class Limits:
    """All probes. The figures below are of ``threads`` threads, the number that computes."""

    threads: int
    load_bits: int
    reads: list[ReadProbe]
    peaks: list[PeakProbe]

    def best_read(self, where: str, threads: int) -> ReadProbe:
        return max((r for r in self.reads if (r.where, r.threads) == (where, threads)), key=lambda r: r.rate)

    def best_peak(self, kind: str, threads: int) -> PeakProbe | None:
        """None on machines that have no such instruction."""
        return max((p for p in self.peaks if (p.kind, p.threads) == (kind, threads)), key=lambda p: p.rate, default=None)

    @property
    def read_rate(self) -> float:
        return self.best_read("memory", self.threads).rate

    def peak_rate(self, *kinds: str) -> float | None:
        """The highest peak of these kinds."""
        return max((p.rate for p in self.peaks if p.kind in kinds and p.threads == self.threads), default=None)


def measure_limits(threads: int, budget_s: float) -> Limits:
    """Probe with one thread, with powers of two and with ``threads``; about ``budget_s`` seconds for each way of doing each thing."""
    from octavo.backends.cpu import _native

    reads: list[ReadProbe] = []
    peaks: list[PeakProbe] = []
    for count in thread_counts(threads):
        for where, size in (("memory", memory_probe_bytes()), ("cache", cache_probe_bytes(count))):
            rows = _native.probe_reads(count, size, budget_s)
            reads += [ReadProbe(where, count, *variant, size, num_bytes, seconds) for *variant, num_bytes, seconds in rows]  # type: ignore[call-arg,arg-type]
        peaks += [PeakProbe(kind, name, count, done, seconds) for kind, name, done, seconds in _native.probe_arithmetic(count, budget_s)]
    return Limits(threads, _native.read_probe_bits(), reads, peaks)


def thread_counts(threads: int) -> list[int]:
    """1, 2, 4, ... and the number itself."""
    return [1 << i for i in range(threads.bit_length()) if 1 << i < threads] + [threads]


def stream_bytes() -> int:
    """Of what is to come from memory: twice the last cache."""
    return min(max(2 * max(cache_bytes().values(), default=0), _MIN_STREAM_BYTES), _MAX_STREAM_BYTES)


def memory_probe_bytes() -> int:
    """Four times the last cache, but at most a quarter of the free memory."""
    return min(2 * stream_bytes(), max(available_memory_bytes() // 4, 1 << 20))


def cache_probe_bytes(threads: int) -> int:
    """Half of the second cache of each core: what a core reads when nothing has to come from afar."""
    return threads * _second_cache(cache_bytes().items()) // 2


def _second_cache(caches: Iterable[tuple[str, int]]) -> int:
    return next((size for name, size in caches if name.startswith("L2")), 512 << 10)
