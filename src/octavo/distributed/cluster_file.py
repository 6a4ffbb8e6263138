"""The file that describes a cluster, for `octavo cluster up FILE`: TOML, read once, every field checked. Pure: no process, no network.

    model = "smollm2"
    secret_file = "cluster.secret"      # beside this file, unless the path is absolute; needed with [control] host, but for Ray

    [serve]                             # where clients come
    host = "0.0.0.0"
    port = 8000

    [control]                           # where workers come; an address that all their machines reach
    host = "10.0.0.1"
    port = 7070

    [engine]                            # flags of `octavo serve` with underscores
    max_num_seqs = 64

    [ray]                               # without this table the workers are processes on this machine
    address = "auto"

    [[workers]]
    role = "prefill"                    # both | prefill | decode
    number = 2
    cpus = 8                            # threads of each, and the cores that Ray sets apart
    resources = { big_memory = 1 }      # of Ray, as its nodes name them
    node = "10.0.0.2"                   # a hint: this node, as long as it is there

    [[workers]]
    role = "decode"

Owns the fields, their limits and their defaults. Flags in [serve] and [engine] are only passed on: their owner is the command line.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.distributed.cluster_options import MAX_WORKERS
from octavo.distributed.roles import ROLES

DEFAULT_CONTROL_PORT = 7070


class ClusterFileError(ValueError):
    """A field of a cluster file is missing, unknown or outside its limits; the message names file, field, value and limit."""


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Workers that are alike. ``cpus`` None: one of the machine's equal parts. ``node`` is a hint, ``resources`` are demands; for Ray."""

    role: str = "both"
    number: int = 1
    cpus: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Ray:
    """``address``: of the cluster, as ``ray.init`` takes it; None: a running one of this machine, else one of its own."""

    address: str | None = None


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """``serve`` and ``engine``: flags of `octavo serve`, unread. ``control_port`` 0: any. ``ray`` None: processes on this machine.

    ``secret_file`` None: a secret is made for this run. ``control_host`` None: loopback for processes, the address that Ray knows this
    machine by for Ray.
    """

    model: str
    groups: tuple[WorkerGroup, ...]
    secret_file: Path | None = None
    control_host: str | None = None
    control_port: int = DEFAULT_CONTROL_PORT
    serve: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    ray: Ray | None = None

    @property
    def num_workers(self) -> int:
        return sum(group.number for group in self.groups)

    @property
    def workers(self) -> Mapping[str, int]:
        """How many of each role."""
        roles = Counter[str]()
        for group in self.groups:
            roles[group.role] += group.number
        return roles


def read_cluster_file(path: str | Path) -> ClusterFile:
    """Raises ClusterFileError; OSError when the file cannot be read."""
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ClusterFileError(f"{path}: it is not TOML: {error}") from None
    try:
        return parse_cluster(content, path.parent)
    except ClusterFileError as error:
        raise ClusterFileError(f"{path}: {error}") from None


def parse_cluster(content: Mapping[str, Any], folder: Path) -> ClusterFile:
    """The cluster that a file in ``folder`` says. Raises ClusterFileError that names the field."""
    _known("", content, ("model", "secret_file", "serve", "control", "engine", "ray", "workers"))
    model = _text("model", content.get("model"))
    control, ray = _table("control", content), _table("ray", content)
    _known("control", control, ("host", "port"))
    _known("ray", ray, ("address",))
    groups = tuple(_groups(content.get("workers")))
    _check_groups(groups, "ray" in content)
    secret_file = None if "secret_file" not in content else folder / _text("secret_file", content["secret_file"])
    made = ClusterFile(
        model,
        groups,
        secret_file,
        control_host=None if "host" not in control else _text("control.host", control["host"]),
        control_port=_integer("control.port", control.get("port", DEFAULT_CONTROL_PORT), 0, 65535),
        serve=_table("serve", content),
        engine=_table("engine", content),
        ray=None if "ray" not in content else Ray(None if "address" not in ray else _text("ray.address", ray["address"])),
    )
    if made.ray is None:
        _check_own_machine(control, groups, made.engine)
    return made


