"""Octavo: an LLM inference engine and server.

    from octavo import LLM, SamplingParams

Names load on first use, so that ``import octavo`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.core.request import ParameterError, SamplingParams
    from octavo.engine.beam_search import BeamSearchParams
    from octavo.engine.llm import LLM
    from octavo.engine.outputs import CompletionOutput, GenerationError, OutputEvent, RequestOutput

__version__ = "0.1.0"

_HOMES = {
    "LLM": "octavo.engine.llm",
    "SamplingParams": "octavo.core.request",
    "BeamSearchParams": "octavo.engine.beam_search",
    "ParameterError": "octavo.core.request",
    "EngineConfig": "octavo.config",
    "RequestOutput": "octavo.engine.outputs",
    "CompletionOutput": "octavo.engine.outputs",
    "OutputEvent": "octavo.engine.outputs",
    "GenerationError": "octavo.engine.outputs",
}
__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "GenerationError",
    "OutputEvent",
    "ParameterError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
