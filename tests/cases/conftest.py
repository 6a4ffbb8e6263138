"""The model of the cases: 2 layers, hidden 64, 4 heads, 2 KV heads, vocabulary 512, float32, random; and an engine for plain runs of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.engine.engine import Engine
from tests.cases.harness import open_plain
from tests.models.tiny import write_tiny_gguf


@pytest.fixture(scope="session")
def rand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "rand.gguf")


@pytest.fixture(scope="session")
def plain(rand: Path) -> Iterator[Engine]:
    with open_plain(rand) as engine:
        yield engine
