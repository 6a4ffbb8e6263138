"""`octavo kv`: what is on disk is listed, and cleared by filters."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from octavo.engine.kv_disk import StoreAbout
from tests.cli.conftest import Octavo
from tests.engine.test_kv_disk import BYTES, FILE_BYTES, SIZE, open_store, payload_of, ref_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two blocks of model old, used three days ago; three of model new, used now."""
    now_ns = time.time_ns()
    old = open_store(tmp_path, about=StoreAbout("fp-old", SIZE, BYTES, "old"))
    new = open_store(tmp_path, about=StoreAbout("fp-new", SIZE, BYTES, "new"))
    for number in range(2):
        old.put(ref_of(number), payload_of(number), now_ns - 3 * 86400 * 10**9 - 10**9)
    for number in range(3):
        new.put(ref_of(number), payload_of(number), now_ns)
    return tmp_path


def num_files(folder: Path) -> int:
    return len(list(folder.rglob("*.kv")))


def test_ls(octavo: Octavo, folder: Path) -> None:
    ended = octavo("kv", "ls", "--path", folder)
    head, new, old = ended.out.splitlines()
    assert ended.code == 0 and head.split()[:4] == ["STORE", "MODEL", "BLOCK", "BLOCKS"]
    assert new.split()[1:5] == ["new", str(SIZE), "3", str(3 * FILE_BYTES)] and new.split()[-1] == "fp-new"
    assert old.split()[1:] == ["old", str(SIZE), "2", str(2 * FILE_BYTES), "3d", "3d", "fp-old"]


def test_ls_json(octavo: Octavo, folder: Path) -> None:
    records = [json.loads(line) for line in octavo("kv", "ls", "--json", "--path", folder).out.splitlines()]
    assert [(r["model"], r["fingerprint"], r["num_blocks"], r["num_bytes"]) for r in records] == [
        ("new", "fp-new", 3, 3 * FILE_BYTES),
        ("old", "fp-old", 2, 2 * FILE_BYTES),
    ]


def test_the_folder_in_octavo_home_is_the_default(octavo: Octavo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    assert len(octavo("kv", "ls").out.splitlines()) == 1
    assert octavo("kv", "clear").out == "nothing to clear\n"
    open_store(tmp_path / "kv").put(ref_of(0), payload_of(0))
    assert "toy" in octavo("kv", "ls").out


@pytest.mark.parametrize(
    ("filters", "num_cleared"),
    [
        ([], 5),
        (["--model", "old"], 2),
        (["--model", "new"], 3),
        (["--unused-for", "2d"], 2),
        (["--unused-for", "4d"], 0),
        (["--model", "new", "--unused-for", "1h"], 0),
        (["--store", StoreAbout("fp-old", SIZE, BYTES, "old").folder_name[:6]], 2),
    ],
)
def test_clear(octavo: Octavo, folder: Path, filters: list[str], num_cleared: int) -> None:
    ended = octavo("kv", "clear", "-y", "--path", folder, *filters)
    assert (ended.code, ended.out) == (0, f"cleared {num_cleared} blocks, {num_cleared * FILE_BYTES} bytes\n")
    assert num_files(folder) == 5 - num_cleared


def test_clear_asks(octavo: Octavo, folder: Path) -> None:
    ended = octavo("kv", "clear", "--path", folder, stdin="n\n")
    assert ended.code == 130 and num_files(folder) == 5
    assert octavo("kv", "clear", "--path", folder, stdin="y\n").code == 0 and num_files(folder) == 0


@pytest.mark.parametrize("filters", [["--model", "none"], ["--store", "zz"], ["--model", "old", "--store", "zz"]], ids=" ".join)
def test_a_store_that_is_not_there(octavo: Octavo, folder: Path, filters: list[str]) -> None:
    ended = octavo("kv", "clear", "-y", "--path", folder, *filters)
    assert ended.code == 1 and "no store of that name; there are: " in ended.err and "(old)" in ended.err and "(new)" in ended.err
    assert num_files(folder) == 5


NAMES = ("smollm2", "SmolLM2-135M-Instruct.Q4_1", "SmolLM2-135M-Instruct.Q4_1.gguf", "/some/SmolLM2-135M-Instruct.Q4_1.gguf",
         "hf:owner/repo:SmolLM2-135M-Instruct.Q4_1.gguf")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_named_as_for_serve(octavo: Octavo, folder: Path, name: str) -> None:
    open_store(folder, about=StoreAbout("fp", SIZE, BYTES, "SmolLM2-135M-Instruct.Q4_1")).put(ref_of(0), payload_of(0))
    assert octavo("kv", "clear", "-y", "--path", folder, "--model", name).out == f"cleared 1 blocks, {FILE_BYTES} bytes\n"
    assert num_files(folder) == 5


@pytest.mark.parametrize("command", [["ls"], ["clear", "-y"]], ids=" ".join)
def test_a_folder_that_is_not_there(octavo: Octavo, tmp_path: Path, command: list[str]) -> None:
    ended = octavo("kv", *command, "--path", tmp_path / "none")
    assert ended.code == 1 and "--path: there is no folder" in ended.err and "none'" in ended.err


def test_a_time_that_is_none_is_refused(octavo: Octavo, folder: Path) -> None:
    ended = octavo("kv", "clear", "-y", "--unused-for", "soon", "--path", folder)
    assert ended.code == 2 and "'soon' is not a time such as 90m, 12h or 7d" in ended.err
