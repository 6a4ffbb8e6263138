"""Kernels that are wrong on this machine are left out, with a warning; the verdicts on them last, each for one machine and build.

The fault is put in natively (``check_kernels_test``), so that what finds it is what runs on a user's machine.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.backends.base import BackendError
from octavo.backends.cpu import _native, kernel_path, verdicts
from octavo.backends.cpu.kernel_path import path_name, replacements, wrong_kernels
from octavo.models.loaded import LoadedModel
from tests.backends.cpu_runs import cpu_logits, make_cpu
from tests.backends.exactness import fixture_model

LEVELS = _native.isa_levels()
BEST = LEVELS[-1]
IDS = list(range(3, 40))
several_levels = pytest.mark.skipif(len(LEVELS) < 2, reason="this machine has one kernel level")


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return fixture_model("llama")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An OCTAVO_HOME without verdicts, the best level, and no check remembered."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    monkeypatch.delenv("OCTAVO_ISA", raising=False)
    kernel_path.short_check.cache_clear()
    yield tmp_path
    kernel_path.short_check.cache_clear()


def put_fault(monkeypatch: pytest.MonkeyPatch, faults: dict[str, str]) -> None:
    """From now on these levels have a fault in one entry."""
    real = _native.check_kernels

    def check(level: str, full: bool) -> list:
        return _native.check_kernels_test(level, full, faults[level]) if level in faults else real(level, full)

    monkeypatch.setattr(_native, "check_kernels", check)


# --- the choice ---------------------------------------------------------------------------------------------------------------------------


def test_each_wrong_entry_comes_from_the_next_level_where_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "isa_levels", lambda: ["portable", "avx2", "avx512"])
    wrong = {"avx512": {"matmul": "a", "rope": "b"}, "avx2": {"rope": "c", "add": "d"}, "portable": {"softcap": "e"}}
    asked: list[str] = []

    def wrong_at(level: str) -> dict[str, str]:
        asked.append(level)
        return wrong[level]

    assert replacements("avx512", wrong_at) == {"matmul": "avx2", "rope": "portable"}
    assert replacements("avx2", wrong_at) == {"rope": "portable", "add": "portable"}
    with pytest.raises(BackendError, match=r"kernel softcap of portable is wrong on this machine \(e\), and no lower level"):
        replacements("portable", wrong_at)
    asked.clear()
    assert replacements("avx512", lambda level: asked.append(level) or {}) == {} and asked == ["avx512"]  # type: ignore[func-returns-value]


def test_the_name_of_a_path_is_one_the_native_module_takes() -> None:
    assert path_name("avx512", {}) == "avx512"
    assert path_name("avx512", {"rope": "portable", "matmul": "avx2"}) == "avx512-matmul:avx2-rope:portable"
    for entry in _native.kernel_entries():
        assert all(row[3] for row in _native.check_kernels(path_name(BEST, {entry: LEVELS[0]}), False))
    for bad in ("avx1024", f"{BEST}-matmul", f"{BEST}-nothing:portable", f"{BEST}-matmul:avx1024"):
        with pytest.raises(ValueError, match=f"isa: {bad} is not a kernel path"):
            _native.check_kernels(bad, False)


def test_the_first_wrong_class_of_an_entry_is_named() -> None:
    rows = [("matmul", "q4_1", "1 row", False, 0.5, 1e-3), ("matmul", "q8_0", "1 row", False, 1.0, 0.0)]
    assert wrong_kernels([("add", "", "1-16 values", True, 0.0, 0.0), *rows]) == {"matmul": "q4_1, 1 row: error 0.5, tolerance 0.001"}
    assert wrong_kernels([("add", "", "1-16 values", False, float("inf"), 0.0)]) == {"add": "1-16 values: error inf, tolerance 0"}


# --- backends -----------------------------------------------------------------------------------------------------------------------------


def test_a_machine_without_wrong_kernels_uses_its_best_level(caplog: pytest.LogCaptureFixture) -> None:
    assert kernel_path.kernel_path() == BEST and caplog.text == ""


@several_levels
@pytest.mark.parametrize("entry", _native.kernel_entries())
def test_a_fault_is_found_at_load(entry: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    put_fault(monkeypatch, {BEST: entry})
    with caplog.at_level(logging.WARNING):
        assert kernel_path.kernel_path() == f"{BEST}-{entry}:{LEVELS[-2]}"
    assert f"kernel {entry} of {BEST} is wrong on this machine" in caplog.text and f"that of {LEVELS[-2]} is used" in caplog.text


def test_a_fault_on_every_level_is_an_error(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    put_fault(monkeypatch, dict.fromkeys(LEVELS, "matmul"))
    with pytest.raises(BackendError, match=f"kernel matmul of {BEST} is wrong on this machine"):
        make_cpu(model)


@several_levels
def test_a_backend_computes_with_what_the_doctor_left(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without any entry of the best level its logits are the next level's, to the bit; a path of its own has a fingerprint of its own."""
    lower = LEVELS[-2]
    verdicts.write_verdicts({BEST: {entry: "for this test" for entry in _native.kernel_entries()}})
    with caplog.at_level(logging.WARNING):
        mixed = make_cpu(model, "fast")
    assert caplog.text.count("for this test") == len(_native.kernel_entries())
    assert mixed.isa == path_name(BEST, dict.fromkeys(_native.kernel_entries(), lower)) and mixed.fingerprint().endswith(mixed.isa)
    monkeypatch.setenv("OCTAVO_ISA", lower)
    plain = make_cpu(model, "fast")
    assert plain.isa == lower
    assert cpu_logits(mixed, IDS, [0, 1, 2]).tobytes() == cpu_logits(plain, IDS, [0, 1, 2]).tobytes()


