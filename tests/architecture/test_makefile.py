"""`make native-test` finds a build folder, whatever was there before. With stand-ins for the tools: nothing is compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[2] / "Makefile"
PIP = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in *"-e ."*) mkdir -p build/extension && touch build/extension/CMakeCache.txt;; esac
"""


def _script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("is_new", [False, True])
def test_native_test_builds_once_where_the_folder_is_missing(tmp_path: Path, is_new: bool) -> None:
    """The stamp of the build is beside what was installed, which outlives the folder."""
    shutil.copy(MAKEFILE, tmp_path)
    for name in ("native/a.cc", "pyproject.toml", "CMakeLists.txt"):
        _script(tmp_path / name, "")
    _script(tmp_path / ".venv/bin/python", PIP)
    for tool in ("cmake", "ctest", "ninja"):
        _script(tmp_path / "tools" / tool, "#!/bin/sh\nexit 0\n")
    if not is_new:
        (tmp_path / ".venv/.octavo").touch()
    calls = tmp_path / "calls"
    calls.touch()
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}  # of a make test
    path = f"{tmp_path / 'tools'}{os.pathsep}{os.environ['PATH']}"
    for num_builds in (1, 1, 2):
        if num_builds == 2:
            shutil.rmtree(tmp_path / "build")
        environment = {**outside, "PATH": path, "CALLS": str(calls)}
        done = subprocess.run(["make", "native-test"], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert calls.read_text().count("-e .") == num_builds
