from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.costs.machines import Design, MachineError, find_machine, known_designs, known_machines, read_machine_file, read_machines

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


def test_the_designs_that_come_along_are_those_of_splitwise() -> None:
    file = known_designs()
    designs = {name: (design.both, design.prefill, design.decode) for name, design in file.designs.items()}
    assert designs == {
        "AA": (None, "dgx-a100", "dgx-a100"), "HH": (None, "dgx-h100", "dgx-h100"), "HA": (None, "dgx-h100", "dgx-a100"),
        "HHcap": (None, "dgx-h100", "dgx-h100-capped"),
        "baseline-a100": ("dgx-a100", None, None), "baseline-h100": ("dgx-h100", None, None),
    }  # fmt: skip
    full, capped = file.machines["dgx-h100"], file.machines["dgx-h100-capped"]
    assert capped.bytes_per_s == full.bytes_per_s and full.ops_share / capped.ops_share == pytest.approx(1.3, rel=0.01)
    assert capped.busy_w == pytest.approx(0.7 * full.busy_w) and all(machine.devices == 8 for machine in file.machines.values())
    assert not set(file.machines) & set(known_machines())  # they are no part of what is tried where no design is named


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
        (WHOLE.replace("1e12", "0"), "m: ops_per_s: 0 is not allowed; a number from 1 to 1e.24"),
        (WHOLE.replace("1e12", "nan"), "m: ops_per_s: nan is not allowed"),
        (WHOLE.replace("1e12", "1e300"), "m: ops_per_s: 1e.300 is not allowed"),
        (WHOLE.replace("1e11", "1e-300"), "m: bytes_per_s: 1e-300 is not allowed"),
        (WHOLE.replace("1e12", "true"), "m: ops_per_s: true is not allowed"),
        (WHOLE + "ops_share = 1.5\n", "m: ops_share: 1.5 is not allowed; a number above 0 and at most 1"),
        (WHOLE + "idle_w = -1\n", "m: idle_w: -1 is not allowed; a number from 0 to 1e.24"),
        (WHOLE + "devices = 0\n", "m: devices: 0 is not allowed; an integer of at least 1"),
    ],
)
def test_a_wrong_file_is_refused_by_its_field(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(MachineError, match=message):
        read_machines(written(tmp_path, text))


BASE = WHOLE + "usd_per_hour = 3.0\nbusy_w = 700\n"


def test_a_machine_like_another(tmp_path: Path) -> None:
    text = BASE + '[capped]\nlike = "m"\nbusy_w = 350\nops_share = 0.3\n[twice]\nlike = "capped"\ndevices = 2\n[l4-here]\nlike = "l4"\n'
    machines = read_machines(written(tmp_path, text + 'basis = "datasheet, our price"\nusd_per_hour = 0.7\nstep_error = 0.15\n'))
    m, capped, twice, own = (machines[name] for name in ("m", "capped", "twice", "l4-here"))
    assert capped == replace(m, name="capped", busy_w=350.0, ops_share=0.3)
    assert twice == replace(capped, name="twice", devices=2)
    known = known_machines()["l4"]
    assert own == replace(known, name="l4-here", basis="datasheet, our price", usd_per_hour=0.7, step_error=0.15)


def test_a_formula_of_ones_own_replaces_a_figure(tmp_path: Path) -> None:
    text = BASE + '[mine]\nlike = "m"\ncores = 2\nghz = 1.0\nops_per_cycle = 10\n[more]\nlike = "mine"\ncores = 4\n'
    text += '[flat]\nlike = "mine"\nops_per_s = 5\n'
    machines = read_machines(written(tmp_path, text))
    assert [machines[name].ops_per_s for name in ("mine", "more", "flat")] == [2e10, 4e10, 5.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[a]\nlike = "nobody"\n', "a: like: 'nobody' is not allowed; one of a, epyc-9654"),
        ('[a]\nlike = "a"\n', "a: like: 'a' is not allowed; it is like itself"),
        ('[a]\nlike = "b"\n[b]\nlike = "a"\n', "like: 'a' is not allowed; it is like itself"),
        ("[a]\nlike = 3\n", "a: like: 3 is not allowed"),
        (WHOLE + "step_error = -0.1\n", "m: step_error: -0.1 is not allowed"),
        (WHOLE + "step_error = nan\n", "m: step_error: nan is not allowed"),
        ("design = 3\n" + WHOLE, "design: 3 is not allowed"),
        (WHOLE + "[design]\nx = 1\n", "design.x: 1 is not allowed; a table"),
        (WHOLE + '[design.x]\nprefill = "m"\n', "design.x: prefill and decode are needed, or both alone"),
        (WHOLE + '[design.x]\nboth = "m"\ndecode = "m"\n', "design.x: prefill and decode are needed"),
        (WHOLE + '[design.x]\nboth = "n"\n', "design.x: both: 'n' is not allowed; one of epyc-9654"),
        (WHOLE + '[design.x]\nboth = "m"\nnum_both = 0\n', "design.x: num_both: 0 is not allowed"),
        (WHOLE + '[design.x]\nboth = "m"\nnum_decode = 1\n', "design.x: num_decode is given without decode"),
        (WHOLE + '[design.x]\nprefill = "m"\ndecode = "m"\nnum_decode = 1\n', "num_prefill and num_decode go together"),
        (WHOLE + '[design.x]\nboth = "m"\nspeed = 1\n', "design.x: speed is unknown"),
        (WHOLE + "busy_w = 10\nidle_w = 11\n", "m: idle_w: 11 is not allowed; at most busy_w, which is 10"),
        (WHOLE + "idle_w = 11\n", "m: idle_w: 11 is not allowed; at most busy_w, which is 0"),
    ],
)
def test_designs_and_likenesses_that_say_nothing(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(MachineError, match=re.escape(message)):
        read_machines(written(tmp_path, text))


def test_the_four_designs_of_splitwise_can_be_said(tmp_path: Path) -> None:
    text = (
        '[a100]\nlike = "a100-80gb"\ndevices = 8\nusd_per_hour = 2.2\n[h100]\nlike = "h100-sxm"\ndevices = 8\nusd_per_hour = 4.75\n'
        '[h100-capped]\nlike = "h100"\nbusy_w = 350\n'
        '[design.AA]\nprefill = "a100"\ndecode = "a100"\nnum_prefill = 45\nnum_decode = 25\n'
        '[design.HH]\nprefill = "h100"\ndecode = "h100"\n[design.HA]\nprefill = "h100"\ndecode = "a100"\n'
        '[design.HHcap]\nprefill = "h100"\ndecode = "h100-capped"\n[design.Baseline]\nboth = "l4"\nnum_both = 70\n'
    )
    file = read_machine_file(written(tmp_path, text))
    assert list(file.machines) == ["a100", "h100", "h100-capped"] and file.machines["h100-capped"].devices == 8
    assert file.designs["AA"] == Design("AA", None, "a100", "a100", None, 45, 25)
    assert file.designs["HHcap"].machines == ("h100", "h100-capped")
    assert file.designs["Baseline"].machines == ("l4",)  # one that comes with Octavo
