"""A model whose next token depends on the last token alone, so that any output can be scripted and every probability is known.

``Bigram.logits`` [vocab, vocab]: row t holds the logits after token t. Sampling is the real rule (``octavo.sampling.reference``), the
tokenizer is the real one on a synthetic vocabulary: three control tokens, the 256 bytes, and the pieces a test names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from octavo.backends.base import KVCapacity
from octavo.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.core.request import MAX_N
from octavo.core.step import SequenceSlice, SliceResult, StepPlan, StepResult
from octavo.engine.engine import Engine
from octavo.models.loaded import LoadedModel
from octavo.models.program import KVLayer, Program
from octavo.models.tokenizer import Tokenizer
from octavo.sampling.reference import LogitsError, ReferenceSampler, raw_logprobs
from tests.models.tiny import BOS_ID, CONTROL_TOKENS, IM_END_ID, byte_vocabulary

EOS_ID = IM_END_ID
LIKELY = 30.0  # logit of a scripted token; all others have 0


def byte_tokenizer(pieces: Sequence[str] = (), **overrides: Any) -> Tokenizer:
    """Byte-level BPE with the tokens of ``byte_vocabulary``."""
    tokens, merges = byte_vocabulary(pieces)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(CONTROL_TOKENS) + [1] * (len(tokens) - len(CONTROL_TOKENS)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": BOS_ID,
        "tokenizer.ggml.eos_token_id": EOS_ID,
        "tokenizer.ggml.add_bos_token": False,
    }
    return Tokenizer.from_gguf(metadata | overrides)


class Bigram:
    """A Backend that computes nothing but a table look-up. ``plans`` are the steps it ran; ``delay_s`` is slept in each."""

    name = "bigram"

    def __init__(self, vocab_size: int, max_num_seqs: int = 64) -> None:
        self.vocab_size = vocab_size
        self.max_num_slots = max_num_seqs + MAX_N
        self.logits = np.zeros((vocab_size, vocab_size), np.float32)
        self.plans: list[StepPlan] = []
        self.delay_s = 0.0
        self.before_step: Callable[[StepPlan], None] | None = None
        self.logits_hook: Callable[[int, int, np.ndarray], None] | None = None
        self.num_blocks = 0
        self.closed = False
        self._sampler = ReferenceSampler(vocab_size, self.max_num_slots)

    def script(self, token_ids: Sequence[int]) -> None:
        """Each token is followed by the next one, almost surely."""
        for token, following in zip(token_ids, token_ids[1:], strict=False):
            self.logits[token] = 0.0
            self.logits[token, following] = LIKELY

    def kv_capacity(self, memory_bytes: int) -> KVCapacity:
        return KVCapacity(1024, memory_bytes // 1024, "f32")

    def allocate_kv(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def fingerprint(self) -> str:
        return "bigram"

    def close(self) -> None:
        self.closed = True

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        for slot in plan.slot_closes:
            if self._sampler.is_open(slot):  # a step that failed, or was never planned to its end, may have left it unopened
                self._sampler.close(slot)
        for entry in plan.slot_opens:
            self._sampler.open(entry)
        for src, dst, seed in plan.slot_forks:
            self._sampler.fork(src, dst, seed)
        if self.before_step is not None:
            self.before_step(plan)
        if self.delay_s:
            time.sleep(self.delay_s)
        return StepResult(plan.step_index, [self._run(piece) for piece in plan.slices], self.delay_s)

    def _run(self, piece: SequenceSlice) -> SliceResult:
        result = SliceResult()
        if self.logits_hook is not None:
            first = piece.num_tokens - 1 - piece.num_drafts if piece.num_samples else piece.num_tokens
            for row, token in enumerate(piece.token_ids):
                if row >= first or (piece.prompt_logprobs is not None and row < len(piece.next_token_ids)):
                    self.logits_hook(piece.seq_id, piece.start + row, self.logits[token].copy())
        if piece.prompt_logprobs is not None:
            rows = zip(piece.token_ids, piece.next_token_ids, strict=False)
            try:
                result.prompt_logprobs = [raw_logprobs(self.logits[t], following, piece.prompt_logprobs) for t, following in rows]
            except LogitsError as error:
                return SliceResult(error=str(error))
        for slot in piece.sample_slots:
            for row in range(piece.num_tokens - 1 - piece.num_drafts, piece.num_tokens):
                logits = self.logits[piece.token_ids[row]]
                outcome = self._sampler.sample(slot, logits, piece.start + row + 1, piece.mask, piece.logprobs)
                if outcome.error is not None and not (piece.num_drafts and result.token_ids):
                    return SliceResult(error=outcome.error, error_code=outcome.error_code)
                if outcome.error is not None:
                    break
                result.token_ids.append(outcome.token_id)
                if outcome.logprobs is not None:
                    result.logprobs = (result.logprobs or []) + [outcome.logprobs]
                if row + 1 < piece.num_tokens and outcome.token_id != piece.token_ids[row + 1]:
                    break
        return result


def bigram_model(tokenizer: Tokenizer, context: int = 4096, chat_template: Any = None) -> LoadedModel:
    size = tokenizer.vocab_size
    program = Program("bigram", (), {}, (KVLayer(1, 8),), size, size, context)
    eos = frozenset({EOS_ID})
    return LoadedModel("bigram", "bigram", "bigram", program, {}, tokenizer, chat_template, eos, tokenizer.bos_token_id, 0, 0)


def bigram_config(num_kv_blocks: int = 512, **scheduler: Any) -> EngineConfig:
    cache = CacheConfig(num_kv_blocks=num_kv_blocks)
    return EngineConfig(ModelConfig("bigram", served_model_name="m"), cache, SchedulerConfig(**scheduler), BackendConfig())


def bigram_engine(
    tokenizer: Tokenizer | None = None, context: int = 4096, num_kv_blocks: int = 512, chat_template: Any = None, **scheduler: Any
) -> Engine:
    """An engine whose ``backend`` is a Bigram and whose served model is called m."""
    tokenizer = tokenizer or byte_tokenizer()
    config = bigram_config(num_kv_blocks, **scheduler)
    backend = Bigram(tokenizer.vocab_size, config.scheduler.max_num_seqs)
    return Engine(bigram_model(tokenizer, context, chat_template), config, backend)


def script(engine: Engine, prompt: str, pieces: Sequence[str | int], then_eos: bool = True) -> list[int]:
    """Make the engine's model answer a prompt that ends in ``prompt`` (one token) with ``pieces``, one token each; return their ids."""
    tokenizer = engine.model.tokenizer
    by_bytes = {tokenizer.token_bytes(t): t for t in range(tokenizer.vocab_size)}
    ids = [piece if isinstance(piece, int) else by_bytes[piece.encode()] for piece in (prompt, *pieces)]
    assert len(set(ids)) == len(ids), "a bigram's output repeats no token"
    backend = engine.backend
    assert isinstance(backend, Bigram)
    backend.script([*ids, EOS_ID] if then_eos else ids)
    return ids[1:]


def byte_ids(engine: Engine, text: str) -> list[int]:
    """The single-byte tokens of ``text``, whatever longer pieces there are."""
    return [len(CONTROL_TOKENS) + b for b in text.encode()]
