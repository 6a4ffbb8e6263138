"""Repeated steps: a run of steps that differ in nothing but that every running sequence is one token further, taken at once.

For simulation, where the tokens and the seconds of such steps are known beforehand. What a run leaves is to the bit what stepping leaves:
the same blocks in the same tables, the same prefix index, the same order of eviction, the same counters. A run ends before anything else
can happen in a plan or its result:

- somebody finishes: it has fewer steps than the shortest remaining answer;
- the pool runs out: the blocks that it takes are there;
- somebody comes in: the head of the queue, which has no room now, has none later either. Let r be the blocks that admission asks for
  beyond what is available. A block that a sequence takes was promised to it and was available, so r stays; as a sequence gets longer,
  what is promised to it never shrinks (max(blocks(n) + 1, blocks(end)) grows with n); a matched block that is evicted has to be made
  new. So r never falls, unless the head's match grows; the run ends with the step that could make it;
- two sequences come to have the same block: the run ends with the step in which one is offered that may be offered already.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence as Seq

from octavo.core import admission, policy
from octavo.core.request import Sequence
from octavo.core.state import Draft, SchedulerState
from octavo.core.step import StepPlan

_GROWS, _OFFERS = 0, 1  # what happens to a sequence in a step, in the order of a step: first all grow, then all offer


def num_repeats(state: SchedulerState) -> int:
    """How many of the coming steps only decode all running sequences, finish none and admit none; 0 when the next step may do more.

    Between steps only. Changes nothing. Careful rather than complete: paced steps, tiers, blocks in pages, lent pages, several choices of
    a request, stop tokens and orders whose ranks change are never repeated.
    """
    kv = state.kv
    if not state.running or state.gap_cost is not None or state.order.dynamic or state.slots.has_closes:
        return 0
    if kv.restorer is not None or kv.pages is not None or kv.pool.lent:
        return 0
    num_steps = min(map(state.num_tokens_left, state.running)) - 1
    if num_steps < 1 or not all(_only_decodes(state, seq) for seq in state.running):
        return 0
    meeting = _steps_to_meeting(state)
    if meeting is None:
        return 0
    return _steps_with_blocks(state, min(num_steps, meeting))


def _only_decodes(state: SchedulerState, seq: Sequence) -> bool:
    """It lacks the KV of its last token alone, may write there, and ends by its length alone."""
    params, rule = seq.request.params, state.requests[seq.request.request_id].stop_rule
    num_tokens = len(seq.token_ids)
    if num_tokens - seq.num_computed != 1 or num_tokens <= seq.num_prompt_tokens or seq.slot < 0:
        return False
    if params.n != 1 or params.beam is not None or rule.eos_token_ids or rule.stop_token_ids:
        return False
    block, offset = divmod(seq.num_computed, state.kv.block_size)
    return offset == 0 or state.kv.pool.ref_counts[seq.block_table[block]] == 1


def _steps_with_blocks(state: SchedulerState, num_steps: int) -> int:
    """Most of ``num_steps`` steps that the pool has blocks for."""
    num_available = state.kv.pool.num_available
    if _num_new_blocks(state, num_steps) <= num_available:
        return num_steps
    return bisect_right(range(1, num_steps), num_available, key=lambda steps: _num_new_blocks(state, steps))


def _num_new_blocks(state: SchedulerState, num_steps: int) -> int:
    """Blocks that ``num_steps`` steps take from the pool."""
    blocks_for = state.kv.blocks_for
    return sum(max(0, blocks_for(seq.num_computed + num_steps) - len(seq.block_table)) for seq in state.running)


def _steps_to_meeting(state: SchedulerState) -> int | None:
    """Steps after which a block is offered that another sequence has or waits for; None when the head of the queue may come in now."""
    kv, head_key = state.kv, None
    if state.waiting and not policy.takes_whole_batches(state.config.scheduling_policy):
        head = state.waiting[0]
        match = kv.find_prefix(head)
        is_alone = len(admission.waiting_group(state)) == 1
        if match.waits or not is_alone or admission.has_room(state, Draft(StepPlan(-1), 0), head, match):
            return None
        head_key = kv.key_after(head, match)
    if kv.index is None:
        return 1 << 62
    least, ends = 1 << 62, [kv.last_offered(seq) for seq in state.running]
    count = Counter(end[0] for end in ends if end is not None)
    for seq, end in zip(state.running, ends, strict=True):
        if end is None:
            continue
        key, depth = end
        node = kv.index.node(key)
        if key == head_key or count[key] > 1 or (node is not None and node.children):
            least = min(least, (depth + 1) * kv.block_size - seq.num_computed)
    return least


def repeat(state: SchedulerState, num_steps: int, token_ids: Seq[int]) -> list[tuple[int, int]]:
    """Take ``num_steps`` steps: each running sequence draws its one of ``token_ids`` in each of them.

    ``num_repeats`` has said, and nothing happened since but such steps, that at least so many may be taken.

    Returns (step, used blocks) at each step of the run, from 1 on, that changed the number of used blocks, the first always among them.
    """
    most = min(map(state.num_tokens_left, state.running), default=0) - 1
    if not 1 <= num_steps <= most:
        raise ValueError(f"num_steps: {num_steps} is not allowed; from 1 to {most}, or a sequence ends")
    starts = [seq.num_computed for seq in state.running]
    for seq, token_id in zip(state.running, token_ids, strict=True):
        seq.token_ids += [token_id] * num_steps
    used = _move_blocks(state, num_steps, starts)
    for seq, start in zip(state.running, starts, strict=True):
        seq.num_computed = start + num_steps
        state.order.drew(seq.request, num_steps)
    num_tokens = num_steps * len(state.running)
    state.stats.num_steps += num_steps
    state.stats.num_computed_tokens += num_tokens
    state.stats.num_output_tokens += num_tokens
    return used


def _move_blocks(state: SchedulerState, num_steps: int, starts: Seq[int]) -> list[tuple[int, int]]:
    """Give and offer blocks as the steps would, in their order. ``starts``: computed tokens of each running sequence before the first."""
    kv, size = state.kv, state.kv.block_size
    moves = list[tuple[int, int, int]]()
    for place, (seq, start) in enumerate(zip(state.running, starts, strict=True)):
        moves += [(step, _GROWS, place) for step in range(len(seq.block_table) * size - start + 1, num_steps + 1, size)]
        if kv.index is not None:
            moves += [(step, _OFFERS, place) for step in range(size - start % size, num_steps + 1, size)]
    moves.sort()
    used, step = [(1, kv.pool.num_used)], 1
    for step, kind, place in moves:
        seq = state.running[place]
        if kind == _GROWS:
            seq.num_computed = starts[place] + step - 1
            grown = kv.grow(seq, 1, [])
            assert grown, f"sequence {seq.seq_id} lacks a block in a run of {num_steps} steps"
            used.append((step, kv.pool.num_used))
        else:
            seq.num_computed = starts[place] + step
            kv.publish(seq)
    return used
