"""Help: every flag explained, every command listed, at once."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest

import octavo as package
from octavo.cli.main import cli
from tests.cli.conftest import Octavo

MOST = 3.0  # times the processor time of a Python that imports click: with numpy it would be four
ATTEMPTS = 20  # neighbours in the caches and on the core make either take longer now and then
BENCHES = ("bench", "bench offline", "bench serve", "bench start", "bench kernels", "bench scheduler", "bench prefix")
COMMANDS = ("run", "chat", "serve", "pull", "models", "quantize", "doctor", "simulate", "plan", "reproduce", *BENCHES)


def command_of(path: str) -> click.Command:
    command: click.Command = cli
    for name in path.split():
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found
    return command


@pytest.mark.parametrize("path", COMMANDS)
def test_every_flag_and_command_is_explained(octavo: Octavo, path: str) -> None:
    command = command_of(path)
    for param in command.params:
        assert not isinstance(param, click.Option) or param.help, f"{path} {param.opts[0]} has no help"
    shown = octavo(*path.split(), "--help")
    assert shown.code == 0 and command.help is not None and command.help.split(".")[0] in " ".join(shown.out.split())
    assert all(param.opts[0] in shown.out for param in command.params if isinstance(param, click.Option))
    assert octavo(*path.split(), "-h") == shown


def test_the_list_of_commands_says_what_they_do(octavo: Octavo) -> None:
    shown = octavo("--help")
    for name in cli.list_commands(click.Context(cli)):
        assert f"  {name} " in shown.out
    assert octavo().code == 2  # without a command: the same page, as an error


def test_the_version_is_the_package_s(octavo: Octavo) -> None:
    assert octavo("--version").out == f"octavo, version {package.__version__}\n"


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["serve", "--help"]])
def test_help_is_instant(argv: list[str]) -> None:
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root / "src")}

    def cpu_s(*command: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], env=env, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    seen = list[tuple[float, float]]()
    for _ in range(ATTEMPTS):  # the first may have to compile
        seen.append((cpu_s("-m", "octavo.cli.main", *argv), cpu_s("-c", "import click")))
        if seen[-1][0] < MOST * seen[-1][1]:
            return
    pytest.fail(f"processor time of the page, and of importing click: {seen}")
