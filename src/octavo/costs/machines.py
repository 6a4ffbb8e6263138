"""Machines: what a roofline divides by. Plain data, read from the TOML files beside this module or from a file of the user's.

A file has one machine per table:

    [h100-sxm]
    basis = "datasheet"              # where the figures come from; "measured" for those of `octavo doctor`
    ops_per_s = 989e12               # 16-bit dense; or cores, ghz and ops_per_cycle, which are multiplied
    bytes_per_s = 3.35e12            # memory; or channels and mega_transfers_per_s of 8 bytes
    memory_bytes = 80e9
    busy_w = 700                     # of the whole device while a step runs

Optional: ops_share and bytes_share (what of the peaks real kernels reach), idle_w, usd_per_hour, link_bytes_per_s, link_latency_s, host_s
(per step), host_s_per_sequence, devices (that share the work of each step evenly: tensor parallel, every figure above is of one).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path

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

    def times(self, devices: int) -> Machine:
        """The machine with so many devices that share each step."""
        return replace(self, devices=devices)


_POSITIVE = ("ops_per_s", "bytes_per_s", "memory_bytes", "link_bytes_per_s")
_SHARES = ("ops_share", "bytes_share")


def read_machines(path: str | Path) -> dict[str, Machine]:
    """The machines of a TOML file, by name. Raises MachineError, OSError."""
    return _machines(Path(path).read_bytes(), str(path))


def known_machines() -> dict[str, Machine]:
    """The machines that come with Octavo, by name."""
    found = dict[str, Machine]()
    for entry in sorted(files("octavo.costs").joinpath("machines").iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".toml"):
            found |= _machines(entry.read_bytes(), entry.name)
    return found


def find_machine(name: str, path: str | Path | None = None) -> Machine:
    """The machine of that name in the file at ``path``, else among the known ones. MachineError lists those that there are."""
    machines = known_machines() if path is None else read_machines(path)
    if name not in machines:
        raise MachineError(f"machine: {name!r} is not allowed; one of {', '.join(machines)}")
    return machines[name]


def _machines(data: bytes, where: str) -> dict[str, Machine]:
    try:
        tables = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MachineError(f"{where}: {error}") from None
    return {name: _machine(f"{where}: {name}", name, table) for name, table in tables.items()}


def _machine(where: str, name: str, table: object) -> Machine:
    if not isinstance(table, Mapping):
        raise MachineError(f"{where}: {table!r} is not allowed; a table [name] of figures is needed")
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
        raise MachineError(f"{where}: basis: {values['basis']!r} is not allowed; a word such as datasheet or measured")
    numbers = {key: _number(where, key, value) for key, value in values.items() if key not in ("basis", "devices")}
    devices = values.get("devices", 1)
    if type(devices) is not int or devices < 1:
        raise MachineError(f"{where}: devices: {devices!r} is not allowed; an integer of at least 1")
    return Machine(name, values["basis"], devices=devices, **numbers)


def _number(where: str, key: str, value: object) -> float:
    limit = "above 0" if key in _POSITIVE else "above 0 and at most 1" if key in _SHARES else "at least 0"
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        ok = 0.0 < value <= 1.0 if key in _SHARES else value > 0.0 if key in _POSITIVE else value >= 0.0
        if ok:
            return float(value)
    raise MachineError(f"{where}: {key}: {value!r} is not allowed; a finite number {limit}")
