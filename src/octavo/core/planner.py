"""The planner: one step's plan out of the queues.

There are no phases. A sequence has known tokens and computed tokens; a step computes some of the gap, and a step that closes it draws
new tokens. Chunks of prompts, prefix hits, decoding and recomputation after a preemption are that one case. Each plan serves the running
sequences in their order, then admits from the queue in its order, within the token budget. Running sequences that lack a block
preempt from the back (``preempting``); an admission never preempts, and none happens in a plan that had to.

Under a bound on the gaps of running streams (``max_itl_ms``) a step is *paced*: all that fit are admitted, and the room of the step is
shared among the prompts by ``pacing``; a running sequence may then get nothing of a step. With the policy *static* a batch is admitted as a
whole, and nothing more until all of it has finished; who is preempted goes into a later batch. With *prefill_first* a step computes
prompts alone as long as there are some, and running answers stand still meanwhile.

Drafts for decoding sequences are guesses of tokens to come, computed behind the last known one; they take what is left of budget and
blocks, and never preempt anybody.

Moves sequences between the queues. Never appends tokens or finishes anything; the rules it follows are in ``policy``.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from octavo.core import admission, policy
from octavo.core.cost import GapCost, StepShape
from octavo.core.pacing import Prompt, StepRoom
from octavo.core.preempting import Preemptor
from octavo.core.prefix_match import PrefixMatch
from octavo.core.request import Sequence
from octavo.core.state import NO_GUESSES, Draft, Guesses, SchedulerState
from octavo.core.step import SequenceSlice, SlotOpen, StepPlan


class Planner:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._preemptor = Preemptor(state)
        self._is_static = policy.takes_whole_batches(state.config.scheduling_policy)
        self._prompts_first = policy.computes_prompts_alone(state.config.scheduling_policy)

    def plan(self, step_index: int, now: float, guesses: Guesses = NO_GUESSES) -> Draft | None:
        """The next step, or None when no sequence is left. ``now``: seconds on the clock of ``Request.arrival_s``."""
        state = self._state
        state.rank_anew()
        plan = StepPlan(step_index, block_copies=state.kv.take_copies(), pages=state.kv.pages)
        draft = Draft(plan, state.config.max_num_batched_tokens, guesses)
        num_preemptions = num_before = state.stats.num_preemptions
        if state.kv.restorer is not None:
            state.kv.restorer.begin_plan(now, self._gap_limit_s())
        if state.gap_cost is not None:
            state.gap_cost.begin(now)
        if not state.running if self._is_static else state.gap_cost is not None:
            self._admit_all(draft, now)
        while not (self._prompts_first and self._plan_prompts(draft, now, admits=state.stats.num_preemptions == num_preemptions)):
            if state.config.enable_chunked_prefill or not self._plan_whole_prompt(draft, now):
                self._plan_running(draft, None if state.gap_cost is None else self._shares(draft, state.gap_cost))
            # Again, if all that came of it was preemption: who was passed over because another computes its blocks may be free to go now.
            if draft.sequences or state.stats.num_preemptions == num_before:
                break
            num_before = state.stats.num_preemptions
        if state.gap_cost is None and not self._is_static and state.stats.num_preemptions == num_preemptions and not self._prompts_first:
            self._plan_admissions(draft, now)
        restorer = state.kv.restorer
        loads = [] if restorer is None else restorer.loads()
        moves_blocks = loads or draft.plan.num_moves or draft.plan.block_copies  # of a sequence that was preempted, say: not to be lost
        if not draft.sequences and not moves_blocks:
            waits = (restorer is not None and restorer.tiers.is_waiting) or state.num_held or state.num_reserved
            assert waits or (not state.running and not state.waiting), "sequences are left but none can go on"
            return None
        draft.plan.slot_closes = state.slots.drain_closes()
        state.stats.num_blocks_saved += len(draft.plan.block_saves)
        state.stats.num_blocks_loaded += len(draft.plan.block_loads)
        if restorer is not None:
            draft.plan.block_saves += restorer.tiers.take_saves()
            for load in loads:
                load.after_copies = len(draft.plan.block_copies)
            draft.plan.block_loads += loads
        return draft

    def _plan_prompts(self, draft: Draft, now: float, admits: bool) -> bool:
        """What running sequences lack but for their last token, then who can come in; False: that is nothing, and answers go on. Nobody is
        preempted for it."""
        kv, chunked = self._state.kv, self._state.config.enable_chunked_prefill
        for seq in self._state.running:
            if draft.budget <= 0 or len(seq.token_ids) - seq.num_computed <= 1:
                continue
            if not self._adopt_prefix(draft, seq, self._find_prefix(seq)):
                gap = len(seq.token_ids) - seq.num_computed
                num_tokens = policy.chunk_size(gap, draft.budget, 0, chunked)
                if gap > 1 and num_tokens and kv.grow(seq, num_tokens, draft.plan.block_copies):
                    self._add_slice(draft, seq, num_tokens)
        if admits:
            self._plan_admissions(draft, now)
        return bool(draft.sequences)

    # --- running sequences --------------------------------------------------------------------------------------------------------------

    def _plan_running(self, draft: Draft, shares: dict[int, int] | None = None) -> None:
        """``shares``: seq_id -> tokens of each prompt in a paced step; None: in arrival order, as the token budget allows."""
        running, grow, chunked = self._state.running, self._state.kv.grow, self._state.config.enable_chunked_prefill
        i = 0
        while i < len(running) and draft.budget > 0:  # preemption takes from the end while we walk
            if self._preemptor.begins_group(i) and not self._preemptor.secure_group(draft.plan, i):
                continue
            seq = running[i]
            i += 1
            num_tokens = len(seq.token_ids) - seq.num_computed
            if num_tokens == 0:  # a beam that waits for the others
                continue
            if num_tokens > 1:
                if shares is not None:
                    num_tokens = shares.get(seq.seq_id, 0)
                elif self._adopt_prefix(draft, seq, self._find_prefix(seq)):
                    continue
                else:
                    gap = len(seq.token_ids) - seq.num_computed
                    num_tokens = policy.chunk_size(gap, draft.budget, _num_decoding(running, i), chunked)
                if num_tokens == 0:
                    continue
            if num_tokens == 1 and seq.seq_id in draft.guesses and self._add_drafts(draft, seq, _num_decoding(running, i)):
                continue
            if grow(seq, num_tokens, draft.plan.block_copies) or self._preemptor.grow(draft.plan, seq, num_tokens):
                self._add_slice(draft, seq, num_tokens)

    def _add_drafts(self, draft: Draft, seq: Sequence, num_decoding_behind: int) -> bool:
        """A slice with as many drafts as budget and blocks allow, so that every sequence behind keeps its token. False: none do."""
        room = min(draft.budget - 1 - num_decoding_behind, self._max_drafts(seq))
        guess = draft.guesses[seq.seq_id][: max(room, 0)]
        num_blocks = self._state.kv.blocks_for(len(seq.token_ids) + len(guess)) - len(seq.block_table)
        if not guess or num_blocks > 1 + max(0, self._state.kv.pool.num_available - len(self._state.running)):
            return False
        if not self._state.kv.grow(seq, 1 + len(guess), draft.plan.block_copies):
            return False
        self._add_slice(draft, seq, 1, guess)
        return True

    def _max_drafts(self, seq: Sequence) -> int:
        """One token less than the sequence may still make: the step draws one more than it accepts."""
        if seq.num_choices > 1 or seq.request.params.beam is not None or wants_prompt_logprobs(seq):
            return 0
        return self._state.num_tokens_left(seq) - 1

    # --- admission ----------------------------------------------------------------------------------------------------------------------

    def _plan_admissions(self, draft: Draft, now: float) -> None:
        state, chunked = self._state, self._state.config.enable_chunked_prefill
        while state.waiting and draft.budget > 0:
            seq = state.waiting[0]
            match = self._find_prefix(seq)
            num_tokens = policy.chunk_size(self._gap_after(seq, match), draft.budget, 0, chunked)
            if num_tokens == 0 and not match.waits:
                return
            group = self._next_group(draft, match)
            if not group:
                return
            self._admit(draft, match, num_tokens, now)
            for other in group[1:]:
                self._admit_behind(draft, other, now)

    def _next_group(self, draft: Draft, match: PrefixMatch) -> list[Sequence]:
        """Who can come in now: the head of the queue, whose ``match`` is known, with the choices that wait behind it; or nobody.

        The head comes without them when there is nobody else to wait for.
        """
        state = self._state
        group = admission.waiting_group(state)
        if len(group) > 1:
            matches = [match, *(self._find_prefix(seq) for seq in group[1:])]
            if admission.has_room_for_all(state, draft, group, matches):
                return group
            if any(seq.request is not group[0].request for seq in state.running):
                return []
        return group[:1] if admission.has_room(state, draft, group[0], match) else []

    def _admit_behind(self, draft: Draft, seq: Sequence, now: float) -> None:
        """Let another choice of the group run, which has room; what the budget allows of it is computed now."""
        match, chunked = self._find_prefix(seq), self._state.config.enable_chunked_prefill
        num_tokens = policy.chunk_size(self._gap_after(seq, match), draft.budget, 0, chunked)
        if not self._enter(draft, match, now) and num_tokens and self._state.kv.grow(seq, num_tokens, draft.plan.block_copies):
            self._add_slice(draft, seq, num_tokens)

    def _plan_whole_prompt(self, draft: Draft, now: float) -> bool:
        """Without chunking: a step of its own for the first prompt that does not fit beside the decoding sequences. False: none."""
        state = self._state
        num_decoding = _num_decoding(state.running, 0)
        num_kept = self._num_to_decode()
        for seq in state.running:
            if len(seq.token_ids) - seq.num_computed <= 1 or self._adopt_prefix(draft, seq, self._find_prefix(seq), num_kept):
                continue
            gap = len(seq.token_ids) - seq.num_computed
            if policy.runs_alone(gap, draft.budget, num_decoding):
                grown = state.kv.grow(seq, gap, draft.plan.block_copies) or self._preemptor.grow(draft.plan, seq, gap)
                if grown:
                    self._add_slice(draft, seq, gap)
                return grown
        if not state.waiting or self._is_static:
            return False
        match = self._find_prefix(state.waiting[0])
        gap = self._gap_after(state.waiting[0], match)
        if match.waits or not policy.runs_alone(gap, draft.budget, num_decoding):
            return False
        group = self._next_group(draft, match)
        if group:
            self._admit(draft, match, gap, now)
            for other in group[1:]:
                self._enter(draft, self._find_prefix(other), now)
        return bool(group)

    def _admit(self, draft: Draft, match: PrefixMatch, num_tokens: int, now: float) -> None:
        """Let the head of the queue run: ``num_tokens`` of it are computed now, unless it has to wait for blocks of another."""
        seq = self._state.waiting[0]
        if not self._enter(draft, match, now):
            grown = self._state.kv.grow(seq, num_tokens, draft.plan.block_copies)
            assert grown, f"sequence {seq.seq_id} was admitted without room"
            self._add_slice(draft, seq, num_tokens)

    def _enter(self, draft: Draft, match: PrefixMatch, now: float) -> bool:
        """Move the head of the queue to the running ones, with what is cached or saved of it. True: it has to wait for another's blocks."""
        state = self._state
        seq = state.waiting[0]
        state.start(seq)
        state.kv.reserve(seq)
        owner = state.requests[seq.request.request_id]
        if seq.num_preemptions:
            seq.num_tokens_at_return = owner.num_known(seq)
        if not owner.started:
            owner.started = True
            state.order.started(owner.request)
            state.stats.num_started += 1
            state.stats.queue_s += max(0.0, now - owner.request.arrival_s)
            if state.kv.index is not None and not wants_prompt_logprobs(seq) and not seq.num_output_tokens:
                state.stats.prefix_query_tokens += seq.num_prompt_tokens
        waits = self._adopt_prefix(draft, seq, match)
        if state.swaps.holds(seq):
            state.swaps.load(seq, draft.plan.block_loads, len(draft.plan.block_copies))
        return waits

    # --- paced steps and batches --------------------------------------------------------------------------------------------------------

    def _admit_all(self, draft: Draft, now: float) -> None:
        """Let all run that have room, in order: each then gets its share of the steps.

        Admission keeps a spare block for each running sequence, so nobody is preempted in a plan that admitted.
        """
        state = self._state
        while state.waiting:
            match = self._find_prefix(state.waiting[0])
            group = self._next_group(draft, match)
            if not group:
                return
            for seq in group:
                self._enter(draft, match if seq is group[0] else self._find_prefix(seq), now)

    def _shares(self, draft: Draft, cost: GapCost) -> dict[int, int]:
        """Tokens of each running sequence that has more than one to compute and does not wait for another's blocks."""
        state, max_itl_ms = self._state, self._state.config.max_itl_ms
        shape, has_stream, prompts = StepShape(), False, dict[int, Prompt]()
        num_kept = self._num_to_decode()  # and, added below, what older prompts lack: none of these is preempted for a restore
        for seq in state.running:
            if seq.num_computed == len(seq.token_ids):  # a beam that waits for the others
                continue
            if len(seq.token_ids) - seq.num_computed == 1:
                num_rows = 1 + min(len(draft.guesses.get(seq.seq_id, ())), max(self._max_drafts(seq), 0))
                shape.add(seq.num_computed, num_rows, num_rows)
                has_stream = has_stream or len(seq.token_ids) > seq.num_prompt_tokens
            elif not self._adopt_prefix(draft, seq, self._find_prefix(seq), num_kept):
                num_kept += state.kv.num_missing(seq)
                if not state.kv.claims_next(seq):
                    state.kv.claim(seq)  # before the next prompt is looked up, so that an equal one waits instead of computing the same
                gap = len(seq.token_ids) - seq.num_computed
                prompts[seq.seq_id] = Prompt(seq.num_computed, gap, scores_rows=wants_prompt_logprobs(seq))
        if not prompts:
            return {}
        limit_s = max_itl_ms / 1000 if has_stream and max_itl_ms is not None else None
        if limit_s is not None and state.kv.restorer is not None:
            limit_s -= state.kv.restorer.tiers.cost.load_s(len(state.kv.restorer.loads()))
        if limit_s is not None and state.preemption_cost is not None:  # what comes back from host memory in this step takes its part
            limit_s -= state.preemption_cost.swap_seconds(len(draft.plan.block_loads))
        room = StepRoom(cost, shape, limit_s, draft.budget - shape.num_rows, state.kv.block_size)
        room.share(list(prompts.values()), draft.plan.step_index % 2 == 1)
        return {seq_id: prompt.num_tokens for seq_id, prompt in prompts.items()}

    def _num_to_decode(self) -> int:
        """Blocks that running sequences need for their next token, if they lack the KV of their last one alone."""
        return self._state.kv.num_to_grow([seq for seq in self._state.running if len(seq.token_ids) - seq.num_computed == 1])

    def _gap_limit_s(self) -> float | None:
        """The bound on the gap that this step puts between tokens, where there is one and a stream for it."""
        max_itl_ms = self._state.config.max_itl_ms
        if max_itl_ms is None or not any(seq.num_output_tokens for seq in self._state.running):
            return None
        return max_itl_ms / 1000

    # --- prefix cache -------------------------------------------------------------------------------------------------------------------

    def _find_prefix(self, seq: Sequence) -> PrefixMatch:
        """What the cache has for ``seq``; nothing when prompt log-probabilities are wanted, since every row has to run for them."""
        if wants_prompt_logprobs(seq):
            return PrefixMatch([])
        match = self._state.kv.find_prefix(seq)
        if self._state.swaps.holds(seq):
            # Its own blocks come back, whoever else has or computes the same.
            match.num_pending, match.tier, match.tail = 0, None, None
        return match

    def _gap_after(self, seq: Sequence, match: PrefixMatch) -> int:
        """Tokens left to compute of a waiting sequence once it shares what was found."""
        num_partial = 0 if match.tail is None else match.tail.num_tokens
        num_cached = len(match.nodes) * self._state.kv.block_size + num_partial
        return len(seq.token_ids) - max(num_cached, self._state.swaps.num_computed(seq))

    def _adopt_prefix(self, draft: Draft, seq: Sequence, match: PrefixMatch, num_kept: int = 0) -> bool:
        """Share what was found. True: the next blocks are being computed by another or restored, so ``seq`` sits this step out.

        ``num_kept``: available blocks that a restore leaves to those who are planned later in this step.
        """
        kv, stats = self._state.kv, self._state.stats
        is_new = seq.num_preemptions == 0 and seq.num_output_tokens == 0
        found = bool(match.nodes) or match.tail is not None
        has_waited = seq.match_waits and not match.waits
        if is_new and (found or has_waited or seq.match_report is None) and not wants_prompt_logprobs(seq):
            seq.match_report = kv.explain(seq, match)
        num_shared = kv.adopt_prefix(seq, match)
        num_copies = len(draft.plan.block_copies)
        num_copied = kv.adopt_tail(seq, match, draft.plan.block_copies)
        if is_new:
            seq.num_cached += num_shared + num_copied
            stats.prefix_hit_tokens += num_shared + num_copied
            stats.prefix_tail_tokens += num_copied
        stats.num_tail_copies += len(draft.plan.block_copies) - num_copies
        draft.num_pending[seq.seq_id] = match.num_pending
        restorer, tier = self._state.kv.restorer, match.tier
        waits = match.num_pending > 0 or (restorer is not None and tier is not None and restorer.begin(seq, tier, num_kept))
        # Once it computes, the cache knows what it has computed: no later look tells what it lacked, unless more is found.
        seq.match_waits = waits and seq.num_computed == seq.num_cached
        return waits

    # --- slices -------------------------------------------------------------------------------------------------------------------------

    def _add_slice(self, draft: Draft, seq: Sequence, num_tokens: int, guess: Seq[int] = ()) -> None:
        tokens, start = seq.token_ids, seq.num_computed
        end, params = start + num_tokens, seq.request.params
        piece = SequenceSlice(seq.seq_id, start, [*tokens[start:end], *guess], seq.block_table, num_drafts=len(guess))
        if start + 1 < len(tokens) and self._state.gap_cost is None:  # in a paced step it was claimed before the shares were
            self._state.kv.claim(seq)
        beams = None if params.beam is None else self._state.requests[seq.request.request_id].beams
        if end == len(tokens) and params.max_tokens != 0 and not (beams is not None and beams.collapsed):
            if seq.slot < 0:
                self._open_slots(draft.plan, seq)
            piece.num_samples = (seq.num_choices if beams is None else 1) + len(guess)  # of a beam only the log-probabilities count
            piece.sample_slots = [seq.slot] if seq.num_choices == 1 or beams is not None else self._state.slots.slots_of(seq)
            piece.logprobs = params.logprobs if beams is None else beams.search.num_candidates
        if params.prompt_logprobs is not None and wants_prompt_logprobs(seq):
            piece.prompt_logprobs = params.prompt_logprobs
            piece.next_token_ids = tokens[start + 1 : end + 1]
        seq.num_scheduled, seq.num_drafts = num_tokens, len(guess)
        draft.budget -= num_tokens + len(guess)
        draft.plan.slices.append(piece)
        draft.sequences.append(seq)

    def _open_slots(self, plan: StepPlan, seq: Sequence) -> None:
        """A slot for each choice that the coming row draws for, rebuilt from the tokens with their split into prompt and output."""
        for i, slot in enumerate(self._state.slots.take(seq)):
            plan.slot_opens.append(SlotOpen.of(slot, seq.request, seq.choice + i, list(seq.output_token_ids)))


def wants_prompt_logprobs(seq: Sequence) -> bool:
    """Prompt log-probabilities were asked for and not delivered yet: they come with the first output token."""
    return seq.request.params.prompt_logprobs is not None and len(seq.token_ids) == seq.num_prompt_tokens


def _num_decoding(running: list[Sequence], start: int) -> int:
    """Sequences from ``start`` on that lack the KV of their last token alone."""
    return sum(1 for seq in running[start:] if len(seq.token_ids) - seq.num_computed == 1)
