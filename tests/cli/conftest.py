"""The command as a user runs it, in this process, and a tiny model file for it."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from octavo.cli.main import main
from tests.models.tiny import write_tiny_gguf


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


Octavo = Callable[..., Ended]


@pytest.fixture
def octavo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Octavo:
    """``octavo(*argv, stdin="")``: the entry point itself, its exit code and what it printed."""

    def run(*argv: str | Path, stdin: str = "") -> Ended:
        monkeypatch.setattr(sys, "argv", ["octavo", *map(str, argv)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that never ends a greedy text: the output rows of its control tokens are zero."""
    rng = np.random.default_rng(5)
    output = rng.standard_normal((512, 64), dtype=np.float32) / np.float32(8)
    output[:3] = 0
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return write_tiny_gguf(path, context=16384, tensors={"output.weight": output})


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a chat template, and with a context of 64 tokens."""
    path = tmp_path_factory.mktemp("models") / "base.gguf"
    return write_tiny_gguf(path, context=64, metadata_overrides={"tokenizer.chat_template": None})
