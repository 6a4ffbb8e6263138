"""The Speculator: drafts for the engine loop. Glue between the proposers (what to draft) and the control (how much of it pays).

    drafts(running) ─▶ {seq_id: token ids} ─▶ Scheduler.plan(now, drafts) ─▶ [a backend] ─▶ Scheduler.apply ─▶ observe(plan, result)

It changes nothing of a sequence. A plan may take fewer of the drafts than offered, or none: only ``SequenceSlice.num_drafts`` counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo.config import MAX_DRAFTS, ConfigError, SpeculativeConfig
from octavo.core.clock import Clock
from octavo.core.request import Sequence, SequenceStatus
from octavo.core.speculative_params import SpeculativeParams
from octavo.core.step import StepPlan, StepResult
from octavo.speculative.acceptance import LOOKUP_PRIOR, MODEL_PRIOR, SequenceRates, SharedRates
from octavo.speculative.control import DraftControl
from octavo.speculative.draft_model import DraftModel
from octavo.speculative.drafted import DraftedSequence
from octavo.speculative.nap import Nap
from octavo.speculative.ngram import NgramProposer
from octavo.speculative.proposer import Proposer
from octavo.speculative.self_draft import SelfDraft
from octavo.speculative.starts import StartBudget
from octavo.speculative.suffix import SuffixProposer

_MAX_INDEXED = 512  # tokens per step: 1 ms or less; a prompt that was found in the cache takes several steps
_PROMPT_SHARE = 4  # beside prompts, drafts take at most this part of a step's room
_SUFFIX_MIN_FIXED = 2  # tokens that have to match where a number of drafts was asked for: of what followed a single one little comes true
_DRAFT_RATE = 0.1
_DRAFT_CUT = 3.0


@dataclass(slots=True)
class SpeculationStats:
    """Counters: they only grow, ``saved_s`` excepted. ``tested`` and ``accepted`` are by position in the draft, the first at index 0.

    A position is tested when all drafts before it were accepted; so accepted / tested is unbiased by where a draft ended, and
    ``alpha`` is their ratio over all positions (Leviathan et al., 2023, section 3.1, for proposals that are certain of themselves).
    """

    num_steps: int = 0  # with at least one draft
    num_proposed: int = 0  # drafts that were in a plan
    num_accepted: int = 0
    tested: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    propose_s: float = 0.0  # host time of proposing, indexing and deciding
    saved_s: float = 0.0  # against the estimate of plain decoding, ``propose_s`` subtracted

    @property
    def alpha(self) -> float | None:
        num_tested = sum(self.tested)
        return self.num_accepted / num_tested if num_tested else None

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Of ``num_drafts`` drafts of a sequence the first ``num_accepted`` were kept."""
        self.num_proposed += num_drafts
        self.num_accepted += num_accepted
        for position in range(min(num_drafts, num_accepted + 1)):
            self.tested[position] += 1
        for position in range(num_accepted):
            self.accepted[position] += 1


