"""What the system says about the machine, read from files as it writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.backends import machine_facts as facts


def test_the_cpu_is_the_first_one_s_name_and_silicon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(facts, "_CPUINFO", file)
    one = "processor\t: {}\ncpu family\t: 26\nmodel\t\t: {}\nmodel name\t: AMD EPYC 9355\nstepping\t: 1\n\n"
    file.write_text(one.format(0, 2) + one.format(1, 3))
    assert facts.cpu_model() == "AMD EPYC 9355, family 26 model 2 stepping 1"
    file.write_text("processor\t: 0\nBogoMIPS\t: 48.00\n")
    assert facts.cpu_model() != ""
    file.unlink()
    assert facts.cpu_model() != ""


def test_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_CACHES", tmp_path)
    assert facts.cache_bytes() == {}
    caches = [(1, "Data", "48K"), (1, "Instruction", "32K"), (2, "Unified", "1024K"), (3, "Unified", "32M")]
    for i, (level, kind, size) in enumerate(caches):
        (tmp_path / f"index{i}").mkdir()
        for name, text in (("level", str(level)), ("type", kind), ("size", size)):
            (tmp_path / f"index{i}" / name).write_text(text + "\n")
    assert facts.cache_bytes() == {"L1d": 48 << 10, "L2": 1 << 20, "L3": 32 << 20}
    (tmp_path / "index2" / "size").write_text("many\n")
    assert facts.cache_bytes() == {}


@pytest.mark.parametrize(
    ("text", "policy"), [("always [madvise] never\n", "madvise"), ("[always] madvise never\n", "always"), ("?", "unknown")]
)
def test_huge_pages(text: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "enabled"
    monkeypatch.setattr(facts, "_HUGE_PAGES", file)
    assert facts.huge_pages() == "unknown"
    file.write_text(text)
    assert facts.huge_pages() == policy


def test_memory() -> None:
    assert facts.total_memory_bytes() > 64 << 20
