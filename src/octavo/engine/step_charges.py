"""Charging one step to the records of its slices: what each request's own part was, and which gaps between tokens have ended.

The others' part needs no charge here: the timeline has added the whole step to its sums, and what is a request's own is taken out of them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

from octavo.core.step import SequenceSlice, SliceResult, StepPlan, StepResult
from octavo.engine.causes import Bottleneck, Cause
from octavo.engine.request_record import RecordState, RequestRecord
from octavo.engine.step_split import StepSplit
from octavo.engine.step_window import StepParts

if TYPE_CHECKING:
    from octavo.core.kv_tiers import KVTiers

_ENDED = RecordState.ENDED
_SCHEDULING, _SWAPPED, _RESTORED, _SAMPLING = map(int, (Cause.SCHEDULING, Cause.SWAPPED, Cause.RESTORED, Cause.SAMPLING))

Records = Seq[RequestRecord | None]  # by slice; None: of a request that the timeline does not know


def charge_call(marks: list[float], call_s: float, plan: StepPlan, result: StepResult, tiers: KVTiers | None) -> float:
    """Divide the time of the backend's call among ``marks``, by cause, but for the model's pass, whose seconds are returned."""
    call_s = max(0.0, call_s)
    device_s = min(result.seconds, call_s) if result.seconds > 0.0 else call_s
    moves_s = min(result.move_seconds, device_s)
    sampling_s = min(result.sampling_seconds, device_s - moves_s)
    marks[_SCHEDULING] += call_s - device_s
    marks[_SAMPLING] += sampling_s
    if moves_s:
        restored_s = moves_s * tiers.num_moves(plan) / plan.num_moves if tiers is not None and plan.num_moves else 0.0
        marks[_SWAPPED] += moves_s - restored_s
        marks[_RESTORED] += restored_s
    return device_s - moves_s - sampling_s


def lost_seconds(plan: StepPlan, split: StepSplit, prompts: Seq[tuple[int, int, int]]) -> tuple[float, float]:
    """(seconds for rows computed again, seconds for rows that might have been cached) of a step's prompts."""
    again_s = missed_s = 0.0
    for place, num_recomputed, num_missed in prompts:
        row_s = split.shares[place] / len(plan.slices[place].token_ids)
        again_s += row_s * num_recomputed
        missed_s += row_s * num_missed
    return again_s, missed_s


def charge_arrival(record: RequestRecord, last: StepParts | None, now_s: float) -> None:
    """From its arrival to ``now_s``, when the first plan meets it: it waited for the step in flight, ``last`` (None: there has been none),
    by what that held, and then for its turn to be taken in."""
    waited_s = max(0.0, now_s - record.arrival_s)
    if last is not None:
        in_step_s = max(0.0, min(last.end_s, now_s) - max(record.arrival_s, last.begin_s))
        part = in_step_s / max(last.seconds, 1e-12)
        record.charge(Cause.RECOMPUTED, part * last.again_s)
        record.charge(Cause.CACHE_MISS, part * last.missed_s)
        record.charge(Cause.OTHERS_PREFILL, part * (last.prefill_s - last.again_s - last.missed_s))
        record.charge(Cause.OTHERS_DECODE, in_step_s - part * last.prefill_s)
        waited_s -= in_step_s
    record.charge(Cause.BETWEEN_STEPS, waited_s)


Gaps = list[tuple[RequestRecord, float]]  # of single records, with the moments that they began


class DecodingCharges(NamedTuple):
    """``fixed_s``: what the step would have taken whatever it held. ``num_positions``: computed tokens behind its rows, in all.
    ``num_whole_gaps`` gaps that are this step, from the end of the last one on, and ``other_gaps``."""

    fixed_s: float
    num_positions: int
    num_whole_gaps: int
    other_gaps: Gaps


def charge_decoding(
    plan: StepPlan, records: Records, weights: Seq[float], device_s: float, last_end_s: float, now_s: float
) -> DecodingCharges:
    """Every slice is one token of a request of its own: ``split_step`` and ``StepCharges.mixed`` in one pass.

    ``device_s``: of the model's pass; ``last_end_s``: the end of the step before; ``now_s``: of this one.
    """
    row, pair, position, sequence, logit_row, fixed = weights
    first, slope = row + pair + position + sequence + logit_row, pair + position
    starts = [piece.start for piece in plan.slices]
    num_positions = sum(starts)
    total = fixed + first * len(starts) + slope * num_positions
    scale = device_s / total if total > 0.0 else 0.0
    fixed_s, slope = scale * fixed, scale * slope
    own_s, num_whole = fixed_s + scale * first, 0
    others: Gaps = []
    for record, start in zip(records, starts, strict=True):
        if record is None or record.state is _ENDED:
            continue
        record.decode_s += own_s + slope * start
        record.num_output_tokens += 1
        token_s = record.token_s
        if token_s == last_end_s:
            num_whole += 1
        elif token_s:
            others.append((record, token_s))
        record.token_s = now_s
    return DecodingCharges(fixed_s, num_positions, num_whole, others)


