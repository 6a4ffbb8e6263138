"""`octavo doctor`: what this machine could do, whether every kernel is right on it, and how near to the limits they come.

Owns the order of the examination and its report (plain data, see ``DoctorReport.record``); ``doctor_text`` writes it for people. Kernels
that are wrong are recorded in the verdict file, so that backends do without them from the next load on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from octavo.backends.base import BackendError
from octavo.backends.cpu.backend import kv_dtype_of
from octavo.backends.cpu.kernel_path import CheckRow, isa_level, known_wrong, path_name, replacements, wrong_kernels
from octavo.backends.cpu.verdicts import WrongKernels, build_id, verdict_file, write_verdicts
from octavo.backends.machine import available_cpus, available_memory_bytes
from octavo.backends.machine_facts import cache_bytes, cpu_model, huge_pages, total_memory_bytes
from octavo.bench.decode import DecodeShare, decode_share
from octavo.bench.kernels import KernelCases, KernelSpeed, measure_kernels, rates
from octavo.bench.limits import Limits, measure_limits
from octavo.bench.offline import OfflineCase
from octavo.config import EngineConfig
from octavo.models.catalog import CATALOG, cached_path

_BUSY = 0.9  # of a CPU: with less than this, what was timed was not this program alone

Checker = Callable[[str], list[CheckRow]]  # every case of a kernel level


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    levels: tuple[str, ...] = ()  # to examine; empty: the one that is used
    threads: int | None = None
    quick: bool = False


@dataclass(slots=True)
class LevelReport:
    """One kernel level: its checks, and the speeds of the path that results when what is wrong is replaced."""

    level: str
    path: str | None  # None: an entry is right on no level
    checks: list[CheckRow]
    wrong: WrongKernels
    replaced: dict[str, str]  # entry -> level
    speeds: list[KernelSpeed] = field(default_factory=list)

    def record(self) -> dict[str, object]:
        names = ("kernel", "format", "shape", "right", "error", "tolerance")
        checks = [_finite(dict(zip(names, row, strict=True))) for row in self.checks]
        names_of_level = {"level": self.level, "path": self.path, "wrong": self.wrong, "replaced": self.replaced}
        return names_of_level | {"checks": checks, "speeds": [asdict(s) for s in self.speeds]}


@dataclass(slots=True)
class DoctorReport:
    machine: dict[str, object]
    used: dict[str, object]
    limits: Limits
    levels: list[LevelReport]
    decode: DecodeShare | None
    warnings: list[str]
    seconds: float = 0.0

    @property
    def all_right(self) -> bool:
        return not any(level.wrong for level in self.levels)

    def record(self) -> dict[str, object]:
        """JSON: bytes, operations and seconds as counted and measured; ``best`` holds the machine's figures per second."""
        limits = self.limits
        reads, peaks = ([asdict(probe) | {"rate": probe.rate} for probe in probes] for probes in (limits.reads, limits.peaks))
        return {
            "doctor": "right" if self.all_right else "wrong",
            "machine": self.machine,
            "used": self.used,
            "limits": {"threads": limits.threads, "best": rates(limits), "reads": reads, "peaks": peaks},
            "levels": [level.record() for level in self.levels],
            "decode": None if self.decode is None else asdict(self.decode),
            "warnings": self.warnings,
            "seconds": round(self.seconds, 2),
            "date": time.strftime("%Y-%m-%d"),
        }


def _finite(row: dict[str, object]) -> dict[str, object]:
    """JSON has no infinity: an error that is not a number, or of something that must hold exactly and does not, is null."""
    return {key: None if isinstance(value, float) and value == float("inf") else value for key, value in row.items()}


def native_checker(level: str) -> list[CheckRow]:
    from octavo.backends.cpu import _native

    return _native.check_kernels(level, True)


