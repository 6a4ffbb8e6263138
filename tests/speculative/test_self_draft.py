"""Self-drafting: the drafts are what a model of the first layers says, and the target's pages are as if nothing had been drafted."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from octavo.core.request import Request, SamplingParams, Sequence
from octavo.core.step import BlockCopy, SequenceSlice, SlotOpen, StepPlan
from octavo.models.loaded import LoadedModel
from octavo.speculative.self_draft import SelfDraft
from tests.backends.cpu_runs import make_cpu
from tests.backends.exactness import fixture_model, quantised

PROMPT = [3 + (i * i + 5 * i) % 200 for i in range(37)]
PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9),
    "penalties": SamplingParams(temperature=0.7, frequency_penalty=0.9, repetition_penalty=1.3),
}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return quantised(fixture_model("llama"), ("q4_1", "q8_0", "q5_0"))


def sequence(params: SamplingParams, prompt: list[int] = PROMPT) -> Sequence:
    request = Request("r", prompt[:-1], params, 5, frozenset([2]))
    seq = Sequence(0, request, token_ids=list(prompt), num_prompt_tokens=len(prompt) - 1)
    seq.num_computed = len(prompt) - 1
    return seq


def step_of(seq: Sequence, num_drafts: int, table: list[int], **more: object) -> StepPlan:
    tokens = [*seq.token_ids[seq.num_computed :], *[0] * num_drafts]
    piece = SequenceSlice(seq.seq_id, seq.num_computed, tokens, array("i", table), 1 + num_drafts, [0], num_drafts=num_drafts)
    return StepPlan(0, [piece], **more)  # type: ignore[arg-type]


def drawn(model: LoadedModel, seq: Sequence, num_tokens: int) -> list[int]:
    """What a model of just the first layer draws behind the sequence."""
    program = model.program.first_layers(1)
    short = make_cpu(replace(model, program=program, weights={name: model.weights[name] for name in program.weights}), "fast", num_blocks=8)
    request = seq.request
    opened = SlotOpen(0, request.params, request.seed, request.prompt_token_ids, list(seq.output_token_ids), request.eos_token_ids)
    tokens, out, start, opens = list(seq.token_ids), [], 0, [opened]
    for _ in range(num_tokens):
        piece = SequenceSlice(0, start, tokens[start:], array("i", range(6)), 1, [0])
        out += short.execute(StepPlan(0, [piece], slot_opens=opens)).slices[0].token_ids
        start, opens = len(tokens), []
        tokens.append(out[-1])
    short.close()
    return out


@pytest.mark.parametrize("name", PARAMS)
def test_drafts_are_those_of_the_first_layers(model: LoadedModel, isa: str, name: str) -> None:
    whole = make_cpu(model, "fast", threads=2, num_blocks=8)
    table = [5, 2, 7, 0]
    whole.execute(StepPlan(0, [SequenceSlice(0, 0, PROMPT[:-1], array("i", table))]))
    draft = SelfDraft(whole.first_layers(1))
    seq = sequence(PARAMS[name])
    for num_drafts in (5, 1, 3):  # slots are closed and opened again
        plan = step_of(seq, num_drafts, table)
        draft.fill(plan, [seq])
        assert plan.slices[0].token_ids == [PROMPT[-1], *drawn(model, seq, num_drafts)]
    draft.close()
    whole.close()


def test_verifying_is_as_if_nothing_had_been_drafted(model: LoadedModel) -> None:
    results = []
    for drafting in (False, True):
        whole = make_cpu(model, "fast", threads=2, num_blocks=8)
        table = [5, 2, 7, 0]
        whole.execute(StepPlan(0, [SequenceSlice(0, 0, PROMPT[:-1], array("i", table))]))
        seq = sequence(SamplingParams(temperature=0.9))
        opened = SlotOpen(0, seq.request.params, 5, PROMPT[:-1], PROMPT[-1:])
        logits: dict[int, bytes] = {}
        whole.logits_hook = lambda _, position, row, to=logits: to.setdefault(position, row.tobytes())  # type: ignore[misc]
        plan = step_of(seq, 4, table)
        draft = SelfDraft(whole.first_layers(1))
        if drafting:
            draft.fill(plan, [seq])
        wanted = plan.slices[0].token_ids
        plan.slot_opens = [opened]
        plan.slices[0].token_ids = wanted if not results else results[0][0]
        outcome = whole.execute(plan).slices[0]
        results.append((plan.slices[0].token_ids, outcome.token_ids, logits))
        draft.close()
        whole.close()
    assert results[0] == results[1]


def test_sequences_of_others_and_plans_that_move_blocks_stay_as_they_are(model: LoadedModel) -> None:
    whole = make_cpu(model, "fast", num_blocks=8)
    draft = SelfDraft(whole.first_layers(1))
    seq = sequence(SamplingParams(temperature=0))
    plan = step_of(seq, 3, [0, 1, 2])
    draft.fill(plan, [])
    assert plan.slices[0].token_ids == [PROMPT[-1], 0, 0, 0]
    plan = step_of(seq, 3, [0, 1, 2], block_copies=[BlockCopy(3, 2)])
    draft.fill(plan, [seq])
    assert plan.slices[0].token_ids == [PROMPT[-1], 0, 0, 0]
    draft.close()
    whole.close()
