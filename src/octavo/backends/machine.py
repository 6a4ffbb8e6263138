"""What this process may still take of the machine: memory and CPUs. Reads the operating system's figures; allocates nothing."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes() -> int:
    """Memory that can be had without swapping: the kernel's estimate, or what a control group leaves when that is less."""
    available = _meminfo_available()
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        # Page cache counts as used, though the kernel gives it up when asked: a model file just read is most of it.
        available = min(available, max(limit - used + _reclaimable(), 0))
    return available


def physical_memory_bytes() -> int:
    """All memory of the machine, whoever has it now, or of the control group when that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _number(_CGROUP / "memory.max")
    return total if limit is None else min(total, limit)


def available_cpus() -> int:
    """CPUs this process may run on at once: its affinity mask, or a control group's quota when that is less. At least 1."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        cpus = min(cpus, -(-int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no control group, or no quota ("max")
    return max(cpus, 1)


def _reclaimable() -> int:
    try:
        for line in (_CGROUP / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _number(path: Path) -> int | None:
    """The integer in a file; None when there is no such file or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
