"""Machines: what a roofline divides by. Plain data, read from the TOML files that come along or from a file of the user's.

A file has one machine per table:

    [h100-sxm]
    basis = "datasheet"              # where the figures come from; "measured" for those of `octavo doctor`
    ops_per_s = 989e12               # 16-bit dense; or cores, ghz and ops_per_cycle, which are multiplied
    bytes_per_s = 3.35e12            # memory; or channels and mega_transfers_per_s of 8 bytes
    memory_bytes = 80e9
    busy_w = 700                     # of the whole device while a step runs

Optional: ops_share and bytes_share (what of the peaks real kernels reach), idle_w, usd_per_hour, link_bytes_per_s, link_latency_s, host_s
(per step), host_s_per_sequence, devices (that share the work of each step evenly: tensor parallel, every figure above is of one),
step_error (what a step's seconds are off by, as a share, as stated by who measured it), like (another machine of the file, or one that
comes with Octavo: its figures, where none are given here).

A table [design.NAME] names a cluster instead: ``prefill`` and ``decode`` are machines for the two phases, or ``both`` is one for both;
``num_prefill``, ``num_decode`` or ``num_both`` say how many, where that is not to be searched:

    [h100-capped]                    # a device held to half its power, for decoding
    like = "h100-sxm"
    busy_w = 350
    ops_share = 0.4

    [design.HHcap]
    prefill = "h100-sxm"
    decode = "h100-capped"
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from octavo.core.words import as_written

DATASHEET = "datasheet"  # the basis of makers' figures
_FORMULAS = {
    "ops_per_s": (("cores", "ghz", "ops_per_cycle"), 1e9),
    "bytes_per_s": (("channels", "mega_transfers_per_s"), 8e6),
}


class MachineError(ValueError):
    """A machine file is wrong; the message names file, machine, field and limit."""


@dataclass(frozen=True, slots=True)
class Machine:
    """``ops_share`` and ``bytes_share`` are typical of good kernels, and no measurement: results on "datasheet" machines are estimates."""

    name: str
    basis: str
    ops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    ops_share: float = 0.6
    bytes_share: float = 0.8
    idle_w: float = 0.0
    busy_w: float = 0.0
    usd_per_hour: float | None = None
    link_bytes_per_s: float = 25e9
    link_latency_s: float = 1e-4
    host_s: float = 0.0005
    host_s_per_sequence: float = 5e-6
    devices: int = 1
    step_error: float | None = None

    def times(self, devices: int) -> Machine:
        """The machine with so many devices that share each step."""
        return replace(self, devices=devices)


@dataclass(frozen=True, slots=True)
class Design:
    """A cluster by its machines' names: ``prefill`` and ``decode``, or ``both``. Numbers are None where they are to be searched."""

    name: str
    both: str | None = None
    prefill: str | None = None
    decode: str | None = None
    num_both: int | None = None
    num_prefill: int | None = None
    num_decode: int | None = None

    @property
    def machines(self) -> tuple[str, ...]:
        return tuple(name for name in (self.both, self.prefill, self.decode) if name is not None)


@dataclass(frozen=True, slots=True)
class MachineFile:
    machines: dict[str, Machine]
    designs: dict[str, Design]


_POSITIVE = ("ops_per_s", "bytes_per_s", "memory_bytes", "link_bytes_per_s")
_SHARES = ("ops_share", "bytes_share")
_MOST = 1e24  # of any figure: seconds and blocks that follow from them are numbers yet


def read_machines(path: str | Path) -> dict[str, Machine]:
    """The machines of a TOML file, by name. Raises MachineError, OSError."""
    return read_machine_file(path).machines


def read_machine_file(path: str | Path) -> MachineFile:
    """The machines and designs of a TOML file. Designs may name machines that come with Octavo. Raises MachineError, OSError."""
    return _machine_file(Path(path).read_bytes(), str(path), known_machines())


def known_machines() -> dict[str, Machine]:
    """The machines that come with Octavo, by name."""
    found = dict[str, Machine]()
    for entry in sorted(files("octavo.costs").joinpath("machines").iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".toml"):
            found |= _machine_file(entry.read_bytes(), entry.name, {}).machines
    return found


def known_designs() -> MachineFile:
    """The designs of published clusters that come with Octavo, and the machines that they name."""
    machines, designs = dict[str, Machine](), dict[str, Design]()
    for entry in sorted(files("octavo.costs").joinpath("designs").iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".toml"):
            found = _machine_file(entry.read_bytes(), entry.name, {})
            machines |= found.machines
            designs |= found.designs
    return MachineFile(machines, designs)


def find_machine(name: str, path: str | Path | None = None) -> Machine:
    """The machine of that name in the file at ``path``, else among the known ones. MachineError lists those that there are."""
    machines = known_machines() if path is None else read_machines(path)
    if name not in machines:
        raise MachineError(f"machine: {name!r} is not allowed; one of {', '.join(machines)}")
    return machines[name]


