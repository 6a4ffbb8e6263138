"""What the machine is: CPU, caches, memory, huge pages. Reads what the system says; judges and measures nothing."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def cpu_model() -> str:
    """The first CPU's name with what tells its silicon apart: "AMD EPYC, family 25 model 17 stepping 1"."""
    fields: dict[str, str] = {}
    try:
        for line in _CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    except OSError:
        pass  # not Linux
    name = fields.get("model name") or platform.processor() or platform.machine()
    named = (("family", "cpu family"), ("model", "model"), ("stepping", "stepping"))
    numbers = [f"{what} {fields[key]}" for what, key in named if key in fields]
    return f"{name}, {' '.join(numbers)}" if numbers else name


def cache_bytes() -> dict[str, int]:
    """Bytes of the data caches the first CPU sees, nearest first: {"L1d": 32768, "L2": 1048576, "L3": 33554432}. Empty when unknown."""
    found: dict[str, int] = {}
    try:
        folders = sorted(_CACHES.glob("index*"))
        for folder in folders:
            kind, level = (folder / "type").read_text().strip(), (folder / "level").read_text().strip()
            if kind != "Instruction":
                found[f"L{level}{'d' if kind == 'Data' else ''}"] = _kib((folder / "size").read_text().strip())
    except (OSError, ValueError):
        return {}
    return found


def _kib(text: str) -> int:
    """Bytes of a size as sysfs writes it: 32768K."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text)


def total_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def huge_pages() -> str:
    """The system's policy for transparent huge pages: always, madvise (on request, as Octavo does), never; or unknown."""
    try:
        text = _HUGE_PAGES.read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or "unknown"
