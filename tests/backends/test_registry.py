"""Backends by name: known ones load when asked for, unknown or broken ones say what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from octavo.backends import registry
from octavo.backends.base import BackendError
from octavo.backends.reference.backend import ReferenceBackend
from octavo.config import BackendConfig, EngineConfig
from tests.backends.reference_runs import open_gguf_weights
from tests.models.tiny import write_tiny_gguf


def test_a_known_name_gives_its_class() -> None:
    assert registry.backend_class("reference") is ReferenceBackend
    assert set(registry.known_backends()) == {"cpu", "reference"}


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BackendError, match="'cuda' is unknown; known: cpu, reference"):
        registry.backend_class("cuda")


def test_a_failed_import_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._BACKENDS, "broken", ("octavo.backends.no_such_module", "Backend", "install the extra"))
    with pytest.raises(BackendError, match=r"'broken' cannot be imported \(No module named .*no_such_module.*; install the extra"):
        registry.backend_class("broken")


def test_the_config_chooses(tmp_path) -> None:
    model = open_gguf_weights(write_tiny_gguf(tmp_path / "m.gguf"))
    backend = registry.create_backend(model, EngineConfig(backend=BackendConfig(backend="reference")))
    assert isinstance(backend, ReferenceBackend)
    assert backend.vocab_size == model.program.vocab_size


def test_the_registry_itself_imports_no_backend() -> None:
    code = "import octavo.backends.registry, sys; sys.exit(any(m in sys.modules for m in ('numpy', 'octavo.backends.cpu.backend')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