def _groups(entries: Any) -> Iterable[WorkerGroup]:
    if entries is None:
        raise _bad("workers", None, "at least one [[workers]] table is needed")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _bad("workers", entries, "[[workers]] tables are needed")
    for index, entry in enumerate(entries):
        name = f"workers[{index}]"
        _known(name, entry, ("role", "number", "cpus", "resources", "node"))
        role = entry.get("role", "both")
        if role not in ROLES:
            raise _bad(f"{name}.role", role, f"one of {', '.join(ROLES)}")
        yield WorkerGroup(
            role,
            _integer(f"{name}.number", entry.get("number", 1), 1, MAX_WORKERS),
            None if "cpus" not in entry else _integer(f"{name}.cpus", entry["cpus"], 1, 1024),
            _resources(f"{name}.resources", entry.get("resources", {})),
            None if "node" not in entry else _text(f"{name}.node", entry["node"]),
        )


def _check_groups(groups: tuple[WorkerGroup, ...], by_ray: bool) -> None:
    """That they make a cluster together."""
    if not groups:
        raise _bad("workers", [], "at least one [[workers]] table is needed")
    number = sum(group.number for group in groups)
    if number > MAX_WORKERS:
        raise _bad("workers", f"{number} workers", f"at most {MAX_WORKERS} together")
    roles = {group.role for group in groups}
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        if role in roles and not roles & {other, "both"}:
            raise _bad("workers", f"roles {', '.join(sorted(roles))}", f"{role} workers need others of role {other} or both")
    if not by_ray:
        for index, group in enumerate(groups):
            for name, value in (("resources", group.resources), ("node", group.node)):
                if value:
                    raise _bad(f"workers[{index}].{name}", value, "it is for Ray, and there is no [ray] table")
            if group.cpus != groups[0].cpus:
                raise _bad(f"workers[{index}].cpus", group.cpus, f"as workers[0] ({groups[0].cpus}): without Ray all have the same")


def _check_own_machine(control: Mapping[str, Any], groups: tuple[WorkerGroup, ...], engine: Mapping[str, Any]) -> None:
    """That nothing is said that processes of this machine have no use for."""
    if "port" in control and "host" not in control:
        raise _bad("control.port", control["port"], "it goes with control.host: without it, and without [ray], workers connect by no port")
    cpus = groups[0].cpus
    if cpus is not None and "threads" in engine:
        limit = f"without Ray it says the threads of each worker, as engine.threads ({engine['threads']!r}) does"
        raise _bad("workers[0].cpus", cpus, limit)


def _resources(name: str, value: Any) -> Mapping[str, float]:
    if not isinstance(value, dict):
        raise _bad(name, value, "a table of numbers is needed")
    for resource, amount in value.items():
        if resource in ("CPU", "num_cpus"):
            raise _bad(f"{name}.{resource}", amount, "cores are said by cpus")
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 < amount < math.inf:
            raise _bad(f"{name}.{resource}", amount, "a finite number above 0")
        if amount > 1 and amount != int(amount):
            raise _bad(f"{name}.{resource}", amount, "a whole number above 1, as Ray counts")
    return {resource: float(amount) for resource, amount in value.items()}


def _known(name: str, table: Mapping[str, Any], fields: tuple[str, ...]) -> None:
    for key in table:
        if key not in fields:
            where = f"{name}.{key}" if name else key
            raise ClusterFileError(f"{where}: there is no such field; there are: {', '.join(fields)}")


def _table(name: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
    value = content.get(name, {})
    if not isinstance(value, dict):
        raise _bad(name, value, f"a [{name}] table is needed")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _bad(name, value, "a text that is not empty is needed")
    if "\0" in value:
        raise _bad(name, value, "a text without null characters is needed")
    return value


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise _bad(name, value, f"an integer from {low} to {high}")
    return value


def _bad(name: str, value: Any, limit: str) -> ClusterFileError:
    return ClusterFileError(f"{name}: it is missing; {limit}" if value is None else f"{name}: {value!r} is not allowed; {limit}")
