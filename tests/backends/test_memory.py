"""The memory a process may still take: the kernel's figure, or what is left of a control group's limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.backends import memory


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_meminfo_available", lambda: 1000)
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "used", "expected"), [("600", "200", 400), ("5000", "200", 1000), ("200", "300", 0), ("max", "200", 1000), (None, None, 1000)]
)
def test_a_control_group_s_limit_counts_when_it_is_less(cgroup: Path, limit: str | None, used: str | None, expected: int) -> None:
    if limit is not None and used is not None:
        (cgroup / "memory.max").write_text(limit + "\n")
        (cgroup / "memory.current").write_text(used + "\n")
    assert memory.available_memory_bytes() == expected


def test_the_machine_s_own_figure_is_plausible() -> None:
    assert 1 << 20 < memory._meminfo_available() < 1 << 50
