"""Hosts on one machine: they reach each other and this process, cables can be pulled, and nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from octavo.bench import netns
from octavo.bench.netns import Network, NetworkError
from tests.cluster.proxy import Sink

pytestmark = pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing()))
HELLO = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 60) as connection:
    connection.sendall(b"x" * int(sys.argv[3]))
"""
LISTENER = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print(flush=True)
print(server.accept()[1][0], flush=True)
"""
TALKER = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), 60)
while True:
    connection.sendall(b"x")
    time.sleep(0.01)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(2) as made:
        yield made


def names(pid: int | None = None) -> set[str]:
    """Namespaces and links that a process has made, this one unless another is named."""
    prefix = f"{netns.PREFIX}{netns._base36(os.getpid() if pid is None else pid)}N"
    found = subprocess.run(["ip", "-j", "netns", "list"], capture_output=True, text=True, check=True).stdout.strip()
    links = subprocess.run(["ip", "-j", "link"], capture_output=True, text=True, check=True).stdout
    all_names = [entry["name"] for entry in json.loads(found or "[]")] + [entry["ifname"] for entry in json.loads(links)]
    return {name for name in all_names if name.startswith(prefix)}


def send(network: Network, host: int, address: str, port: int, num_bytes: int = 1) -> None:
    network.hosts[host].run([sys.executable, "-c", HELLO, address, str(port), str(num_bytes)])


def test_hosts_reach_this_process_and_each_other(network: Network) -> None:
    with Sink(network.address) as sink:
        send(network, 0, network.address, sink.port, 1000)
        send(network, 1, network.address, sink.port, 500)
        assert sink.wait_for(1500)
    first, second = network.hosts
    process = second.popen([sys.executable, "-c", LISTENER, second.address, "7000"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    send(network, 0, second.address, 7000)
    assert process.stdout.readline().strip() == first.address


def test_a_pulled_cable_loses_packets_and_keeps_connections(network: Network) -> None:
    host = network.hosts[0]
    with Sink(network.address) as sink:
        host.popen([sys.executable, "-c", TALKER, network.address, str(sink.port)])
        assert sink.wait_for(5)
        host.set_link(up=False)
        for _ in range(20):  # what was on its way may come late; else something would come fifty times in each of them
            before = sink.num_bytes
            time.sleep(0.5)
            if sink.num_bytes == before:
                break
        assert sink.num_bytes == before and sink.num_connections == 1
        host.set_link(up=True)
        assert sink.wait_for(before + 5) and sink.num_connections == 1


def test_a_throttled_link_is_as_slow_as_it_is_told_to_be(network: Network) -> None:
    """No faster, whatever the machine does: the bucket holds at most what its burst says."""
    num_bytes = 4 << 20
    network.hosts[0].throttle(0.1)
    with Sink(network.address) as sink:
        started_s = time.monotonic()
        send(network, 0, network.address, sink.port, num_bytes)
        assert sink.wait_for(num_bytes)
        assert time.monotonic() - started_s >= 0.95 * (8 * (num_bytes - (512 << 10)) / 1e8)
    network.hosts[0].throttle(None)
    with pytest.raises(ValueError, match="gbit_per_s: 0 is not allowed; above 0"):
        network.hosts[0].throttle(0)


def test_nothing_is_left_behind() -> None:
    before = names()
    with pytest.raises(KeyError), Network(3) as network:
        process = network.hosts[2].popen(["sleep", "1000"])
        assert len(names()) > len(before)
        raise KeyError
    assert process.returncode is not None and names() == before


def test_a_half_built_network_is_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    before, add = names(), Network._add_host

    def add_one(self: Network, number: int, address: str) -> None:
        if number == 1:
            raise NetworkError("no more")
        add(self, number, address)

    monkeypatch.setattr(Network, "_add_host", add_one)
    with pytest.raises(NetworkError, match="no more"), Network(2):
        pass
    assert names() == before


def test_what_a_killed_process_left_is_swept_away() -> None:
    code = "from octavo.bench.netns import Network; Network(1).__enter__().hosts[0].popen(['sleep', '1000']); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert len(names(child.pid)) == 2  # the bridge; the host, whose link has its name
        child.kill()
    netns.sweep()
    assert names(child.pid) == set()


def test_names_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netns.os, "getpid", lambda: 4194304)  # the largest that Linux gives
    network = Network(netns.MAX_HOSTS)
    assert len(f"{network._name}H{netns._base36(netns.MAX_HOSTS - 1)}") <= 15


@pytest.mark.parametrize("num_hosts", [0, 65])
def test_the_number_of_hosts(num_hosts: int) -> None:
    with pytest.raises(ValueError, match="num_hosts"):
        Network(num_hosts)
