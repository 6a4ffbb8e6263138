"""Admission: how many blocks a newcomer and those who run will want soon, so that nobody is let in only to be put out again.

Counts blocks; moves nothing. A *group* is the waiting choices of one request: they come in together.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import takewhile

from octavo.core import policy
from octavo.core.prefix_match import PrefixMatch
from octavo.core.request import Sequence
from octavo.core.state import Draft, RequestState, SchedulerState
from octavo.core.step import StepPlan


def waiting_group(state: SchedulerState) -> list[Sequence]:
    """The sequence at the head of the queue and, behind it, other choices of its request."""
    request = state.waiting[0].request
    return list(takewhile(lambda seq: seq.request is request, state.waiting))


def has_room(state: SchedulerState, draft: Draft, seq: Sequence, match: PrefixMatch, ahead: Seq[Sequence] = ()) -> bool:
    """Places for all choices, and blocks for all known tokens beside those that the running sequences need for theirs, and will need soon.

    An empty engine takes in whatever fits. ``ahead``: waiting sequences that come before it.
    """
    if seq.num_choices > state.config.max_num_seqs - state.num_running - sum(other.num_choices for other in ahead):
        return False
    if not state.kv.can_admit(seq, match, 0):  # the usual answer in a full pool, without looking at who runs
        return False
    num_behind = num_lacking(state, seq) - state.kv.num_missing(seq)
    num_ahead = sum(num_lacking(state, other) + growth(state, other) for other in ahead)
    return state.kv.can_admit(seq, match, num_behind + num_ahead + _num_promised(state, draft, (seq,)))


def has_room_from_outside(state: SchedulerState, owner: RequestState) -> bool:
    """As ``has_room`` for the sequence of a request that another engine has, and that takes its room at once. The head of the queue keeps
    what it waits for, if it comes before it: else who was preempted would never come back while others come."""
    seq, group = owner.sequences[0], waiting_group(state) if state.waiting else []
    owner.rank = state.order.rank(owner.request, owner.sequences, owner.stop_rule.max_tokens)
    state.requests[owner.request.request_id] = owner  # for these questions alone
    ahead = [other for other in group if state.place_of(other) < state.place_of(seq)]
    found = has_room(state, Draft(StepPlan(-1), 0), seq, PrefixMatch([]), ahead)
    del state.requests[owner.request.request_id]
    return found


def has_room_for_all(state: SchedulerState, draft: Draft, group: Seq[Sequence], matches: Seq[PrefixMatch]) -> bool:
    """As ``has_room`` for a group, whose common blocks count once."""
    if sum(seq.num_choices for seq in group) > state.config.max_num_seqs - state.num_running:
        return False
    num_new = num_new_blocks(state, group, matches)
    return num_new + _num_promised(state, draft, group) <= state.kv.pool.num_available


def num_new_blocks(state: SchedulerState, group: Seq[Sequence], matches: Seq[PrefixMatch]) -> int:
    """Blocks that a waiting group takes from what is available to hold all its known tokens.

    Common to its choices are the blocks that were saved for several of them, or, where blocks are recomputed, the full blocks of the
    prompt; each choice has its own part-filled block, for it is about to write there.
    """
    kv, num_own, common, revived = state.kv, 0, set[tuple[bool, int]](), set[int]()
    for seq, match in zip(group, matches, strict=True):
        revived.update(node.block for node in match.nodes if kv.pool.ref_counts[node.block] == 0)
        blocks: Seq[int] = ()
        if state.swaps.holds(seq):
            blocks = state.swaps.full_blocks(seq)
        elif kv.index is not None and seq.num_output_tokens:
            blocks = range(seq.num_prompt_tokens // kv.block_size)
        common.update((state.swaps.holds(seq), block) for block in blocks[len(match.nodes) :])  # host blocks, or places in the prompt
        num_own += kv.blocks_for(len(seq.token_ids)) - max(len(blocks), len(match.nodes))
    return num_own + len(common) + len(revived)


def _num_promised(state: SchedulerState, draft: Draft, newcomers: Seq[Sequence]) -> int:
    """Blocks to leave alone: what running sequences, and those that are to come from other engines and have room here, lack for their known
    tokens, and what they and the newcomers grow by soon."""
    if not state.running and not state.reserved:
        return 0
    promised = 0
    for owner in state.reserved.values():
        promised += state.kv.num_missing(owner.sequences[0]) + _growth(state, owner, owner.sequences[0])
    for seq in state.running:
        promised += num_lacking(state, seq) - draft.num_pending.get(seq.seq_id, 0)
        promised += growth(state, seq)
    return promised + sum(growth(state, seq) for seq in newcomers)


def num_lacking(state: SchedulerState, seq: Sequence) -> int:
    """Blocks that ``seq`` lacks for its known tokens; for a trunk of beams, what these lack for theirs."""
    beams = state.requests[seq.request.request_id].beams
    return state.kv.num_missing(seq) if beams is None or not beams.collapsed else beams.num_missing(state.kv, seq)


def growth(state: SchedulerState, seq: Sequence) -> int:
    """Blocks beyond those of its known tokens that ``seq``, or all beams behind it, will want in the steps that admission looks ahead."""
    return _growth(state, state.requests[seq.request.request_id], seq)


def _growth(state: SchedulerState, owner: RequestState, seq: Sequence) -> int:
    num_known = owner.num_known(seq)
    num_left = owner.stop_rule.max_tokens - (num_known - seq.num_prompt_tokens)
    return policy.expected_growth(num_known, num_left, seq.num_choices, state.kv.block_size, state.config.admission_lookahead)
