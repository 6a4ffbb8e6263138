"""A front end and its workers on hosts of their own, made of network namespaces that share a host name and a file system."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from octavo.bench import netns
from tests.cluster.chaos import cluster
from tests.cluster.chaos_report import ChaosCase
from tests.cluster.known_requests import ask_all, difference, known_requests
from tests.cluster.processes import Server
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
