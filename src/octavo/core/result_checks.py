"""Whether a step's result belongs to its plan: found out before anything is applied. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.core.state import Draft
from octavo.core.step import SequenceSlice, SliceResult, StepResult

TextStops = Mapping[tuple[str, int], tuple[int, str]]
"""(request_id, choice) -> (this step's tokens to keep, the stop string that ends the sequence)."""


class StepProtocolError(RuntimeError):
    """plan and apply were called out of turn, or a result does not belong to its plan."""


def check_result(draft: Draft, result: StepResult, text_stops: TextStops) -> None:
    """StepProtocolError when ``result`` or ``text_stops`` do not belong to the plan of ``draft``."""
    step = draft.plan.step_index
    if result.step_index != step:
        raise StepProtocolError(f"the result of step {result.step_index} was applied while step {step} is in flight")
    if len(result.slices) != len(draft.plan.slices):
        raise StepProtocolError(f"step {step}: {len(result.slices)} results for {len(draft.plan.slices)} slices")
    for piece, outcome in zip(draft.plan.slices, result.slices, strict=True):
        num_drawn = len(outcome.token_ids)
        if piece.num_drafts and outcome.error is None and 0 < num_drawn <= piece.num_samples:
            _check_drafts(step, piece, outcome)
        elif outcome.error is None and num_drawn != piece.num_samples:
            drawn = f"{len(outcome.token_ids)} tokens for {piece.num_samples} samples"
            raise StepProtocolError(f"step {step}, sequence {piece.seq_id}: {drawn}")
        if outcome.error is None:
            _check_logprobs(step, piece, outcome)
    if text_stops:
        drawn_by = {
            (seq.request.request_id, seq.choice + i): len(outcome.token_ids) if piece.num_drafts else 1
            for piece, outcome, seq in zip(draft.plan.slices, result.slices, draft.sequences, strict=True)
            for i in range(1 if piece.num_drafts else piece.num_samples)
        }
        for key, (num_kept, text) in text_stops.items():
            if not 0 <= num_kept <= drawn_by.get(key, -1):
                raise StepProtocolError(f"step {step}: stop {text!r} keeps {num_kept} tokens of {key}, which drew {drawn_by.get(key, 0)}")


def _check_drafts(step: int, piece: SequenceSlice, outcome: SliceResult) -> None:
    """All drawn tokens but the last are the drafts."""
    accepted = outcome.token_ids[:-1]
    if accepted != piece.token_ids[piece.num_tokens - piece.num_drafts :][: len(accepted)]:
        raise StepProtocolError(f"step {step}, sequence {piece.seq_id}: {outcome.token_ids} were drawn behind other drafts")


def _check_logprobs(step: int, piece: SequenceSlice, outcome: SliceResult) -> None:
    """Log-probabilities are there when asked, one per token: found out before anything is applied."""
    wanted = (
        ("logprobs", outcome.logprobs, len(outcome.token_ids) if piece.logprobs is not None else 0),
        ("prompt_logprobs", outcome.prompt_logprobs, len(piece.next_token_ids) if piece.prompt_logprobs is not None else 0),
    )
    for name, given, count in wanted:
        if len(given or ()) != count:
            raise StepProtocolError(f"step {step}, sequence {piece.seq_id}: {len(given or ())} {name} for {count} tokens")
