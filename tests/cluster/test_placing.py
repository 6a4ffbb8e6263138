"""What workers ask of Ray's nodes, and which nodes can give it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.distributed.cluster_file import WorkerGroup
from octavo.distributed.placing import Node, PlacingError, alive, check_fits, demand, equal_share, find_node, named


def node(number: int, cores: float, is_alive: bool = True, **resources: float) -> Node:
    names = {"NodeID": f"id-{number}", "NodeManagerAddress": f"10.0.0.{number}", "NodeManagerHostname": f"host-{number}"}
    found: dict[str, Any] = {**names, "Alive": is_alive, "Resources": {"CPU": cores, **resources}}
    return found


def test_names() -> None:
    groups = [WorkerGroup("prefill", 2), WorkerGroup(), WorkerGroup("decode"), WorkerGroup("prefill", cpus=3)]
    assert list(named(groups)) == ["prefill-0", "prefill-1", "worker-0", "decode-0", "prefill-2"]
    assert named(groups)["prefill-2"].cpus == 3


@given(st.lists(st.integers(0, 20), max_size=5), st.integers(1, 12))
def test_an_equal_share_is_the_largest_that_all_can_have(cores: list[int], number: int) -> None:
    share = equal_share([node(i, count) for i, count in enumerate(cores)], number)

    def have_place(each: int) -> int:
        return sum(count // each for count in cores)

    assert share == 0 or have_place(share) >= number
    assert have_place(share + 1) < number


def test_hints_name_nodes_in_several_ways() -> None:
    nodes = [node(1, 2), node(2, 4) | {"NodeName": "big"}]
    assert [find_node(nodes, hint) for hint in ("10.0.0.2", "host-2", "id-2", "big")] == [nodes[1]] * 4
    assert find_node(nodes, "10.0.0.3") is None
    assert alive([node(1, 2, is_alive=False), nodes[1]]) == [nodes[1]]


def test_demands() -> None:
    assert demand(WorkerGroup(), 3) == {"CPU": 3.0}
    assert demand(WorkerGroup(cpus=5, resources={"a": 0.5}), 3) == {"CPU": 5.0, "a": 0.5}


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (WorkerGroup(node="10.0.0.9"), "node: '10.0.0.9' is not allowed; Ray has no such node, it has: 10.0.0.1, 10.0.0.2"),
        (WorkerGroup(cpus=5), "cpus: 5 is not allowed; the most that one of Ray's nodes has is 4"),
        (WorkerGroup(resources={"a": 2.0}), "resources.a: 2 is not allowed; the most that one of Ray's nodes has is 1"),
        (WorkerGroup(resources={"b": 1.0}), "resources.b: 1 is not allowed; the most that one of Ray's nodes has is 0"),
        (WorkerGroup(cpus=4, resources={"a": 1.0}), "workers: 4 CPU, 1 a is not allowed; none of Ray's nodes has all of it"),
    ],
)
def test_what_no_node_could_hold(group: WorkerGroup, message: str) -> None:
    nodes = [node(1, 2, a=1.0), node(2, 4)]
    check_fits(WorkerGroup(), 4, nodes)
    check_fits(WorkerGroup(cpus=2, resources={"a": 1.0}, node="host-1"), 4, nodes)
    with pytest.raises(PlacingError, match="^" + re.escape(message)):
        check_fits(group, 1, nodes)


def test_a_ray_without_nodes() -> None:
    with pytest.raises(PlacingError, match="it has: none"):
        check_fits(WorkerGroup(node="a"), 1, [])
