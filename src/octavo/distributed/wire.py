"""Records of core and engine as they travel in messages: requests, events, what an engine holds. Exact both ways; nothing is kept or sent.

Fields that have their defaults are left out, fields that a reader does not know are skipped. What a peer says is checked where it is taken
in, since schedulers and streams trust it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.request import FinishReason, ParameterError, Request, SamplingParams
from octavo.core.speculative_params import SpeculativeParams
from octavo.core.step import TokenLogprobs
from octavo.distributed.worker_account import WorkerAccount
from octavo.engine.outputs import CacheMatch, OutputEvent

MAX_LIMIT = 1 << 40  # of what a worker says that it holds


class MessageError(ValueError):
    """Bytes that are no message of this protocol, or say what cannot be."""


class WireRequest(msgspec.Struct, omit_defaults=True, gc=False):
    """A ``core.request.Request`` whose parameters are resolved. Clocks do not travel: ``age_s`` is how long ago a worker had got it first
    that has lost it since; 0 where none has."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: list[int] = []
    age_s: float = 0.0
    cache_salt: str | None = None
    priority: int = 0
    user: str | None = None
    speculative: SpeculativeParams | None = None

    @classmethod
    def of(cls, request: Request, age_s: float = 0.0) -> WireRequest:
        """``age_s``: seconds since a worker got it first that has lost it."""
        eos = sorted(request.eos_token_ids)
        params, rest = request.params, (request.cache_salt, request.priority, request.user, request.speculative)
        return cls(request.request_id, request.prompt_token_ids, params, request.seed, eos, max(0.0, age_s), *rest)

    def request(self, request_id: str, now: float) -> Request:
        """The request under the name that it has here, arriving ``now`` on the clock of who takes it in; one that was elsewhere before
        keeps its place in queues."""
        return Request(
            request_id,
            self.prompt_token_ids,
            self.params,
            self.seed,
            frozenset(self.eos_token_ids),
            now,
            self.cache_salt,
            self.priority,
            self.user,
            self.speculative,
            came_s=now - self.age_s if self.age_s > 0.0 else None,
        )

    def check(self, vocab_size: int) -> None:
        """ParameterError when it is not what a front end of this model sends: the scheduler trusts these fields."""
        self.params.validate(vocab_size)
        if self.params.max_tokens is None:
            raise ParameterError("max_tokens", None, "a number, once a request is on its way to a worker")
        if not 0 <= self.seed < 1 << 64:
            raise ParameterError("seed", self.seed, "an unsigned integer of at most 64 bits")
        check_token_ids("prompt", self.prompt_token_ids, vocab_size)
        check_token_ids("eos_token_ids", self.eos_token_ids, vocab_size)


class WorkerLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker's engine holds. ``kv_bytes_per_token``: of all layers, as stored. ``max_total_tokens``: of a sequence, pool included.
    ``kv_layout``: fields of the pages that blocks are made of, where they are (``core.kv_pages.PageLayout``)."""

    max_model_len: int
    max_total_tokens: int
    max_num_seqs: int
    vocab_size: int
    block_size: int
    num_kv_blocks: int
    kv_bytes_per_token: int
    draft_methods: list[str] = []
    kv_layout: dict[str, Any] | None = None

    def check(self, vocab_size: int) -> None:
        """MessageError unless an engine of a model with ``vocab_size`` tokens can be like that: memory is laid out by these numbers."""
        for name in ("max_model_len", "max_total_tokens", "max_num_seqs", "block_size", "num_kv_blocks", "kv_bytes_per_token"):
            if not 0 < getattr(self, name) <= MAX_LIMIT:
                raise MessageError(f"{name}: {getattr(self, name)!r} is not allowed; from 1 to {MAX_LIMIT}")
        if self.vocab_size != vocab_size:
            raise MessageError(f"vocab_size: {self.vocab_size!r} is not allowed; the model has {vocab_size}")


class Ticket(msgspec.Struct, frozen=True, omit_defaults=True):
    """The request is to be handed over after its prompt. ``layerwise``: KV is sent while the prompt is computed, else when it is done."""

    layerwise: bool = False


class Event(msgspec.Struct, omit_defaults=True, gc=False):
    """An ``OutputEvent`` of an attempt. ``account``: with the last event of all its choices, where its time went. An attempt that was
    aborted has no event but one for this."""

    key: int
    choice: int = 0
    text: str = ""
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_code: str | None = None
    cache_match: CacheMatch | None = None
    cumulative_logprob: float | None = None
    account: WorkerAccount | None = None

    def check(self, vocab_size: int) -> None:
        """MessageError unless a model with ``vocab_size`` tokens could have made it: readers look up what these numbers name."""
        for name, number in (("choice", self.choice), ("num_cached_tokens", self.num_cached_tokens)):
            if number < 0:
                raise MessageError(f"{name}: {number!r} is not allowed; from 0")
        if (num := len(self.logprobs or ())) > len(self.token_ids):
            raise MessageError(f"logprobs: {num} are not allowed; at most one for each of {len(self.token_ids)} tokens")
        entries = [*(self.logprobs or ()), *(self.prompt_logprobs or ())]
        for entry in entries:
            if len(entry.top_ids) != len(entry.top_logprobs):
                raise MessageError(f"top_logprobs: {len(entry.top_logprobs)} are not allowed; one for each of {len(entry.top_ids)} tokens")
        for token in (*self.token_ids, *(t for entry in entries for t in (entry.token_id, *entry.top_ids))):
            if not 0 <= token < vocab_size:
                raise MessageError(f"token_ids: {token!r} is not allowed; token ids are from 0 to {vocab_size - 1}")
        check_account(self.account)

    @classmethod
    def of(cls, key: int, event: OutputEvent, account: WorkerAccount | None = None) -> Event:
        return cls(
            key,
            event.choice,
            event.text,
            event.token_ids,
            event.finish_reason,
            event.stop_reason,
            event.logprobs,
            event.prompt_logprobs,
            event.num_cached_tokens,
            event.error,
            event.error_code,
            event.cache_match,
            event.cumulative_logprob,
            account,
        )

    def output(self, request_id: str) -> OutputEvent:
        """As an event of the request that the attempt is for."""
        return OutputEvent(
            request_id,
            self.choice,
            self.text,
            self.token_ids,
            self.logprobs,
            self.prompt_logprobs,
            self.finish_reason,
            self.stop_reason,
            self.num_cached_tokens,
            self.error,
            self.error_code,
            self.cache_match,
            self.cumulative_logprob,
        )


def check_account(account: WorkerAccount | None) -> None:
    """MessageError for one that cannot be."""
    if account is not None and (fault := account.fault()) is not None:
        raise MessageError(f"account: {fault}")


def check_token_ids(param: str, token_ids: list[int], vocab_size: int) -> None:
    """ParameterError unless all of them are tokens."""
    for token in (max(token_ids, default=0), min(token_ids, default=0)):
        if not 0 <= token < vocab_size:
            raise ParameterError(param, token, f"token ids are integers from 0 to {vocab_size - 1}")
