"""Flags that take a number with a fraction: NaN, infinity and a negative number are refused by the flag's name, before anything is done."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from octavo.cli.kv import Duration
from octavo.cli.main import cli
from octavo.cli.options import ByteSize, Finite
from octavo.cli.plan import RateRange
from octavo.models import catalog
from tests.cli.conftest import Octavo

OF_FRACTIONS = (click.types.FloatParamType, click.FloatRange, Duration, ByteSize, RateRange)
ARGUMENTS = {  # of commands whose body looks at the flag
    "bench cluster-ways": ["--data", "."], "run": ["hi"], "quantize": ["in.gguf", "out.gguf"],
}  # fmt: skip
BAD = ("nan", "inf", "-1", "9" * 400)


def commands(path: tuple[str, ...] = (), command: click.Command = cli) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands((*path, name), found)
    else:
        yield path, command


def flags() -> list[tuple[str, str]]:
    """(command, flag) of every option that takes a fraction, or a number with a unit."""
    return [
        (" ".join(path), param.opts[0])
        for path, command in commands()
        for param in command.params
        if isinstance(param, click.Option) and isinstance(param.type, OF_FRACTIONS)
    ]


def test_every_command_with_such_flags_is_found() -> None:
    found = flags()
    assert {("run", "--temperature"), ("simulate", "--acceptance"), ("bench spec", "--temperature")} < set(found)
    assert ("kv clear", "--unused-for") in found
    assert {("bench cascade", "--seconds"), ("serve", "--swap-space"), ("plan", "--rate-range")} < set(found)


@pytest.mark.parametrize("path", sorted({path for path, _ in flags()}))
def test_what_is_no_finite_number_is_refused_by_name(octavo: Octavo, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(catalog, "ensure_model", lambda *_: pytest.fail("a model was asked for"))
    for flag in (flag for of, flag in flags() if of == path):
        for value in BAD:
            if flag == "--burstiness" and value in ("inf", "9" * 400):  # a fixed rate
                continue
            ended = octavo(*path.split(), *ARGUMENTS.get(path, []), flag, value)
            assert (ended.code, ended.out) == (2, ""), (flag, value, ended)
            assert flag in ended.err.rpartition("Error:")[2], (flag, value, ended.err)


@pytest.mark.parametrize("flags", [("bench", "cascade", "--seconds", "0"), ("bench", "spec", "--temperature", "101")], ids=" ".join)
def test_limits_are_named(octavo: Octavo, flags: tuple[str, ...]) -> None:
    ended = octavo(*flags)
    limit = {"0": "a finite number above 0", "101": "a number from 0 to 100"}[flags[-1]]
    assert ended.code == 2 and f"'{flags[2]}': {float(flags[-1])} is not allowed; {limit}" in " ".join(ended.err.split())


def test_a_number_within_limits() -> None:
    assert Finite(0, 1).convert("1", None, None) == 1.0 and Finite(0.5, or_infinite=True).convert("inf", None, None) == float("inf")
    with pytest.raises(click.BadParameter, match="0.4 is not allowed; a number from 0.5, or inf"):
        Finite(0.5, or_infinite=True).convert("0.4", None, None)