class Speculator:
    """``proposers`` by method name. ``default``: for requests that say nothing (``Request.speculative`` None).

    ``max_total_tokens``: most tokens that a sequence can reach (``LengthLimits.max_total_tokens``). ``clock`` times the proposing.
    ``max_drafts``: most drafts of a sequence where "auto" chooses. ``auto_method``: the proposer that "auto" means.
    ``least_evidence``: by method, what a proposal has to rest on where a number of drafts was asked for (1, where nothing is said).
    """

    def __init__(
        self,
        proposers: Mapping[str, Proposer],
        default: SpeculativeParams,
        max_total_tokens: int,
        clock: Clock,
        max_drafts: int = MAX_DRAFTS,
        auto_method: str = "suffix",
        least_evidence: Mapping[str, int] | None = None,
    ) -> None:
        self.stats = SpeculationStats()
        self.control = DraftControl()
        self._proposers = dict(proposers)
        self.default = default
        self._max_total_tokens = max_total_tokens
        self._clock = clock
        self._max_drafts = max_drafts
        self._auto_method = auto_method
        self._least_evidence = dict(least_evidence or {})
        self._shared = {name: SharedRates(LOOKUP_PRIOR if p.looks_up else MODEL_PRIOR) for name, p in self._proposers.items()}
        self._draft_s = dict.fromkeys(self._proposers, 0.0)  # host seconds per draft
        self._sequences: dict[int, DraftedSequence] = {}
        self._host_s = 0.0  # of the step being made
        self._nap = Nap()
        self._start_s = 0.0  # of these, what reading texts before their first draft took
        self._starts = StartBudget()
        self._has_fixed = False  # drafts in it that were asked for, whether or not they pay

    @property
    def methods(self) -> frozenset[str]:
        """What a request may name as ``speculative.method`` besides "auto"."""
        return frozenset(self._proposers)

    @property
    def num_tracked(self) -> int:
        """Sequences that something is kept of."""
        return len(self._sequences)

    # --- before the plan ----------------------------------------------------------------------------------------------------------------

    def drafts(self, running: Seq[Sequence], max_rows: int, num_queued_tokens: int = 0) -> dict[int, list[int]]:
        """Drafts by seq_id, each non-empty, for sequences that lack the KV of their last token alone.

        ``running``: all running sequences, in any state (prompts are indexed while they are computed). ``max_rows``: the step's token
        budget; drafts and one row for each decoding sequence fit it. ``num_queued_tokens``: tokens of waiting requests that this step
        may take in, 0 if none: beside prompts a draft has to earn the time of its row. A sequence that may take r more tokens gets at
        most r - 1 drafts, and none after one that would end it. Called once per step, before the plan.
        """
        self._host_s, self._start_s, self._has_fixed = 0.0, 0.0, False
        if not self.default.enabled and not self._sequences and all(seq.request.speculative is None for seq in running):
            return {}
        may_sleep = all(not isinstance(one.params.num_drafts, int) for one in self._sequences.values())
        if self._nap.begin(len(running), may_sleep):
            return {}
        started_s = self._clock.now()
        batch = _Batch(num_prompt_tokens=num_queued_tokens)
        num_to_index = _MAX_INDEXED
        for seq in running:
            decodes = batch.add(seq)
            drafted = self._sequences.get(seq.seq_id) or self._begin(seq)
            if drafted is None:
                continue
            if num_to_index > 0:
                num_to_index -= drafted.catch_up(num_to_index)
            if decodes and drafted.num_indexed == len(seq.token_ids) and may_draft(seq) and drafted.has_proposal():
                batch.proposing.append(drafted)
        offered = self._propose(self._choose(batch, max_rows)) if batch.proposing else {}
        self._host_s = max(0.0, self._clock.now() - started_s)
        self.stats.propose_s += self._host_s
        return offered

    def _begin(self, seq: Sequence) -> DraftedSequence | None:
        """Start to follow a sequence; None when nothing is to be drafted for it."""
        params = seq.request.speculative or self.default
        if not params.enabled or seq.request.params.beam is not None:  # of beams nothing is drawn
            return None
        name = self._auto_method if params.method == "auto" else params.method
        proposer = self._proposers[name]
        proposer.begin(seq.seq_id, (), seq.request, seq.choice)
        drafted = self._sequences[seq.seq_id] = DraftedSequence.of(seq, params, name, proposer, SequenceRates(self._shared[name]))
        return drafted

    def _choose(self, batch: _Batch, max_rows: int) -> list[tuple[DraftedSequence, int]]:
        """(sequence, drafts wanted): as asked for where a number was, else as many as pay in what is left of the step."""
        room = max_rows - batch.num_decoding
        chosen: list[tuple[DraftedSequence, int]] = []
        open_ones: list[DraftedSequence] = []
        chances: list[list[float]] = []
        for drafted in batch.proposing:
            most = min(drafted.room(self._max_total_tokens), room)
            fixed = drafted.params.num_drafts
            if most < 1:
                continue
            if isinstance(fixed, int):
                if drafted.evidence < self._least_evidence.get(drafted.method, 1):
                    continue
                chosen.append((drafted, min(fixed, most)))
                room -= chosen[-1][1]
                continue
            row = drafted.chances(min(most, self._max_drafts))
            if row and (drafted.is_started or self._may_start(drafted, row, batch)):
                open_ones.append(drafted)
                chances.append(row)
        self._has_fixed = bool(chosen)
        num_fixed = sum(k for _, k in chosen)
        num_prompt_rows = min(batch.num_prompt_tokens, room)
        if num_prompt_rows:
            room //= _PROMPT_SHARE
        if chances and room > 0:
            draft_s = max(self._draft_s[drafted.method] for drafted in open_ones)
            lengths = self.control.lengths(
                chances, batch.num_decoding, batch.num_context, num_fixed + num_prompt_rows, min(room, sum(map(len, chances))), draft_s
            )
            chosen += [(drafted, k) for drafted, k in zip(open_ones, lengths, strict=True) if k]
        return chosen

    def _may_start(self, drafted: DraftedSequence, chances: list[float], batch: _Batch) -> bool:
        """Whether a sequence that its proposer has not read yet is worth that; one of them in a step."""
        if drafted.proposer.looks_up:
            return True  # it reads as the text grows
        if batch.has_start:
            return False
        saving_s = self.control.saving_per_token(chances, batch.num_decoding, batch.num_context, self._draft_s[drafted.method])
        batch.has_start = self._starts.may_start(drafted.num_indexed, drafted.room(self._max_total_tokens) + 1, saving_s)
        return batch.has_start

    def _propose(self, chosen: list[tuple[DraftedSequence, int]]) -> dict[int, list[int]]:
        """Ask each proposer once for all its sequences."""
        by_method: dict[str, list[tuple[DraftedSequence, int]]] = {}
        for entry in chosen:
            by_method.setdefault(entry[0].method, []).append(entry)
        offered: dict[int, list[int]] = {}
        for method, entries in by_method.items():
            started_s = self._clock.now()
            found = self._proposers[method].propose([(drafted.seq.seq_id, k) for drafted, k in entries])
            elapsed_s = self._clock.now() - started_s
            num_found = sum(map(len, found))
            num_to_read = sum(drafted.num_indexed for drafted, _ in entries if not (drafted.is_started or drafted.proposer.looks_up))
            if num_to_read:
                self._start(num_to_read, elapsed_s - num_found * self._draft_s[method], [drafted for drafted, _ in entries])
            elif num_found and not isinstance(self._proposers[method], SelfDraft):  # whose drafts are made when the plan is
                self._price(method, elapsed_s / num_found)
            for (drafted, _), tokens in zip(entries, found, strict=True):
                tokens = tokens if isinstance(drafted.proposer, SelfDraft) else drafted.usable(tokens)
                if tokens:
                    drafted.offer(tokens)
                    offered[drafted.seq.seq_id] = tokens
        return offered

    def _start(self, num_tokens: int, seconds: float, sequences: list[DraftedSequence]) -> None:
        self._start_s += max(0.0, seconds)
        self._starts.started(num_tokens, max(0.0, seconds))
        for drafted in sequences:
            drafted.is_started = True

    def fill(self, plan: StepPlan) -> None:
        """Put the drafts into a plan that holds a place for each: those of proposers that need the plan's blocks to make them.

        Slices whose drafts a model drew are told from what, where that is kept.
        """
        for piece in plan.slices:
            known = self._sequences.get(piece.seq_id) if piece.num_drafts else None
            if known is not None and isinstance(known.proposer, DraftModel):
                drawn_from = known.proposer.take_distributions(piece.seq_id)  # of all that were offered
                piece.draft_distributions = None if drawn_from is None else drawn_from[: piece.num_drafts]
        filling = {i: drafted for i, drafted in self._sequences.items() if isinstance(drafted.proposer, SelfDraft)}
        if not filling:
            return
        started_s = self._clock.now()
        shallow = next(iter(filling.values())).proposer
        assert isinstance(shallow, SelfDraft)
        num_drafts = shallow.fill(plan, [drafted.seq for drafted in filling.values()])
        for piece in plan.slices:
            drafted = filling.get(piece.seq_id)
            if drafted is not None:
                drafted.offer(piece.token_ids[piece.num_tokens - piece.num_drafts :] if piece.num_drafts else [])
        elapsed_s = max(0.0, self._clock.now() - started_s)
        self._host_s += elapsed_s
        self.stats.propose_s += elapsed_s
        if num_drafts:
            self._price(shallow.name, elapsed_s / num_drafts)

    def _price(self, method: str, draft_s: float) -> None:
        """The first drafts of a sequence may have to read its prompt: what they take beyond a multiple is not the price of a draft."""
        last_s = self._draft_s[method]
        self._draft_s[method] = draft_s if last_s == 0.0 else last_s + _DRAFT_RATE * (min(draft_s, _DRAFT_CUT * last_s) - last_s)

    # --- after the step -----------------------------------------------------------------------------------------------------------------

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from a step, after ``Scheduler.apply``; every step, drafts or not. Never called for a step that failed.

        A slice with ``num_drafts`` k has ``token_ids`` of its accepted drafts and the token drawn after them: 1 to k + 1.
        What is known of sequences that are FINISHED is forgotten here, aborted ones included.
        """
        if not self._sequences:
            return
        if self._nap.asleep:
            self._forget_finished()
            return
        num_rows = num_drafts = num_decoding = num_kept = num_context = 0
        for piece, outcome in zip(plan.slices, result.slices, strict=True):
            k = piece.num_drafts
            num_rows += len(piece.token_ids)
            if len(piece.token_ids) - k == 1:
                num_decoding += 1
                num_kept += len(outcome.token_ids)
                num_context += piece.start + 1
            if k:
                num_drafts += k
                self.stats.count(k, max(0, len(outcome.token_ids) - 1))
        self._account(num_rows, num_drafts, num_decoding, num_kept, num_context, result.seconds)
        self._nap.looked(num_drafts, self._host_s, result.seconds)
        self._forget_finished()

    def _forget_finished(self) -> None:
        for seq_id in [i for i, drafted in self._sequences.items() if drafted.seq.status is SequenceStatus.FINISHED]:
            self._sequences.pop(seq_id).proposer.end(seq_id)

    def _account(self, num_rows: int, num_drafts: int, num_decoding: int, num_kept: int, num_context: int, seconds: float) -> None:
        """What the step took against plain decoding."""
        control, stats = self.control, self.stats
        stats.num_steps += num_drafts > 0
        if num_rows - num_drafts == num_decoding > 0:
            saved_s = control.observe(num_rows, num_decoding, num_kept, num_context, seconds, self._host_s)
            drafting_s = saved_s + self._start_s if num_drafts and not self._has_fixed else 0.0
            control.settle(num_decoding, num_context, seconds, drafting_s)
            self._starts.earn(drafting_s + control.allowance_s(seconds), control.limit_s(num_decoding, num_context))
            stats.saved_s += saved_s
        else:
            stats.saved_s -= self._host_s
            if num_drafts and num_decoding:
                stats.saved_s += control.saved_beside_prompts(num_rows, num_drafts, num_decoding, num_kept, num_context)


def may_draft(seq: Sequence) -> bool:
    """Not for a prompt's end that yields several choices, or whose prompt log-probabilities are still to be told."""
    return seq.num_choices == 1 and (seq.request.params.prompt_logprobs is None or len(seq.token_ids) > seq.num_prompt_tokens)


