"""Answers are the same to the bit from one engine, from two replicas, and from a prefill worker that hands over to a decode worker.

Over HTTP, from processes as they are served: texts, log-probabilities and ends of requests of many kinds, sampled for the most part, many
at a time. A dozen on a tiny model is in the usual suite; two hundred on a real one, by Ray as well, are long (soak).
"""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.known_requests import KnownRequest, ask_all, difference, known_requests
from tests.cluster.processes import Server
from tests.models.tiny import write_tiny_gguf

FLAGS = ["--threads", "1", "--max-num-seqs", "16"]
ARRANGEMENTS = {"replicas": ["--workers", "2"], "prefill and decode": ["--workers", "prefill=1,decode=1"]}
BY_RAY = {f"{name}, by Ray": [*flags, "--ray"] for name, flags in ARRANGEMENTS.items()}


def served(model: Path, requests: list[KnownRequest], flags: list[str], log: Path, at_once: int) -> tuple[list[Any], float]:
    """The answers, and how many requests were handed over."""
    with Server(["serve", "--port", "0", "-m", str(model), *FLAGS, *flags], log) as server:
        answers = asyncio.run(ask_all(server.port, requests, at_once))
        return answers, server.num_handed_over


def compare(model: Path, requests: list[KnownRequest], arrangements: dict[str, list[str]], folder: Path, at_once: int) -> None:
    right, _ = served(model, requests, [], folder / "one.log", 4)
    for name, flags in arrangements.items():
        answers, num_handed = served(model, requests, flags, folder / "cluster.log", at_once)
        found = {i: words for i, (a, b) in enumerate(zip(answers, right, strict=True)) if (words := difference(a, b)) is not None}
        assert not found, f"{name}: {found}"
        assert (num_handed > len(requests) / 2) == name.startswith("prefill"), f"{name}: {num_handed} were handed over"


def test_a_dozen_requests(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "m.gguf", context=512)
    requests = known_requests(12, seed=3, max_prompt_words=60, max_output=16)
    compare(model, requests, ARRANGEMENTS, tmp_path, at_once=6)


@pytest.mark.soak
@pytest.mark.model
def test_two_hundred_requests(smollm2_path: Path, tmp_path: Path) -> None:
    by_ray = BY_RAY if importlib.util.find_spec("ray") is not None else {}
    compare(smollm2_path, known_requests(200, seed=4), ARRANGEMENTS | by_ray, tmp_path, at_once=16)
