"""Sequences whose KV goes from one engine to another: what the scheduler of either side keeps of them meanwhile.

    sender     running ──offer──▶ offered ──release──▶ gone (its blocks stay in the prefix cache)
                  ▲                  │
                  └─────resume───────┘   (nobody took it: it goes on here)

    receiver   reserve ──▶ reserved ──begin──▶ running
                              └──────cancel──▶ gone

The two sides know nothing of each other; who moves the bytes, and what happens when that fails, is ``distributed.handoff``'s business.
Room may be reserved before the sender has computed anything, so that KV goes over while the prompt is computed: nothing of a reserved
sequence is read before it begins, its tokens included.
An offered sequence keeps its blocks and takes no part in steps. A reserved one has its blocks and its place among the running ones; what
the blocks hold means nothing before ``begin``. All of it may happen while a step of others is in flight.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from octavo.core import admission
from octavo.core.limits import StopRule, check_outputs
from octavo.core.request import ParameterError, Request, Sequence, SequenceStatus
from octavo.core.state import RequestState, SchedulerState
from octavo.core.step import BlockMove

UNKNOWN_TOKEN = -1  # in a reserved sequence, where a token will be


class Reservation(NamedTuple):
    """``blocks``: in order of position. ``saves`` are to be made before anything is written there: what the prefix cache had in them goes
    to host memory, and no plan will do it in time (``KVTiers.lost`` when it fails)."""

    blocks: list[int]
    saves: list[BlockMove]


class Transfers:
    """Of one scheduler, whose ``state`` it shares."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._offered: dict[str, RequestState] = {}

    # --- sender -------------------------------------------------------------------------------------------------------------------------

    def offer(self, request_id: str) -> list[int]:
        """Take a request out of the running ones, its blocks with it; returns its output tokens. The last of them has no KV.

        Raises ValueError unless it is one running sequence that has just drawn: its prompt computed, not in a step, not a beam.
        """
        state = self._state
        owner = state.requests.get(request_id)
        seq = owner.sequences[0] if owner is not None and len(owner.sequences) == 1 else None
        if owner is None or seq is None or not _may_go(owner, seq):
            raise ValueError(f"request_id: {request_id!r} is not allowed; a single running sequence that has drawn a token is needed")
        state.running.remove(seq)
        state.slots.give_back(seq)
        state.forget(owner)
        self._offered[request_id] = owner
        state.num_held += 1
        return list(seq.output_token_ids)

    def release(self, request_id: str) -> None:
        """Somebody else goes on with it: give its blocks back; those that are offered stay in the prefix cache. KeyError if not offered."""
        self._give_back_offered(request_id)

    def _give_back_offered(self, request_id: str) -> None:
        seq = self._take_offered(request_id).sequences[0]
        seq.status = SequenceStatus.FINISHED
        self._state.release(seq)

    def resume(self, request_id: str) -> None:
        """Nobody took it: it runs on here, or waits for a place as if it had been preempted. KeyError if not offered."""
        state, owner = self._state, self._take_offered(request_id)
        seq = owner.sequences[0]
        state.requests[request_id] = owner
        state.order.added(owner.request)
        state.order.started(owner.request)
        owner.rank = state.order.rank(owner.request, owner.sequences, owner.stop_rule.max_tokens)
        if state.num_running < state.config.max_num_seqs:
            state.insert_running(seq)
        else:
            state.kv.release(seq, forget=False)
            seq.num_computed = 0
            seq.num_preemptions += 1
            state.stats.num_preemptions += 1
            state.enqueue(seq)

    def _take_offered(self, request_id: str) -> RequestState:
        owner = self._offered.pop(request_id)
        self._state.num_held -= 1
        return owner

    # --- receiver -----------------------------------------------------------------------------------------------------------------------

    def reserve(self, request: Request, num_tokens: int) -> Reservation | None:
        """Blocks for the KV of the first ``num_tokens`` tokens, which are to be all but the last when it begins.

        These are the prompt's, or more. None when there is no room or place now. Raises ParameterError when there can never be: too long,
        an id in use, n above 1 or beams, which are not handed over.
        """
        state = self._state
        if request.request_id in state.requests or request.request_id in state.reserved:
            raise ParameterError("request_id", request.request_id, "a request with this id is not finished yet")
        state.limits.check_prompt(request)
        owner = self._owner(request, num_tokens)
        seq = owner.sequences[0]
        if not admission.has_room_from_outside(state, owner):
            return None
        state.kv.reserve(seq)
        if not state.kv.expect(seq, num_tokens):  # admission counts on window layers giving back what they pass, chunk by chunk
            state.kv.release(seq, forget=True)
            return None
        seq.num_scheduled = num_tokens  # computed elsewhere, and on its way
        state.reserved[request.request_id] = owner
        return Reservation(list(seq.block_table), [] if state.kv.restorer is None else state.kv.restorer.tiers.take_late_saves())

    def _owner(self, request: Request, num_tokens: int) -> RequestState:
        """Of tokens that are not known yet, those behind the prompt, there are as many as there will be."""
        state, num_prompt = self._state, len(request.prompt_token_ids)
        rule = StopRule.of(request, state.limits.max_output_tokens(request))
        check_outputs(request, num_tokens + 1 - num_prompt, rule)
        token_ids = [*request.prompt_token_ids, *[UNKNOWN_TOKEN] * (num_tokens + 1 - num_prompt)]
        seq = Sequence(state.next_seq_id(), request, token_ids=token_ids, num_prompt_tokens=num_prompt)
        return RequestState(request, state.arrival_of(request), rule, [seq], started=True)

    def begin(self, request_id: str, output_token_ids: Seq[int], exact: bool = True) -> None:
        """The reserved blocks hold the KV of the prompt and of the first ``output_token_ids``: the request runs.

        The last has no KV, nor have others that were drawn with it, from drafts: they are computed here. ``exact``: to the bit what this
        engine would have computed; else the prefix cache does not offer it to others. KeyError if it is not reserved, ParameterError when
        the blocks are for more tokens, or so many leave nothing to be made.
        """
        state, owner = self._state, self._state.reserved[request_id]
        seq = owner.sequences[0]
        if len(output_token_ids) < seq.num_output_tokens:
            raise ParameterError("output_token_ids", len(output_token_ids), f"KV of {seq.num_output_tokens - 1} of them is reserved for")
        check_outputs(seq.request, len(output_token_ids), owner.stop_rule)
        del state.reserved[request_id]
        seq.token_ids[seq.num_prompt_tokens :] = output_token_ids
        seq.num_computed, seq.num_scheduled = seq.num_scheduled, 0
        state.kv.arrived(seq)
        owner.arrival = state.arrival_of(owner.request)
        state.requests[request_id] = owner
        state.stats.num_requests += 1
        state.order.added(owner.request)
        state.order.started(owner.request)
        owner.rank = state.order.rank(owner.request, owner.sequences, owner.stop_rule.max_tokens)
        state.insert_running(seq)
        if not exact:
            state.kv.withhold(seq)
        state.kv.publish(seq)

    def cancel(self, request_id: str) -> None:
        """It does not come: give the reserved blocks back. KeyError if it is not reserved."""
        self._give_back_reserved(request_id)

    def _give_back_reserved(self, request_id: str) -> None:
        seq = self._state.reserved.pop(request_id).sequences[0]
        seq.num_scheduled = 0
        seq.status = SequenceStatus.FINISHED
        self._state.kv.release(seq, forget=True)

    # --- both ---------------------------------------------------------------------------------------------------------------------------

    def drop_all(self) -> None:
        """What the blocks hold is not to be trusted any more: give back all that are offered or reserved."""
        for request_id in [*self._offered]:
            self._state.kv.withhold(self._offered[request_id].sequences[0])
            self._give_back_offered(request_id)
        for request_id in [*self._state.reserved]:
            self._give_back_reserved(request_id)

    # --- reading ------------------------------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """AssertionError if a block may be written to from elsewhere whose contents the next plan would save."""
        if self._state.kv.restorer is not None:
            written = {block for owner in self._state.reserved.values() for block in owner.sequences[0].block_table}
            assert not written & self._state.kv.restorer.tiers.sources(), "a reserved block holds what is yet to be saved"

    def sender_sequence(self, request_id: str) -> Sequence | None:
        """The one sequence of a request that waits, runs or is offered here; None when there is none, or several."""
        owner = self._state.requests.get(request_id) or self._offered.get(request_id)
        return owner.sequences[0] if owner is not None and len(owner.sequences) == 1 else None

    def num_there(self, seq: Sequence) -> int:
        """Leading tokens of ``seq`` whose KV its full blocks hold now: none while the plan in flight brings it back from host memory."""
        return 0 if seq.seq_id in self._state.kv.loading else seq.num_computed

    def is_offered(self, request_id: str) -> bool:
        return request_id in self._offered

    def is_reserved(self, request_id: str) -> bool:
        return request_id in self._state.reserved

    def pages_of(self, blocks: Iterable[int], num_columns: int) -> array[int]:
        """Where ``blocks`` lie, int32 [blocks][columns], flat; -1: not there, since its window has passed. As ``StepPlan.pages``."""
        pool, pages = self._state.kv.pool, array("i")
        for block in blocks:
            pages.extend(pool.pages_of(block) or range(block * num_columns, (block + 1) * num_columns))
        return pages

    @property
    def sequences(self) -> list[Sequence]:
        """All that hold blocks here and do not run."""
        return [owner.sequences[0] for owner in (*self._offered.values(), *self._state.reserved.values())]


def _may_go(owner: RequestState, seq: Sequence) -> bool:
    whole = seq.num_choices == 1 and owner.request.params.n == 1 and owner.beams is None
    drawn = seq.num_output_tokens > 0 and len(seq.token_ids) - seq.num_computed == 1
    return whole and drawn and seq.status is SequenceStatus.RUNNING and seq.num_scheduled == 0
