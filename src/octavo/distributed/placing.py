"""What workers ask of Ray's nodes, and whether nodes can give it. Pure: no Ray, no process.

A node is what ``ray.nodes()`` lists: a dict with "NodeID", "Alive", "NodeManagerAddress", "NodeManagerHostname", "NodeName", "Resources".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.distributed.cluster_file import WorkerGroup
from octavo.distributed.cluster_options import worker_name

Node = Mapping[str, Any]
_NAMES = ("NodeManagerAddress", "NodeManagerHostname", "NodeName", "NodeID")


class PlacingError(ValueError):
    """No node can hold a worker, or a hint names none; the message names the field, the value and what there is."""


def alive(nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if node["Alive"]]


def find_node(nodes: Sequence[Node], hint: str) -> Node | None:
    """The node that ``hint`` names by its address, host name, Ray name or id."""
    return next((node for node in nodes if hint in [node.get(name) for name in _NAMES]), None)


def named(groups: Sequence[WorkerGroup]) -> dict[str, WorkerGroup]:
    """Every worker by its name: worker-0, worker-1, ..., or prefill-0, decode-0, ..."""
    found: dict[str, WorkerGroup] = {}
    counts: dict[str, int] = {}
    for group in groups:
        first = counts.get(group.role, 0)
        counts[group.role] = first + group.number
        found |= {worker_name(group.role, number): group for number in range(first, first + group.number)}
    return found


def equal_share(nodes: Sequence[Node], number: int) -> int:
    """The most cores that ``number`` workers can each have on these nodes; 0: there are more workers than cores."""
    cores = [int(node["Resources"].get("CPU", 0)) for node in nodes]
    return next((share for share in range(max(cores, default=0), 0, -1) if sum(core // share for core in cores) >= number), 0)


def demand(group: WorkerGroup, share: int) -> dict[str, float]:
    """What one worker of a group asks for. ``share``: cores of a worker that does not say."""
    return {"CPU": float(share if group.cpus is None else group.cpus), **group.resources}


def check_fits(group: WorkerGroup, share: int, nodes: Sequence[Node]) -> None:
    """Raises PlacingError when a worker's hint names no node, or no node could hold it even if it were empty."""
    if group.node is not None and find_node(nodes, group.node) is None:
        there = ", ".join(sorted(str(node["NodeManagerAddress"]) for node in nodes))
        raise PlacingError(f"node: {group.node!r} is not allowed; Ray has no such node, it has: {there or 'none'}")
    wanted = demand(group, share)
    for name, amount in wanted.items():
        most = max((node["Resources"].get(name, 0.0) for node in nodes), default=0.0)
        if amount > most:
            field = "cpus" if name == "CPU" else f"resources.{name}"
            raise PlacingError(f"{field}: {amount:g} is not allowed; the most that one of Ray's nodes has is {most:g}")
    if not any(all(node["Resources"].get(name, 0.0) >= amount for name, amount in wanted.items()) for node in nodes):
        raise PlacingError(f"workers: {shown(wanted)} is not allowed; none of Ray's nodes has all of it")


def shown(wanted: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in wanted.items())
