"""The beams of a request as sequences that share KV blocks: forked where hypotheses part, released where they are dropped.

    trunk ──its last row──▶ beams ──a row of each──▶ search.advance ──▶ beams (forked, kept, released) ──▶ ... ──▶ hypotheses
      ▲                       │
      └──────preempt──────────┘   (one waiting sequence of the tokens that all share)

All beams of a request take a step together, and are preempted together: selection needs a row of each, so one that waits for blocks which
the others hold would wait for ever. After a preemption the *trunk*, what all have in common, is computed once and forked; each beam then
computes its own rest. Who is done earlier keeps its row and waits (nothing left to compute) for the others.

Owns which sequence carries which beam, and the places and slots that a request of ``width`` beams keeps even while it has fewer. The
rule of selection is in ``beam``; who gives way, in ``planner``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.core.beam import BeamSearch
from octavo.core.match_report import MatchReport
from octavo.core.request import Sequence, SequenceStatus
from octavo.core.step import SliceResult, TokenEvent, TokenLogprobs

if TYPE_CHECKING:
    from octavo.core.kv_manager import KVManager
    from octavo.core.state import RequestState, SchedulerState


@dataclass(slots=True)
class BeamGroup:
    """``RequestState.sequences`` carry ``search.beams``, in their order; or there is one *collapsed* trunk, which ends before they part.

    Before the prompt's end there is one sequence and one beam without tokens. ``rows``: of the beams that have their row in this round.
    """

    search: BeamSearch
    collapsed: bool = False
    rows: dict[int, TokenLogprobs] = field(default_factory=dict)  # by seq_id
    match_report: MatchReport | None = None  # of the prompt, for the first event

    def take_row(self, state: SchedulerState, owner: RequestState, seq: Sequence, outcome: SliceResult) -> bool:
        """The best tokens after ``seq``. The last row of a round has the search go on, and the sequences with it. True when it is over."""
        assert outcome.logprobs is not None
        (self.rows[seq.seq_id],) = outcome.logprobs
        if seq.match_report is not None:
            self.match_report, seq.match_report = seq.match_report, None
        if len(self.rows) < len(owner.sequences):
            return False
        rows = [self.rows.pop(seq.seq_id) for seq in owner.sequences]
        state.order.drew(owner.request, len(rows))
        parents = self.search.advance(rows)
        if not self.search.done:
            self._follow(state, owner, parents)
        return self.search.done

    def _follow(self, state: SchedulerState, owner: RequestState, parents: list[int]) -> None:
        """A beam's first continuation takes its sequence over, others are forked off; who has none is released."""
        old, new = owner.sequences, list[Sequence]()
        for parent, is_first in zip(parents, _firsts(parents), strict=True):
            new.append(old[parent] if is_first else state.fork(old[parent]))
        self._replace(state, owner, new)
        kept = set(parents)
        for i, seq in enumerate(old):
            if i not in kept:
                seq.status = SequenceStatus.FINISHED
                state.release(seq)
        for seq, beam in zip(new, self.search.beams, strict=True):
            seq.token_ids.append(beam.token_ids[-1])

    def expand(self, state: SchedulerState, owner: RequestState) -> None:
        """The trunk is computed: it becomes the first beam, and the others are forked off."""
        (trunk,) = owner.sequences
        new = [trunk, *(state.fork(trunk) for _ in self.search.beams[1:])]
        for seq, beam in zip(new, self.search.beams, strict=True):
            seq.token_ids += beam.token_ids[seq.num_output_tokens :]
        self._replace(state, owner, new)
        self.collapsed = False

    def collapse(self, state: SchedulerState, owner: RequestState) -> Sequence:
        """Running beams give back all that they hold; one trunk, which is neither running nor waiting yet, takes their place."""
        for seq in owner.sequences:
            assert seq.num_scheduled == 0, f"sequence {seq.seq_id} is in the plan that preempts it"
            state.running.remove(seq)
            state.release(seq)
            seq.status = SequenceStatus.FINISHED
        first, num_shared = owner.sequences[0], self._num_shared()
        trunk = Sequence(state.next_seq_id(), first.request, num_choices=self.search.params.width)
        trunk.num_prompt_tokens, trunk.num_cached, trunk.num_preemptions = first.num_prompt_tokens, first.num_cached, first.num_preemptions
        trunk.token_ids = first.token_ids[: first.num_prompt_tokens + num_shared]
        owner.sequences[:] = [trunk]
        self.rows.clear()
        self.collapsed = True
        return trunk

    def finish(self, state: SchedulerState, owner: RequestState) -> list[TokenEvent]:
        """The search is over: one event per choice with all of its hypothesis, the best first, and the end of the request. No events, and
        no end, when there are fewer hypotheses than are wanted."""
        request, events = owner.request, list[TokenEvent]()
        if len(self.search.hypotheses) < request.params.n:
            return []
        for choice, best in enumerate(self.search.hypotheses[: request.params.n]):
            event = TokenEvent(request.request_id, choice, best.token_ids, best.entries or None)
            event.num_cached_tokens, event.cumulative_logprob = owner.sequences[0].num_cached, best.sum_logprob
            event.finish_reason, event.stop_reason = best.end
            state.stats.num_output_tokens += len(best.token_ids)
            events.append(event)
        events[0].match_report = self.match_report
        for seq in owner.sequences:
            seq.status = SequenceStatus.FINISHED
            state.release(seq)
        state.stats.num_finished += len(events)
        state.forget(owner)
        return events

    def shortage(self, owner: RequestState) -> str:
        found = f"beam search found {len(self.search.hypotheses)} hypotheses where {owner.request.params.n} are wanted"
        return f"{found}; min_tokens and stop tokens forbid all others"

    @property
    def num_output_tokens(self) -> int:
        """Of each beam: they are of one length."""
        return len(self.search.beams[0].token_ids)

    @property
    def has_begun(self) -> bool:
        """Whether the beams have tokens: before that one sequence computes the prompt, as for any request."""
        return self.num_output_tokens > 0

    def num_missing(self, kv: KVManager, trunk: Sequence) -> int:
        """Blocks that ``trunk`` and the beams behind it lack to compute all their known tokens, if they share none but those that the trunk
        fills."""
        num_shared, num_known = len(trunk.token_ids) // kv.block_size, trunk.num_prompt_tokens + self.num_output_tokens
        num_own = kv.blocks_for(num_known) - num_shared
        return num_shared + len(self.search.beams) * num_own - len(trunk.block_table)

    def _num_shared(self) -> int:
        """Output tokens that all beams begin with; each has at least one more."""
        first, last = min(beam.token_ids for beam in self.search.beams), max(beam.token_ids for beam in self.search.beams)
        pairs = enumerate(zip(first[:-1], last[:-1], strict=True))
        return next((i for i, (a, b) in pairs if a != b), len(first) - 1)

    def _replace(self, state: SchedulerState, owner: RequestState, new: list[Sequence]) -> None:
        """``new`` run in the place of the request's sequences and take over their slots. The first one keeps the places that are spare."""
        old = owner.sequences
        state.slots.hand_over(old, new)
        place = state.running.index(old[0])
        state.running[place : place + len(old)] = new
        for i, seq in enumerate(new):
            seq.choice, seq.num_choices = i, 1
        new[0].num_choices += self.search.params.width - len(new)
        owner.sequences = new

    def check_invariants(self, sequences: list[Sequence]) -> None:
        """AssertionError unless sequences and beams agree. For tests."""
        assert sum(seq.num_choices for seq in sequences) == self.search.params.width, "places of beams are lost"
        assert not self.search.done and self.rows.keys() < {seq.seq_id for seq in sequences}
        if self.collapsed:
            (trunk,) = sequences
            output = list(trunk.output_token_ids)
            assert all(beam.token_ids[: len(output)] == output and len(beam.token_ids) > len(output) for beam in self.search.beams)
            return
        assert [list(seq.output_token_ids) for seq in sequences] == [beam.token_ids for beam in self.search.beams]
        for seq in sequences:
            assert (seq.num_computed == len(seq.token_ids)) == (seq.seq_id in self.rows), f"sequence {seq.seq_id} waits without a row"


def _firsts(parents: list[int]) -> list[bool]:
    """Of each entry, whether it is the first of its value."""
    return [parent not in parents[:i] for i, parent in enumerate(parents)]
