"""Limits of control groups are limits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.backends import machine


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(32)), raising=False)
    monkeypatch.setattr(machine, "_meminfo_available", lambda: 64 << 30)
    return tmp_path


@pytest.mark.parametrize(("text", "cpus"), [("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1), ("max 100000", 32), ("6400000 100000", 32)])
def test_cpu_quota(cgroup: Path, text: str, cpus: int) -> None:
    (cgroup / "cpu.max").write_text(text + "\n")
    assert machine.available_cpus() == cpus


def test_without_a_control_group(cgroup: Path) -> None:
    assert machine.available_cpus() == 32 and machine.available_memory_bytes() == 64 << 30


def test_page_cache_is_not_memory_in_use(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text(str(1 << 30))
    (cgroup / "memory.current").write_text(str(1 << 30))
    (cgroup / "memory.stat").write_text("anon 1000\ninactive_file 700000000\nactive_file 5\n")
    assert machine.available_memory_bytes() == 700_000_000
    (cgroup / "memory.max").write_text("max\n")
    assert machine.available_memory_bytes() == 64 << 30
