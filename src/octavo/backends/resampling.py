"""A backend that verifies drafts by the accept/resample rule instead of Gumbel coupling: another backend computes, this one draws.

    plan ─▶ drafts as known tokens, their rows' logits shown ─▶ [wrapped backend] ─▶ accept or resample, row by row ─▶ SliceResults

Owns sampling slots that follow the plan and all drawn tokens, and the counters of what was accepted. Slices without drafts are drawn by the
wrapped backend, as always. The rule is ``sampling.accept``, the law of a row ``ReferenceSampler.distribution``; computes nothing else.

The law of a text is the target's, whatever is drafted. The text itself depends on where drafts were offered, and so on batch and budget:
only Gumbel coupling makes it one and the same. Greedy text is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from octavo.backends.base import Backend, BackendError, KVCapacity, ShowsLogits
from octavo.config import MAX_DRAFTS
from octavo.core.step import SequenceSlice, SliceResult, SlotOpen, StepPlan, StepResult
from octavo.sampling.accept import accept_or_resample, overlap
from octavo.sampling.reference import LogitsError, ReferenceSampler, raw_logprobs

if TYPE_CHECKING:
    from octavo.backends.base import LogitsHook

LENIENCES = (0.5, 0.3, 0.1)  # of table 5 of the paper

Rows = dict[tuple[int, int], np.ndarray]  # (sequence id, position of the row) -> raw logits, float32 [vocab_size]


@dataclass(slots=True)
class AcceptanceStats:
    """Counters: they only grow. By position in the draft, the first at index 0.

    A position is tested when all drafts before it were accepted, so that a ratio to ``tested`` is unbiased by where drafts end.
    ``overlap`` sums sum_x min(p(x), q(x)) over the tested positions, ``lenient_overlap`` sum_x min(p(x) / lenience, q(x)) for LENIENCES.
    """

    tested: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    overlap: list[float] = field(default_factory=lambda: [0.0] * MAX_DRAFTS)
    lenient_overlap: dict[float, float] = field(default_factory=lambda: dict.fromkeys(LENIENCES, 0.0))

    @property
    def alpha(self) -> float | None:
        """E[sum_x min(p(x), q(x))] (Leviathan et al., 2023, corollary 3.6), of less variance than accepted / tested. None: no draft yet."""
        num_tested = sum(self.tested)
        return sum(self.overlap) / num_tested if num_tested else None

    @property
    def lenient_alphas(self) -> dict[float, float]:
        """The same by lenience (appendix A.5, table 5). Empty: no draft yet."""
        num_tested = sum(self.tested)
        return {lenience: total / num_tested for lenience, total in self.lenient_overlap.items()} if num_tested else {}

    def count(self, index: int, p: np.ndarray, q: np.ndarray | None, draft: int, accepted: bool) -> None:
        self.tested[index] += 1
        self.accepted[index] += accepted
        self.overlap[index] += overlap(p, q, draft)
        for lenience in LENIENCES:
            self.lenient_overlap[lenience] += overlap(p, q, draft, lenience)


class ResamplingBackend:
    """``backend`` with the accept/resample rule; whatever is not about a step (threads, weight_bytes, ...) is the wrapped backend's.

    Raises BackendError for a backend that does not show its logits.
    """

    def __init__(self, backend: Backend) -> None:
        if not hasattr(backend, "logits_hook"):
            raise BackendError(f"spec_rule: resample needs a backend with a logits_hook; {backend.name} has none")
        self.wrapped = cast(ShowsLogits, backend)
        self.name = backend.name
        self.vocab_size = backend.vocab_size
        self.max_num_slots = backend.max_num_slots
        self.acceptance = AcceptanceStats()
        self._sampler = ReferenceSampler(self.vocab_size, self.max_num_slots)
        self._opens: dict[int, SlotOpen] = {}  # how to open each slot again, outputs excepted
        self._stale: set[int] = set()  # slots whose wrapped twin has not been told of all tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    @property
    def logits_hook(self) -> LogitsHook | None:
        """The wrapped backend's; it sees the rows of drafts as well."""
        return self.wrapped.logits_hook

    @logits_hook.setter
    def logits_hook(self, hook: LogitsHook | None) -> None:
        self.wrapped.logits_hook = hook

    def kv_capacity(self, memory_bytes: int) -> KVCapacity:
        return self.wrapped.kv_capacity(memory_bytes)

    def allocate_kv(self, num_blocks: int) -> None:
        self.wrapped.allocate_kv(num_blocks)

    def fingerprint(self) -> str:
        return self.wrapped.fingerprint()

    def close(self) -> None:
        self.wrapped.close()

    # --- steps --------------------------------------------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> StepResult:
        """As ``Backend.execute``. ``seconds`` include the rule's. Raises ValueError for drafts whose slice contradicts itself."""
        started = time.perf_counter()
        self._follow(plan)
        rows: Rows = {}
        found = self._run(self._without_drafts(plan), {s.seq_id for s in plan.slices if s.num_drafts}, rows)
        results = [self._take(s, outcome, rows) for s, outcome in zip(plan.slices, found.slices, strict=True)]
        return StepResult(plan.step_index, results, time.perf_counter() - started, found.move_seconds, found.sampling_seconds)

    def _follow(self, plan: StepPlan) -> None:
        """The plan's effects on slots."""
        for slot in plan.slot_closes:
            self._stale.discard(slot)
            if self._opens.pop(slot, None) is not None:
                self._sampler.close(slot)
        for entry in plan.slot_opens:
            self._sampler.open(entry)
            self._opens[entry.slot] = entry
        for src, dst, seed in plan.slot_forks:
            self._sampler.fork(src, dst, seed)
            self._opens[dst] = replace(self._opens[src], slot=dst, seed=seed)

    def _without_drafts(self, plan: StepPlan) -> StepPlan:
        """What the wrapped backend runs: nothing is drawn behind drafts, and slots that it draws with know all their tokens."""
        used = {slot for s in plan.slices if not s.num_drafts for slot in s.sample_slots} | {src for src, _, _ in plan.slot_forks}
        behind = sorted(used & self._stale)
        self._stale.difference_update(behind)
        again = [replace(self._opens[slot], output_token_ids=self._sampler.output_token_ids(slot)) for slot in behind]
        return replace(
            plan,
            slices=[_shown(s) if s.num_drafts else s for s in plan.slices],
            slot_closes=[*plan.slot_closes, *behind],
            slot_opens=[*plan.slot_opens, *again],
        )

    def _run(self, plan: StepPlan, drafted: set[int], rows: Rows) -> StepResult:
        """Execute; the logits of the sequences in ``drafted`` come into ``rows``."""
        if not drafted:
            return self.wrapped.execute(plan)
        hook = self.wrapped.logits_hook

        def keep(seq_id: int, position: int, logits: np.ndarray) -> None:
            if seq_id in drafted:
                rows[seq_id, position] = logits
            if hook is not None:
                hook(seq_id, position, logits)

        self.wrapped.logits_hook = keep
        try:
            return self.wrapped.execute(plan)
        finally:
            self.wrapped.logits_hook = hook

    def _take(self, s: SequenceSlice, outcome: SliceResult, rows: Rows) -> SliceResult:
        if s.num_drafts:
            self._stale.add(s.sample_slots[0])
            return self._verify(s, outcome, rows)
        for slot, token in zip(s.sample_slots, outcome.token_ids, strict=False):  # none where there is an error
            self._sampler.append(slot, token)
        return outcome

    # --- the rule -----------------------------------------------------------------------------------------------------------------------

    def _verify(self, s: SequenceSlice, outcome: SliceResult, rows: Rows) -> SliceResult:
        """Draft after draft until one is not accepted; one more token behind them if all are."""
        result = SliceResult(logprobs=None if s.logprobs is None else [])
        first = s.start + s.num_tokens - 1 - s.num_drafts  # position of the row before the first draft
        for index in range(s.num_drafts + 1):
            logits = rows.get((s.seq_id, first + index))
            if logits is None:  # the backend gave up at an earlier row
                return result if result.token_ids else SliceResult(error=outcome.error, error_code=outcome.error_code)
            try:
                token, goes_on = self._draw(s, index, logits)
                entry = None if s.logprobs is None else raw_logprobs(logits, token, min(s.logprobs, self.vocab_size))
            except LogitsError as error:
                if result.token_ids:
                    return result  # the next step begins with this row
                return SliceResult(error=str(error), error_code=error.code)
            self._sampler.append(s.sample_slots[0], token)
            result.token_ids.append(token)
            if result.logprobs is not None and entry is not None:
                result.logprobs.append(entry)
            if not goes_on:
                break
        return result

    def _draw(self, s: SequenceSlice, index: int, logits: np.ndarray) -> tuple[int, bool]:
        """The token behind the row before draft ``index``, and whether it is that draft. The slot does not have it yet."""
        slot, position = s.sample_slots[0], s.start + s.num_tokens - s.num_drafts + index
        if index == s.num_drafts:
            return self._sampler.choose(slot, logits, position, s.mask), False
        p, draft = self._sampler.distribution(slot, logits, s.mask), s.token_ids[index - s.num_drafts]
        q = self._distribution_of(s, index)
        token, accepted = accept_or_resample(p, q, draft, self._opens[slot].seed, position)
        self.acceptance.count(index, p, q, draft, accepted)
        return token, accepted

    def _distribution_of(self, s: SequenceSlice, index: int) -> np.ndarray | None:
        q = None if s.draft_distributions is None else s.draft_distributions[index]
        if q is not None and not (isinstance(q, np.ndarray) and q.shape == (self.vocab_size,)):
            raise ValueError(f"sequence {s.seq_id}: draft_distributions[{index}] is no array of {self.vocab_size} probabilities")
        return q


def _shown(s: SequenceSlice) -> SequenceSlice:
    """The slice with its drafts as known tokens, none drawn, and the logits of all its rows computed."""
    where = f"sequence {s.seq_id}"
    if fault := s.drafts_fault():
        raise ValueError(f"{where}: {fault}")
    if len(s.sample_slots) != 1:
        raise ValueError(f"{where}: {len(s.sample_slots)} slots for {s.num_drafts} drafts, and one draws behind all of them")
    if s.draft_distributions is not None and len(s.draft_distributions) != s.num_drafts:
        raise ValueError(f"{where}: {len(s.draft_distributions)} draft_distributions for {s.num_drafts} drafts")
    return replace(
        s, num_samples=0, sample_slots=[], logprobs=None, mask=None, num_drafts=0, draft_distributions=None,
        prompt_logprobs=0, next_token_ids=[*s.token_ids[1:], s.token_ids[-1]],  # the last one stands for any
    )  # fmt: skip