@several_levels
def test_a_level_that_is_asked_for_by_name_is_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts.write_verdicts({BEST: {"rope": "why"}})
    monkeypatch.setenv("OCTAVO_ISA", BEST)
    assert kernel_path.kernel_path() == f"{BEST}-rope:{LEVELS[-2]}"
    monkeypatch.setenv("OCTAVO_ISA", LEVELS[0])
    assert kernel_path.kernel_path() == LEVELS[0]


# --- verdicts -----------------------------------------------------------------------------------------------------------------------------


def test_verdicts_are_kept_per_level_and_replaced(home: Path) -> None:
    assert verdicts.read_verdicts() == {}
    verdicts.write_verdicts({"avx512": {"matmul": "why"}})
    verdicts.write_verdicts({"avx2": {}, "portable": {"add": "because"}})
    assert verdicts.read_verdicts() == {"avx512": {"matmul": "why"}, "avx2": {}, "portable": {"add": "because"}}
    verdicts.write_verdicts({"avx512": {}})
    assert verdicts.read_verdicts()["avx512"] == {}
    assert [path.name for path in home.iterdir()] == ["kernels.json"]


@pytest.mark.parametrize("what", ["cpu_model", "build_id"])
def test_another_machine_or_build_has_verdicts_of_its_own(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts.write_verdicts({BEST: {"matmul": "why"}})
    with monkeypatch.context() as other:
        other.setattr(verdicts, what, lambda: "another")
        assert verdicts.read_verdicts() == {}
        verdicts.write_verdicts({BEST: {"rope": "why"}})
        assert verdicts.read_verdicts() == {BEST: {"rope": "why"}}
    assert verdicts.read_verdicts() == {BEST: {"matmul": "why"}}


def test_the_file_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(verdicts._MAX_MACHINES + 3):
        monkeypatch.setattr(verdicts, "cpu_model", lambda name=f"cpu {i}": name)
        verdicts.write_verdicts({BEST: {"add": str(i)}})
    machines = json.loads(verdicts.verdict_file().read_text())["machines"]
    assert [next(iter(levels.values()))["add"] for levels in machines.values()] == [str(i) for i in range(3, verdicts._MAX_MACHINES + 3)]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'"text"', b'{"format": 2, "machines": {}}', b'{"format": 1}', b'{"format": 1, "machines": {"m": [1]}}', b"\xff"],
)
def test_a_damaged_file_is_a_warning_and_is_replaced(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    verdicts.verdict_file().write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert kernel_path.kernel_path() == BEST
    assert "kernels.json" in caplog.text and "kernels that were found wrong may be used" in caplog.text
    verdicts.write_verdicts({BEST: {"add": "why"}})
    assert verdicts.read_verdicts() == {BEST: {"add": "why"}}


def test_a_write_that_fails_leaves_the_old_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts.write_verdicts({BEST: {"add": "old"}})

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(verdicts.json, "dump", full)
    with pytest.raises(OSError, match="no space"):
        verdicts.write_verdicts({BEST: {}})
    assert verdicts.read_verdicts() == {BEST: {"add": "old"}} and len(list(home.iterdir())) == 1