def examine(options: DoctorOptions, progress: Callable[[str], None], checker: Checker = native_checker) -> DoctorReport:
    """The whole examination: under a minute on two cores, about ten seconds when quick. Writes the verdict file."""
    started = time.perf_counter()
    threads = options.threads or available_cpus()
    used_level = isa_level()
    levels = options.levels or (used_level,)
    warnings: list[str] = []
    progress("checking kernels")
    reports = _check_levels(levels, checker, warnings)
    progress("probing memory and arithmetic")
    limits = measure_limits(threads, 0.01 if options.quick else 0.05)
    cases = KernelCases(contexts=(512,)) if options.quick else KernelCases()
    for report in reports:
        if report.path is not None:
            progress(f"timing {report.path} kernels")
            report.speeds = measure_kernels(report.path, limits, cases, 0.01 if options.quick else 0.1)
    progress("decoding")
    decode = _decode(limits, options.quick, warnings)
    report_of_used = next((r for r in reports if r.level == used_level), None)
    used = _used(used_level, report_of_used, threads)
    return DoctorReport(_machine(), used, limits, reports, decode, warnings, time.perf_counter() - started)


def _check_levels(levels: tuple[str, ...], checker: Checker, warnings: list[str]) -> list[LevelReport]:
    """Check these levels, and lower ones as far as they have to step in; record the verdicts."""
    rows: dict[str, list[CheckRow]] = {}

    def wrong_at(level: str) -> WrongKernels:
        if level not in rows:
            rows[level] = checker(level)
        return wrong_kernels(rows[level])

    reports = []
    for level in levels:
        wrong = wrong_at(level)
        try:
            replaced = replacements(level, wrong_at)
            path: str | None = path_name(level, replaced)
        except BackendError as e:
            warnings.append(str(e))
            replaced, path = {}, None
        for entry, lower in replaced.items():
            warnings.append(f"kernel {entry} of {level} is wrong ({wrong[entry]}); from now on that of {lower} is used")
        reports.append(LevelReport(level, path, rows[level], wrong, replaced))
    try:
        write_verdicts({level: wrong_kernels(checks) for level, checks in rows.items()})
    except OSError as e:
        warnings.append(f"the verdict cannot be kept in {verdict_file()} ({e.strerror})")
    return reports


def _decode(limits: Limits, quick: bool, warnings: list[str]) -> DecodeShare | None:
    """The default model, when it is in the cache; nothing is downloaded."""
    path = cached_path(CATALOG[EngineConfig().model.model])
    if path is None:
        return None
    case = OfflineCase(num_prompt=512, num_output=32 if quick else 128, batch=1, repeat=1 if quick else 3)
    try:
        share = decode_share(str(path), limits.threads, limits.read_rate, case)
    except (BackendError, ValueError, OSError) as e:
        warnings.append(f"{path.name} was not measured: {e}")
        return None
    if share.cpu_share < _BUSY:
        taken = f"other processes took {100 * (1 - share.cpu_share):.0f} % of a CPU meanwhile"
        warnings.append(f"decoding is timed by the clock, and {taken}: its share is too low; repeat when nothing else runs")
    return share


def _machine() -> dict[str, object]:
    return {
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "cpus_usable": available_cpus(),
        "caches": cache_bytes(),
        "memory_bytes": total_memory_bytes(),
        "memory_available_bytes": available_memory_bytes(),
        "huge_pages": huge_pages(),
    }


def _used(level: str, report: LevelReport | None, threads: int) -> dict[str, object]:
    """What a backend with default settings computes with: the path as the examination leaves it."""
    from octavo.backends.cpu import _native

    replaced = replacements(level, known_wrong) if report is None else report.replaced
    cpus = _native.thread_cpus(threads)
    return {
        "level": level,
        "levels": _native.isa_levels(),
        "entries": {entry: replaced.get(entry, level) for entry in _native.kernel_entries()},
        "kv_dtype": kv_dtype_of(EngineConfig()),
        "threads": threads,
        "pinned_threads": sum(len(own) == 1 for own in cpus[1:]),  # the first is Python's own and never pinned
        "build": build_id(),
        "verdict_file": str(verdict_file()),
    }