class StepCharges:
    """Of a step that holds more than single tokens. ``last_end_s``: the end of the step before. After ``mixed``: ``num_whole_gaps`` gaps
    that are this step, from the end of the last one on, and ``other_gaps``."""

    def __init__(self, plan: StepPlan, result: StepResult, split: StepSplit, step: StepParts, last_end_s: float) -> None:
        self._plan, self._result, self._split, self._step = plan, result, split, step
        self._last_end_s = last_end_s
        self.num_whole_gaps = 0
        self.other_gaps: Gaps = []

    def mixed(self, records: Records, prompts: Seq[tuple[int, int, int]]) -> None:
        """Any slices. ``prompts``: (place, rows computed before, rows that might have been cached)."""
        rows = {place: (num_recomputed, num_missed) for place, num_recomputed, num_missed in prompts}
        seen = set[str]()
        before = {record.request_id: record.token_s for record in records if record is not None}
        for place, record in enumerate(records):
            if record is None or record.state is RecordState.ENDED:
                continue
            piece, share_s = self._plan.slices[place], self._split.shares[place]
            fixed_s = 0.0 if record.request_id in seen else self._split.fixed_s  # once a request
            seen.add(record.request_id)
            outcome = self._result.slices[place]
            if place in rows:
                self._prompt(record, piece, share_s, fixed_s, rows[place])
            elif piece.num_drafts:
                self._drafts(record, piece, outcome, share_s, fixed_s)
            else:
                record.decode_s += fixed_s + share_s
            if outcome.token_ids:
                record.num_output_tokens += len(outcome.token_ids)
                self._gap(record, before[record.request_id])

    def _prompt(self, record: RequestRecord, piece: SequenceSlice, share_s: float, fixed_s: float, rows: tuple[int, int]) -> None:
        own_s, num_tokens = share_s + fixed_s, len(piece.token_ids)
        recomputed, missed = (num_rows / num_tokens for num_rows in rows)
        needed = 1.0 - recomputed - missed
        recomputed_s = own_s * recomputed
        record.charge(Cause.RECOMPUTED, fixed_s * recomputed)  # the timeline's sums have the share itself
        record.charge(Cause.CACHE_MISS, fixed_s * missed)
        record.charge(Cause.PREFILL, own_s * needed)
        record.charge(Cause.OTHERS_PREFILL, -share_s * needed)
        record.charge(Cause.OTHERS_DECODE, -fixed_s)
        record.own_recomputed_s += recomputed_s
        record.own_missed_s += own_s * missed
        if recomputed_s:
            record.note_away(Bottleneck.KV, recomputed_s)
        if num_tokens > rows[0]:
            record.add_chunk(num_tokens - rows[0], own_s - recomputed_s)

    def _drafts(self, record: RequestRecord, piece: SequenceSlice, outcome: SliceResult, share_s: float, fixed_s: float) -> None:
        """Rows of drafts cost what they add to one row; a draft that came true saved a step like this one without them."""
        drafts_s = share_s * piece.num_drafts / len(piece.token_ids)
        record.decode_s += fixed_s + share_s - drafts_s
        record.charge(Cause.DRAFTS, drafts_s)
        record.charge(Cause.OTHERS_DECODE, -drafts_s)
        num_accepted = max(0, len(outcome.token_ids) - 1)
        record.num_drafts += piece.num_drafts
        record.num_accepted += num_accepted
        record.draft_gain_s += num_accepted * max(0.0, self._step.end_s - self._step.since_s - drafts_s)

    def _gap(self, record: RequestRecord, since_s: float) -> None:
        if record.token_s != self._step.end_s and since_s:
            if since_s == self._last_end_s:
                self.num_whole_gaps += 1
            else:
                self.other_gaps.append((record, since_s))
        record.token_s = self._step.end_s
