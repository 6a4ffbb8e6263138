"""Backends by name, imported when one is asked for, so that a missing extra is a clear message and costs nothing otherwise."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from octavo.backends.base import Backend, BackendError

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.models.loaded import ModelBody

# name -> (module, class, what to do when the import fails)
_BACKENDS = {
    "cpu": (
        "octavo.backends.cpu.backend",
        "CpuBackend",
        "its native module is built when octavo is installed (pip install .), which needs a C++ compiler",
    ),
    "reference": ("octavo.backends.reference.backend", "ReferenceBackend", "it needs numpy"),
}


def known_backends() -> tuple[str, ...]:
    return tuple(_BACKENDS)


def backend_class(name: str) -> type[Backend]:
    """The class of a backend. Raises BackendError for an unknown name, or when its module cannot be imported."""
    if name not in _BACKENDS:
        raise BackendError(f"backend: {name!r} is unknown; known: {', '.join(_BACKENDS)}")
    module, attribute, remedy = _BACKENDS[name]
    try:
        loaded: type[Backend] = getattr(importlib.import_module(module), attribute)
    except ImportError as exc:
        raise BackendError(f"backend {name!r} cannot be imported ({exc}); {remedy}") from exc
    return loaded


def create_backend(model: ModelBody, config: EngineConfig) -> Backend:
    """The backend that ``config.backend.backend`` names, with the model loaded and no KV pool yet."""
    cls: type = backend_class(config.backend.backend)
    backend: Backend = cls(model, config)
    return backend
