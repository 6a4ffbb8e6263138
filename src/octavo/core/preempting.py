"""Preemption: running sequences that lack blocks take them from those behind them in the order.

The choices of a request are preempted and come back together, unless nobody else runs and the pool cannot hold them all. Preempted
sequences give up their blocks and compute them again, or have them saved in host memory (``swapping``). Beams always compute them again:
what they have in common comes back as one sequence (``beam_group``).

Nobody whom the plan being made computes or loads is preempted. Moves sequences from the running ones to the queue; admits nobody.
"""

from __future__ import annotations

from octavo.core import policy
from octavo.core.request import Sequence, SequenceStatus
from octavo.core.state import SchedulerState
from octavo.core.step import StepPlan


class Preemptor:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def begins_group(self, i: int) -> bool:
        """Whether several choices of a request run, the first of them at place ``i``."""
        running = self._state.running
        request = running[i].request
        return i + 1 < len(running) and running[i + 1].request is request and (i == 0 or running[i - 1].request is not request)

    def secure_group(self, plan: StepPlan, first: int) -> bool:
        """Preempt from the back until the choices of a request, from place ``first`` on, have room for their known tokens, so that none of
        them runs in a plan that preempts the others. False when they were preempted."""
        running, kv = self._state.running, self._state.kv
        request = running[first].request
        while True:
            group = [seq for seq in running[first:] if seq.request is request]
            if len(group) < 2 or kv.num_to_grow(group) <= kv.pool.num_available or not self._preempt_one(plan, first):
                return bool(group)

    def grow(self, plan: StepPlan, seq: Sequence, num_tokens: int) -> bool:
        """Preempt from the back until ``seq`` has its blocks; False when it came to be the victim itself."""
        first = self._state.running.index(seq)
        while self._preempt_one(plan, first) and seq.status is SequenceStatus.RUNNING:
            if self._state.kv.grow(seq, num_tokens, plan.block_copies):
                return True
        return False

    def _preempt_one(self, plan: StepPlan, first: int) -> bool:
        """Preempt a sequence from place ``first`` on, and those that go with it, but nobody whom the plan holds. False: nobody is left."""
        state = self._state
        free = [seq for seq in state.running[first:] if not self._is_in_plan(seq)]
        if not free:
            return False
        victim = policy.choose_victim(free)
        group = policy.victim_group(state.running, victim)
        self.preempt(plan, [seq for seq in group if seq in free])
        return True

    def _is_in_plan(self, seq: Sequence) -> bool:
        """Whether the plan being made computes or loads anything of ``seq``, or of another beam, for these can only go together."""
        state = self._state
        owner = state.requests[seq.request.request_id]
        group = (seq,) if owner.beams is None else owner.sequences
        return any(other.num_scheduled > 0 or other.seq_id in state.kv.loading for other in group)

    def preempt(self, plan: StepPlan, group: list[Sequence]) -> None:
        """``group``: running choices of one request, none of them in the plan."""
        state = self._state
        owner, swapped = state.requests[group[0].request.request_id], self.swaps_out(group)
        if swapped:
            state.swaps.save(group, plan.block_saves)
            state.stats.num_swap_preemptions += len(group)
        else:
            owner.prompt_logprobs.clear()  # those of the lost chunks come again
        state.stats.num_preemptions += len(group)
        if owner.beams is not None and owner.beams.has_begun and not owner.beams.collapsed:
            group = [owner.beams.collapse(state, owner)]
        else:
            for seq in group:
                state.running.remove(seq)
                state.slots.give_back(seq)
                state.kv.release(seq, forget=False)
        for seq in group:
            seq.num_computed = 0
            seq.num_preemptions += 1
            state.enqueue(seq)

    def swaps_out(self, group: list[Sequence]) -> bool:
        """Whether the blocks of a group go to host memory: all of it, or nothing. Never those of beams, which come back as a trunk."""
        state = self._state
        if group[0].request.params.beam is not None:
            return False
        num_blocks = state.swaps.num_to_save(group)
        if not num_blocks or num_blocks > state.swaps.pool.num_free or any(state.kv.is_being_filled(seq) for seq in group):
            return False
        cost = state.preemption_cost
        num_tokens = min(sum(seq.num_computed for seq in group), num_blocks * state.kv.block_size)  # common blocks once
        costs = None if cost is None else (cost.recompute_seconds(num_tokens), cost.swap_seconds(2 * num_blocks))
        return policy.swaps_out(state.config.preemption, costs)
