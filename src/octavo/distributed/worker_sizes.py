"""What workers hold, and so what may be asked of a cluster, and of which worker. No I/O.

Requests that leave their length open get what every worker can give: they can move to any. One that asks for more is taken as long as a
worker is there that can hold it, and goes to such workers alone. What a worker holds is worked out as it does it itself, by its scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.core.limits import LengthLimits
from octavo.core.recording import layout_of
from octavo.core.request import ParameterError, Request
from octavo.core.scheduler import Scheduler
from octavo.distributed.messages import MessageError, Ready, WorkerLimits
from octavo.engine.params import PreparedRequest, RequestPreparer

if TYPE_CHECKING:
    from octavo.models.loaded import LoadedModel


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
    """``least``: of the worker that holds least of all that have been there; None before the first."""

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        self.least: Ready | None = None
        self.preparer: RequestPreparer | None = None  # for what every worker can do
        self.methods: set[str] = set()
        self._model, self._config = model, config
        self._known: tuple[WorkerLimits, LengthLimits] | None = None  # the last that were worked out: workers are alike, mostly

    def take(self, ready: Ready) -> LengthLimits:
        """A worker has come: what it holds. Raises MessageError for limits that no worker has."""
        limits = ready.limits
        lengths = self._lengths(limits)
        if self.least is None or self.least.limits.num_kv_blocks > limits.num_kv_blocks:
            self.preparer = self._preparer(lengths)
            self.least, self.methods = ready, set(limits.draft_methods)
        return lengths

    def _lengths(self, limits: WorkerLimits) -> LengthLimits:
        if self._known is not None and self._known[0] == limits:
            return self._known[1]
        config = self._config
        try:
            # For one sequence, however it reserves: no more is laid out.
            enough = 2 << (limits.max_model_len // limits.block_size).bit_length()
            scheduler = Scheduler(
                replace(config.scheduler, max_itl_ms=None), config.cache, min(limits.num_kv_blocks, enough), limits.max_model_len,
                layout=layout_of(limits.kv_layout),
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
