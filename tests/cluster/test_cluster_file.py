"""Cluster files: what they say, and every way in which they can be wrong, by field."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from octavo.distributed import cluster_file
from octavo.distributed.cluster_file import ClusterFile, ClusterFileError, Ray, WorkerGroup, parse_cluster, read_cluster_file

SMALLEST = {"model": "smollm2", "workers": [{}]}


def example() -> str:
    """The file in the module's own docstring."""
    lines = (cluster_file.__doc__ or "").splitlines()
    return "\n".join(line[4:] for line in lines if line.startswith("    "))


def test_the_documented_file() -> None:
    assert parse_cluster(tomllib.loads(example()), Path("/etc/octavo")) == ClusterFile(
        "smollm2",
        (WorkerGroup("prefill", 2, 8, {"big_memory": 1.0}, "10.0.0.2"), WorkerGroup("decode")),
        Path("/etc/octavo/cluster.secret"),
        "10.0.0.1",
        7070,
        {"host": "0.0.0.0", "port": 8000},
        {"max_num_seqs": 64},
        Ray("auto"),
    )


def test_the_smallest_file() -> None:
    assert parse_cluster(SMALLEST, Path(".")) == ClusterFile("smollm2", (WorkerGroup(),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ""}, "model: '' is not allowed; a text that is not empty is needed"),
        ({"model": None}, "model: it is missing; a text"),
        ({"modell": "x"}, "modell: there is no such field; there are: model, secret_file, serve, control, engine, ray, workers"),
        ({"secret_file": 3}, "secret_file: 3 is not allowed; a text"),
        ({"serve": 3}, "serve: 3 is not allowed; a [serve] table is needed"),
        ({"engine": []}, "engine: [] is not allowed; a [engine] table is needed"),
        ({"control": {"port": 65536}}, "control.port: 65536 is not allowed; an integer from 0 to 65535"),
        ({"control": {"port": True}}, "control.port: True is not allowed; an integer"),
        ({"control": {"host": " "}}, "control.host: ' ' is not allowed; a text"),
        ({"control": {"address": "x"}}, "control.address: there is no such field; there are: host, port"),
        ({"ray": "auto"}, "ray: 'auto' is not allowed; a [ray] table is needed"),
        ({"ray": {"adress": "auto"}}, "ray.adress: there is no such field; there are: address"),
        ({"ray": {"address": 1}}, "ray.address: 1 is not allowed; a text"),
        ({"workers": None}, "workers: it is missing; at least one [[workers]] table is needed"),
        ({"workers": []}, "workers: [] is not allowed; at least one [[workers]] table is needed"),
        ({"workers": {"role": "both"}}, "workers: {'role': 'both'} is not allowed; [[workers]] tables are needed"),
        ({"workers": [{}, 3]}, "workers: [{}, 3] is not allowed; [[workers]] tables are needed"),
        ({"workers": [{}, {"role": "mixed"}]}, "workers[1].role: 'mixed' is not allowed; one of both, prefill, decode"),
        ({"workers": [{"number": 0}]}, "workers[0].number: 0 is not allowed; an integer from 1 to 1024"),
        ({"workers": [{"number": 1000}, {"number": 25}]}, "workers: '1025 workers' is not allowed; at most 1024 together"),
        ({"workers": [{"cpus": 0.5}]}, "workers[0].cpus: 0.5 is not allowed; an integer from 1 to 1024"),
        ({"workers": [{"gpus": 1}]}, "workers[0].gpus: there is no such field; there are: role, number, cpus, resources, node"),
        ({"workers": [{"role": "prefill"}]}, "workers: 'roles prefill' is not allowed; prefill workers need others of role decode or both"),
        ({"workers": [{"role": "decode"}]}, "workers: 'roles decode' is not allowed; decode workers need others of role prefill or both"),
        ({"workers": [{"node": "a"}]}, "workers[0].node: 'a' is not allowed; it is for Ray, and there is no [ray] table"),
        ({"workers": [{"resources": {"a": 1}}]}, "workers[0].resources: {'a': 1.0} is not allowed; it is for Ray"),
        ({"workers": [{"cpus": 1}, {"cpus": 2}]}, "workers[1].cpus: 2 is not allowed; as workers[0] (1): without Ray all have the same"),
        ({"control": {"port": 7171}}, "control.port: 7171 is not allowed; it goes with control.host: without it, and without [ray]"),
        (
            {"engine": {"threads": 4}, "workers": [{"cpus": 1}]},
            "workers[0].cpus: 1 is not allowed; without Ray it says the threads of each worker, as engine.threads (4) does",
        ),
        ({"secret_file": "a\0b"}, "secret_file: 'a\\x00b' is not allowed; a text without null characters is needed"),
        ({"model": "a\0b"}, "model: 'a\\x00b' is not allowed; a text without null characters"),
        ({"control": {"host": "\0a"}}, "control.host: '\\x00a' is not allowed; a text without null characters"),
        ({"ray": {"address": "\0a"}}, "ray.address: '\\x00a' is not allowed; a text without null characters"),
        ({"ray": {}, "workers": [{"node": 7}]}, "workers[0].node: 7 is not allowed; a text"),
        ({"ray": {}, "workers": [{"resources": 7}]}, "workers[0].resources: 7 is not allowed; a table of numbers is needed"),
        ({"ray": {}, "workers": [{"resources": {"CPU": 1}}]}, "workers[0].resources.CPU: 1 is not allowed; cores are said by cpus"),
        ({"ray": {}, "workers": [{"resources": {"a": 0}}]}, "workers[0].resources.a: 0 is not allowed; a finite number above 0"),
        ({"ray": {}, "workers": [{"resources": {"a": True}}]}, "workers[0].resources.a: True is not allowed; a finite number above 0"),
        ({"ray": {}, "workers": [{"resources": {"a": float("nan")}}]}, "workers[0].resources.a: nan is not allowed; a finite number"),
        ({"ray": {}, "workers": [{"resources": {"a": 1.5}}]}, "workers[0].resources.a: 1.5 is not allowed; a whole number above 1"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    content = {name: value for name, value in (SMALLEST | change).items() if value is not None}
    with pytest.raises(ClusterFileError, match="^" + re.escape(message)):
        parse_cluster(content, Path("."))


def test_what_ray_has_a_use_for_is_allowed_with_it() -> None:
    """A port of the address that Ray knows this machine by, and cores that it sets apart beside the threads that each worker runs."""
    content = {"ray": {}, "control": {"port": 7171}, "engine": {"threads": 4}, "workers": [{"cpus": 8}]}
    made = parse_cluster(SMALLEST | content, Path("."))
    assert (made.control_host, made.control_port, made.groups[0].cpus, made.engine) == (None, 7171, 8, {"threads": 4})


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(example())
    assert read_cluster_file(path).secret_file == tmp_path / "cluster.secret"
    path.write_text("model = \n")
    with pytest.raises(ClusterFileError, match=rf"{re.escape(str(path))}: it is not TOML: "):
        read_cluster_file(path)
    path.write_bytes(b"model = '\xff'\n")
    with pytest.raises(ClusterFileError, match="it is not TOML"):
        read_cluster_file(path)
    path.write_text("model = 'm'\nworkers = 3\n")
    with pytest.raises(ClusterFileError, match=rf"^{re.escape(str(path))}: workers: 3 is not allowed"):
        read_cluster_file(path)
    with pytest.raises(OSError):
        read_cluster_file(tmp_path / "none.toml")


def test_prefill_and_decode_make_up_for_each_other() -> None:
    for roles in (("prefill", "decode"), ("prefill", "both"), ("decode", "both")):
        made = parse_cluster({"model": "m", "workers": [{"role": role, "number": 2} for role in roles]}, Path("."))
        assert [group.role for group in made.groups] == list(roles) and made.num_workers == 4