def _machine_file(data: bytes, where: str, known: Mapping[str, Machine]) -> MachineFile:
    try:
        tables = tomllib.loads(data.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MachineError(f"{where}: {error}") from None
    designs = tables.pop("design", {})
    machines = {name: _machine(f"{where}: {name}", name, _inherited(where, name, tables, known)) for name in tables}
    if not isinstance(designs, Mapping):
        raise MachineError(f"{where}: design: {as_written(designs)} is not allowed; tables [design.NAME]")
    names = {**known, **machines}
    return MachineFile(machines, {name: _design(f"{where}: design.{name}", name, table, names) for name, table in designs.items()})


def _inherited(where: str, name: str, tables: Mapping[str, Any], known: Mapping[str, Machine]) -> object:
    """The table of a machine with what it takes from the one it is like."""
    seen, table = [name], tables[name]
    while isinstance(table, Mapping) and "like" in table:
        like, own = table["like"], {key: value for key, value in table.items() if key != "like"}
        if not isinstance(like, str) or like in seen or (like not in tables and like not in known):
            problem = "it is like itself" if like in seen else f"one of {', '.join((*tables, *known))}"
            raise MachineError(f"{where}: {name}: like: {as_written(like)} is not allowed; {problem}")
        if like in tables and isinstance(tables[like], Mapping):
            base = dict(tables[like])
            seen.append(like)
        else:
            values = {f.name: getattr(known[like], f.name) for f in fields(Machine) if f.name != "name"}
            base = {key: value for key, value in values.items() if value is not None}
        for target, (factors, _) in _FORMULAS.items():  # a figure of its own replaces a formula, and the other way round
            if target in own or any(factor in own for factor in factors):
                base = {key: value for key, value in base.items() if key != target and (key not in factors or target not in own)}
        table = {**base, **own}
    return table


def _design(where: str, name: str, table: object, machines: Mapping[str, Machine]) -> Design:
    if not isinstance(table, Mapping):
        raise MachineError(f"{where}: {as_written(table)} is not allowed; a table with prefill and decode, or with both, is needed")
    known = {f.name for f in fields(Design)} - {"name"}
    for key in table:
        if key not in known:
            raise MachineError(f"{where}: {key} is unknown; known: {', '.join(sorted(known))}")
    if {key for key in ("both", "prefill", "decode") if key in table} not in ({"both"}, {"prefill", "decode"}):
        raise MachineError(f"{where}: prefill and decode are needed, or both alone")
    for key, value in table.items():
        if key.startswith("num_"):
            if type(value) is not int or value < 1:
                raise MachineError(f"{where}: {key}: {as_written(value)} is not allowed; an integer of at least 1")
            if key.removeprefix("num_") not in table:
                raise MachineError(f"{where}: {key} is given without {key.removeprefix('num_')}")
        elif value not in machines:
            raise MachineError(f"{where}: {key}: {as_written(value)} is not allowed; one of {', '.join(machines)}")
    if ("num_prefill" in table) != ("num_decode" in table):
        raise MachineError(f"{where}: num_prefill and num_decode go together")
    return Design(name, **table)


def _machine(where: str, name: str, table: object) -> Machine:
    if not isinstance(table, Mapping):
        raise MachineError(f"{where}: {as_written(table)} is not allowed; a table [name] of figures is needed")
    values = dict(table)
    for target, (factors, unit) in _FORMULAS.items():
        if target not in values and all(factor in values for factor in factors):
            values[target] = math.prod(_number(where, factor, values.pop(factor)) for factor in factors) * unit
    names = {f.name for f in fields(Machine)} - {"name"}
    for key in values:
        if key not in names:
            raise MachineError(f"{where}: {key} is unknown; known: {', '.join(sorted(names))}")
    for key in ("basis", "ops_per_s", "bytes_per_s", "memory_bytes"):
        if key not in values:
            raise MachineError(f"{where}: {key} is missing")
    if not isinstance(values["basis"], str):
        raise MachineError(f"{where}: basis: {as_written(values['basis'])} is not allowed; a word such as datasheet or measured")
    numbers = {key: _number(where, key, value) for key, value in values.items() if key not in ("basis", "devices")}
    devices = values.get("devices", 1)
    if type(devices) is not int or devices < 1:
        raise MachineError(f"{where}: devices: {as_written(devices)} is not allowed; an integer of at least 1")
    machine = Machine(name, values["basis"], devices=devices, **numbers)
    if machine.idle_w > machine.busy_w:
        raise MachineError(f"{where}: idle_w: {machine.idle_w:g} is not allowed; at most busy_w, which is {machine.busy_w:g}")
    return machine


def _number(where: str, key: str, value: object) -> float:
    limit = f"from 1 to {_MOST:g}" if key in _POSITIVE else "above 0 and at most 1" if key in _SHARES else f"from 0 to {_MOST:g}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        ok = 0.0 < value <= 1.0 if key in _SHARES else (key not in _POSITIVE or value >= 1.0) and 0.0 <= value <= _MOST
        if ok:
            return float(value)
    raise MachineError(f"{where}: {key}: {as_written(value)} is not allowed; a number {limit}")
