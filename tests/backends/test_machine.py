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


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1), ("max 100000", 32), ("6400000 100000", 32)],
)
def test_cpu_quota(cgroup: Path, text: str, cpus: int) -> None:
    (cgroup / "cpu.max").write_text(text + "\n")
    assert machine.available_cpus() == cpus


def test_without_a_control_group(cgroup: Path) -> None:
    assert machine.available_cpus() == 32 and machine.available_memory_bytes() == 64 << 30


def test_memory_of_the_machine_and_of_its_control_group(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 20}.__getitem__)
    assert machine.physical_memory_bytes() == 4 << 30
    (cgroup / "memory.max").write_text(str(1 << 30))
    assert machine.physical_memory_bytes() == 1 << 30
    (cgroup / "memory.max").write_text(str(1 << 40))
    assert machine.physical_memory_bytes() == 4 << 30


def test_page_cache_is_not_memory_in_use(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text(str(1 << 30))
    (cgroup / "memory.current").write_text(str(1 << 30))
    (cgroup / "memory.stat").write_text("anon 1000\ninactive_file 700000000\nactive_file 5\n")
    assert machine.available_memory_bytes() == 700_000_000
    (cgroup / "memory.max").write_text("max\n")
    assert machine.available_memory_bytes() == 64 << 30


@pytest.mark.parametrize(
    ("limit", "used", "expected"), [("600", "200", 400), (str(100 << 30), "200", None), ("200", "300", 0), ("max", "200", None)]
)
def test_a_control_group_s_limit_counts_when_it_is_less(cgroup: Path, limit: str, used: str, expected: int | None) -> None:
    (cgroup / "memory.max").write_text(limit + "\n")
    (cgroup / "memory.current").write_text(used + "\n")
    assert machine.available_memory_bytes() == (64 << 30 if expected is None else expected)


def test_the_machine_s_own_figure_is_plausible() -> None:
    assert 1 << 20 < machine._meminfo_available() < 1 << 50
