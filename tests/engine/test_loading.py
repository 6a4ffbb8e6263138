"""Weights and text are loaded side by side, and neither half is left behind when the other cannot be had."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.backends import registry
from octavo.backends.base import BackendError
from octavo.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig
from octavo.engine.engine import Engine
from octavo.engine.loading import load_halves
from octavo.models.loading import open_model
from octavo.models.model_file import ModelFileError
from tests.engine.scripted import Bigram
from tests.models.tiny import write_tiny_gguf

TIMEOUT_S = 60.0


class Opened:
    """An ``OpenedModel`` whose text is whatever ``read_text`` does."""

    body: Any = None

    def __init__(self, read_text: Any) -> None:
        self.read_text = read_text


def test_the_backend_is_made_beside_the_text_and_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that waits for both others to be done: in turn they would wait for ever."""
    text, beside = threading.Event(), threading.Event()
    backend = Bigram(8)

    def create(*_: Any) -> Bigram:
        assert text.wait(TIMEOUT_S) and beside.wait(TIMEOUT_S)
        return backend

    monkeypatch.setattr(registry, "create_backend", create)
    model = SimpleNamespace()
    opened: Any = Opened(lambda: (text.set(), model)[1])
    assert load_halves(opened, EngineConfig(), beside.set) == (model, backend)
    assert not backend.closed


@pytest.mark.parametrize("broken", ["text", "beside"])
def test_a_half_that_fails_closes_the_backend(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    backend = Bigram(8)
    monkeypatch.setattr(registry, "create_backend", lambda *_: backend)

    def fail() -> Any:
        raise ModelFileError(f"no {broken}")

    opened: Any = Opened(fail if broken == "text" else SimpleNamespace)
    with pytest.raises(ModelFileError, match=f"^no {broken}$"):
        load_halves(opened, EngineConfig(), fail)
    assert backend.closed


def test_the_error_of_the_text_comes_before_the_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(*_: Any) -> Any:
        raise BackendError("no backend")

    def fail() -> Any:
        raise ModelFileError("no text")

    monkeypatch.setattr(registry, "create_backend", create)
    readable: Any = Opened(SimpleNamespace)
    with pytest.raises(BackendError, match="^no backend$"):
        load_halves(readable, EngineConfig())
    unreadable: Any = Opened(fail)
    with pytest.raises(ModelFileError, match="^no text$"):
        load_halves(unreadable, EngineConfig())


def test_no_thread_is_left_when_the_text_of_a_real_file_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", metadata_overrides={"tokenizer.ggml.model": "rwkv"})
    assert open_model(path).body.program.vocab_size == 512  # its weights are fine
    before = set(threading.enumerate())
    with pytest.raises(ModelFileError, match="tokenizer.ggml.model: 'rwkv'"):
        Engine.load(EngineConfig(ModelConfig(str(path)), CacheConfig(num_kv_blocks=4), backend=BackendConfig(threads=2)))
    assert set(threading.enumerate()) <= before  # those of others may end at any time
