"""The models that draft for an engine: a second one, or the first layers of its own.

Owns their opening, the check that a second model speaks the target's tokens, and where it keeps its KV: in pages that the target's pool
lends (``core/lodging``), or, where its blocks do not fit these, in a pool of its own, which has as many blocks as the target's.
What they propose, and how much of it, is ``speculative``'s business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.backends.base import Backend
from octavo.config import ConfigError, EngineConfig
from octavo.core.kv_pages import GuestLayout
from octavo.core.scheduler import Scheduler
from octavo.speculative.draft_model import DraftModel, VocabularyMismatch, check_vocabularies
from octavo.speculative.self_draft import SelfDraft

if TYPE_CHECKING:
    from octavo.models.loaded import LoadedModel

logger = logging.getLogger("octavo.engine")


def _draft_config(config: EngineConfig, name: str) -> EngineConfig:
    """Its blocks are of one kind: what it keeps of a sequence is given up as a whole."""
    return replace(config, model=replace(config.model, model=name), cache=replace(config.cache, enable_kv_groups=False))


class DraftModels:
    """Opened before the KV pool is sized, started after.

    Raises ConfigError for a draft model that is not to be had or of other tokens, ModelFileError, BackendError.
    """

    def __init__(self, config: EngineConfig, target: LoadedModel) -> None:
        self._config = config
        self._target = target
        self._model: LoadedModel | None = None
        self._backend: Backend | None = None
        self._close: list[Callable[[], None]] = []
        self._lodging: GuestLayout | None = None
        name = config.speculative.draft_model
        if name is not None:
            self._open(name)

    def _open(self, name: str) -> None:
        from octavo.engine.loading import load_halves
        from octavo.models.catalog import PullError, ensure_model
        from octavo.models.loading import open_model

        target, config = self._target, self._config
        try:
            path = ensure_model(name)
        except PullError as error:
            raise ConfigError(f"draft_model: {str(error).removeprefix('model: ')}") from None
        draft, backend = load_halves(open_model(path), _draft_config(config, name))
        self._close.append(backend.close)
        try:
            check_vocabularies(target.tokenizer, draft.tokenizer, target.eos_token_ids, draft.eos_token_ids)
        except VocabularyMismatch as error:
            self.close()
            raise ConfigError(str(error)) from None
        self._model, self._backend = draft, backend

    @property
    def kv_bytes_per_block(self) -> int:
        """Of a block of the draft model."""
        return 0 if self._backend is None else self._backend.kv_capacity(0).bytes_per_block

    def find_lodging(self, target: Backend) -> bool:
        """Whether the draft model, if there is one, keeps its KV in the target's pool; says in the log why not."""
        if self._backend is None:
            return False
        cache, capacity = self._config.cache, target.kv_capacity(0)
        page_bytes = capacity.bytes_per_block if capacity.layout is None else capacity.layout.page_bytes
        self._lodging, why = None, f"its blocks of {self.kv_bytes_per_block} bytes waste too much of pages of {page_bytes}"
        if cache.kv_reservation != "paged":
            why = "chunks are reserved in the target's"
        elif cache.has_kv_tiers:
            why = "what the target's evicts goes to host memory, in steps of the target"
        elif type(self._backend) is not type(target):
            why = f"it runs on {self._backend.name} and the target on {target.name}"
        else:
            self._lodging = self._backend.guest_layout(page_bytes)
        if self._lodging is None:
            logger.info("the draft model has a KV pool of its own: %s", why)
        return self._lodging is not None

    def start(self, target: Backend, num_kv_blocks: int) -> SelfDraft | None:
        """Give the draft model its KV memory; a proposer of the model's own layers, where that is configured. ``target`` has its pool."""
        config, shallow = self._config, None
        keep = config.speculative.spec_rule == "resample"
        if self._backend is not None and self._lodging is not None:
            self._backend.lodge_kv(target, self._lodging)
        elif self._backend is not None:
            self._backend.allocate_kv(num_kv_blocks)
        num_layers = config.speculative.self_draft_layers
        if num_layers is not None:
            try:
                shallow = SelfDraft(target.first_layers(num_layers), keep)
            except ValueError as error:
                raise ConfigError(f"self_draft_layers: {num_layers} is not allowed; {str(error).partition('; ')[2]}") from None
            self._close.append(shallow.close)
        return shallow

    def draft_model(self, target: Backend, scheduler: Scheduler) -> DraftModel | None:
        """The proposer with a model of its own, where that is configured, after ``start``."""
        if self._backend is None or self._model is None:
            return None
        config, context = self._config, self._model.program.context
        keep, block_size = config.speculative.spec_rule == "resample", config.cache.block_size
        lender = None if self._lodging is None else (scheduler.kv, self._lodging)
        return DraftModel(self._backend, scheduler.num_blocks, block_size, target.vocab_size, context, keep, lender)

    def close(self) -> None:
        for close in self._close:
            close()
        self._close.clear()
