"""Loads a model's two halves side by side: its weights on a thread of their own, its text on the caller's.

Owns the thread and what becomes of one half when the other fails. A backend packs its weights without the interpreter lock, so that
reading a tokenizer, which is work of the interpreter, costs no time on a machine with two cores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from octavo.backends import registry

if TYPE_CHECKING:
    from octavo.backends.base import Backend
    from octavo.config import EngineConfig
    from octavo.models.loaded import LoadedModel
    from octavo.models.loading import OpenedModel


def load_halves(opened: OpenedModel, config: EngineConfig, beside: Callable[[], object] | None = None) -> tuple[LoadedModel, Backend]:
    """The whole of ``opened`` and the backend that ``config`` names, holding its weights; ``beside`` is called meanwhile.

    Raises ModelFileError for its text, what ``beside`` raises, BackendError: the first of them that happens, in this order. No backend
    is left running then.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="octavo-load") as pool:
        backend = pool.submit(registry.create_backend, opened.body, config)
        try:
            model = opened.read_text()
            if beside is not None:
                beside()
        except BaseException:
            with contextlib.suppress(Exception):
                backend.result().close()
            raise
        return model, backend.result()
