"""Files whose names users gave: what can be written is told beforehand, and nothing that is there is lost or becomes something else."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.engine.user_files import UserFileError, check_writable, open_new, unused, write_whole


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def link_to_pipe(folder: Path) -> Path:
    (folder / "link").symlink_to(pipe(folder))
    return folder / "link"


NO_FILES: list[tuple[Callable[[Path], Path], str]] = [
    (pipe, "a pipe"),
    (link_to_pipe, "a pipe"),
    (lambda folder: Path("/dev/null"), "a device"),
    (lambda folder: folder, "folder"),
    (lambda folder: folder / "none" / "file", "folder"),
    (lambda folder: Path("/proc/file"), ""),  # nobody may write there
]


@pytest.mark.parametrize(("make", "why"), NO_FILES)
def test_what_is_no_file_is_refused_beforehand_and_stays(tmp_path: Path, make: Callable[[Path], Path], why: str) -> None:
    path = make(tmp_path)
    was = path.stat().st_mode if path.exists() else None
    for refuse in (check_writable, lambda path: write_whole(path, "text")):
        with pytest.raises(UserFileError, match=f"^{path}: .*{why}"):
            refuse(path)
    assert (path.stat().st_mode if path.exists() else None) == was
    assert not (tmp_path / "none").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("make", [make for make, _ in NO_FILES])
def test_a_file_to_be_written_bit_by_bit_is_a_file_too(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path)
    with pytest.raises(UserFileError):
        open_new(path)
    assert not (tmp_path / "none").exists()


def test_a_link_stays_one(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    for text in ("first", "second"):  # one that points nowhere yet, then one that points to a file
        write_whole(link, text)
        assert link.is_symlink() and file.read_text() == text and not file.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_file_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    file.chmod(0o640)
    write_whole(file, "new")
    assert file.read_text() == "new" and stat.S_IMODE(file.stat().st_mode) == 0o640


def test_what_is_in_a_file_is_not_lost(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("a recording\n")
    with pytest.raises(UserFileError, match="it holds 12 bytes already"):
        open_new(file)
    assert file.read_text() == "a recording\n"


def test_a_new_file_is_its_owners_alone(tmp_path: Path) -> None:
    with open_new(tmp_path / "file") as file:
        file.write("é")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600 and (tmp_path / "file").read_bytes() == "é".encode()
    (tmp_path / "empty").touch()
    with open_new(tmp_path / "empty") as file:
        file.write("b")
    assert (tmp_path / "empty").read_text() == "b"


def test_a_name_that_is_not_used(tmp_path: Path) -> None:
    base = str(tmp_path / "run.w0")
    seen = []
    for _ in range(4):
        with open_new(unused(base)) as file:
            file.write("x")
        seen.append(unused(base))
    assert seen == [f"{base}.{number}" for number in (2, 3, 4, 5)]
    (tmp_path / "run.w0.5").touch()
    assert unused(base) == f"{base}.5"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert unused(str(tmp_path / "link")) == f"{tmp_path / 'link'}.2"
