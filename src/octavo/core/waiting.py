"""Why a sequence waits: what keeps the head of the queue out, and what a running sequence without a slice is waiting for. Looks only."""

from __future__ import annotations

from typing import Literal

from octavo.core import policy
from octavo.core.request import Sequence
from octavo.core.state import Draft, SchedulerState

Block = Literal["policy", "places", "blocks", "tokens"]
Wait = Literal["tier", "prefix"]


def admission_block(state: SchedulerState, num_planned: int, has_preempted: bool) -> Block | None:
    """What keeps the first of the queue, and with it everybody behind, out of a plan that has been made with ``num_planned`` tokens:
    the batch that is to finish first, places, KV blocks, or the tokens that a step may hold. None: nobody waits."""
    if not state.waiting:
        return None
    seq, config = state.waiting[0], state.config
    if policy.takes_whole_batches(config.scheduling_policy) and state.running:
        return "policy"
    if seq.num_choices > config.max_num_seqs - state.num_running:
        return "places"
    if has_preempted or state.gap_cost is not None or state.kv.num_missing(seq) > state.kv.pool.num_available:
        return "blocks"
    room = config.max_num_batched_tokens - num_planned
    if room <= 0 or (not config.enable_chunked_prefill and len(seq.token_ids) > room):
        return "tokens"
    return "blocks"


def why_waiting(state: SchedulerState, draft: Draft | None, seq: Sequence) -> Wait | None:
    """Whose KV a running sequence without a slice in ``draft`` waits for: a tier's, or that of another request with the same beginning.
    None: for neither, there was no room for it."""
    restorer = state.kv.restorer
    if restorer is not None and (any(seq is other for other in restorer.sequences) or restorer.tiers.is_reading(seq.seq_id)):
        return "tier"
    return "prefix" if draft is not None and draft.num_pending.get(seq.seq_id, 0) > 0 else None
