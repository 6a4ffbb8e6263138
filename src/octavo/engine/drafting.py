"""The models that draft for an engine: a second one, or the first layers of its own.

Owns their opening, the check that a second model speaks the target's tokens, and its KV pool, which has as many blocks as the target's.
What they propose, and how much of it, is ``speculative``'s business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.backends.base import Backend
from octavo.config import ConfigError, EngineConfig
from octavo.speculative.draft_model import DraftModel, VocabularyMismatch, check_vocabularies
from octavo.speculative.self_draft import SelfDraft

if TYPE_CHECKING:
    from octavo.models.loaded import LoadedModel


def _draft_config(config: EngineConfig, name: str) -> EngineConfig:
    """Its blocks are of one kind: what it keeps of a sequence is given up as a whole."""
    return replace(config, model=replace(config.model, model=name), cache=replace(config.cache, enable_kv_groups=False))


class DraftModels:
    """Opened before the KV pool is sized, started after.

    Raises ConfigError for a draft model of other tokens, ModelFileError, BackendError.
    """

    def __init__(self, config: EngineConfig, target: LoadedModel) -> None:
        self._config = config
        self._target = target
        self._model: LoadedModel | None = None
        self._backend: Backend | None = None
        self._close: list[Callable[[], None]] = []
        name = config.speculative.draft_model
        if name is not None:
            self._open(name)

    def _open(self, name: str) -> None:
        from octavo.engine.loading import load_halves
        from octavo.models.catalog import ensure_model
        from octavo.models.loading import open_model

        target, config = self._target, self._config
        draft, backend = load_halves(open_model(ensure_model(name)), _draft_config(config, name))
        self._close.append(backend.close)
        try:
            check_vocabularies(target.tokenizer, draft.tokenizer, target.eos_token_ids, draft.eos_token_ids)
        except VocabularyMismatch as error:
            self.close()
            raise ConfigError(str(error)) from None
        self._model, self._backend = draft, backend

    @property
    def kv_bytes_per_block(self) -> int:
        """Of a block of the draft model's pool; there is one for each of the target's."""
        return 0 if self._backend is None else self._backend.kv_capacity(0).bytes_per_block

    def start(self, target: Backend, num_kv_blocks: int) -> tuple[DraftModel | None, SelfDraft | None]:
        """Proposers, where they are configured. ``target`` has its KV pool."""
        config, draft, shallow = self._config, None, None
        keep = config.speculative.spec_rule == "resample"
        if self._backend is not None and self._model is not None:
            self._backend.allocate_kv(num_kv_blocks)
            context = self._model.program.context
            draft = DraftModel(self._backend, num_kv_blocks, config.cache.block_size, target.vocab_size, context, keep)
        num_layers = config.speculative.self_draft_layers
        if num_layers is not None:
            try:
                shallow = SelfDraft(target.first_layers(num_layers), keep)
            except ValueError as error:
                raise ConfigError(f"self_draft_layers: {num_layers} is not allowed; {str(error).partition('; ')[2]}") from None
            self._close.append(shallow.close)
        return draft, shallow

    def close(self) -> None:
        for close in self._close:
            close()
        self._close.clear()
