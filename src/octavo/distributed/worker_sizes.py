"""What workers hold, and so what may be asked of a cluster, and of which worker. No I/O.

Requests that leave their length open get what every worker can give: they can move to any. One that asks for more is taken as long as a
worker is there that can hold it, and goes to such workers alone. What a worker holds is worked out as it does it itself, by its scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.core.kv_pages import PageLayout
from octavo.core.limits import LengthLimits
from octavo.core.recording import layout_of
from octavo.core.request import ParameterError, Request
from octavo.core.scheduler import Scheduler
from octavo.distributed.messages import MessageError, Ready, WorkerLimits
from octavo.distributed.wire import MAX_LIMIT
from octavo.engine.engine import resolve_max_model_len
from octavo.engine.params import PreparedRequest, RequestPreparer

if TYPE_CHECKING:
    from octavo.models.loaded import LoadedModel
    from octavo.models.program import Program


def check_limits(limits: WorkerLimits, config: EngineConfig, program: Program) -> None:
    """MessageError unless an engine that runs ``program`` as ``config`` says can be like that: memory is laid out by these numbers."""
    limits.check(program.vocab_size)
    if limits.block_size != config.cache.block_size:
        raise MessageError(f"block_size: {limits.block_size} is not allowed; it was told to have {config.cache.block_size}")
    most = resolve_max_model_len(config, program.context)
    if limits.max_model_len > most:
        raise MessageError(f"max_model_len: {limits.max_model_len} is not allowed; at most {most} here")
    if (layout := _layout_of(limits)) is not None:
        _check_layout(layout, len(program.kv_layers))


def _layout_of(limits: WorkerLimits) -> PageLayout | None:
    try:
        return layout_of(limits.kv_layout)
    except (LookupError, TypeError, ValueError) as error:
        raise MessageError(f"kv_layout: no KV pool is like that: {error}") from error


def _check_layout(layout: PageLayout, num_layers: int) -> None:
    """A page holds one layer or more: there are no more pages than layers."""
    parts = {"page_bytes": (layout.page_bytes, 1), "num_full": (layout.num_full, 0), "num_window": (layout.num_window, 0)}
    if layout.window is not None:
        parts["window"] = layout.window, 1
    for name, (value, least) in parts.items():
        if type(value) is not int or not least <= value <= MAX_LIMIT:
            raise MessageError(f"kv_layout: {name} {str(value)[:100]!r} is not allowed; from {least} to {MAX_LIMIT}")
    num_pages, num_placed = layout.num_pages, len(layout.layers)
    if not 1 <= num_pages <= num_layers or num_placed != num_layers or (layout.window is None) != (layout.num_window == 0):
        raise MessageError(f"kv_layout: {num_pages} pages of {num_placed} layers are not allowed; the model has {num_layers} layers")


def lack(request: Request, lengths: LengthLimits) -> ParameterError | None:
    """Why a resolved request can never run to its end on a worker with these ``lengths``; None: it can."""
    try:
        lengths.check_prompt(request)
    except ParameterError as error:
        return error
    most = lengths.clamped_max_tokens(request)
    if most is None:
        return None
    limit = f"at most {most} behind this prompt of {len(request.prompt_token_ids)} tokens, on the largest worker that is there"
    return ParameterError("max_tokens", request.params.max_tokens, limit)


class WorkerSizes:
    """``least``: of the worker that holds least of those that are there or, while there is none, that were there last; None before the
    first."""

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        self.least: Ready | None = None
        self.preparer: RequestPreparer | None = None  # for what every worker can do
        self.methods: set[str] = set()
        self._model, self._config = model, config
        self._is_of_gone = False  # ``least`` is: the next worker's counts in its place
        self._known: tuple[WorkerLimits, LengthLimits] | None = None  # the last that were worked out: workers are alike, mostly

    def take(self, ready: Ready) -> LengthLimits:
        """A worker has come: what it holds. Raises MessageError for limits that no worker has."""
        lengths = self._lengths(ready.limits)
        if self.least is None or self._is_of_gone or self.least.limits.num_kv_blocks > ready.limits.num_kv_blocks:
            self._set_least(ready)
        return lengths

    def gone(self, left: Iterable[Ready]) -> None:
        """A worker has gone. ``left``: those that are there."""
        least = min(left, key=lambda ready: ready.limits.num_kv_blocks, default=None)
        self._is_of_gone = least is None
        if least is not None:
            self._set_least(least)

    def _set_least(self, ready: Ready) -> None:
        if self.least is None or self.least.limits != ready.limits:
            self.preparer = self._preparer(self._lengths(ready.limits))
            self.methods = set(ready.limits.draft_methods)
        self.least, self._is_of_gone = ready, False

    def _lengths(self, limits: WorkerLimits) -> LengthLimits:
        if self._known is not None and self._known[0] == limits:
            return self._known[1]
        config = self._config
        try:
            # For one sequence, however it reserves: no more is laid out.
            enough = 2 << (limits.max_model_len // limits.block_size).bit_length()
            scheduler = Scheduler(
                replace(config.scheduler, max_itl_ms=None), config.cache, min(limits.num_kv_blocks, enough), limits.max_model_len,
                layout=_layout_of(limits),
            )  # fmt: skip
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise MessageError(f"limits: {limits} cannot be; no KV pool is like that: {error}") from error
        self._known = limits, scheduler.limits
        return scheduler.limits

    def _preparer(self, lengths: LengthLimits) -> RequestPreparer:
        model, max_n = self._model, self._config.scheduler.max_num_seqs
        return RequestPreparer(model.program.vocab_size, lengths, max_n, model.eos_token_ids, model.tokenizer)

    def prepare(self, request: Request, there: Iterable[LengthLimits]) -> PreparedRequest:
        """See ``RequestPreparer.prepare``. ``there``: of the workers that take requests. Not before the first worker."""
        assert self.preparer is not None
        if lack(request, self.preparer.limits) is not None:
            largest = max(there, key=lambda lengths: lengths.max_total_tokens, default=self.preparer.limits)
            if largest.max_total_tokens > self.preparer.limits.max_total_tokens:
                return self._preparer(largest).prepare(request)
        return self.preparer.prepare(request)
