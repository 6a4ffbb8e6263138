"""The Speculator: drafts for the engine loop. Glue between the proposers (what to draft) and the control (how much of it pays).

    drafts(running) ─▶ {seq_id: token ids} ─▶ Scheduler.plan(now, drafts) ─▶ [a backend] ─▶ Scheduler.apply ─▶ observe(plan, result)

It changes nothing of a sequence. A plan may take fewer of the drafts than offered, or none: only ``SequenceSlice.num_drafts`` counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo.config import MAX_DRAFTS, SpeculativeConfig
from octavo.core.clock import Clock
from octavo.core.request import Sequence
from octavo.core.speculative_params import SpeculativeParams
from octavo.core.step import StepPlan, StepResult
from octavo.speculative.proposer import Proposer


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


class Speculator:
    """``proposers`` by method name. ``default``: for requests that say nothing (``Request.speculative`` None).

    ``max_total_tokens``: most tokens that a sequence can reach (``LengthLimits.max_total_tokens``). ``clock`` times the proposing.
    """

    def __init__(self, proposers: Mapping[str, Proposer], default: SpeculativeParams, max_total_tokens: int, clock: Clock) -> None:
        self.stats = SpeculationStats()

    @property
    def methods(self) -> frozenset[str]:
        """What a request may name as ``speculative.method`` besides "auto"."""
        raise NotImplementedError

    def drafts(self, running: Seq[Sequence], max_rows: int, num_queued_tokens: int = 0) -> dict[int, list[int]]:
        """Drafts by seq_id, each non-empty, for sequences that lack the KV of their last token alone.

        ``running``: all running sequences, in any state (prompts are indexed while they are computed). ``max_rows``: the step's token
        budget; drafts and one row for each decoding sequence fit it. ``num_queued_tokens``: tokens of waiting requests that this step
        may take in, 0 if none: beside prompts a draft has to earn the time of its row. A sequence that may take r more tokens gets at
        most r - 1 drafts, and none after one that would end it. Called once per step, before the plan.
        """
        raise NotImplementedError

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from a step, after ``Scheduler.apply``; every step, drafts or not. Never called for a step that failed.

        A slice with ``num_drafts`` k has ``token_ids`` of its accepted drafts and the token drawn after them: 1 to k + 1.
        What is known of sequences that are FINISHED is forgotten here, aborted ones included.
        """
        raise NotImplementedError


def create_speculator(
    config: SpeculativeConfig, max_total_tokens: int, clock: Clock, others: Mapping[str, Proposer] | None = None
) -> Speculator:
    """A Speculator with the proposers that need no model, set as configured, and ``others`` (draft models) by their method names."""
    raise NotImplementedError
