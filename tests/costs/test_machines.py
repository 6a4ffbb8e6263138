from __future__ import annotations

from pathlib import Path

import pytest

from octavo.costs.machines import MachineError, find_machine, known_machines, read_machines

WHOLE = '[m]\nbasis = "measured"\nops_per_s = 1e12\nbytes_per_s = 1e11\nmemory_bytes = 1e9\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "machines.toml"
    path.write_text(text)
    return path


def test_the_machines_that_come_along_say_where_their_figures_come_from() -> None:
    machines = known_machines()
    assert {"a100-80gb", "h100-sxm", "l4", "epyc-9654"} <= machines.keys()
    for machine in machines.values():
        assert machine.basis == "datasheet" and machine.usd_per_hour is None
        assert 0 < machine.idle_w < machine.busy_w


def test_figures_by_formula(tmp_path: Path) -> None:
    text = '[cpu]\nbasis = "datasheet"\ncores = 4\nghz = 2.5\nops_per_cycle = 64\n'
    text += "channels = 2\nmega_transfers_per_s = 4800\nmemory_bytes = 1e9\n"
    machine = read_machines(written(tmp_path, text))["cpu"]
    assert machine.ops_per_s == 4 * 2.5e9 * 64 and machine.bytes_per_s == 2 * 4800e6 * 8


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE + "usd_per_hour = 2.5\ndevices = 2\n[other]\n" + WHOLE.partition("\n")[2])
    assert find_machine("m", path).usd_per_hour == 2.5 and find_machine("m", path).devices == 2
    assert find_machine("other", path).times(8).devices == 8
    with pytest.raises(MachineError, match="machine: 'l4' is not allowed; one of m, other"):
        find_machine("l4", path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[m", "machines.toml"),
        ("m = 3\n", "a table"),
        (WHOLE.replace("bytes_per_s = 1e11\n", ""), "m: bytes_per_s is missing"),
        (WHOLE.replace('basis = "measured"\n', ""), "m: basis is missing"),
        (WHOLE.replace('"measured"', "3"), "m: basis: 3 is not allowed"),
        (WHOLE + "bandwidth = 3\n", "m: bandwidth is unknown; known: basis"),
        (WHOLE.replace("1e12", "0"), "m: ops_per_s: 0 is not allowed; a finite number above 0"),
        (WHOLE.replace("1e12", "nan"), "m: ops_per_s: nan is not allowed"),
        (WHOLE.replace("1e12", "true"), "m: ops_per_s: True is not allowed"),
        (WHOLE + "ops_share = 1.5\n", "m: ops_share: 1.5 is not allowed; a finite number above 0 and at most 1"),
        (WHOLE + "idle_w = -1\n", "m: idle_w: -1 is not allowed; a finite number at least 0"),
        (WHOLE + "devices = 0\n", "m: devices: 0 is not allowed; an integer of at least 1"),
    ],
)
def test_a_wrong_file_is_refused_by_its_field(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(MachineError, match=message):
        read_machines(written(tmp_path, text))
