"""A front end and its workers on hosts of their own, made of network namespaces that share a host name and a file system."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

from octavo.bench import netns
from octavo.distributed.handshake import SECRET_VARIABLE, new_secret
from tests.cluster.chaos import cluster, num_ready
from tests.cluster.chaos_report import ChaosCase
from tests.cluster.known_requests import ask_all, difference, known_requests
from tests.cluster.processes import Process, Server
from tests.models.tiny import write_tiny_gguf

pytestmark = pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing()))


def test_kv_moves_between_hosts(tmp_path: Path) -> None:
    """Over TCP, at the address by which a worker reaches the front end: it cannot share memory with a worker of another host."""
    model = write_tiny_gguf(tmp_path / "m.gguf", context=512)
    requests = known_requests(10, seed=6, max_prompt_words=60, max_output=12)
    with Server(["serve", "--port", "0", "-m", str(model), "--threads", "1"], tmp_path / "one.log") as one:
        right = asyncio.run(ask_all(one.port, requests, 4))
    with cluster(ChaosCase(str(model), 0, roles=("prefill", "decode")), tmp_path) as made:
        answers = asyncio.run(ask_all(made.server.port, requests, 4))
        assert made.server.num_handed_over > len(requests) / 2, made.server.text
    assert [difference(a, b) for a, b in zip(answers, right, strict=True)] == [None] * len(right)


@pytest.mark.soak
def test_kv_moves_between_the_front_ends_host_and_others(tmp_path: Path) -> None:
    """A worker that reaches its front end by loopback is brought KV from elsewhere, where that one reaches the front end."""
    model = write_tiny_gguf(tmp_path / "m.gguf", context=512)
    with socket.create_server(("0.0.0.0", 0)) as free:
        port = free.getsockname()[1]
    serve = ["serve", "--port", "0", "-m", str(model), "--threads", "1", "--num-kv-blocks", "200", "--workers-listen", f"0.0.0.0:{port}"]
    environment = {SECRET_VARIABLE: new_secret()}
    with netns.Network(1) as network, contextlib.ExitStack() as stack:
        front = Server(serve, tmp_path / "front-end.log", environment)
        stack.callback(front.stop)
        front.start()
        for role, address, host in (("decode", "127.0.0.1", None), ("prefill", network.address, network.hosts[0])):
            arguments = ["worker", "--connect", f"{address}:{port}", "--name", role, "--role", role]
            stack.enter_context(Process(arguments, tmp_path / f"{role}.log", host, environment))
        front.wait_until_ready()
        front.wait_for(lambda: num_ready(front) == 2)
        asyncio.run(ask_all(front.port, known_requests(4, seed=6, max_prompt_words=60, max_output=12), 4))
        assert front.num_handed_over == 4, front.text