@dataclass(slots=True)
class _Batch:
    """What the next step holds whether or not anything is drafted, and the sequences that have something to propose."""

    num_prompt_tokens: int
    num_decoding: int = 0
    num_context: int = 0
    proposing: list[DraftedSequence] = field(default_factory=list)
    has_start: bool = False  # of a sequence that its proposer has not read yet

    def add(self, seq: Sequence) -> bool:
        """Whether ``seq`` decodes: lacks the KV of its last token alone."""
        num_tokens = len(seq.token_ids)
        gap = num_tokens - seq.num_computed
        if gap != 1:
            self.num_prompt_tokens += gap
            return False
        self.num_decoding += 1
        self.num_context += num_tokens
        return True


def create_speculator(
    config: SpeculativeConfig, max_total_tokens: int, clock: Clock, others: Mapping[str, Proposer] | None = None
) -> Speculator:
    """A Speculator with the proposers that need no model, set as configured, and ``others`` (draft models) by their method names.

    Raises ConfigError when the configured method is none of them.
    """
    lookups: dict[str, Proposer] = {
        "ngram": NgramProposer(config.ngram_min, config.ngram_max),
        "suffix": SuffixProposer(config.suffix_min or 1),
    }
    proposers = lookups | dict(others or {})
    if config.spec_method != "auto" and config.spec_method not in proposers:
        raise ConfigError(f"spec_method: {config.spec_method!r} is not allowed; one of {', '.join(['auto', *sorted(proposers)])}")
    default = SpeculativeParams(config.spec, config.spec_method)
    auto_method = "draft" if "draft" in proposers else "suffix"
    least_evidence = {"suffix": config.suffix_min or _SUFFIX_MIN_FIXED}
    return Speculator(proposers, default, max_total_tokens, clock, config.max_drafts, auto_method, least_evidence)
